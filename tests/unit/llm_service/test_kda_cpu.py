"""Kimi Delta Attention by numba's kernel and torch's products together."""

from __future__ import annotations

import itertools

import pytest
import torch

from llm_service.layers.cache_spec import Segment
from llm_service.layers.cpu import kda_backend, selection
from llm_service.layers.cpu.kda_backend import NumbaBackend
from llm_service.layers.kda.backend import KdaShape
from llm_service.layers.kda.choose import choose
from testkit import gdn_cases
from testkit.kda_cases import Case

SHAPES = (KdaShape(2, 16), KdaShape(3, 18, width=3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("counts", gdn_cases.COUNTS, ids=str)
@pytest.mark.parametrize(("shape", "least"), [*zip(SHAPES, (-5.0, None), strict=True)], ids=str)
def test_sequences_of_a_batch_are_transformers_one_by_one(
    shape: KdaShape, least: float | None, counts: tuple[int, ...], dtype: torch.dtype
) -> None:
    backend = choose(shape, dtype, torch.device("cpu"))
    gdn_cases.check(backend, Case.drawn(shape, sum(counts), dtype, least), counts)


def test_the_kernel_computes_tokens_that_come_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    case, backend = Case.drawn(SHAPES[0], 1, torch.float32), choose(SHAPES[0], torch.float32, torch.device("cpu"))
    step = [Segment(0, 1, 0, fresh=True)]
    monkeypatch.setattr(kda_backend.kda_step, "step", None)
    with pytest.raises(TypeError):
        backend.batch(step).run(case.given, case.weights, case.states(1))
    monkeypatch.setattr(selection, "is_numba", lambda: False)  # as while it is compiled
    assert backend.batch(step).run(case.given, case.weights, case.states(1)).isfinite().all()


def test_drafts_have_the_bits_of_tokens_that_come_one_by_one_whoever_is_beside_them() -> None:
    """Of two sequences, beside one that has none."""
    shape = KdaShape(4, 32)
    case, counts = Case.drawn(shape, 9, torch.float32), (3, 1, 5)
    backend, alone, beside = NumbaBackend(shape), case.states(3), case.states(3)
    for pools in zip(alone.tensors, beside.tensors, strict=True):
        for each in pools:
            each.fill_(0.5)
    begins = list(itertools.accumulate(counts, initial=0))
    segments = [
        Segment(begin, begin + count, slot, fresh=False, context=70)
        for slot, (begin, count) in enumerate(zip(begins, counts, strict=False))
    ]
    out = backend.batch(segments).run(case.given, case.weights, beside)
    for each in segments:
        for row in range(each.begin, each.end):
            own = backend.batch([Segment(0, 1, each.slot, fresh=False)])
            assert torch.equal(own.run(case.part(row, row + 1), case.weights, alone)[0], out[row])
    assert all(torch.equal(one, other) for one, other in zip(alone.tensors, beside.tensors, strict=True))


@pytest.mark.parametrize("least", [-5.0, None], ids=str)
def test_what_is_far_from_zero_stays_finite(least: float | None) -> None:
    case = Case.drawn(SHAPES[0], 2, torch.float32, least)
    for each in (case.given.qkv, case.given.z, case.given.a, case.given.b):
        each.mul_(1e4)
    segments = [Segment(0, 1, 0, fresh=True), Segment(1, 2, 1, fresh=True)]
    assert NumbaBackend(SHAPES[0]).batch(segments).run(case.given, case.weights, case.states(2)).isfinite().all()
