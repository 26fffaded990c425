"""Which back end computes attention: the one asked for, or the best that is there."""

from __future__ import annotations

import importlib.util

import torch

from common.checkpoint import CheckpointError
from llm_service.layers.attention.backend import AttentionBackend, CacheShape
from llm_service.layers.attention.plain import PlainBackend


def choose(name: str, shape: CacheShape, dtype: torch.dtype, device: torch.device) -> AttentionBackend:
    """The back end of a name; `auto` is flash or triton on a GPU, numba or torch on a CPU, whichever is there first.

    Raises CheckpointError, saying what is missing, where the named one cannot be used.
    """
    if name != "auto":
        found = _BACKENDS[name](shape, dtype, device)
        if isinstance(found, str):
            raise CheckpointError(f"--attention {name} cannot be used: {found}")
        return found
    order = ("flash", "triton", "torch") if device.type == "cuda" else ("numba", "torch")
    candidates = (_BACKENDS[each](shape, dtype, device) for each in order)
    return next(each for each in candidates if not isinstance(each, str))


def _torch(shape: CacheShape, _: torch.dtype, device: torch.device) -> AttentionBackend | str:
    return PlainBackend(shape, device)


def _numba(shape: CacheShape, dtype: torch.dtype, device: torch.device) -> AttentionBackend | str:
    if device.type != "cpu":
        return "it computes on CPUs"
    if dtype != torch.float32:
        return "it computes in float32"
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed"
    from llm_service.layers.attention import numba_decode

    return PlainBackend(shape, device, numba_decode.decode)


def _triton(shape: CacheShape, dtype: torch.dtype, device: torch.device) -> AttentionBackend | str:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    import triton

    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        return "there is no GPU"
    from llm_service.layers.attention.paged import PagedBackend

    return PagedBackend(shape, dtype, device)


def _flash(shape: CacheShape, dtype: torch.dtype, device: torch.device) -> AttentionBackend | str:
    if device.type != "cuda":
        return "there is no GPU"
    if dtype not in (torch.bfloat16, torch.float16):
        return "it computes in bfloat16 or float16"
    from llm_service.layers.attention import flash

    if (compute := flash.find(shape.block_size)) is None:
        return "flash-attn 3 is not installed, nor version 2 with a --block-size that is a multiple of 256"
    return flash.FlashBackend(shape, device, compute)


_BACKENDS = {"torch": _torch, "numba": _numba, "triton": _triton, "flash": _flash}
"""From a name to what makes the back end; a string in its place says why it cannot be used."""
