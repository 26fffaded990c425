"""Mamba-2 by our own Triton kernels, for any GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from llm_service.layers.cache_spec import StateCache
from llm_service.layers.gpu import mamba2_kernels
from llm_service.layers.gpu.convolutions import convolve_runs, convolve_steps
from llm_service.layers.mamba2.backend import Mamba2Input, Mamba2Shape, Mamba2Weights
from llm_service.layers.mamba2.metadata import Mamba2Metadata
from llm_service.layers.recurrent.backend import CHUNK
from llm_service.layers.recurrent.kernel_backend import RecurrentKernelBackend

_EXACT = "ieee"
"""How float32 is multiplied: three products in tf32 do not fit the registers of 8.0."""
_PART = (32, 16)
"""Columns of a state that one program takes through a run, in 16 bits and in float32."""


@dataclass(frozen=True, slots=True)
class Mamba2Constants:
    """What the kernels are compiled for."""

    shape: Mamba2Shape
    exact: bool

    @property
    def heads(self) -> dict[str, int]:
        """Constants of both kernels that know heads."""
        shape = self.shape
        return {
            "GROUPS": shape.groups,
            "GROUP": shape.group,
            "STATE_DIM": shape.state_dim,
            "HEAD_DIM": shape.head_dim,
            "STATE": max(16, triton.next_power_of_2(shape.state_dim)),
        }

    @property
    def step(self) -> dict[str, Any]:
        """Constants and options of `mamba2_step_kernel`."""
        return {**self.heads, "HEAD": self._head, "num_warps": 8}

    @property
    def scan(self) -> dict[str, Any]:
        """Constants and options of `mamba2_scan_kernel`."""
        precision = _EXACT if self.exact else "tf32"
        return {**self.heads, "PART": self.part, "TILE": CHUNK, "PRECISION": precision, "num_warps": 8, "num_stages": 1}

    @property
    def norm(self) -> dict[str, Any]:
        """Constants and options of `group_norm_kernel`."""
        size = self.shape.values // self.shape.groups
        return {"GROUPS": self.shape.groups, "SIZE": size, "BLOCK": triton.next_power_of_2(size), "num_warps": 4}

    @property
    def part(self) -> int:
        """Columns of a state that one program takes."""
        return min(_PART[self.exact], self._head)

    @property
    def _head(self) -> int:
        return max(16, int(triton.next_power_of_2(self.shape.head_dim)))


class TritonBackend(RecurrentKernelBackend[Mamba2Metadata, "TritonBatch"]):
    """Makes batches for the kernels, compiled for one shape and type."""

    def __init__(self, shape: Mamba2Shape, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(Mamba2Metadata, device)
        self._compiled = Mamba2Constants(shape, dtype == torch.float32)

    def over(self, metadata: Mamba2Metadata) -> TritonBatch:
        """See `StableStateBackend`."""
        return TritonBatch(metadata, self._compiled)


@dataclass(frozen=True, slots=True)
class TritonBatch:
    """A batch of the kernels; nothing in them waits for the device, so a graph may capture it."""

    metadata: Mamba2Metadata
    compiled: Mamba2Constants

    def run(self, given: Mamba2Input, weights: Mamba2Weights, cache: StateCache) -> Tensor:
        """See `Mamba2Batch`."""
        tables, shape = self.metadata.tables, self.compiled.shape
        mixed = torch.empty(given.xbc.shape, dtype=given.xbc.dtype, device=given.xbc.device)
        read = torch.zeros(given.z.shape, device=given.z.device)  # rows of padding are normed too
        if len(tables.runs):
            self._run_tiles(read, mixed, given, weights, cache)
        if len(tables.steps):
            self._run_steps(read, mixed, given, weights, cache)
        out = torch.empty(given.z.shape, dtype=given.z.dtype, device=given.z.device)
        mamba2_kernels.group_norm_kernel[(len(out), shape.groups)](
            *(out, read, given.z, weights.gain, given.z.stride(0), weights.eps), **self.compiled.norm
        )
        return out

    def _run_steps(
        self, read: Tensor, mixed: Tensor, given: Mamba2Input, weights: Mamba2Weights, cache: StateCache
    ) -> None:
        shape, steps, (convolution, recurrent) = self.compiled.shape, self.metadata.tables.steps, cache.tensors
        convolve_steps(mixed, given.xbc, self.metadata.tables, convolution, weights.conv, weights.conv_bias)
        mamba2_kernels.mamba2_step_kernel[(len(steps), shape.heads)](
            read,
            mixed,
            given.dt,
            steps,
            self.metadata.answers,
            recurrent,
            weights.a_log,
            weights.dt_bias,
            weights.d,
            given.dt.stride(0),
            shape.least_step,
            **self.compiled.step,
        )

    def _run_tiles(
        self, read: Tensor, mixed: Tensor, given: Mamba2Input, weights: Mamba2Weights, cache: StateCache
    ) -> None:
        tables, shape, (convolution, recurrent) = self.metadata.tables, self.compiled.shape, cache.tensors
        convolve_runs(mixed, given.xbc, tables, convolution, weights.conv, weights.conv_bias)
        parts = triton.cdiv(shape.head_dim, self.compiled.part)
        mamba2_kernels.mamba2_scan_kernel[(len(tables.runs), shape.heads, parts)](
            read,
            mixed,
            given.dt,
            tables.runs,
            tables.tiles,
            self.metadata.answers,
            recurrent,
            weights.a_log,
            weights.dt_bias,
            weights.d,
            given.dt.stride(0),
            shape.least_step,
            **self.compiled.scan,
        )
