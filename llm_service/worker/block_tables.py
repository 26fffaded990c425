"""The block tables of running sequences, as workers keep them; plans say which blocks are added."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llm_service.plan import Appended


class BlockTables:
    """A row for each sequence. `numbers` is int32 [rows, width], valid up to each sequence's length; it grows when
    needed."""

    def __init__(self) -> None:
        self.numbers = np.zeros((0, 0), np.int32)

    def append(self, appended: Sequence[Appended]) -> bool:
        """Takes in what a plan says, in the order of the plans. True where there was no room, and `numbers` is another
        array now.

        >>> tables = BlockTables()
        >>> tables.append([Appended(1, 0, np.array([4, 7], np.int32).tobytes())])
        True
        >>> tables.numbers[1, :2].tolist(), tables.append([Appended(1, 1, np.array([5], np.int32).tobytes())])
        ([4, 7], False)
        >>> tables.numbers[1, :2].tolist()
        [4, 5]
        """
        blocks = [np.frombuffer(each.blocks, np.int32) for each in appended]
        rows = max((each.row + 1 for each in appended), default=0)
        width = max((each.begin + len(part) for each, part in zip(appended, blocks, strict=True)), default=0)
        if grown := rows > self.numbers.shape[0] or width > self.numbers.shape[1]:
            self._grow(rows, width)
        for each, part in zip(appended, blocks, strict=True):
            self.numbers[each.row, each.begin : each.begin + len(part)] = part
        return grown

    def _grow(self, rows: int, width: int) -> None:
        """Grows to at least these sizes, and beyond by half, so that a growing table is seldom copied."""
        before = self.numbers
        sizes = zip(before.shape, (rows, width), strict=True)
        larger = [max(now, wanted + wanted // 2) if wanted > now else now for now, wanted in sizes]
        self.numbers = np.zeros(larger, np.int32)
        self.numbers[: before.shape[0], : before.shape[1]] = before
