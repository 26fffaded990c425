from __future__ import annotations

import pytest

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
