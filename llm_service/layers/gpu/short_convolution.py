"""Gated short convolutions by our own Triton kernels, for any GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from llm_service.layers.cache_spec import StateCache
from llm_service.layers.gpu.convolutions import convolve_runs, convolve_steps
from llm_service.layers.recurrent.kernel_backend import RecurrentKernelBackend
from llm_service.layers.recurrent.metadata import RecurrentMetadata


@dataclass(frozen=True, slots=True)
class ConvolutionKernelBatch:
    """A batch of the kernels; nothing in them waits for the device, so a graph may capture it."""

    metadata: RecurrentMetadata

    def run(self, x: Tensor, weight: Tensor, cache: StateCache) -> Tensor:
        """See `Convolves`. Rows of padding are left as memory had them."""
        (states,) = cache.tensors
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if len(self.metadata.runs):
            convolve_runs(out, x, self.metadata, states, weight, silu=False)
        if len(self.metadata.steps):
            convolve_steps(out, x, self.metadata, states, weight, silu=False)
        return out


class ConvolutionKernelBackend(RecurrentKernelBackend[RecurrentMetadata, ConvolutionKernelBatch]):
    """Makes batches for the kernels, over metadata as well."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(RecurrentMetadata, device)

    def over(self, metadata: RecurrentMetadata) -> ConvolutionKernelBatch:
        """See `StableStateBackend`."""
        return ConvolutionKernelBatch(metadata)
