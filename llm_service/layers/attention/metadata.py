"""Metadata of a batch for paged kernels: as integers on the host, and as tensors on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.gpu.transfer import to_device
from llm_service.layers.attention.backend import PagedChunk

_LEAST, _MULTIPLE = 128, 64
"""Fewest keys of a part of a context, and the multiple that their number must be."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a back end divides a step into programs: contexts into about `parts` parts in all, and chunks of several
    tokens into tiles of `tile` tokens. With `singles`, the first sequences with one token each have no tiles, and are
    computed apart."""

    parts: int
    tile: int
    singles: bool = True


@dataclass(frozen=True, slots=True)
class WorkNumbers:
    """Contexts cut into parts, int32 on the host: `parts` [m + 2] has the keys of a part, the number of each item's
    first part, and the number of all parts; `split` are the items with several parts; `rooms` [m] is where results of
    an item's parts go, one place each, and −1 for items with one part."""

    parts: np.ndarray
    rooms: np.ndarray
    split: np.ndarray

    @classmethod
    def cut(cls, lengths: np.ndarray, wanted: int) -> WorkNumbers:
        """Cuts contexts of these lengths, int [m], into parts, all as long but the last of each item, so that programs
        of one part each are as good as equally busy: `wanted` parts, or fewer where they would be short, and at the
        most one more for each item. Fewer than `wanted` are of several parts, and these have fewer than twice as many.

        >>> [each.tolist() for each in WorkNumbers.cut(np.array([5000, 64, 300]), 8).arrays]
        [[704, 0, 8, 9, 10], [0, -1, -1], [0]]
        >>> [each.tolist() for each in WorkNumbers.cut(np.array([100, 128]), 8).arrays]
        [[128, 0, 1, 2], [-1, -1], []]
        """
        keys = max(_LEAST, -(-int(lengths.sum()) // (max(1, wanted) * _MULTIPLE)) * _MULTIPLE)
        counts = -(-lengths // keys)
        parts = np.zeros(len(lengths) + 2, np.int32)
        parts[0] = keys
        counts.cumsum(out=parts[2:])
        several = np.where(counts > 1, counts, 0)
        rooms = np.where(counts > 1, several.cumsum() - several, -1)
        return cls(parts, rooms.astype(np.int32), np.flatnonzero(several).astype(np.int32))

    @property
    def arrays(self) -> list[np.ndarray]:
        """The input of `WorkList.over`, on the device."""
        return [self.parts, self.rooms, self.split]

    @property
    def room(self) -> int:
        """Places for the results of parts."""
        return int((self.parts[self.split + 2] - self.parts[self.split + 1]).sum())


@dataclass(frozen=True, slots=True)
class WorkList:
    """`WorkNumbers` on the device, with room for at most `most_parts` parts, whose results take at most `room` places.
    A `split` of −1 is padding, and so is an item without parts."""

    parts: Tensor
    rooms: Tensor
    split: Tensor
    most_parts: int
    room: int

    @property
    def items(self) -> int:
        """Number of contexts, or of places for them."""
        return len(self.rooms)

    @classmethod
    def over(cls, numbers: WorkNumbers, moved: Sequence[Tensor]) -> WorkList:
        """From the `arrays` of these numbers, moved to the device."""
        parts, rooms, split = moved
        return cls(parts, rooms, split, int(numbers.parts[-1]), numbers.room)


@dataclass(frozen=True, slots=True)
class BatchNumbers:
    """`AttentionMetadata` without the block table, as int32 arrays on the host; the first `decodes` sequences have one
    token each."""

    slot_mapping: np.ndarray
    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    prompts: np.ndarray
    tiles: np.ndarray
    decode_work: WorkNumbers
    tile_work: WorkNumbers
    tile: int
    decodes: int
    longest_query: int
    longest: int

    @classmethod
    def of(
        cls,
        contexts: np.ndarray,
        counts: np.ndarray,
        answered: np.ndarray,
        rows: np.ndarray,
        tables: np.ndarray,
        size: int,
        tiling: Tiling,
    ) -> BatchNumbers:
        """Of sequences with so many tokens in the cache and, behind these, in the batch, of which so many of both are
        an answer's, int [s] each, whose block tables, of blocks of `size` tokens, are `rows` int [s] of `tables` int32
        [r, w]. Of a chunk the tile with the longest context comes first, so that the short ones fill what is left at
        the end.

        >>> tables = np.array([[0, 1, 2, 4, 6], [3, 5, 0, 0, 0]], np.int32)
        >>> numbers = BatchNumbers.of(*np.array([[17, 0], [1, 70], [3, 0], [1, 0]]), tables, 16, Tiling(1, 64))
        >>> numbers.slot_mapping[:3].tolist(), numbers.query_start_loc.tolist(), numbers.seq_lens.tolist()
        ([81, 0, 1], [0, 1, 71], [18, 70])
        >>> numbers.decodes, numbers.tiles.tolist(), numbers.prompts.tolist()
        (1, [[1, 64], [1, 0]], [15, 70])
        >>> drafts = np.array([[17, 30], [1, 3], [1, 3], [1, 0]])
        >>> verified = BatchNumbers.of(*drafts, tables, 16, Tiling(1, 4, singles=False))
        >>> verified.decodes, verified.tiles.tolist()
        (0, [[0, 0], [1, 0]])
        """
        several = np.flatnonzero(counts != 1)
        decodes = 0 if not tiling.singles else int(several[0]) if len(several) else len(counts)
        tile = tiling.tile
        cut = [(n, at) for n in range(decodes, len(counts)) for at in reversed(range(0, int(counts[n]), tile))]
        tiles = np.array(cut, np.int32).reshape(-1, 2)
        starts = np.zeros(len(counts) + 1, np.int32)
        counts.cumsum(out=starts[1:])
        if decodes == len(counts):
            rows_of, position = rows, contexts
        else:  # of each token
            owner = np.repeat(np.arange(len(counts)), counts)
            rows_of, position = rows[owner], np.arange(starts[-1]) - starts[owner] + contexts[owner]
        block, place = np.divmod(position, size)
        lengths = (contexts + counts).astype(np.int32)
        owners, firsts = tiles.T
        seen = np.minimum(lengths[owners], contexts[owners] + firsts + tile)
        return cls(
            slot_mapping=(tables[rows_of, block] * size + place).astype(np.int32),
            query_start_loc=starts,
            seq_lens=lengths,
            prompts=(lengths - answered).astype(np.int32),
            tiles=tiles,
            decode_work=WorkNumbers.cut(lengths[:decodes], tiling.parts),
            tile_work=WorkNumbers.cut(seen, tiling.parts),
            tile=tile,
            decodes=decodes,
            longest_query=int(counts.max()),
            longest=int(lengths.max()),
        )


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Metadata of a flattened batch of n tokens and s sequences, the first `decodes` of which have one token each.

    All are int32: `slot_mapping` [n] is the slot of each token's keys and values; `block_table` [s, w] is valid up to
    each sequence's length; `query_start_loc` [s + 1] is where each sequence's tokens begin in the batch; `seq_lens` [s]
    are its tokens in cache and batch together, and `prompts` [s] its prompt tokens; `tiles` [t, 2] are the tokens of
    other sequences than decodes, `tile` at a time, as (sequence, first token). Contexts of decodes and tiles are cut
    into parts by `WorkNumbers.cut`. `longest_query` and `longest` bound a sequence's tokens in the batch, and in all.

    A sequence of length 0 and a tile of sequence −1 are padding, and have no part.
    """

    slot_mapping: Tensor
    block_table: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    prompts: Tensor
    tiles: Tensor
    decode_work: WorkList
    tile_work: WorkList
    tile: int
    longest_query: int
    longest: int

    @property
    def decodes(self) -> int:
        """Number of leading sequences with one token each, or of places for them."""
        return self.decode_work.items

    @classmethod
    def of(
        cls, chunks: Sequence[PagedChunk], block_size: int, device: torch.device, tiling: Tiling = Tiling(1, 64)
    ) -> AttentionMetadata:
        """The metadata of a batch whose block tables are on the host.

        >>> chunks = [PagedChunk(17, 1, [3, 5]), PagedChunk(0, 70, [0, 1, 2, 4, 6])]
        >>> metadata = AttentionMetadata.of(chunks, 16, torch.device("cpu"))
        >>> metadata.block_table.tolist(), metadata.decodes
        ([[3, 5, 0, 0, 0], [0, 1, 2, 4, 6]], 1)
        """
        tables = np.zeros((len(chunks), max(len(chunk.blocks) for chunk in chunks)), np.int32)
        for row, chunk in zip(tables, chunks, strict=True):
            row[: len(chunk.blocks)] = chunk.blocks
        contexts, counts, answered = np.array([(each.context, each.count, each.answered) for each in chunks]).T
        rows = np.arange(len(chunks))
        numbers = BatchNumbers.of(contexts, counts, answered, rows, tables, block_size, tiling)
        table, *moved = to_device([tables, *cls.arrays(numbers)], device)
        return cls.over(numbers, moved, table)

    @staticmethod
    def arrays(numbers: BatchNumbers) -> list[np.ndarray]:
        """The input of `over`, on the device."""
        return [
            numbers.slot_mapping,
            numbers.query_start_loc,
            numbers.seq_lens,
            numbers.prompts,
            numbers.tiles,
            *numbers.decode_work.arrays,
            *numbers.tile_work.arrays,
        ]

    @classmethod
    def over(cls, numbers: BatchNumbers, moved: Sequence[Tensor], block_table: Tensor) -> AttentionMetadata:
        """From the `arrays` of these numbers, moved to the device, and the batch's block table."""
        slot_mapping, query_start_loc, seq_lens, prompts, tiles, *works = moved
        return cls(
            slot_mapping=slot_mapping,
            block_table=block_table,
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            prompts=prompts,
            tiles=tiles,
            decode_work=WorkList.over(numbers.decode_work, works[:3]),
            tile_work=WorkList.over(numbers.tile_work, works[3:]),
            tile=numbers.tile,
            longest_query=numbers.longest_query,
            longest=numbers.longest,
        )
