"""The gated delta net by Triton's kernels, compiled, against transformers. `make gpu-check`."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from llm_service.layers.cache_spec import Segment
from llm_service.layers.gdn import fla_rule
from llm_service.layers.gdn.backend import GdnShape
from llm_service.layers.gdn.choose import choose
from llm_service.layers.gdn.metadata import GdnMetadata
from llm_service.layers.gdn.triton_backend import TritonBackend
from tests import gdn_cases
from tests.gdn_cases import Case

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


def test_the_library_s_chunks_are_transformers() -> None:
    shape, counts = SHAPES[-1], (1, 130, 1, 65, 7)
    if (rule := fla_rule.find(shape)) is None:
        pytest.skip("flash-linear-attention is not installed")
    case = Case.drawn(shape, sum(counts), torch.bfloat16, "cuda")
    gdn_cases.check(TritonBackend(shape, torch.bfloat16, GPU, rule), case, counts)


def test_a_gpu_gets_the_kernels() -> None:
    assert isinstance(choose(SHAPES[-1], torch.bfloat16, GPU), TritonBackend)


def test_a_graph_of_steps_is_replayed_over_new_tables() -> None:
    case = Case.drawn(SHAPES[-1], 4, torch.bfloat16, "cuda")
    backend, plain, replayed = TritonBackend(SHAPES[-1], torch.bfloat16, GPU), case.states(6), case.states(6)
    metadata = GdnMetadata.of([Segment(row, row + 1, row, fresh=True) for row in range(4)], GPU)
    batch = backend.over(metadata)
    batch.run(case.given, case.weights, case.states(6))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = batch.run(case.given, case.weights, replayed)
    for slots, fresh in (([5, 0, 3, 1], True), ([3, 5, 1, 0], False)):
        segments = [Segment(row, row + 1, slot, fresh) for row, slot in enumerate(slots)]
        metadata.steps.copy_(GdnMetadata.of(segments, GPU).steps)
        graph.replay()
        assert torch.equal(out, backend.batch(segments).run(case.given, case.weights, plain))
    for one, other in zip(plain.tensors, replayed.tensors, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
