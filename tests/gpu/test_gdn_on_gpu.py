"""The gated delta net by Triton's kernels, compiled, against transformers. `make gpu-check`."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from llm_service.layers.cache_spec import Segment
from llm_service.layers.gdn import fla_rule
from llm_service.layers.gdn.backend import GdnShape
from llm_service.layers.gdn.choose import choose
from llm_service.layers.gdn.triton_backend import TritonBackend
from testkit import gdn_cases
from testkit.gdn_cases import Case

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
SHAPES = (*gdn_cases.SHAPES, GdnShape(16, 32, 128, 128))
each_type = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@each_type
@pytest.mark.parametrize("counts", gdn_cases.COUNTS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sequences_of_a_batch_are_transformers_one_by_one(
    shape: GdnShape, counts: tuple[int, ...], dtype: torch.dtype
) -> None:
    gdn_cases.check(TritonBackend(shape, dtype, GPU), Case.drawn(shape, sum(counts), dtype, "cuda"), counts)


@each_type
def test_states_that_a_run_passes_are_copied(dtype: torch.dtype) -> None:
    gdn_cases.check_copies(TritonBackend(SHAPES[-1], dtype, GPU), Case.drawn(SHAPES[-1], 270, dtype, "cuda"))


def test_the_library_s_chunks_are_transformers() -> None:
    shape, counts = SHAPES[-1], (1, 130, 1, 65, 7)
    if (rule := fla_rule.find(shape)) is None:
        pytest.skip("flash-linear-attention is not installed")
    case = Case.drawn(shape, sum(counts), torch.bfloat16, "cuda")
    gdn_cases.check(TritonBackend(shape, torch.bfloat16, GPU, rule), case, counts)


def test_the_library_copies_states_that_a_run_passes() -> None:
    if (rule := fla_rule.find(SHAPES[-1])) is None:
        pytest.skip("flash-linear-attention is not installed")
    case = Case.drawn(SHAPES[-1], 270, torch.bfloat16, "cuda")
    gdn_cases.check_copies(TritonBackend(SHAPES[-1], torch.bfloat16, GPU, rule), case)


def test_a_gpu_gets_the_kernels() -> None:
    assert isinstance(choose(SHAPES[-1], torch.bfloat16, GPU), TritonBackend)


@pytest.mark.parametrize("decodes_only", [False, True])
def test_a_graph_is_replayed_over_new_metadata(decodes_only: bool) -> None:
    counts = [1, 1, 1] if decodes_only else [1, 70, 33]
    case = Case.drawn(SHAPES[-1], sum(counts), torch.bfloat16, "cuda")
    backend, plain, replayed = TritonBackend(SHAPES[-1], torch.bfloat16, GPU), case.states(6), case.states(6)
    metadata = backend.padding(sum(counts), 3, decodes_only=decodes_only)
    batch = backend.over(metadata)
    batch.run(case.given, case.weights, case.states(6))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = batch.run(case.given, case.weights, replayed)
    ends = [sum(counts[: n + 1]) for n in range(3)]
    for slots, fresh in (([5, 0, 3], True), ([3, 5, 0], False), ([0, 3], False)):
        segments = [
            Segment(end - count, end, slot, fresh) for end, count, slot in zip(ends, counts, slots, strict=False)
        ]
        metadata.packed.copy_(torch.from_numpy(metadata.numbers(segments)))
        graph.replay()
        expected = backend.batch(segments).run(case.given, case.weights, plain)
        assert torch.equal(out[: segments[-1].end], expected[: segments[-1].end])
    for one, other in zip(plain.tensors, replayed.tensors, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
