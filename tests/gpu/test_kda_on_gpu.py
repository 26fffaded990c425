"""Kimi Delta Attention by Triton's kernels, compiled, against transformers. `make gpu-check`."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from llm_service.layers.cache_spec import Segment
from llm_service.layers.kda.backend import KdaShape
from llm_service.layers.kda.choose import choose
from llm_service.layers.kda.triton_backend import TritonBackend
from testkit import gdn_cases
from testkit.kda_cases import Case

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
SHAPES = (KdaShape(2, 16), KdaShape(3, 24, width=3), KdaShape(64, 128))
BOUNDS = (-5.0, None, -5.0)
each_type = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@each_type
@pytest.mark.parametrize("counts", gdn_cases.COUNTS, ids=str)
@pytest.mark.parametrize(("shape", "least"), [*zip(SHAPES, BOUNDS, strict=True)], ids=str)
def test_sequences_of_a_batch_are_transformers_one_by_one(
    shape: KdaShape, least: float | None, counts: tuple[int, ...], dtype: torch.dtype
) -> None:
    gdn_cases.check(TritonBackend(shape, dtype, GPU), Case.drawn(shape, sum(counts), dtype, least, "cuda"), counts)


@each_type
def test_states_that_a_run_passes_are_copied(dtype: torch.dtype) -> None:
    case = Case.drawn(SHAPES[-1], 270, dtype, device="cuda")
    gdn_cases.check_copies(TritonBackend(SHAPES[-1], dtype, GPU), case)


def test_a_gpu_gets_the_kernels() -> None:
    assert isinstance(choose(SHAPES[-1], torch.bfloat16, GPU), TritonBackend)


@pytest.mark.parametrize("decodes_only", [False, True])
def test_a_graph_is_replayed_over_new_metadata(decodes_only: bool) -> None:
    counts, shape = [1, 1, 1] if decodes_only else [1, 70, 33], SHAPES[-1]
    case, backend = Case.drawn(shape, sum(counts), torch.bfloat16, device="cuda"), choose(shape, torch.bfloat16, GPU)
    assert isinstance(backend, TritonBackend)
    segments, begin = [], 0
    for slot, count in enumerate(counts, 1):
        segments.append(Segment(begin, begin + count, slot, fresh=True))
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
