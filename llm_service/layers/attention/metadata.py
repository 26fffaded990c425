"""What paged kernels need to know of a batch, as tensors on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from llm_service.plan import Chunk

TILE = 64
"""Tokens of one chunk that one program of the prefill kernel takes."""


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """A flattened batch of n tokens, s sequences, the first `decodes` of which have one token each.

    All are int32: `slot_mapping` [n] is where a token's keys and values go; `block_table` [s, w] is read only as far as
    a sequence is long; `query_start_loc` [s + 1] is where each sequence's tokens begin in the batch; `seq_lens` [s] are
    its tokens in the cache and in the batch together; `tiles` [t, 2] the tokens of those that are no decodes, TILE at a
    time, as (sequence, first token); `decode_lengths` [decodes] the lengths of the decodes. `longest_query` and
    `longest` bound a sequence's tokens in the batch, and in all.

    A sequence of length 0 and a tile of sequence −1 are padding.
    """

    slot_mapping: Tensor
    block_table: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    tiles: Tensor
    decode_lengths: Tensor
    longest_query: int
    longest: int

    @property
    def decodes(self) -> int:
        """Leading sequences of one token each, or places for such."""
        return len(self.decode_lengths)

    @classmethod
    def of(cls, chunks: Sequence[Chunk], block_size: int, device: torch.device) -> AttentionMetadata:
        """The metadata of a plan's chunks.

        >>> chunks = [Chunk(17, 1, [3, 5]), Chunk(0, 70, [0, 1, 2, 4, 6])]
        >>> metadata = AttentionMetadata.of(chunks, 16, torch.device("cpu"))
        >>> metadata.slot_mapping[:3].tolist(), metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        ([81, 0, 1], [0, 1, 71], [18, 70])
        >>> metadata.decode_lengths.tolist(), metadata.tiles.tolist()
        ([18], [[1, 0], [1, 64]])
        """
        counts = np.array([chunk.count for chunk in chunks])
        contexts = np.array([chunk.context for chunk in chunks])
        blocks = np.zeros((len(chunks), max(len(chunk.blocks) for chunk in chunks)), np.int32)
        for row, chunk in zip(blocks, chunks, strict=True):
            row[: len(chunk.blocks)] = chunk.blocks
        decodes = int(np.argmax(np.append(counts != 1, True)))
        tiles = [(n, at) for n in range(decodes, len(chunks)) for at in range(0, chunks[n].count, TILE)]
        starts = np.concatenate([[0], counts.cumsum()])
        # A token's sequence, and its position in it.
        owner = np.repeat(np.arange(len(chunks)), counts)
        position = np.arange(starts[-1]) - starts[owner] + contexts[owner]
        slots = blocks[owner, position // block_size] * block_size + position % block_size

        def move(array: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array, np.int32)).to(device)

        return cls(
            slot_mapping=move(slots),
            block_table=move(blocks),
            query_start_loc=move(starts),
            seq_lens=move(contexts + counts),
            tiles=move(np.array(tiles).reshape(-1, 2)),
            decode_lengths=move((contexts + counts)[:decodes]),
            longest_query=int(counts.max()),
            longest=int((contexts + counts).max()),
        )
