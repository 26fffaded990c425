from __future__ import annotations

import sys
from importlib.metadata import packages_distributions

import pytest

from tests.launch import ROOT
from tests.source_tree import Tree
from tools.requirements import requirements


def names(*extras: str) -> set[str]:
    return {line.partition(">")[0] for line in requirements(extras)}


def test_without_extras_only_the_client_is_asked_for() -> None:
    assert names() == {"grpcio", "protobuf"}


def test_an_extra_brings_those_that_it_names() -> None:
    assert {"torch", "grpcio", "scikit-image", "matplotlib", "pytest"} <= names("test")
    assert not any("twinlens" in line for line in requirements(["dev"]))


def test_an_unknown_extra_is_an_error() -> None:
    with pytest.raises(KeyError, match="nonsense"):
        names("nonsense")


def test_the_services_ask_for_what_they_import_and_for_nothing_else() -> None:
    """Optional packages aside: those are looked for where they are used."""
    optional = {"triton", "flash_attn", "opentelemetry", "transformers", "torchvision"}
    tree = Tree.read(ROOT, ("common", "encoder_service", "llm_service"))
    ours = {"common", "encoder_service", "llm_service", "twinlens", *optional, *sys.stdlib_module_names}
    imported = {name.name.partition(".")[0] for module in tree.modules.values() for name in module.imports} - ours
    known = {module: set(map(_plain, found)) for module, found in packages_distributions().items()}
    asked = set(map(_plain, names("services")))
    assert {module for module in imported if not known[module] & asked} == set()
    assert asked - set().union(*(known[module] for module in imported)) == set()


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")
