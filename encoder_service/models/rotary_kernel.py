"""Rotary positions of a tower's queries and keys, in Triton: one kernel instead of twelve operators a layer, which a
GPU finishes faster than they are launched. Computed in float32 and rounded once, as by `blocks.apply_rotary`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from encoder_service.models.tower import Rotary

_HEADS = 32
"""Heads of a token in one program: all queries and keys of most towers."""


@triton.jit
def rotary_kernel(
    x,
    out,
    cosine,
    sine,
    row,
    out_row,
    heads,
    HEAD: tl.constexpr,
    HALF: tl.constexpr,
    ANGLES: tl.constexpr,
    DIMS: tl.constexpr,
    PART: tl.constexpr,
):
    """Turns the first half of each head against the second; out may be x. Grid [tokens, heads / PART].

    Tokens of x and out are `row` and `out_row` apart, their heads lie together; cosine and sine [tokens, ANGLES]
    float32, the HALF first of the first half of a head and the HALF last of the other: HALF numbers are of both.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * PART + tl.arange(0, PART)
    dim = tl.arange(0, DIMS)
    inside = (head < heads)[:, None] & (dim < HALF)[None, :]
    within = head[:, None] * HEAD + dim[None, :]
    first = tl.load(x + token * row + within, inside, 0.0).to(tl.float32)
    second = tl.load(x + token * row + within + HALF, inside, 0.0).to(tl.float32)
    angle = token * ANGLES + dim
    cos = tl.load(cosine + angle, dim < HALF, 0.0)[None, :]
    sin = tl.load(sine + angle, dim < HALF, 0.0)[None, :]
    upper = (first * cos - second * sin).to(out.dtype.element_ty)
    cos = tl.load(cosine + angle + (ANGLES - HALF), dim < HALF, 0.0)[None, :]
    sin = tl.load(sine + angle + (ANGLES - HALF), dim < HALF, 0.0)[None, :]
    tl.store(out + token * out_row + within + HALF, (second * cos + first * sin).to(out.dtype.element_ty), inside)
    tl.store(out + token * out_row + within, upper, inside)


def turn(x: Tensor, rotary: Rotary, *, fresh: bool = False) -> Tensor:
    """Rotates x [N, heads, head_dim], whose tokens may be strided and whose heads are contiguous: in place, or into a
    `fresh` tensor. Returns it."""
    count, heads, head = x.shape
    launch = constants(heads, head, rotary.cos.shape[-1])
    out = x.new_empty(x.shape) if fresh else x
    cos, sin = rotary.cos.contiguous(), rotary.sin.contiguous()
    rotary_kernel[(count, triton.cdiv(heads, launch["PART"]))](
        x, out, cos, sin, x.stride(0), out.stride(0), heads, **launch, num_warps=4
    )
    return out


def constants(heads: int, head: int, angles: int = 0) -> dict[str, int]:
    """The constants of a launch for so many heads of this size; tables have so many `angles`, 0: half a head's."""
    half = head // 2
    part = min(_HEADS, triton.next_power_of_2(heads))
    return {"HEAD": head, "HALF": half, "ANGLES": angles or half, "DIMS": triton.next_power_of_2(half), "PART": part}
