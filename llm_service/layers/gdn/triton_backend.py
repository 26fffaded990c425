"""Gated delta nets by our own Triton kernels, for any GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from llm_service.layers.cache_spec import Segment, StateCache
from llm_service.layers.gdn.backend import GdnInput, GdnShape, GdnWeights
from llm_service.layers.gdn.fla_rule import FlaRule, Round, rounds
from llm_service.layers.gpu import gdn_kernels as kernels
from llm_service.layers.gpu.convolutions import convolve_runs, convolve_steps
from llm_service.layers.recurrent.backend import CHUNK
from llm_service.layers.recurrent.kernel_backend import RecurrentKernelBackend
from llm_service.layers.recurrent.metadata import RecurrentMetadata
from llm_service.layers.recurrent.segments import split

_KEYS = (64, 32)
"""Key dimensions multiplied at once, in 16 bits and in float32, which takes more registers."""
_EXACT = "tf32x3"
"""Float32 products on tensor cores in three parts: exact ones do not fit into registers."""
INVERT: dict[str, Any] = {"NEAR": CHUNK // 4, "EXACT": _EXACT, "num_warps": 1}
"""Constants and options of `invert_kernel`, which is exact in all types; its blocks are small."""
_PART = (32, 16)
"""Columns of a state per program, in 16 bits and in float32: few, so that one sequence has programs for many
multiprocessors."""


@dataclass(frozen=True, slots=True)
class KernelConstants:
    """What the kernels are compiled for."""

    shape: GdnShape
    exact: bool

    @property
    def heads(self) -> dict[str, int]:
        """Constants of all kernels that know heads."""
        shape = self.shape
        return {
            "KEY_HEADS": shape.key_heads,
            "GROUP": shape.group,
            "KEY_DIM": shape.key_dim,
            "VALUE_DIM": shape.value_dim,
            "KEYS": max(16, triton.next_power_of_2(shape.key_dim)),
        }

    @property
    def values(self) -> int:
        """A value head's size, filled up to a power of two."""
        return max(16, int(triton.next_power_of_2(self.shape.value_dim)))

    @property
    def step(self) -> dict[str, Any]:
        """Constants and options of `step_kernel`."""
        return {**self.heads, "VALUES": self.values, "num_warps": 8}

    @property
    def system(self) -> dict[str, Any]:
        """Constants and options of `system_kernel`."""
        part = min(_KEYS[self.exact], self.heads["KEYS"])
        return {**self.heads, "PART": part, "TILE": CHUNK, "PRECISION": self._precision, "num_warps": 4}

    @property
    def scan(self) -> dict[str, Any]:
        """Constants and options of `scan_kernel`, which has no room to prefetch a tile."""
        options = {"num_warps": 8 if self.exact else 4, "num_stages": 1}
        return {**self.heads, "PART": self.part, "TILE": CHUNK, "PRECISION": self._precision, **options}

    @property
    def part(self) -> int:
        """Columns of a state that one program takes."""
        return min(_PART[self.exact], self.values)

    @property
    def _precision(self) -> str:
        return _EXACT if self.exact else "tf32"


class TritonBackend(RecurrentKernelBackend[RecurrentMetadata, "TritonBatch"]):
    """Makes batches for the kernels, compiled for one shape and type. `rule` computes chunks instead of ours."""

    def __init__(self, shape: GdnShape, dtype: torch.dtype, device: torch.device, rule: FlaRule | None = None) -> None:
        super().__init__(RecurrentMetadata, device)
        self._compiled, self._rule = KernelConstants(shape, dtype == torch.float32), rule

    def batch(self, segments: Sequence[Segment]) -> TritonBatch:
        """See `GdnBackend`."""
        made = super().batch(segments)
        if self._rule is None:
            return made
        runs, _ = split(segments)
        return replace(made, rule=self._rule, rounds=rounds(runs, self._device))

    def over(self, metadata: RecurrentMetadata) -> TritonBatch:
        """See `StableStateBackend`. Our kernels alone follow metadata: a library asks for lengths."""
        return TritonBatch(metadata, self._compiled)


@dataclass(frozen=True, slots=True)
class TritonBatch:
    """A batch of the kernels, which never wait for the device, so graphs may capture it, unless it has a `rule`, which
    computes chunks in `rounds`."""

    metadata: RecurrentMetadata
    compiled: KernelConstants
    rule: FlaRule | None = None
    rounds: Sequence[Round] = ()

    def run(self, given: GdnInput, weights: GdnWeights, cache: StateCache) -> Tensor:
        """See `GdnBatch`."""
        mixed = torch.empty(given.qkv.shape, dtype=given.qkv.dtype, device=given.qkv.device)
        out = torch.empty(given.z.shape, dtype=given.z.dtype, device=given.z.device)
        if len(self.metadata.runs):
            self._run_tiles(out, mixed, given, weights, cache)
        if len(self.metadata.steps):
            self._run_steps(out, mixed, given, weights, cache)
        return out

    def _run_steps(self, out: Tensor, mixed: Tensor, given: GdnInput, weights: GdnWeights, cache: StateCache) -> None:
        shape, steps, (convolution, recurrent) = self.compiled.shape, self.metadata.steps, cache.tensors
        convolve_steps(mixed, given.qkv, self.metadata, convolution, weights.conv)
        kernels.step_kernel[(len(steps), shape.value_heads)](
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
            shape.key_dim**-0.5,
            **self.compiled.step,
        )

    def _run_tiles(self, out: Tensor, mixed: Tensor, given: GdnInput, weights: GdnWeights, cache: StateCache) -> None:
        metadata, shape = self.metadata, self.compiled.shape
        convolve_runs(mixed, given.qkv, metadata, cache.tensors[0], weights.conv)
        if self.rule is None:
            self._scan(out, mixed, given, weights, cache.tensors[1])
        else:
            for each in self.rounds:
                self.rule.run(out, mixed, given, weights, cache.tensors[1], each)
        kernels.norm_gate_kernel[(len(metadata.tiles), shape.value_heads)](
            out,
            given.z,
            metadata.runs,
            metadata.tiles,
            weights.gain,
            given.z.stride(0),
            shape.value_heads,
            weights.eps,
            VALUE_DIM=shape.value_dim,
            VALUES=self.compiled.values,
            TILE=CHUNK,
            num_warps=4,
        )

    def _scan(self, out: Tensor, mixed: Tensor, given: GdnInput, weights: GdnWeights, recurrent: Tensor) -> None:
        metadata, shape = self.metadata, self.compiled.shape
        sizes = (len(metadata.tiles), shape.value_heads, CHUNK, CHUNK)
        system, within = torch.empty((2, *sizes), dtype=torch.float32, device=out.device)
        kernels.system_kernel[(len(metadata.tiles), shape.value_heads)](
            system,
            within,
            mixed,
            given.a,
            given.b,
            metadata.runs,
            metadata.tiles,
            weights.a_log,
            weights.dt_bias,
            given.a.stride(0),
            given.b.stride(0),
            shape.key_dim**-0.5,
            **self.compiled.system,
        )
        kernels.invert_kernel[(len(metadata.tiles), shape.value_heads)](
            system, metadata.tiles, shape.value_heads, **INVERT
        )
        kernels.scan_kernel[(len(metadata.runs), shape.value_heads, triton.cdiv(shape.value_dim, self.compiled.part))](
            out,
            system,
            within,
            mixed,
            given.a,
            given.b,
            metadata.runs,
            metadata.tiles,
            recurrent,
            weights.a_log,
            weights.dt_bias,
            given.a.stride(0),
            given.b.stride(0),
            shape.key_dim**-0.5,
            **self.compiled.scan,
        )
