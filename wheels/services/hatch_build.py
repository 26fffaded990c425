"""Takes sources, version and requirements from the checkout around this folder."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

_CHECKOUT = Path(__file__).resolve().parent.parent.parent
_PACKAGES = ("common", "encoder_service", "llm_service", "gateway")


class Metadata(MetadataHookInterface):
    """Version and requirements."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Both distributions are of one release; the groups of requirements are those of the checkout."""
        groups = tomllib.loads((_CHECKOUT / "pyproject.toml").read_text("utf-8"))["dependency-groups"]
        stated = (_CHECKOUT / "twinlens/_version.py").read_text("utf-8")
        (version,) = re.findall(r'^__version__ = "(.+)"$', stated, re.MULTILINE)
        metadata["version"] = version
        metadata["dependencies"] = [f"twinlens=={version}", *groups["services"]]
        extras = "gateway", "tracing", "transformers", "gpu", "nixl", "kv-events", "heic"
        metadata["optional-dependencies"] = {name: groups[name] for name in extras}


class Sources(BuildHookInterface):  # type: ignore[type-arg]
    """The packages, beside which this folder lies."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        """Adds each package under its own name."""
        build_data["force_include"] |= {str(_CHECKOUT / package): package for package in _PACKAGES}
