"""How a product with a weight of few bits is divided among programs."""

from __future__ import annotations

from dataclasses import dataclass

_PROGRAMS = 256
"""Programs enough to keep a large GPU's memory busy: a product of few rows and few outputs is split along its inputs
into so many."""
LEAST = 1024
"""Inputs of a split."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Tile sizes of one program and its number of warps; `splits` programs share the inputs."""

    rows: int
    outputs: int
    inputs: int
    splits: int
    num_warps: int
    num_stages: int


def splits_of(outputs: int, inputs: int) -> int:
    """How many programs share the inputs in a product of few rows, if each computes 64 outputs."""
    programs, splits = -(-outputs // 64), 1
    while programs * splits * 2 <= _PROGRAMS and inputs // (2 * splits) >= LEAST:
        splits *= 2
    return splits
