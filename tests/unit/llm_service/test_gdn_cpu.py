"""The gated delta net by numba's kernel and torch's products together."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch

from llm_service.layers.cache_spec import Segment
from llm_service.layers.cpu import gdn_backend, selection
from llm_service.layers.cpu.gdn_backend import NumbaBackend
from llm_service.layers.gdn.backend import GdnBackend, GdnShape
from llm_service.layers.gdn.choose import choose
from llm_service.layers.gdn.torch_backend import TorchBackend
from testkit import gdn_cases
from testkit.gdn_cases import Case

SHAPES = (*gdn_cases.SHAPES, GdnShape(2, 4, 18, 24, width=3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("counts", gdn_cases.COUNTS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sequences_of_a_batch_are_transformers_one_by_one(
    shape: GdnShape, counts: tuple[int, ...], dtype: torch.dtype
) -> None:
    gdn_cases.check(choose(shape, dtype, torch.device("cpu")), Case.drawn(shape, sum(counts), dtype), counts)


def test_the_kernel_computes_tokens_that_come_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    case, backend = Case.drawn(SHAPES[0], 1, torch.float32), choose(SHAPES[0], torch.float32, torch.device("cpu"))
    step = [Segment(0, 1, 0, fresh=True)]
    monkeypatch.setattr(gdn_backend.gdn_step, "step", None)
    with pytest.raises(TypeError):
        backend.batch(step).run(case.given, case.weights, case.states(1))
    monkeypatch.setattr(selection, "is_numba", lambda: False)  # as while it is compiled
    assert backend.batch(step).run(case.given, case.weights, case.states(1)).isfinite().all()


def test_a_sequence_has_the_same_bits_whoever_is_beside_it() -> None:
    case = Case.drawn(SHAPES[0], 9, torch.float32)
    backend, alone, beside = NumbaBackend(SHAPES[0]), case.states(9), case.states(9)
    segments = [Segment(row, row + 1, 8 - row, fresh=True) for row in range(9)]
    for fresh in (True, False):
        steps = [Segment(each.begin, each.end, each.slot, fresh) for each in segments]
        out = backend.batch(steps).run(case.given, case.weights, beside)
        for each in steps:
            own = backend.batch([Segment(0, 1, each.slot, fresh)])
            row = own.run(case.part(each.begin, each.end), case.weights, alone)
            assert torch.equal(row[0], out[each.begin])
    assert all(torch.equal(one, other) for one, other in zip(alone.tensors, beside.tensors, strict=True))


@pytest.mark.parametrize("make", [NumbaBackend, partial(TorchBackend, device=torch.device("cpu"))])
def test_drafts_have_the_bits_of_tokens_that_come_one_by_one(make: Callable[[GdnShape], GdnBackend]) -> None:
    """Of two sequences, beside one that has none."""
    shape = GdnShape(4, 8, 64, 64)
    case, counts = Case.drawn(shape, 9, torch.float32), (3, 1, 5)
    backend, alone, beside = make(shape), case.states(3), case.states(3)
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


def test_what_is_far_from_zero_stays_finite() -> None:
    case = Case.drawn(SHAPES[0], 2, torch.float32)
    case.given.qkv[:, ::3] = 1e4
    case.given.qkv[:, 1::3] = -1e4
    case.given.z[:, ::2] = -300.0
    case.given.a[:] = 500.0
    case.given.b[:, ::2] = -200.0
    steps = [Segment(row, row + 1, row, fresh=True) for row in range(2)]
    backends: tuple[GdnBackend, GdnBackend] = NumbaBackend(SHAPES[0]), TorchBackend(SHAPES[0], torch.device("cpu"))
    ours, theirs = (each.batch(steps).run(case.given, case.weights, case.states(2)) for each in backends)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
