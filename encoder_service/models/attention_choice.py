"""Which way to compute attention: the one that was asked for, or the best one that works here."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Final

import torch

from common import log
from encoder_service.models.attention import Backend, Flash, Sdpa, Triton

_log = log.get("attention")

BACKENDS: Final[dict[str, Callable[[], Backend]]] = {"flash": Flash, "triton": Triton, "sdpa": Sdpa}
"""By name, the one to be preferred first."""


_AGREEMENT = 0.05
"""Two back ends may differ by this much over values around 1: bfloat16 has eight bits."""


class AttentionUnavailable(Exception):
    """The back end that was asked for cannot run here; the message says why, for the operator."""


def choose(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> Backend:
    """The back end of this name, or for `auto` the first one that passes a trial. Raises AttentionUnavailable."""
    if name != "auto":
        if why := _obstacle(name, device, dtype, wanted=True):
            raise AttentionUnavailable(f"--attention {name}: {why}")
        try:
            return BACKENDS[name]()
        except ImportError as error:
            raise AttentionUnavailable(f"--attention {name}: {error}") from error
    return _first(candidates(device, dtype), device, dtype, head_dim)


def choose_captured(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> Backend:
    """As `choose`, for CUDA graphs: there `auto` prefers our kernel, whose launch grows with patches, not segments."""
    if name != "auto":
        return choose(name, device, dtype, head_dim)
    ordered = sorted(candidates(device, dtype), key=lambda each: each != "triton")
    return _first(ordered, device, dtype, head_dim)


def _first(names: Sequence[str], device: torch.device, dtype: torch.dtype, head_dim: int) -> Backend:
    for name in names:
        if name == "sdpa":
            break
        if (backend := _tried(name, device, dtype, head_dim)) is not None:
            return backend
    return BACKENDS["sdpa"]()


def candidates(device: torch.device, dtype: torch.dtype) -> list[str]:
    """What `auto` may take, the best first."""
    return [name for name in BACKENDS if not _obstacle(name, device, dtype, wanted=False)]


def _tried(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> Backend | None:
    """The back end, if it runs on this device and agrees with torch's own attention: a package, a driver or a compiler
    may be too old."""
    lengths = [5, 130, 64]
    q, k, v = torch.randn(sum(lengths), 3, 2, head_dim, device=device).to(dtype).unbind(1)
    try:
        backend = BACKENDS[name]()
        found = backend.over(lengths, device)(q, k, v)
    except Exception as error:  # noqa: BLE001 - whatever a kernel fails with, the next back end may do
        _log.warning("an attention back end does not run here", backend=name, why=str(error)[:500])
        return None
    difference = (found.float() - Sdpa().over(lengths, device)(q, k, v).float()).abs().max().item()
    if difference < _AGREEMENT:
        return backend
    _log.warning("an attention back end computes something else", backend=name, difference=difference)
    return None


def _obstacle(name: str, device: torch.device, dtype: torch.dtype, *, wanted: bool) -> str:
    """Why a back end cannot run; empty where it can. The interpreter counts where it is `wanted` by name."""
    if name == "sdpa":
        return ""
    if name == "triton":
        if not importlib.util.find_spec("triton"):
            return "triton is not installed"
        import triton

        interpreted = wanted and triton.knobs.runtime.interpret
        return "" if device.type == "cuda" or interpreted else "it needs a GPU"
    if device.type != "cuda":
        return "it needs a GPU"
    if dtype not in (torch.float16, torch.bfloat16):
        return "it needs bfloat16 or float16"
    known = importlib.util.find_spec("flash_attn") or importlib.util.find_spec("torch.nn.attention.varlen")
    return "" if known else "neither flash-attn nor a torch that has varlen_attn is installed"
