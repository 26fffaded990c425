"""Kimi Delta Attention by our own Triton kernels, for any GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from llm_service.layers.cache_spec import StateCache
from llm_service.layers.gdn.triton_backend import INVERT
from llm_service.layers.gpu import gdn_kernels
from llm_service.layers.gpu import kda_kernels as kernels
from llm_service.layers.gpu.convolutions import convolve_runs, convolve_steps
from llm_service.layers.kda.backend import KdaInput, KdaShape, KdaWeights
from llm_service.layers.kda.torch_backend import gated_norm
from llm_service.layers.recurrent.backend import CHUNK
from llm_service.layers.recurrent.kernel_backend import RecurrentKernelBackend
from llm_service.layers.recurrent.metadata import RecurrentMetadata

_NEAR = 16
"""Tokens whose pairs are multiplied elementwise."""
_KEYS = 32
"""Key dimensions multiplied at once."""
_PART = 16
"""Columns of a state that one program takes through a run: few, so that one sequence has programs for many
multiprocessors."""
_EXACT = "tf32x3"
"""Products of float32 on tensor cores, in three parts."""


@dataclass(frozen=True, slots=True)
class KdaConstants:
    """What the kernels are compiled for; `exact`: products have all digits of float32."""

    shape: KdaShape
    exact: bool

    @property
    def heads(self) -> dict[str, Any]:
        """Constants of all kernels that know heads."""
        dims = max(16, int(triton.next_power_of_2(self.shape.head_dim)))
        return {"HEADS": self.shape.heads, "HEAD_DIM": self.shape.head_dim, "DIMS": dims}

    @property
    def step(self) -> dict[str, Any]:
        """Constants and options of `kda_step_kernel`."""
        return {**self.heads, "num_warps": 8}

    @property
    def pairs(self) -> dict[str, Any]:
        """Constants and options of `kda_pairs_kernel`."""
        part = min(_KEYS, self.heads["DIMS"])
        sizes = {"PART": part, "TILE": CHUNK, "NEAR": _NEAR}
        return {**self.heads, **sizes, "PRECISION": self._precision, "num_warps": 4}

    @property
    def fade(self) -> dict[str, Any]:
        """Constants and options of `kda_fade_kernel`."""
        return {**self.heads, "TILE": CHUNK, "num_warps": 8}

    @property
    def scan(self) -> dict[str, Any]:
        """Constants and options of `kda_scan_kernel`, which has no room to prefetch a tile."""
        heads = self.heads
        sizes = {"HALF": max(16, heads.pop("DIMS") // 2), "PART": _PART, "TILE": CHUNK}
        return {**heads, **sizes, "PRECISION": self._precision, "num_warps": 4, "num_stages": 1}

    @property
    def _precision(self) -> str:
        return _EXACT if self.exact else "tf32"


class TritonBackend(RecurrentKernelBackend[RecurrentMetadata, "TritonBatch"]):
    """Makes batches for the kernels, compiled for one shape and type."""

    def __init__(self, shape: KdaShape, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(RecurrentMetadata, device)
        self._compiled = KdaConstants(shape, dtype == torch.float32)

    def over(self, metadata: RecurrentMetadata) -> TritonBatch:
        """See `StableStateBackend`."""
        return TritonBatch(metadata, self._compiled)


@dataclass(frozen=True, slots=True)
class TritonBatch:
    """A batch of the kernels; nothing in them waits for the device, so that a graph may capture it."""

    metadata: RecurrentMetadata
    compiled: KdaConstants

    def run(self, given: KdaInput, weights: KdaWeights, cache: StateCache) -> Tensor:
        """See `KdaBatch`."""
        mixed = torch.empty(given.qkv.shape, dtype=torch.float32, device=given.qkv.device)
        out = torch.empty(given.z.shape, dtype=given.z.dtype, device=given.z.device)
        if len(self.metadata.runs):
            self._run_tiles(out, mixed, given, weights, cache)
            out = gated_norm(out, given.z, weights.gain, weights.eps)
        if len(self.metadata.steps):
            self._run_steps(out, mixed, given, weights, cache)
        return out

    def _run_steps(self, out: Tensor, mixed: Tensor, given: KdaInput, weights: KdaWeights, cache: StateCache) -> None:
        shape, steps, (convolution, recurrent) = self.compiled.shape, self.metadata.steps, cache.tensors
        convolve_steps(mixed, given.qkv, self.metadata, convolution, weights.conv)
        kernels.kda_step_kernel[(len(steps), shape.heads)](
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
            **self.compiled.step,
        )

    def _run_tiles(self, out: Tensor, mixed: Tensor, given: KdaInput, weights: KdaWeights, cache: StateCache) -> None:
        runs, tiles, shape = self.metadata.runs, self.metadata.tiles, self.compiled.shape
        states = cache.tensors[0]
        convolve_runs(mixed, given.qkv, self.metadata, states, weights.conv)
        sizes = len(tiles), shape.heads, CHUNK, CHUNK
        system, within = torch.empty((2, *sizes), dtype=torch.float32, device=out.device)
        kernels.kda_pairs_kernel[(len(tiles), shape.heads, CHUNK // _NEAR)](
            system,
            within,
            mixed,
            given.a,
            given.b,
            runs,
            tiles,
            weights.a_log,
            weights.dt_bias,
            given.a.stride(0),
            given.b.stride(0),
            shape.head_dim**-0.5,
            weights.least or 0.0,
            BOUNDED=weights.least is not None,
            **self.compiled.pairs,
        )
        gdn_kernels.invert_kernel[(len(tiles), shape.heads)](system, tiles, shape.heads, **INVERT)
        writes, left = (mixed.new_empty(each, shape.values) for each in (len(mixed), len(tiles)))
        kernels.kda_fade_kernel[(len(tiles), shape.heads)](
            mixed,
            writes,
            left,
            given.a,
            runs,
            tiles,
            weights.a_log,
            weights.dt_bias,
            given.a.stride(0),
            shape.head_dim**-0.5,
            weights.least or 0.0,
            BOUNDED=weights.least is not None,
            **self.compiled.fade,
        )
        kernels.kda_scan_kernel[(len(runs), shape.heads, triton.cdiv(shape.head_dim, _PART))](
            out,
            system,
            within,
            mixed,
            writes,
            left,
            given.a,
            given.b,
            runs,
            tiles,
            cache.tensors[1],
            given.b.stride(0),
            **self.compiled.scan,
        )
