"""Mamba-2 by numba's kernel and torch's products together."""

from __future__ import annotations

import pytest
import torch

from llm_service.layers.cache_spec import Segment
from llm_service.layers.cpu import mamba2_backend, selection
from llm_service.layers.cpu.mamba2_backend import NumbaBackend
from llm_service.layers.mamba2.backend import Mamba2Shape
from llm_service.layers.mamba2.choose import choose
from testkit import mamba2_cases
from testkit.mamba2_cases import Case

SHAPES = (*mamba2_cases.SHAPES, Mamba2Shape(2, 4, 24, 18, width=3))
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("counts", mamba2_cases.COUNTS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sequences_of_a_batch_are_transformers_one_by_one(
    shape: Mamba2Shape, counts: tuple[int, ...], dtype: torch.dtype
) -> None:
    mamba2_cases.check(choose(shape, dtype, CPU), Case.drawn(shape, sum(counts), dtype), counts)


def test_the_kernel_computes_tokens_that_come_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    case, backend = Case.drawn(SHAPES[0], 1, torch.float32), choose(SHAPES[0], torch.float32, CPU)
    step = [Segment(0, 1, 0, fresh=True)]
    monkeypatch.setattr(mamba2_backend.mamba2_step, "step", None)
    with pytest.raises(TypeError):
        backend.batch(step).run(case.given, case.weights, case.states(1))
    monkeypatch.setattr(selection, "is_numba", lambda: False)  # as while it is compiled
    assert backend.batch(step).run(case.given, case.weights, case.states(1)).isfinite().all()


def test_drafts_have_the_bits_of_tokens_that_come_one_by_one_whoever_is_beside_them() -> None:
    case, counts = Case.drawn(SHAPES[0], 9, torch.float32), (3, 1, 5)
    backend, alone, beside = NumbaBackend(SHAPES[0]), case.states(3), case.states(3)
    for pools in zip(alone.tensors, beside.tensors, strict=True):
        for each in pools:
            each.fill_(0.5)
    segments, begin = [], 0
    for slot, count in enumerate(counts):
        segments.append(Segment(begin, begin + count, slot, fresh=False, context=70, answers=count))
        begin += count
    out = backend.batch(segments).run(case.given, case.weights, beside)
    for each in segments:
        for row in range(each.begin, each.end):
            own = backend.batch([Segment(0, 1, each.slot, fresh=False, answers=1)])
            assert torch.equal(own.run(case.part(row, row + 1), case.weights, alone)[0], out[row])
    assert all(torch.equal(one, other) for one, other in zip(alone.tensors, beside.tensors, strict=True))
