"""Chooses the attention back end: the configured one, or the best available."""

from __future__ import annotations

import dataclasses
import importlib.util

import torch

from common.checkpoints.checkpoint import CheckpointError
from common.hardware import E4M3_CAPABILITY
from common.telemetry import log
from llm_service.layers.attention.backend import AttentionBackend, CacheShape, MakesBackend, PagedChunk
from llm_service.layers.attention.torch_backend import TorchBackend
from llm_service.layers.cpu import selection

_log = log.get("attention")


def choose(asked: str | MakesBackend, shape: CacheShape, dtype: torch.dtype, device: torch.device) -> AttentionBackend:
    """The back end of this name, or of this factory; `auto` is flash or triton on GPUs, numba or torch on CPUs: the
    first available one, which on a GPU must pass a trial.

    Raises CheckpointError, which says what is missing, if the named one cannot be used.
    """
    if not isinstance(asked, str):
        return asked(shape)
    if asked != "auto":
        found = _BACKENDS[asked](shape, dtype, device)
        if isinstance(found, str):
            raise CheckpointError(f"--attention {asked} cannot be used: {found}")
        return found
    order = ("flash", "triton", "torch") if device.type == "cuda" else ("numba", "torch")
    for each in order:
        found = _BACKENDS[each](shape, dtype, device)
        if not isinstance(found, str) and (device.type == "cpu" or each == "torch" or runs(each, shape, dtype, device)):
            return found
        if isinstance(found, str) and each != "flash":  # flash is a package of its own
            _log.info("an attention back end is not used", backend=each, cause=found)
    raise AssertionError("torch computes everywhere")


@torch.inference_mode()
def runs(name: str, shape: CacheShape, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a back end computes a prompt, and a token behind it, as torch does: a package, a driver or a compiler may
    be too old, or missing, or make wrong code of a kernel. Raises OutOfMemoryError."""
    blocks = -(-(_TRIED + 1) // shape.block_size)
    small = dataclasses.replace(shape, layers=1, blocks=blocks)
    noise, apart = torch.Generator(device).manual_seed(0), list[float]()
    try:
        backend = _BACKENDS[name](small, dtype, device)
        assert not isinstance(backend, str)
        plain = TorchBackend(small, device)
        ours, theirs = (small.new_cache(dtype, device)[0] for _ in range(2))
        for context, count in ((0, _TRIED), (_TRIED, 1)):
            chunks = [PagedChunk(context, count, [*range(blocks)])]
            query, key, value = (each.normal_(generator=noise) for each in small.zeros(count, dtype, device))
            found = backend.batch(chunks).attend(query, key, value, ours).float()
            expected = plain.batch(chunks).attend(query, key, value, theirs).float()
            apart.append(float((found - expected).norm() / expected.norm()))
    except torch.OutOfMemoryError:  # it says nothing about a back end
        raise
    except Exception as error:  # noqa: BLE001 - whatever it fails with, the next one may do
        _log.warning("an attention back end does not run here", backend=name, cause=str(error)[:500])
        return False
    if not (right := all(each < _APART for each in apart)):
        _log.warning("an attention back end computes wrong results", backend=name, apart=apart)
    return right


_TRIED = 150
"""Tokens of a trial's prompt: several tiles of queries, and several parts of a context."""
_APART = 0.05
"""How far results may be from torch's, by their length: bfloat16 has eight bits."""


def _torch(shape: CacheShape, _: torch.dtype, device: torch.device) -> AttentionBackend | str:
    return TorchBackend(shape, device)


def _numba(shape: CacheShape, dtype: torch.dtype, device: torch.device) -> AttentionBackend | str:
    if device.type != "cpu":
        return "it computes on CPUs"
    if not selection.allows_panels():
        return "our kernels for CPUs are turned off"
    if shape.values_in_keys:
        return _LATENT
    if shape.int8:
        return _INT8
    if shape.fp8:
        return _FP8
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed"
    from llm_service.layers.cpu.numba_backend import NumbaBackend

    short = dtype == torch.bfloat16 and selection.computes_bfloat16() and shape.head_dim % 2 == 0
    if dtype != torch.float32 and not short:
        return "it computes in float32"
    return NumbaBackend(shape, dtype, packs=selection.wide_vectors())


def _triton(shape: CacheShape, dtype: torch.dtype, device: torch.device) -> AttentionBackend | str:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    import triton

    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        return "there is no GPU"
    if shape.values_in_keys:
        from llm_service.layers.attention.latent_triton import LatentTritonBackend

        if shape.kind.softcap is not None:
            return "it knows no soft caps of scores over latents"
        if shape.kind.sight.answer_window:
            return f"{_ANSWERS} over latents"
        return LatentTritonBackend(shape, dtype, device)
    if shape.fp8 and device.type == "cuda" and torch.cuda.get_device_capability(device) < E4M3_CAPABILITY:
        return "GPUs have had e4m3 since Ada, 8.9"
    from llm_service.layers.attention.triton_backend import TritonBackend

    return TritonBackend(shape, dtype, device)


def _flash(shape: CacheShape, dtype: torch.dtype, device: torch.device) -> AttentionBackend | str:
    if device.type != "cuda":
        return "there is no GPU"
    if dtype not in (torch.bfloat16, torch.float16):
        return "it computes in bfloat16 or float16"
    if shape.values_in_keys:
        return _LATENT
    if shape.int8:
        return _INT8
    if shape.fp8:
        return _FP8
    if shape.kind.sight.chunk:
        return "it knows no chunks of a sequence within which layers attend"
    if shape.kind.sight.answer_window:
        return _ANSWERS
    if shape.head_dim > _WIDEST_OF_FLASH:
        return f"it knows heads of {_WIDEST_OF_FLASH} numbers at most, and some have {shape.head_dim}"
    from llm_service.layers.attention import flash_backend

    capped = shape.kind.softcap is not None
    if (compute := flash_backend.find(shape.block_size, softcap=capped)) is None:
        which = "with soft caps of scores " if capped else ""
        return f"flash-attn 3 {which}is not installed, nor version 2 with a --block-size that is a multiple of 256"
    return flash_backend.FlashBackend(shape, device, compute)


_WIDEST_OF_FLASH = 256
_ANSWERS = "it knows no windows that are for answers alone"
_LATENT = "it knows no values that lie within keys, as latent attention has them"
_FP8 = "it reads no keys and values of e4m3"
_INT8 = "it reads no keys and values in 8 bits"
_BACKENDS = {"torch": _torch, "numba": _numba, "triton": _triton, "flash": _flash}
"""Factories of back ends by name; a string instead says why a back end cannot be used."""
