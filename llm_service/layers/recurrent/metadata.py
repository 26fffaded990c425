"""Metadata of a batch of layers with states for kernels, as tensors on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.gpu.transfer import ALIGNMENT, aligned, to_device
from llm_service.layers.cache_spec import Segment
from llm_service.layers.recurrent.backend import CHUNK
from llm_service.layers.recurrent.segments import split

NOBODY = -1
"""Marks a missing slot or run: nothing is read or written."""
_WIDTHS = (3, 5, 3)
"""Numbers of a step, of a run, and of a tile."""


@dataclass(frozen=True, slots=True)
class RecurrentMetadata:
    """All int32: `steps` [s, 3] (row, slot, fresh), `runs` [r, 5] (begin, end, slot, fresh, first tile) and `tiles` [t,
    3] (run, first token, copy), CHUNK tokens each, consecutive for a run: the state behind a tile is also copied to its
    `copy`. A step or run with slot NOBODY, and a tile with run NOBODY, are padding. All of it is in `packed`, in this
    order, each part aligned."""

    steps: Tensor
    runs: Tensor
    tiles: Tensor
    packed: Tensor

    @classmethod
    def of(cls, segments: Sequence[Segment], device: torch.device) -> RecurrentMetadata:
        """The metadata of a step's segments. Those of one sequence become one run.

        >>> segments = [Segment(0, 1, 4, fresh=False), Segment(1, 65, 7, fresh=True, copy=9)]
        >>> metadata = RecurrentMetadata.of([*segments, Segment(65, 81, 7, fresh=False)], torch.device("cpu"))
        >>> metadata.steps.tolist(), metadata.runs.tolist(), metadata.tiles.tolist()
        ([[0, 4, 0]], [[1, 81, 7, 1, 0]], [[0, 1, 9], [0, 65, -1]])
        """
        numbers, counts = packed_of(segments)
        (packed,) = to_device([numbers], device)
        return cls.over(packed, counts)

    @classmethod
    def padding(cls, tokens: int, sequences: int, device: torch.device, *, decodes_only: bool) -> RecurrentMetadata:
        """Room for any segments of so many tokens of so many sequences, of which none has several with `decodes_only`.
        What stands in it is padding.

        >>> metadata = RecurrentMetadata.padding(130, 8, torch.device("cpu"), decodes_only=False)
        >>> [len(each) for each in (metadata.steps, metadata.runs, metadata.tiles)]
        [8, 8, 9]
        """
        runs = 0 if decodes_only else min(sequences, tokens // 2)
        tiles = runs + (tokens - runs) // CHUNK if runs else 0
        counts = [sequences, runs, tiles]
        packed = torch.full((sum(_sizes(counts)),), NOBODY, dtype=torch.int32, device=device)
        return cls.over(packed, counts)

    @classmethod
    def over(cls, packed: Tensor, counts: Sequence[int]) -> RecurrentMetadata:
        """Over numbers in the form of `packed`, with so many steps, runs and tiles."""
        parts = packed.split(_sizes(counts))
        steps, runs, tiles = (
            part[: width * count].view(-1, width) for part, width, count in zip(parts, _WIDTHS, counts, strict=True)
        )
        return cls(steps, runs, tiles, packed)

    @property
    def counts(self) -> list[int]:
        """How many steps, runs and tiles there is room for."""
        return [len(each) for each in (self.steps, self.runs, self.tiles)]

    def numbers(self, segments: Sequence[Segment]) -> np.ndarray:
        """The content of `packed` for a step: its metadata, followed by padding in each part."""
        return _packed(_arrays(segments), self.counts)


def packed_of(segments: Sequence[Segment]) -> tuple[np.ndarray, list[int]]:
    """The content of `RecurrentMetadata.packed` for a step's segments, int32, and the numbers of steps, runs and
    tiles."""
    arrays = _arrays(segments)
    counts = [len(each) for each in arrays]
    return _packed(arrays, counts), counts


def _sizes(counts: Sequence[int]) -> list[int]:
    """Numbers that so many steps, runs and tiles take."""
    return [aligned(width * count, ALIGNMENT // 4) for width, count in zip(_WIDTHS, counts, strict=True)]


def _packed(arrays: Sequence[np.ndarray], counts: Sequence[int]) -> np.ndarray:
    """Tables one after the other, with room for so many rows each, int32."""
    sizes = _sizes(counts)
    packed = np.full(sum(sizes), NOBODY, np.int32)
    for array, end, size in zip(arrays, np.cumsum(sizes), sizes, strict=True):
        packed[end - size : end - size + array.size] = array.reshape(-1)
    return packed


def _arrays(segments: Sequence[Segment]) -> list[np.ndarray]:
    """Steps, runs and tiles of a step's segments, int32."""
    parts, rounds = split(segments)
    steps = rounds[0] if rounds else []
    runs: list[list[int]] = []
    tiles: list[tuple[int, int, int]] = []
    for part in parts:
        if runs and runs[-1][1:3] == [part.begin, part.slot]:
            runs[-1][1] = part.end
        else:
            runs.append([part.begin, part.end, part.slot, part.fresh, len(tiles)])
        starts = range(part.begin, part.end, CHUNK)
        tiles += [(len(runs) - 1, at, part.copy if at == starts[-1] else NOBODY) for at in starts]
    tables = [(step.begin, step.slot, step.fresh) for step in steps], runs, tiles
    return [np.array(table, np.int32).reshape(-1, width) for table, width in zip(tables, _WIDTHS, strict=True)]
