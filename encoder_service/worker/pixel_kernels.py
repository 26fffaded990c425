"""Patches of 8-bit pictures on a GPU, in Triton: a kernel for each axis of `fixed_point.resize`, with the same bits,
and one that cuts patches and writes them into their places in a batch, with values from a table of 256. Frames are as
decoders write them, [T, H, W, 3]."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from encoder_service.worker.fixed_point import line_on

_LINES, _ACROSS = 4, 256
"""Lines, and numbers of each, per program."""
_BESIDE = 1024
"""And of some columns."""
_CHANGING = ["length", "out_length", "taps", "precision", "half"]


@triton.jit(do_not_specialize=[*_CHANGING, "lines"])  # they differ from picture to picture
def line_kernel(
    x,
    out,
    first,
    weight,
    lines,
    length,
    out_length,
    taps,
    precision,
    half,
    LINES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Resizes lines [lines, length, 3] to [lines, out_length, 3]. Grid [lines / LINES, 3 · out_length / BLOCK].

    A pixel is made of `taps` consecutive pixels; weights [taps, out_length] beyond the end are 0; half is half of 1 <<
    precision.
    """
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pixel, here = at // 3, at < 3 * out_length
    inside = (line < lines)[:, None] & here[None, :]
    begin = tl.load(first + pixel, here, 0)
    source = x + line[:, None] * 3 * length + (at % 3)[None, :]
    total = tl.zeros([LINES, BLOCK], tl.int32) + half
    for tap in range(taps):
        place = 3 * tl.minimum(begin + tap, length - 1)
        share = tl.load(weight + tap * out_length + pixel, here, 0)
        total += tl.load(source + place[None, :], inside, 0).to(tl.int32) * share[None, :]
    total = tl.minimum(tl.maximum(total >> precision, 0), 255)
    tl.store(out + line[:, None] * 3 * out_length + at[None, :], total.to(tl.uint8), inside)


@triton.jit(do_not_specialize=[*_CHANGING, "across"])
def column_kernel(
    x,
    out,
    first,
    weight,
    across,
    length,
    out_length,
    taps,
    precision,
    half,
    BLOCK: tl.constexpr,
):
    """Resizes columns of frames [T, length, across] to [T, out_length, across], `across` numbers of any channel; the
    rest as in `line_kernel`. Grid [T · out_length, across / BLOCK]."""
    line = tl.program_id(0)
    pixel, frame = line % out_length, (line // out_length).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < across
    begin = tl.load(first + pixel)
    source = x + frame * length * across + at
    total = tl.zeros([BLOCK], tl.int32) + half
    for tap in range(taps):
        place = tl.minimum(begin + tap, length - 1).to(tl.int64)
        share = tl.load(weight + tap * out_length + pixel)
        total += tl.load(source + place * across, inside, 0).to(tl.int32) * share
    total = tl.minimum(tl.maximum(total >> precision, 0), 255)
    tl.store(out + line.to(tl.int64) * across + at, total.to(tl.uint8), inside)


@triton.jit(do_not_specialize=["frames", "high", "wide", "rows", "columns"])
def patch_kernel(
    x,
    out,
    table,
    frames,
    high,
    wide,
    rows,
    columns,
    PATCH: tl.constexpr,
    TEMPORAL: tl.constexpr,
    MERGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Cuts frames [frames, high, wide, 3] into tiles of rows × columns patches, and these into patches, squares of
    MERGE together: [patches, 3 · TEMPORAL · PATCH²], each number x of a channel as table [3, 256] has it. Frames that
    are missing are as the last one. Grid [patches]."""
    area = PATCH * PATCH
    index = tl.program_id(0)
    tile, within = index // (rows * columns), index % (rows * columns)
    across = wide // (columns * PATCH)
    tiles = high // (rows * PATCH) * across
    square, corner = within // (MERGE * MERGE), within % (MERGE * MERGE)
    squares = columns // MERGE
    row = tile % tiles // across * rows + square // squares * MERGE + corner // MERGE
    column = tile % tiles % across * columns + square % squares * MERGE + corner % MERGE
    at = tl.arange(0, BLOCK)
    inside = at < 3 * TEMPORAL * area
    channel = at // (TEMPORAL * area)
    frame = tl.minimum(tile // tiles * TEMPORAL + at // area % TEMPORAL, frames - 1)
    line = frame.to(tl.int64) * high + row * PATCH + at // PATCH % PATCH
    place = (line * wide + column * PATCH + at % PATCH) * 3 + channel
    value = tl.load(x + place, inside, 0).to(tl.int32)
    made = tl.load(table + channel * 256 + value, inside)
    tl.store(out + index.to(tl.int64) * (3 * TEMPORAL * area) + at, made, inside)


def resize(frames: Tensor, size: tuple[int, int]) -> Tensor:
    """Frames [T, H, W, 3] uint8 as `fixed_point.resize` has them in (height, width)."""
    (count, height, width, _), (high, wide) = frames.shape, size
    if width != wide:
        source, frames = frames, frames.new_empty(count, height, wide, 3)
        taps = line_on(width, wide, frames.device)
        lines = count * height
        grid = triton.cdiv(lines, _LINES), triton.cdiv(3 * wide, _ACROSS)
        told = lines, width, wide, len(taps.weight), taps.precision, 1 << (taps.precision - 1)
        line_kernel[grid](source, frames, taps.index[0], taps.weight, *told, **LINE)
    if height != high:
        source, frames = frames, frames.new_empty(count, high, wide, 3)
        taps = line_on(height, high, frames.device)
        grid = count * high, triton.cdiv(3 * wide, _BESIDE)
        told = 3 * wide, height, high, len(taps.weight), taps.precision, 1 << (taps.precision - 1)
        column_kernel[grid](source, frames, taps.index[0], taps.weight, *told, **COLUMN)
    return frames


def write_patches(
    frames: Tensor, out: Tensor, table: Tensor, tile: tuple[int, int], patch: int, temporal: int, merge: int
) -> None:
    """Fills the contiguous out [patches, dim] with all patches of frames [T, H, W, 3], cut into tiles of (rows,
    columns) patches; `table` [3, 256] has out's type."""
    count, high, wide, _ = frames.shape
    patch_kernel[(len(out),)](frames, out, table, count, high, wide, *tile, **constants(patch, temporal, merge))


LINE = {"LINES": _LINES, "BLOCK": _ACROSS, "num_warps": 4}
COLUMN = {"BLOCK": _BESIDE, "num_warps": 4}
"""Constants of launches."""


def constants(patch: int, temporal: int, merge: int) -> dict[str, int]:
    """The same, of patches of a processor."""
    block = triton.next_power_of_2(3 * temporal * patch * patch)
    return {"PATCH": patch, "TEMPORAL": temporal, "MERGE": merge, "BLOCK": block, "num_warps": 8}
