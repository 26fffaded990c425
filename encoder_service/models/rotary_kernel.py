"""Rotary positions of a tower's queries and keys, in Triton: one kernel in the place of twelve operators a layer, which
a GPU ends faster than it can begin them. Computed in float32 and rounded once, as by `blocks.apply_rotary`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from encoder_service.models.tower import Rotary

_HEADS = 32
"""What one program takes of a token: all queries and keys of most towers."""


@triton.jit
def rotary_kernel(
    x, cosine, sine, row, heads, HEAD: tl.constexpr, HALF: tl.constexpr, DIMS: tl.constexpr, PART: tl.constexpr
):
    """Turns the first half of each head against the second, in place. Grid [tokens, heads / PART].

    Tokens of x are `row` apart, their heads lie together; cosine and sine [tokens, HALF] float32.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * PART + tl.arange(0, PART)
    dim = tl.arange(0, DIMS)
    inside = (head < heads)[:, None] & (dim < HALF)[None, :]
    place = x + token * row + head[:, None] * HEAD + dim[None, :]
    first = tl.load(place, inside, 0.0).to(tl.float32)
    second = tl.load(place + HALF, inside, 0.0).to(tl.float32)
    cos = tl.load(cosine + token * HALF + dim, dim < HALF, 0.0)[None, :]
    sin = tl.load(sine + token * HALF + dim, dim < HALF, 0.0)[None, :]
    tl.store(place, (first * cos - second * sin).to(x.dtype.element_ty), inside)
    tl.store(place + HALF, (second * cos + first * sin).to(x.dtype.element_ty), inside)


def turn(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotates x [N, heads, head_dim] in place, whose tokens may be apart and whose heads are not, and returns it."""
    count, heads, head = x.shape
    launch = constants(heads, head)
    rotary_kernel[(count, triton.cdiv(heads, launch["PART"]))](
        x, rotary.cos, rotary.sin, x.stride(0), heads, **launch, num_warps=4
    )
    return x


def constants(heads: int, head: int) -> dict[str, int]:
    """What a launch for so many heads of this size is compiled for."""
    half = head // 2
    part = min(_HEADS, triton.next_power_of_2(heads))
    return {"HEAD": head, "HALF": half, "DIMS": triton.next_power_of_2(half), "PART": part}
