"""Mamba-2 by Triton's kernels, compiled, against transformers. `make gpu-check`."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from llm_service.layers.cache_spec import Segment
from llm_service.layers.mamba2.backend import Mamba2Shape
from llm_service.layers.mamba2.choose import choose
from llm_service.layers.mamba2.triton_backend import TritonBackend
from testkit import mamba2_cases
from testkit.mamba2_cases import Case

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
SHAPES = (*mamba2_cases.SHAPES, Mamba2Shape(8, 64, 64, 128, least_step=0.001))
each_type = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@each_type
@pytest.mark.parametrize("counts", mamba2_cases.COUNTS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sequences_of_a_batch_are_transformers_one_by_one(
    shape: Mamba2Shape, counts: tuple[int, ...], dtype: torch.dtype
) -> None:
    mamba2_cases.check(TritonBackend(shape, dtype, GPU), Case.drawn(shape, sum(counts), dtype, "cuda"), counts)


@each_type
def test_states_that_a_run_passes_are_copied(dtype: torch.dtype) -> None:
    mamba2_cases.check_copies(TritonBackend(SHAPES[-1], dtype, GPU), Case.drawn(SHAPES[-1], 270, dtype, "cuda"))


def test_a_gpu_gets_the_kernels() -> None:
    assert isinstance(choose(SHAPES[-1], torch.bfloat16, GPU), TritonBackend)


@pytest.mark.parametrize("decodes_only", [False, True])
def test_a_graph_is_replayed_over_new_metadata(decodes_only: bool) -> None:
    counts = [1, 1, 1] if decodes_only else [1, 70, 33]
    case, backend = (
        Case.drawn(SHAPES[-1], sum(counts), torch.bfloat16, "cuda"),
        TritonBackend(SHAPES[-1], torch.bfloat16, GPU),
    )
    segments, begin = [], 0
    for slot, count in enumerate(counts, 1):
        segments.append(Segment(begin, begin + count, slot, fresh=True, answers=count * (slot == 1)))
        begin += count
    cache, alone = case.states(4), case.states(4)
    metadata = backend.padding(begin, len(counts), decodes_only=decodes_only)
    batch, graph = backend.over(metadata), torch.cuda.CUDAGraph()
    batch.run(case.given, case.weights, cache)  # compiles
    with torch.cuda.graph(graph):
        out = batch.run(case.given, case.weights, cache)
    metadata.packed.copy_(torch.from_numpy(metadata.numbers(segments)))
    graph.replay()
    expected = backend.batch(segments).run(case.given, case.weights, alone)
    assert torch.equal(out, expected)
    assert all(torch.equal(one[1:], other[1:]) for one, other in zip(cache.tensors, alone.tensors, strict=True))
