"""The decoder in CUDA graphs: by number of sequences for decoding, by number of tokens for everything else.

A step of few tokens is mostly launches; a graph starts them all at once. A batch that no graph fits runs eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from common import log
from common.gpu import Capture
from llm_service.layers.attention.metadata import TILE, AttentionMetadata
from llm_service.layers.cache_spec import Segment
from llm_service.layers.mixer import StateMetadata
from llm_service.models.decoder import Decoder, Deepstack
from llm_service.plan import Chunk, StepPlan
from llm_service.worker.caches import Caches

_log = log.get("graphs")


@dataclass(frozen=True, slots=True)
class CaptureBounds:
    """The largest batch: sequences, tokens of a step, tokens of a sequence, and levels of deepstack."""

    sequences: int
    tokens: int
    context: int
    levels: int


def decode_sizes(largest: int) -> list[int]:
    """Numbers of sequences that get a graph: dense where padding would cost most, and never more than about 50.

    >>> decode_sizes(70)
    [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 70]
    """
    ladder = [1, 2, 4, *range(8, 65, 8), *range(96, 257, 32), *range(320, 1025, 64)]
    return [size for size in ladder if size < largest] + [largest]


def prefill_sizes(largest: int) -> list[int]:
    """Numbers of tokens that get a graph; above the last one, launches no longer matter.

    >>> prefill_sizes(512)
    [16, 32, 64, 128, 192, 256, 384, 512]
    """
    ladder = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024)
    return [size for size in ladder if size <= largest]


@dataclass(frozen=True, slots=True)
class Buffers:
    """What replays read and write, for all sizes: a smaller graph uses the beginning. None of it ever moves.

    `hidden` and `out` [N, hidden]; `positions` int32 [3, N]; `deep` [levels − 1, N, hidden].
    """

    hidden: Tensor
    positions: Tensor
    deep: Tensor
    out: Tensor
    metadata: AttentionMetadata

    @classmethod
    def of(cls, bounds: CaptureBounds, block_size: int, like: Tensor) -> Self:
        """Zeros for the largest batch, of the type and on the device of a tensor [hidden]."""
        tokens, sequences = max(bounds.tokens, bounds.sequences), bounds.sequences

        def integers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=like.device)

        metadata = AttentionMetadata(
            slot_mapping=integers(tokens),
            block_table=integers(sequences, -(-bounds.context // block_size)),
            query_start_loc=integers(sequences + 1),
            seq_lens=integers(sequences),
            tiles=integers(-(-tokens // TILE) + sequences, 2),
            decode_lengths=integers(sequences),
            longest_query=0,
            longest=bounds.context,
        )
        width = len(like)
        return cls(
            like.new_zeros(tokens, width),
            integers(3, tokens),
            like.new_zeros(bounds.levels - 1, tokens, width),
            like.new_zeros(tokens, width),
            metadata,
        )


@dataclass(frozen=True, slots=True)
class Graph:
    """One size. `metadata` are its part of the buffers', `states` what its layers with states read, a few numbers for
    each sequence; `deep` says whether it adds deepstack levels."""

    tokens: int
    metadata: AttentionMetadata
    states: list[StateMetadata]
    deep: bool
    replay: Callable[[], None]

    @property
    def decodes_only(self) -> bool:
        """It has no place for a chunk of several tokens."""
        return not len(self.metadata.tiles)


class GraphRunner:
    """Replays what it can, from input embeddings to hidden states, attention and the ranks' sums included. `replays`
    counts.

    All ranks of a group choose alike, since the choice follows from the plan alone, so a replay issues collectives in
    the order of the capture, on every rank. They have no time limit there: a lost rank is noticed by its missing beat
    (see `ranks`).
    """

    def __init__(
        self,
        decoder: Decoder,
        caches: Caches,
        bounds: CaptureBounds,
        capture: Capture,
        *,
        max_bytes: int,
        agree: Callable[[int], int] = lambda number: number,
    ) -> None:
        """Captures graphs, except for those with which all would hold more than `max_bytes`; `agree` is given 1 or 0
        and answers with the least of all ranks.

        The largest comes first: graphs share memory, as much as the largest needs, and none of it is given back as long
        as one of them is left. So one that needs too much has to be tried while there is no other.
        """
        self.replays = 0
        self._decoder, self._caches, self._bounds = decoder, caches, bounds
        self._null_slot = caches.null_block * caches.block_size
        like = torch.empty(decoder.config.hidden_size, dtype=decoder.dtype, device=decoder.device)
        self._buffers = Buffers.of(bounds, caches.block_size, like)
        self._filled = 0  # leading places of `deep` that hold rows of the replay before
        self._decodes: list[Graph] = []
        self._prefills: list[Graph] = []
        wanted = [(size, True) for size in decode_sizes(bounds.sequences)]
        wanted += [(size, False) for size in prefill_sizes(bounds.tokens)]
        for size, decodes_only in sorted(wanted, reverse=True):
            graph = self._capture(size, capture, decodes_only=decodes_only)
            if agree(int(capture.held <= max_bytes)):
                (self._decodes if decodes_only else self._prefills).insert(0, graph)
            else:
                _log.warning("a graph is left out: it needs too much memory", tokens=size, max_bytes=max_bytes)
            del graph  # the memory of one that is left out is free before the next is captured

    @property
    def sizes(self) -> tuple[list[int], list[int]]:
        """Sequences of each decode graph, and tokens of each prefill graph, the smallest first."""
        return [graph.tokens for graph in self._decodes], [graph.tokens for graph in self._prefills]

    def can_replay(self, chunks: Sequence[Chunk], *, deep: bool) -> bool:
        """Whether a graph fits a batch, which has deepstack rows or has not."""
        return self._fitting(chunks, deep=deep) is not None

    def pad(self, chunks: Sequence[Chunk], *, deep: bool) -> int:
        """Tokens that are computed for a batch: the size that it is padded to, or its own number."""
        graph = self._fitting(chunks, deep=deep)
        return graph.tokens if graph else sum(chunk.count for chunk in chunks)

    def replay(self, hidden: Tensor, positions: Tensor, plan: StepPlan, deepstack: Deepstack | None) -> Tensor:
        """Input embeddings [n, hidden] and positions int32 [3, n] of a plan → hidden states [n, hidden], valid until
        the next replay."""
        graph, buffers, n = self._fitting(plan.chunks, deep=deepstack is not None), self._buffers, len(hidden)
        assert graph is not None, "no graph fits"
        buffers.hidden[:n].copy_(hidden)
        buffers.positions[:, :n].copy_(positions)
        if graph.deep:
            self._put_deepstack(deepstack, n)
        metadata = AttentionMetadata.of(plan.chunks, self._caches.block_size, torch.device("cpu"))
        _fill(graph.metadata, metadata, n, self._null_slot)
        if graph.states:
            segments = Segment.of(plan.chunks, plan.slots, plan.passed)
            for states in graph.states:
                states.fill(segments)
        graph.replay()
        self.replays += 1
        return buffers.out[:n]

    def _fitting(self, chunks: Sequence[Chunk], *, deep: bool) -> Graph | None:
        tokens = sum(chunk.count for chunk in chunks)
        if len(chunks) > self._bounds.sequences:
            return None
        decodes_only = tokens == len(chunks) and not deep
        graphs = self._decodes if decodes_only else self._prefills
        return next((graph for graph in graphs if graph.tokens >= tokens), None)

    def _put_deepstack(self, deepstack: Deepstack | None, tokens: int) -> None:
        """A level is added to all tokens, and is zero where there is no row."""
        self._buffers.deep[:, : self._filled].zero_()
        self._filled = 0
        if deepstack is not None:
            self._buffers.deep[:, deepstack.index] = deepstack.values
            self._filled = tokens

    def _capture(self, tokens: int, capture: Capture, *, decodes_only: bool) -> Graph:
        """A graph of so many tokens. It is captured over a batch of padding, which a replay fills in."""
        buffers, whole = self._buffers, self._buffers.metadata
        sequences = min(tokens, self._bounds.sequences)
        tiles = 0 if decodes_only else -(-tokens // TILE) + sequences
        metadata = replace(
            whole,
            slot_mapping=whole.slot_mapping[:tokens],
            block_table=whole.block_table[:sequences],
            query_start_loc=whole.query_start_loc[: sequences + 1],
            seq_lens=whole.seq_lens[:sequences],
            tiles=whole.tiles[:tiles],
            decode_lengths=whole.decode_lengths[:sequences],
            longest_query=1 if decodes_only else tokens,
        )
        # Padded tokens write their keys to the null block, and no table leads to them.
        metadata.slot_mapping.fill_(self._null_slot)
        for lengths in (metadata.query_start_loc, metadata.seq_lens, metadata.decode_lengths):
            lengths.zero_()
        metadata.tiles.fill_(-1)
        hidden, positions, out = buffers.hidden[:tokens], buffers.positions[:, :tokens], buffers.out[:tokens]
        deep = not decodes_only and len(buffers.deep) > 0
        levels = Deepstack(None, buffers.deep[:, :tokens]) if deep else None
        states = self._caches.state_metadata(tokens, sequences, decodes_only=decodes_only)
        batches = self._caches.batches_over(metadata, states)

        def run() -> None:
            out.copy_(self._decoder(hidden, positions, self._caches.layers, batches, levels))

        return Graph(tokens, metadata, [*states.values()], deep, capture(run))


def _fill(into: AttentionMetadata, metadata: AttentionMetadata, tokens: int, null_slot: int) -> None:
    """Copies a batch's metadata to the beginning of a graph's; what follows becomes padding."""
    for target, source, rest in (
        (into.slot_mapping, metadata.slot_mapping, null_slot),
        (into.query_start_loc, metadata.query_start_loc, tokens),
        (into.seq_lens, metadata.seq_lens, 0),
        (into.decode_lengths, metadata.decode_lengths, 0),
        (into.tiles, metadata.tiles, -1),
    ):
        target[: len(source)].copy_(source, non_blocking=True)
        target[len(source) :].fill_(rest)
    into.block_table[: metadata.block_table.shape[0], : metadata.block_table.shape[1]].copy_(
        metadata.block_table, non_blocking=True
    )
