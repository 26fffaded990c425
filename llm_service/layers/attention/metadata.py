"""What paged kernels need to know of a batch: as integers on the host, and as tensors on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from llm_service.layers.attention.backend import PagedChunk
from llm_service.layers.transfer import to_device

TILE = 64
"""Tokens of one chunk that one program of the prefill kernel takes."""
_LEAST, _MULTIPLE = 128, 64
"""Keys of a part of a context: at the least, and what their number is a multiple of."""


def cut(lengths: np.ndarray, wanted: int) -> tuple[np.ndarray, np.ndarray]:
    """Cuts contexts of these lengths, int [s], into parts, all as long but the last of each sequence, so that programs
    of one part each are as good as equally busy: `wanted` parts, or fewer where they would be short, and at the most
    one more for each sequence. int32 [s + 2]: keys of a part, the number of each sequence's first part, and of all
    parts; and the sequences of several parts, fewer than `wanted`.

    >>> [each.tolist() for each in cut(np.array([5000, 64, 300]), 8)]
    [[704, 0, 8, 9, 10], [0]]
    >>> [each.tolist() for each in cut(np.array([100, 128]), 8)]
    [[128, 0, 1, 2], []]
    """
    keys = max(_LEAST, -(-int(lengths.sum()) // (max(1, wanted) * _MULTIPLE)) * _MULTIPLE)
    counts = -(-lengths // keys)
    parts = np.zeros(len(lengths) + 2, np.int32)
    parts[0] = keys
    counts.cumsum(out=parts[2:])
    return parts, np.flatnonzero(counts > 1).astype(np.int32)


@dataclass(frozen=True, slots=True)
class BatchNumbers:
    """What `AttentionMetadata` says of a batch, without the block table, as int32 arrays on the host; its first
    `decodes` sequences have one token each."""

    slot_mapping: np.ndarray
    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    tiles: np.ndarray
    parts: np.ndarray
    split: np.ndarray
    decodes: int
    longest_query: int
    longest: int

    @classmethod
    def of(
        cls, contexts: np.ndarray, counts: np.ndarray, rows: np.ndarray, tables: np.ndarray, size: int, wanted: int
    ) -> BatchNumbers:
        """Of sequences with so many tokens in the cache and, behind these, in the batch, int [s] each, whose block
        tables, of blocks of `size` tokens, are `rows` int [s] of `tables` int32 [r, w]. So many parts are `wanted`.

        >>> tables = np.array([[0, 1, 2, 4, 6], [3, 5, 0, 0, 0]], np.int32)
        >>> numbers = BatchNumbers.of(*np.array([[17, 0], [1, 70], [1, 0]]), tables, 16, 1)
        >>> numbers.slot_mapping[:3].tolist(), numbers.query_start_loc.tolist(), numbers.seq_lens.tolist()
        ([81, 0, 1], [0, 1, 71], [18, 70])
        >>> numbers.decodes, numbers.tiles.tolist()
        (1, [[1, 0], [1, 64]])
        """
        several = np.flatnonzero(counts != 1)
        decodes = int(several[0]) if len(several) else len(counts)
        tiles = [(n, at) for n in range(decodes, len(counts)) for at in range(0, int(counts[n]), TILE)]
        starts = np.zeros(len(counts) + 1, np.int32)
        counts.cumsum(out=starts[1:])
        if decodes == len(counts):
            rows_of, position = rows, contexts
        else:  # of each token
            owner = np.repeat(np.arange(len(counts)), counts)
            rows_of, position = rows[owner], np.arange(starts[-1]) - starts[owner] + contexts[owner]
        block, place = np.divmod(position, size)
        lengths = (contexts + counts).astype(np.int32)
        parts, split = cut(lengths[:decodes], wanted)
        return cls(
            slot_mapping=(tables[rows_of, block] * size + place).astype(np.int32),
            query_start_loc=starts,
            seq_lens=lengths,
            tiles=np.array(tiles, np.int32).reshape(-1, 2),
            parts=parts,
            split=split,
            decodes=decodes,
            longest_query=int(counts.max()),
            longest=int(lengths.max()),
        )


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """A flattened batch of n tokens, s sequences, the first `decodes` of which have one token each.

    All are int32: `slot_mapping` [n] is where a token's keys and values go; `block_table` [s, w] is read only as far as
    a sequence is long; `query_start_loc` [s + 1] is where each sequence's tokens begin in the batch; `seq_lens` [s] are
    its tokens in the cache and in the batch together; `tiles` [t, 2] the tokens of those that are no decodes, TILE at a
    time, as (sequence, first token); `decode_lengths` [decodes] the lengths of the decodes. Their contexts are cut into
    parts of the same length, as `cut` gives it: `parts` [decodes + 2], and `split`, the decodes of several parts.
    `most_parts`, `longest_query` and `longest` bound parts, a sequence's tokens in the batch, and in all.

    A sequence of length 0, a tile of sequence −1 and a `split` of −1 are padding.
    """

    slot_mapping: Tensor
    block_table: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    tiles: Tensor
    decode_lengths: Tensor
    parts: Tensor
    split: Tensor
    most_parts: int
    longest_query: int
    longest: int

    @property
    def decodes(self) -> int:
        """Leading sequences of one token each, or places for such."""
        return len(self.decode_lengths)

    @classmethod
    def of(
        cls, chunks: Sequence[PagedChunk], block_size: int, device: torch.device, parts: int = 1
    ) -> AttentionMetadata:
        """The metadata of a batch whose block tables are on the host; so many `parts` are wanted, see `cut`.

        >>> chunks = [PagedChunk(17, 1, [3, 5]), PagedChunk(0, 70, [0, 1, 2, 4, 6])]
        >>> metadata = AttentionMetadata.of(chunks, 16, torch.device("cpu"))
        >>> metadata.block_table.tolist(), metadata.decode_lengths.tolist()
        ([[3, 5, 0, 0, 0], [0, 1, 2, 4, 6]], [18])
        """
        tables = np.zeros((len(chunks), max(len(chunk.blocks) for chunk in chunks)), np.int32)
        for row, chunk in zip(tables, chunks, strict=True):
            row[: len(chunk.blocks)] = chunk.blocks
        contexts, counts = np.array([(chunk.context, chunk.count) for chunk in chunks]).T
        numbers = BatchNumbers.of(contexts, counts, np.arange(len(chunks)), tables, block_size, parts)
        table, *moved = to_device([tables, *cls.arrays(numbers)], device)
        return cls.over(numbers, moved, table)

    @staticmethod
    def arrays(numbers: BatchNumbers) -> list[np.ndarray]:
        """What `over` takes on the device."""
        return [
            numbers.slot_mapping,
            numbers.query_start_loc,
            numbers.seq_lens,
            numbers.tiles,
            numbers.parts,
            numbers.split,
        ]

    @classmethod
    def over(cls, numbers: BatchNumbers, moved: Sequence[Tensor], block_table: Tensor) -> AttentionMetadata:
        """Of what `arrays` gave, moved to the device, and the batch's block table."""
        slot_mapping, query_start_loc, seq_lens, tiles, parts, split = moved
        return cls(
            slot_mapping=slot_mapping,
            block_table=block_table,
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            tiles=tiles,
            decode_lengths=seq_lens[: numbers.decodes],
            parts=parts,
            split=split,
            most_parts=int(numbers.parts[-1]),
            longest_query=numbers.longest_query,
            longest=numbers.longest,
        )
