"""Which kernels compute on CPUs in this process: numba's, or torch's while numba's are being compiled.

Whoever runs steps switches between two of them. Everything else uses numba's, which are compiled at their first call.
"""

from __future__ import annotations

import torch

from common.hardware import multiplies_bfloat16, multiplies_byte_tiles, multiplies_bytes, multiplies_tiles


def wide_vectors() -> bool:
    """Whether this processor has vectors of 16 float32, for which our kernels are written."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


def fused_vectors() -> bool:
    """Whether this processor has vectors that it multiplies and adds in one go."""
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


def computes_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 (AVX512-BF16), and our kernels may have weights as they want them."""
    return _state.panels and wide_vectors() and multiplies_bfloat16()


def computes_tiles() -> bool:
    """Whether it does so by tiles as well (AMX)."""
    return computes_bfloat16() and multiplies_tiles()


def computes_bytes() -> bool:
    """Whether this processor multiplies numbers of 8 bits (AVX512-VNNI), and our kernels may have weights as they want
    them."""
    return _state.panels and wide_vectors() and multiplies_bytes()


def computes_byte_tiles() -> bool:
    """Whether it does so by tiles as well (AMX)."""
    return computes_bytes() and computes_tiles() and multiplies_byte_tiles()


class _State:
    numba = True
    panels = True


_state = _State()


def is_numba() -> bool:
    """Whether numba's kernels compute."""
    return _state.numba


def select(*, numba: bool) -> None:
    """Has numba's kernels compute from now on, or torch's."""
    _state.numba = numba


def allows_panels() -> bool:
    """Whether weights may be laid out as numba's kernels want them."""
    return _state.panels


def leave_to_torch() -> None:
    """Leaves everything to torch for good, and weights in torch's layout. To be called before any weight exists."""
    _state.numba = _state.panels = False
