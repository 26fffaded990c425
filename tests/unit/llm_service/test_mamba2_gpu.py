"""Mamba-2 by Triton's kernels in their interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from llm_service.layers.cache_spec import Segment
from llm_service.layers.mamba2.backend import Mamba2Shape
from llm_service.layers.mamba2.triton_backend import TritonBackend
from testkit import mamba2_cases
from testkit.mamba2_cases import Case

CPU = torch.device("cpu")
SHAPES = (Mamba2Shape(1, 2, 16, 32, least_step=0.3), Mamba2Shape(2, 2, 24, 24, width=3))
COUNTS = ((1, 1), (1, 70, 65, 2))


@pytest.mark.parametrize(
    ("shape", "dtype", "counts"),
    [
        *((SHAPES[0], torch.float16, counts) for counts in COUNTS),
        *((SHAPES[1], torch.float32, counts) for counts in COUNTS),
        (SHAPES[0], torch.bfloat16, COUNTS[1]),
        (mamba2_cases.SHAPES[1], torch.float16, mamba2_cases.COUNTS[2]),
    ],
    ids=str,
)
def test_sequences_of_a_batch_are_transformers_one_by_one(
    shape: Mamba2Shape, dtype: torch.dtype, counts: tuple[int, ...]
) -> None:
    mamba2_cases.check(TritonBackend(shape, dtype, CPU), Case.drawn(shape, sum(counts), dtype), counts)


@pytest.mark.parametrize("counts", [(1, 66, 5), (1, 1, 1)], ids=str)
def test_padding_touches_nothing(counts: tuple[int, ...]) -> None:
    tokens, shape = sum(counts), SHAPES[0]
    case = Case.drawn(shape, tokens + 3, torch.float32)
    cache, alone = case.states(4), case.states(4)
    backend = TritonBackend(shape, torch.float32, CPU)
    metadata = backend.padding(tokens + 3, len(counts) + 2, decodes_only=tokens == len(counts))
    batch, begin, segments = backend.over(metadata), 0, []
    for slot, count in enumerate(counts, 1):
        segments.append(Segment(begin, begin + count, slot, fresh=True, answers=count * (slot == 1)))
        begin += count
    before = [Segment(0, tokens + 3, 0, fresh=True)]
    if tokens == len(counts):
        before = [Segment(n, n + 1, 0, fresh=True, answers=1) for n in range(len(counts) + 2)]
    for given in (before, segments):  # what stood there before is gone
        metadata.packed.copy_(torch.from_numpy(metadata.numbers(given)))
    out = batch.run(case.given, case.weights, cache)
    expected = backend.batch(segments).run(case.part(0, tokens), case.weights, alone)
    assert torch.equal(out[:tokens], expected)
    for one, other in zip(cache.tensors, alone.tensors, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_states_that_a_run_passes_are_copied() -> None:
    backend = TritonBackend(SHAPES[0], torch.float32, CPU)
    mamba2_cases.check_copies(backend, Case.drawn(SHAPES[0], 210, torch.float32))
