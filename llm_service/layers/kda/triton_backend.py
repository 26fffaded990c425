"""Kimi Delta Attention on any GPU: tokens that come one by one by a Triton kernel of our own, chunks by torch's
products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from llm_service.layers.cache_spec import Segment, StateCache
from llm_service.layers.gdn.metadata import GdnMetadata
from llm_service.layers.gdn.torch_backend import split
from llm_service.layers.gpu.gdn_kernels import conv_step_kernel
from llm_service.layers.gpu.kda_kernels import kda_step_kernel
from llm_service.layers.kda.backend import KdaInput, KdaShape, KdaWeights
from llm_service.layers.kda.torch_backend import TorchBatch

_CHANNELS = 256
"""What one program of a convolution takes of a token."""


def constants_of(shape: KdaShape) -> dict[str, int]:
    """Constants and options of `kda_step_kernel`."""
    dims = max(16, int(triton.next_power_of_2(shape.head_dim)))
    return {"HEADS": shape.heads, "HEAD_DIM": shape.head_dim, "DIMS": dims, "num_warps": 8}


class TritonBackend:
    """Makes batches for the kernels."""

    name = "triton"

    def __init__(self, shape: KdaShape, device: torch.device) -> None:
        self._shape, self._device = shape, device

    def batch(self, segments: Sequence[Segment]) -> TritonBatch:
        """See `KdaBackend`."""
        runs, rounds = split(segments)
        alone = GdnMetadata.of(rounds[0] if rounds else [], self._device)
        return TritonBatch(self._shape, alone.steps, TorchBatch(self._shape, tuple(runs), ()) if runs else None)

    def padding(self, tokens: int, sequences: int, *, decodes_only: bool) -> GdnMetadata:
        """See `StableStateBackend`. Chunks follow no metadata: beside these layers an index chooses, and steps with
        more than a token of a sequence have no graphs for that reason (`Caches.decodes_alone`)."""
        assert decodes_only, "chunks are computed by torch"
        return GdnMetadata.padding(tokens, sequences, self._device, decodes_only=True)

    def over(self, metadata: GdnMetadata) -> TritonBatch:
        """See `StableStateBackend`."""
        return TritonBatch(self._shape, metadata.steps)


@dataclass(frozen=True, slots=True)
class TritonBatch:
    """A batch whose `steps` are as `GdnMetadata` has them; `runs` computes what comes before these."""

    shape: KdaShape
    steps: Tensor
    runs: TorchBatch | None = None

    def run(self, given: KdaInput, weights: KdaWeights, cache: StateCache) -> Tensor:
        """See `KdaBatch`."""
        if self.runs is None:
            out = torch.empty(given.z.shape, dtype=given.z.dtype, device=given.z.device)
        else:
            out = self.runs.run(given, weights, cache)
        if len(self.steps):
            self._run_steps(out, given, weights, cache)
        return out

    def _run_steps(self, out: Tensor, given: KdaInput, weights: KdaWeights, cache: StateCache) -> None:
        shape, steps, (convolution, recurrent) = self.shape, self.steps, cache.tensors
        mixed = torch.empty(given.qkv.shape, dtype=torch.float32, device=given.qkv.device)
        conv_step_kernel[(len(steps), triton.cdiv(shape.channels, _CHANNELS))](
            mixed,
            given.qkv,
            steps,
            convolution,
            weights.conv,
            weights.conv,  # no biases
            given.qkv.stride(0),
            shape.channels,
            WIDTH=shape.width,
            BLOCK=_CHANNELS,
            BIAS=False,
            num_warps=4,
        )
        kda_step_kernel[(len(steps), shape.heads)](
            out,
            mixed,
            given.z,
            given.a,
            given.b,
            steps,
            recurrent,
            weights.a_log,
            weights.dt_bias,
            weights.gain,
            given.z.stride(0),
            given.a.stride(0),
            given.b.stride(0),
            weights.eps,
            shape.head_dim**-0.5,
            weights.least or 0.0,
            BOUNDED=weights.least is not None,
            **constants_of(shape),
        )
