"""Attention over a packed sequence: its back ends, and the choice among them.

A batch is one packed sequence of patches, divided into *segments* (a picture, a frame group, or a window of one) that
attention never crosses.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from common.cpu.compiling import Compilation, Readiness, not_kept
from common.gpu.transfer import tensors_to_device
from common.hardware import multiplies_bfloat16, multiplies_tiles
from common.telemetry import log
from encoder_service.models import row_kernels

_log = log.get("attention")

Lengths = Sequence[int]
"""Patches of each segment, in order; their sum is the length of the packed sequence."""


class Segments(Protocol):
    """Full attention inside each segment: q, k, v and the result are [N, heads, head_dim]."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


class StableSegments(Segments, Protocol):
    """Segments in a table that stays in place and is refilled before each replay of a CUDA graph. Rows behind the last
    segment are undefined."""

    def holds(self, lengths: Lengths) -> bool:
        """Whether there is room for these segments."""
        ...

    def table(self, lengths: Lengths) -> Tensor:
        """The table of these segments, on the host."""
        ...

    def fill(self, table: Tensor) -> None:
        """Uses these segments from now on, in replays too. Waits for nothing if the table is on the device."""
        ...


class Backend(Protocol):
    """One way to compute attention: it gets ready once for each batch, and the result is called in every layer."""

    name: str

    def over(self, lengths: Lengths, device: torch.device) -> Segments:
        """Gets ready for the segments of one batch."""
        ...

    def stable(self, patches: int, longest: int, device: torch.device) -> StableSegments | None:
        """Room for any reasonable division of `patches` patches into segments of at most `longest`.

        None if launches depend on the lengths, so that a captured one could not serve others.
        """
        ...


class Sdpa:
    """torch's own attention: neighbouring segments of one length go through it as one batch."""

    name = "sdpa"

    def over(self, lengths: Lengths, device: torch.device) -> Segments:  # noqa: ARG002 - the lengths stay on the host
        return functools.partial(_sdpa, runs(lengths))

    def stable(self, patches: int, longest: int, device: torch.device) -> None:  # noqa: ARG002
        return None


def _sdpa(parts: Sequence[tuple[int, int]], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out, start = torch.empty(q.shape, dtype=q.dtype, device=q.device), 0
    for count, length in parts:
        end = start + count * length
        shape = (count, length, *q.shape[1:])
        one, two, three = (part[start:end].view(shape).transpose(1, 2) for part in (q, k, v))
        out[start:end].view(shape).copy_(F.scaled_dot_product_attention(one, two, three).transpose(1, 2))
        start = end
    return out


class Numba:
    """Our kernels for CPUs with AVX512-BF16, with AMX tiles if available. Kernels that are not cached on disk are
    compiled by a process in the background while torch computes (`wait`: here and now, as if no folder is writable).
    They include the row kernels and, with tiles, those of whole blocks (`row_kernels`)."""

    name = "numba"

    def __init__(self, *, wait: bool = False) -> None:
        from common.cpu import jit, pair_attention, short_rows, tile_attention  # numba takes its time

        tiles, self._blocks = multiplies_tiles(), None
        self._segments = tile_attention.TiledAttention if tiles else pair_attention.PairAttention
        self._rows = short_rows
        jit.use_threads(torch.get_num_threads())
        kernels = [*(tile_attention.KERNELS if tiles else pair_attention.KERNELS), *short_rows.KERNELS]
        if tiles:
            from encoder_service.models import fused_block

            self._blocks = fused_block
            kernels += fused_block.KERNELS
        missing = not_kept(kernels)
        if missing and (wait or any(jit.find(name).folder is None for name in missing)):
            _log.info("our kernels are compiled before this serves", kernels=len(missing))
            jit.compile_all(map(jit.find, missing))
            missing = []
        self._compiling = Compilation(missing) if missing else None

    def over(self, lengths: Lengths, device: torch.device) -> Segments:
        if self._compiling is not None and self._compiling.readiness is not Readiness.THERE:
            return Sdpa().over(lengths, device)
        row_kernels.select(self._rows, self._blocks)
        return self._segments(lengths)

    def stable(self, patches: int, longest: int, device: torch.device) -> None:  # noqa: ARG002
        return None


def runs(lengths: Lengths) -> list[tuple[int, int]]:
    """Neighbours of one length, together: (count, length). Lengths 4 4 4 6 4 give (3, 4), (1, 6), (1, 4)."""
    return [(len(list(group)), length) for length, group in itertools.groupby(lengths)]


class Triton:
    """Our own kernel; on a CPU it runs in Triton's interpreter, if that is enabled."""

    name = "triton"

    def over(self, lengths: Lengths, device: torch.device) -> Segments:
        segments = _TritonSegments(sum(lengths), max(lengths), len(lengths), device)
        segments.fill(*tensors_to_device([segments.table(lengths)], device))
        return segments

    def stable(self, patches: int, longest: int, device: torch.device) -> StableSegments:
        return _TritonSegments(patches, longest, max_segments(patches), device)


class _TritonSegments:
    """A table of tiles, [T, 3] int32; each segment may end with a tile that is not full."""

    def __init__(self, patches: int, longest: int, segments: int, device: torch.device) -> None:
        from encoder_service.models import varlen_attention as kernel

        self._kernel = kernel
        self._rows = kernel.tile_rows(longest)
        self._table = torch.zeros(patches // self._rows + segments, 3, dtype=torch.int32, device=device)

    def holds(self, lengths: Lengths) -> bool:
        return sum(-(-length // self._rows) for length in lengths) <= len(self._table)

    def table(self, lengths: Lengths) -> Tensor:
        """The rest is zeros: tiles that are empty."""
        tiles = torch.tensor(self._kernel.tiles(lengths, self._rows), dtype=torch.int32)
        return F.pad(tiles, (0, 0, 0, len(self._table) - len(tiles)))

    def fill(self, table: Tensor) -> None:
        self._table.copy_(table)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._kernel.varlen_attention(q, k, v, self._table, self._rows)


_FLASH = {
    "flash3": (("flash_attn_interface", "flash_attn_varlen_func"),),
    "flash": (("flash_attn", "flash_attn_varlen_func"), ("torch.nn.attention.varlen", "varlen_attn")),
}
"""Where flash attention is found, as (module, function): version 3 for Hopper; version 2, or the kernels that torch
ships. All take (q, k, v, bounds of queries, bounds of keys, longest of each) in this order."""


class Flash:
    """Flash attention by a library. Raises ImportError if there is none of this name."""

    def __init__(self, name: str = "flash") -> None:
        self.name = name
        self._run = _flash(name)

    def over(self, lengths: Lengths, device: torch.device) -> Segments:
        segments = _FlashSegments(self._run, max(lengths), len(lengths), device)
        segments.fill(*tensors_to_device([segments.table(lengths)], device))
        return segments

    def stable(self, patches: int, longest: int, device: torch.device) -> StableSegments:
        return _FlashSegments(self._run, longest, flash_segments(patches, longest), device)


class _FlashSegments:
    """Bounds of segments, [S + 1] int32. `longest` is an upper bound that decides how many programs are launched."""

    def __init__(self, run: Callable[..., Any], longest: int, size: int, device: torch.device) -> None:
        self._run = run
        self._longest = longest
        self._bounds = torch.zeros(size + 1, dtype=torch.int32, device=device)

    def holds(self, lengths: Lengths) -> bool:
        return len(lengths) < len(self._bounds) and max(lengths) <= self._longest

    def table(self, lengths: Lengths) -> Tensor:
        """The rest repeats the end: segments that are empty."""
        bounds = [0, *itertools.accumulate(lengths)]
        bounds += [bounds[-1]] * (len(self._bounds) - len(bounds))
        return torch.tensor(bounds, dtype=torch.int32)

    def fill(self, table: Tensor) -> None:
        self._bounds.copy_(table)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = self._run(q, k, v, self._bounds, self._bounds, self._longest, self._longest)
        attended: Tensor = out[0] if isinstance(out, tuple) else out  # early third versions give their sums as well
        return attended


def _flash(name: str) -> Callable[..., Any]:
    """Raises ImportError if there is none. A package may be unusable: built for another torch, or a version without
    this function."""
    for module, function in _FLASH[name]:
        with contextlib.suppress(ImportError, AttributeError, OSError, RuntimeError):
            run: Callable[..., Any] = getattr(importlib.import_module(module), function)
            return run
    raise ImportError(_MISSING[name])


_MISSING = {
    "flash3": "flash-attn 3 cannot be imported",
    "flash": "neither flash-attn nor a torch that has varlen_attn can be imported",
}


def max_segments(patches: int) -> int:
    """The number of segments that a graph of so many patches has room for: windows or thumbnails of 16 patches."""
    return max(1, patches // 16)


def flash_segments(patches: int, longest: int) -> int:
    """The same where a launch has a program for every 128 patches of `longest`, of every segment that there is room
    for: as many as make 512 of these, the rest of which end at once.

    >>> [flash_segments(patches, patches) for patches in (256, 1024, 2048, 4096, 16384)]
    [16, 64, 32, 16, 16]
    """
    return min(max_segments(patches), max(16, 4 * patches // longest, 512 // -(-longest // 128)))


BACKENDS: Final[dict[str, Callable[..., Backend]]] = {
    **{name: functools.partial(Flash, name) for name in _FLASH},
    "triton": Triton,
    "numba": functools.cache(Numba),
    "sdpa": Sdpa,
}
"""By name, the one to be preferred first."""

_AGREEMENT = 0.05
"""Two back ends may differ by this much over values around 1: bfloat16 has eight bits."""


class AttentionUnavailable(Exception):
    """The back end that was asked for cannot run here; the message says why, for the operator."""


def choose(name: str, device: torch.device, dtype: torch.dtype, head_dim: int, kernels: str = "auto") -> Backend:
    """The back end of this name, or for `auto` the first one that passes a trial: with `kernels` wait, once ours for
    CPUs are compiled, with torch none of ours. Raises AttentionUnavailable."""
    if name != "auto":
        if why := _obstacle(name, device, dtype, wanted=True):
            raise AttentionUnavailable(f"--attention {name}: {why}")
        try:
            return _made(name, wait=True)
        except ImportError as error:
            raise AttentionUnavailable(f"--attention {name}: {error}") from error
    return next(_that_run(candidates(device, dtype), device, dtype, head_dim, kernels))


def capturable(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, kernels: str = "auto"
) -> list[Backend]:
    """The back ends for CUDA graphs, beginning with the default if nobody measures: for `auto` all that pass a trial,
    our kernel first, whose launch grows with patches instead of segments; else the one of this name."""
    if name != "auto":
        return [choose(name, device, dtype, head_dim, kernels)]
    names = sorted(candidates(device, dtype), key=lambda each: each != "triton")
    return list(_that_run(names, device, dtype, head_dim, kernels))


def _that_run(
    names: Sequence[str], device: torch.device, dtype: torch.dtype, head_dim: int, kernels: str
) -> Iterator[Backend]:
    """Those that pass a trial; torch's own needs none."""
    for name in names:
        if name == "sdpa":
            yield BACKENDS["sdpa"]()
        elif name == "numba" and kernels == "torch":
            continue
        elif (backend := _tried(name, device, dtype, head_dim, wait=kernels == "wait")) is not None:
            yield backend


def _made(name: str, *, wait: bool) -> Backend:
    """The back end of this name; our CPU kernels once they are compiled, if it is to `wait` for them."""
    return BACKENDS[name](wait=True) if name == "numba" and wait else BACKENDS[name]()


def candidates(device: torch.device, dtype: torch.dtype) -> list[str]:
    """The back ends that `auto` may choose, the best first."""
    return [name for name in BACKENDS if not _obstacle(name, device, dtype, wanted=False)]


def _tried(name: str, device: torch.device, dtype: torch.dtype, head_dim: int, *, wait: bool) -> Backend | None:
    """The back end, if it runs on this device and agrees with torch's own attention: a package, a driver or a compiler
    may be too old."""
    lengths = [5, 130, 64]
    q, k, v = torch.randn(sum(lengths), 3, 2, head_dim, device=device).to(dtype).unbind(1)
    try:
        backend = _made(name, wait=wait)
        found = backend.over(lengths, device)(q, k, v)
    except Exception as error:  # noqa: BLE001 - whatever a kernel fails with, the next back end may do
        _log.warning("an attention back end does not run here", backend=name, cause=str(error)[:500])
        return None
    difference = (found.float() - Sdpa().over(lengths, device)(q, k, v).float()).abs().max().item()
    if difference < _AGREEMENT:
        return backend
    _log.warning("an attention back end computes wrong results", backend=name, difference=difference)
    return None


def _obstacle(name: str, device: torch.device, dtype: torch.dtype, *, wanted: bool) -> str:
    """Why a back end cannot run; empty if it can. The interpreter counts if it is `wanted` by name."""
    if name == "sdpa":
        return ""
    if name == "triton":
        if device.type != "cuda" and not wanted:  # to import it takes a quarter of a service's start
            return "it needs a GPU"
        if not importlib.util.find_spec("triton"):
            return "triton is not installed"
        import triton

        return "" if device.type == "cuda" or triton.knobs.runtime.interpret else "it needs a GPU"
    if name == "numba":
        able = torch.backends.cpu.get_cpu_capability() == "AVX512" and multiplies_bfloat16()
        if device.type != "cpu" or not able:
            return "it needs a CPU with AVX512-BF16"
        return "" if dtype == torch.bfloat16 else "it needs bfloat16"
    if device.type != "cuda":
        return "it needs a GPU"
    if dtype not in (torch.float16, torch.bfloat16):
        return "it needs bfloat16 or float16"
    known = any(importlib.util.find_spec(module) for module, _ in _FLASH[name])
    return "" if known else _MISSING[name]
