"""Short convolutions by Triton's kernels, compiled, against torch's operators. `make gpu-check`."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from llm_service.layers.gpu.short_convolution import ConvolutionKernelBackend
from llm_service.layers.recurrent.short_convolution import backend_on
from testkit import convolution_cases
from testkit.convolution_cases import COUNTS, SIZES, Case, segments_of

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
each_type = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@each_type
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sequences_of_a_batch_are_what_torch_makes_of_them(
    size: tuple[int, int], counts: tuple[int, ...], dtype: torch.dtype
) -> None:
    convolution_cases.check(Case.drawn(size, sum(counts), dtype, "cuda"), counts)


@each_type
def test_states_that_a_run_passes_are_copied(dtype: torch.dtype) -> None:
    convolution_cases.check_copies(Case.drawn(SIZES[0], 210, dtype, "cuda"))


@pytest.mark.parametrize("counts", [(1, 66, 5), (1, 1, 1)], ids=str)
def test_padding_touches_nothing(counts: tuple[int, ...]) -> None:
    convolution_cases.check_padding(Case.drawn(SIZES[0], sum(counts) + 3, torch.bfloat16, "cuda"), counts)


def test_a_gpu_gets_the_kernels() -> None:
    assert isinstance(backend_on(GPU), ConvolutionKernelBackend)


@pytest.mark.parametrize("counts", [(1, 70, 33), (1, 1, 1)], ids=str)
def test_a_graph_is_replayed_over_new_metadata(counts: tuple[int, ...]) -> None:
    case, backend = Case.drawn(SIZES[0], sum(counts), torch.bfloat16, "cuda"), ConvolutionKernelBackend(GPU)
    cache, alone = case.states(5), case.states(5)
    metadata = backend.padding(len(case.x), len(counts), decodes_only=sum(counts) == len(counts))
    batch, graph, segments = backend.over(metadata), torch.cuda.CUDAGraph(), segments_of(counts, fresh=True)
    batch.run(case.x, case.weight, cache)  # compiles
    with torch.cuda.graph(graph):
        out = batch.run(case.x, case.weight, cache)
    metadata.packed.copy_(torch.from_numpy(metadata.numbers(segments)))
    graph.replay()
    assert torch.equal(out, backend.batch(segments).run(case.x, case.weight, alone))
    torch.testing.assert_close(cache.tensors, alone.tensors, rtol=0, atol=0, equal_nan=True)
