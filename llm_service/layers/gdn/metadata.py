"""What kernels need to know of a batch of gated delta nets, as tensors on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from llm_service.layers.cache_spec import Segment
from llm_service.layers.gdn.backend import CHUNK
from llm_service.layers.gdn.torch_backend import split

NOBODY = -1
"""Stands for a slot or a run where there is none: nothing is read or written."""


@dataclass(frozen=True, slots=True)
class GdnMetadata:
    """All int32: `steps` [s, 3] (row, slot, fresh), `runs` [r, 5] (begin, end, slot, fresh, first tile) and `tiles`
    [t, 3] (run, first token, copy), CHUNK tokens each, those of a run one after the other: the state behind a tile goes
    to its copy as well. A step or a run of slot NOBODY, and a tile of run NOBODY, are padding."""

    steps: Tensor
    runs: Tensor
    tiles: Tensor

    @classmethod
    def of(cls, segments: Sequence[Segment], device: torch.device) -> GdnMetadata:
        """The metadata of a step's segments. Those of one sequence become one run.

        >>> segments = [Segment(0, 1, 4, fresh=False), Segment(1, 65, 7, fresh=True, copy=9)]
        >>> metadata = GdnMetadata.of([*segments, Segment(65, 81, 7, fresh=False)], torch.device("cpu"))
        >>> metadata.steps.tolist(), metadata.runs.tolist(), metadata.tiles.tolist()
        ([[0, 4, 0]], [[1, 81, 7, 1, 0]], [[0, 1, 9], [0, 65, -1]])
        """
        parts, steps = split(segments)
        runs: list[list[int]] = []
        tiles: list[tuple[int, int, int]] = []
        for part in parts:
            if runs and runs[-1][1:3] == [part.begin, part.slot]:
                runs[-1][1] = part.end
            else:
                runs.append([part.begin, part.end, part.slot, part.fresh, len(tiles)])
            starts = range(part.begin, part.end, CHUNK)
            tiles += [(len(runs) - 1, at, part.copy if at == starts[-1] else NOBODY) for at in starts]

        def move(numbers: Sequence[Sequence[int]], width: int) -> Tensor:
            return torch.from_numpy(np.array(numbers, np.int32).reshape(-1, width)).to(device)

        return cls(move([(step.begin, step.slot, step.fresh) for step in steps], 3), move(runs, 5), move(tiles, 3))

    @classmethod
    def padding(cls, tokens: int, sequences: int, device: torch.device, *, decodes_only: bool) -> GdnMetadata:
        """Room for any segments of so many tokens of so many sequences, of which none has several with `decodes_only`.
        What stands in it is padding.

        >>> metadata = GdnMetadata.padding(130, 8, torch.device("cpu"), decodes_only=False)
        >>> [len(each) for each in (metadata.steps, metadata.runs, metadata.tiles)]
        [8, 8, 9]
        """
        runs = 0 if decodes_only else min(sequences, tokens // 2)
        tiles = runs + (tokens - runs) // CHUNK if runs else 0
        sizes = (sequences, 3), (runs, 5), (tiles, 3)
        return cls(*(torch.full(size, NOBODY, dtype=torch.int32, device=device) for size in sizes))

    def fill(self, segments: Sequence[Segment]) -> None:
        """A step's metadata stand at the beginning; what follows becomes padding."""
        given = GdnMetadata.of(segments, torch.device("cpu"))
        for mine, new in ((self.steps, given.steps), (self.runs, given.runs), (self.tiles, given.tiles)):
            mine[: len(new)].copy_(new, non_blocking=True)
            mine[len(new) :].fill_(NOBODY)
