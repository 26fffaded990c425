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
"""The slot of a step that is padding: nothing is read or written."""


@dataclass(frozen=True, slots=True)
class GdnMetadata:
    """All int32: `steps` [s, 3] (row, slot, fresh), `runs` [r, 5] (begin, end, slot, fresh, first tile) and `tiles`
    [t, 2] (run, first token), CHUNK tokens each, those of a run one after the other."""

    steps: Tensor
    runs: Tensor
    tiles: Tensor

    @classmethod
    def of(cls, segments: Sequence[Segment], device: torch.device) -> GdnMetadata:
        """The metadata of a step's segments.

        >>> segments = [Segment(0, 1, 4, fresh=False), Segment(1, 81, 7, fresh=True)]
        >>> metadata = GdnMetadata.of(segments, torch.device("cpu"))
        >>> metadata.steps.tolist(), metadata.runs.tolist(), metadata.tiles.tolist()
        ([[0, 4, 0]], [[1, 81, 7, 1, 0]], [[0, 1], [0, 65]])
        """
        runs, steps = split(segments)
        tiles = [(index, at) for index, run in enumerate(runs) for at in range(run.begin, run.end, CHUNK)]
        counts = [-(-(run.end - run.begin) // CHUNK) for run in runs]
        firsts = np.cumsum([0, *counts])[:-1]
        rows = [(run.begin, run.end, run.slot, run.fresh, first) for run, first in zip(runs, firsts, strict=True)]

        def move(numbers: Sequence[Sequence[int]], width: int) -> Tensor:
            return torch.from_numpy(np.array(numbers, np.int32).reshape(-1, width)).to(device)

        return cls(move([(step.begin, step.slot, step.fresh) for step in steps], 3), move(rows, 5), move(tiles, 2))
