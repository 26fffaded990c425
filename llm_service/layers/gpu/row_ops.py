"""`RowOps` by Triton's kernels."""

from __future__ import annotations

from llm_service.layers.gpu.routing_kernels import route, sort_by_expert, weighted_sum
from llm_service.layers.gpu.row_kernels import add_rms_norm, gelu_and_mul, qk_norm_rotary, rms_norm, silu_and_mul

__all__ = [
    "add_rms_norm",
    "gelu_and_mul",
    "qk_norm_rotary",
    "rms_norm",
    "route",
    "silu_and_mul",
    "sort_by_expert",
    "weighted_sum",
]
