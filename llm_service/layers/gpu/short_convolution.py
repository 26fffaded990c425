"""Gated short convolutions by our own Triton kernels, for any GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llm_service.layers.cache_spec import Segment, StateCache
from llm_service.layers.gdn.metadata import GdnMetadata
from llm_service.layers.gpu.convolutions import convolve_runs, convolve_steps


@dataclass(frozen=True, slots=True)
class ConvolutionKernelBatch:
    """A batch of the kernels; nothing in them waits for the device, so a graph may capture it."""

    metadata: GdnMetadata

    def run(self, x: Tensor, weight: Tensor, cache: StateCache) -> Tensor:
        """See `Convolves`. Rows of padding are left as memory had them."""
        (states,) = cache.tensors
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if len(self.metadata.runs):
            convolve_runs(out, x, self.metadata, states, weight, silu=False)
        if len(self.metadata.steps):
            convolve_steps(out, x, self.metadata, states, weight, silu=False)
        return out


class ConvolutionKernelBackend:
    """Makes batches for the kernels, over metadata as well."""

    name = "triton"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def batch(self, segments: Sequence[Segment]) -> ConvolutionKernelBatch:
        """See `StateBackend`."""
        return self.over(GdnMetadata.of(segments, self._device))

    def padding(self, tokens: int, sequences: int, *, decodes_only: bool) -> GdnMetadata:
        """See `StableStateBackend`."""
        return GdnMetadata.padding(tokens, sequences, self._device, decodes_only=decodes_only)

    def over(self, metadata: GdnMetadata) -> ConvolutionKernelBatch:
        """See `StableStateBackend`."""
        return ConvolutionKernelBatch(metadata)
