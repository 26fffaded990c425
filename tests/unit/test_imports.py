"""Every module is imported by a test, though nobody but a program of its own may use it."""

from __future__ import annotations

import importlib

from tests.launch import ROOT

PACKAGES = ("twinlens", "common", "encoder_service", "llm_service", "gateway", "tools")


def test_every_module_can_be_imported() -> None:
    paths = [path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    for path in sorted(paths):
        if path.stem != "__main__":  # which is a program
            importlib.import_module(".".join(path.with_suffix("").parts).removesuffix(".__init__"))
