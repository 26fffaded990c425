"""A kernel that fails, crashes or hangs stops no other one from being tried."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import kernels_device
from benchmarks.device import Again
from benchmarks.kernels_device import Place, Trial
from common.gpu.graphs import CaptureFailed

HERE = Place(torch.device("cpu"), torch.float32, tiny=True)


def of(found: float, later: float | None = None) -> Trial:
    results = iter([found, found, found if later is None else later])
    return Trial(lambda: torch.full((3,), next(results)), torch.ones(3))


def fails(_: Place) -> Trial:
    try:
        raise RuntimeError("first\nand more")
    except RuntimeError:
        raise RuntimeError("second")  # noqa: B904 - as the end of a capture does


def test_each_says_how_it_did(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: dict[str, Any] = {
        "right": lambda _: of(1.0),
        "wrong": lambda _: of(1.1),
        "wrong in a graph": lambda _: of(1.0, 1.1),
        "broken": fails,
    }
    monkeypatch.setattr(kernels_device, "trials", lambda: made)
    said = list(kernels_device.run(HERE, 0, tmp_path / "progress", once=False))
    assert said[0] == "right: 0.0e+00 apart, replayed 0.0e+00"
    assert said[1] == "wrong: FAILED: AssertionError: 1.0e-01 of its length apart from torch's"
    assert said[2].endswith("apart from torch's, but only once it is replayed")
    assert said[3].startswith("broken: FAILED: RuntimeError: first")
    assert (tmp_path / "progress").read_text() == "3"
    assert list(kernels_device.run(HERE, 3, None, once=True)) == [said[3]]


def test_what_cannot_be_captured_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(_: object) -> None:
        raise CaptureFailed("operation not permitted")

    monkeypatch.setattr(Again, "__call__", lambda _, run: refuses(run))
    monkeypatch.setattr(kernels_device, "trials", lambda: {"one": lambda _: of(1.0)})
    assert list(kernels_device.run(HERE, 0, None, once=False)) == [
        "one: FAILED to be captured: operation not permitted"
    ]


def test_behind_a_process_that_ended_another_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []

    def call(command: list[str]) -> int:
        begin = int(command[command.index("--begin") + 1])
        begun.append(begin)
        progress = Path(command[command.index("--progress") + 1])
        progress.write_text({0: "2", 3: "3", 4: "9"}[begin])
        return {0: -11, 3: 1, 4: os.EX_OK}[begin]

    monkeypatch.setattr(kernels_device.subprocess, "call", call)
    assert kernels_device._processes([]) == [2, 3]
    assert begun == [0, 3, 4]


@pytest.mark.parametrize("experts", [False, True], ids=["rows", "rows of experts"])
def test_a_product_whose_trial_has_failed_is_not_hidden_by_what_computes_the_same(
    experts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from llm_service.layers.gpu import int8_weight, quantized_weight

    def tried(form: str) -> str:
        make = kernels_device._grouped(form) if experts else kernels_device._product(form, 4)
        monkeypatch.setattr(kernels_device, "trials", lambda: {form: make})
        return next(iter(kernels_device.run(HERE, 0, None, once=True)))

    monkeypatch.setattr(int8_weight, "_is_right", lambda _: False)
    monkeypatch.setattr(quantized_weight, "_is_right", lambda *_: False)
    assert tried("w8a8") == "w8a8: FAILED: AssertionError: products of int8 fail their trial"
    assert tried("awq") == "awq: FAILED: AssertionError: our kernel fails its trial"
