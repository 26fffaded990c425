"""The decoder in CUDA graphs: decode graphs by number of sequences, mixed graphs by number of tokens, and separate ones
for steps that verify drafts. A step of few tokens spends most of its time on launches; a graph launches everything at
once. A batch that fits no graph runs eagerly."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import chain
from typing import Self

import numpy as np
import torch
from torch import Tensor

from common.gpu.graphs import Capture, CaptureFailed
from common.gpu.transfer import ALIGNMENT, aligned
from common.telemetry import log
from llm_service.layers.attention.metadata import AttentionMetadata, BatchNumbers, Tiling, WorkList, WorkNumbers
from llm_service.layers.cache_spec import Segment
from llm_service.layers.lora.row_tiles import RowTiles
from llm_service.layers.mixer import StateMetadata
from llm_service.models.model import Deepstack, Model
from llm_service.plan import Chunk, StepPlan
from llm_service.worker.adapters import RankAdapters
from llm_service.worker.caches import Caches
from llm_service.worker.device_tables import DeviceTables

_log = log.get("graphs")
_FAILS = -1
"""What a rank reports that cannot capture a graph. Other ranks report 1, or 0 where the graph needs too much memory."""


@dataclass(frozen=True, slots=True)
class CaptureBounds:
    """The limits of a batch: sequences, tokens of a step, tokens of a sequence, and deepstack levels; where drafts are
    verified, tokens per sequence and tokens of a step that verifies."""

    sequences: int
    tokens: int
    context: int
    levels: int
    drafts: int = 0
    draft_rows: int = 0


class GraphKind(IntEnum):
    """The steps that a graph serves."""

    PREFILL = 0
    """Any chunks, and rows of media."""
    VERIFY = 1
    """One token of each sequence, with or without drafts behind it."""
    DECODE = 2
    """A token of each sequence."""


def decode_sizes(largest: int) -> list[int]:
    """Batch sizes that get a decode graph: dense where padding would cost most, and never more than about 50.

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


def verify_sizes(largest: int) -> list[int]:
    """Numbers of tokens that get a graph for verifying drafts: it takes a draft at least.

    >>> verify_sizes(16)
    [2, 4, 8, 16]
    """
    return decode_sizes(largest)[1:] if largest > 1 else []


@dataclass(frozen=True, slots=True)
class Buffers:
    """The static tensors that replays read and write. All sizes share them: a smaller graph uses the beginning of each.
    Their addresses never change.

    `hidden` [N, entry_size] is the decoder's input and `out` [N, exit_size] its output; `deep` [levels − 1, N, hidden];
    `block_table` int32 [sequences, blocks]; `token_ids` int32 [N].
    """

    hidden: Tensor
    deep: Tensor
    out: Tensor
    block_table: Tensor
    token_ids: Tensor

    @classmethod
    def of(
        cls, tokens: int, bounds: CaptureBounds, block_size: int, like: Tensor, entry_size: int, exit_size: int
    ) -> Self:
        """Zeroed buffers for graphs of up to `tokens` tokens, with the dtype and device of `like`, a tensor
        [hidden]."""
        width = len(like)
        table = bounds.sequences, -(-bounds.context // block_size)
        return cls(
            like.new_zeros(tokens, entry_size),
            like.new_zeros(bounds.levels - 1, tokens, width),
            like.new_zeros(tokens, exit_size),
            torch.zeros(table, dtype=torch.int32, device=like.device),
            torch.zeros(tokens, dtype=torch.int32, device=like.device),
        )


@dataclass(frozen=True, slots=True)
class GraphNumbers:
    """The integers of a step that one graph reads: int32, all in one tensor, `packed`, so that one copy fills them.

    `positions` [position_rows, tokens], `rows` [sequences] of the block tables; the rest are those of
    `AttentionMetadata`, with room for any step that fits. Whatever a step does not use is padding: the keys of padding
    tokens are written to the slot `null_slot`.
    """

    null_slot: int
    packed: Tensor
    positions: Tensor
    rows: Tensor
    slot_mapping: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    prompts: Tensor
    tiles: Tensor
    decode_work: WorkList
    tile_work: WorkList
    tiling: Tiling

    @classmethod
    def padding(
        cls,
        tokens: int,
        sequences: int,
        tiles: int,
        tiling: Tiling,
        null_slot: int,
        device: torch.device,
        *,
        position_rows: int = 3,
    ) -> Self:
        """The numbers of a step that is all padding."""
        each, wanted, singles = (sequences,), tiling.parts, sequences if tiling.singles else 0
        shapes: list[tuple[int, ...]] = [(position_rows, tokens), each, (tokens,), (sequences + 1,), each, each]
        shapes.append((tiles, 2))
        for items in (singles, tiles):
            shapes += [(items + 2,), (items,), (wanted if items else 0,)]
        sizes = [aligned(math.prod(shape), ALIGNMENT // 4) for shape in shapes]
        packed = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        rooms = zip(packed.split(sizes), shapes, strict=True)
        views = [room[: math.prod(shape)].view(shape) for room, shape in rooms]
        positions, rows, slots, starts, lengths, prompts, tile_list, *works = views
        decode_work = WorkList(works[0], works[1], works[2], singles + wanted, 2 * wanted)
        tile_work = WorkList(works[3], works[4], works[5], tiles + wanted, 2 * wanted)
        made = cls(
            null_slot,
            packed,
            positions=positions,
            rows=rows,
            slot_mapping=slots,
            query_start_loc=starts,
            seq_lens=lengths,
            prompts=prompts,
            tiles=tile_list,
            decode_work=decode_work,
            tile_work=tile_work,
            tiling=tiling,
        )
        made.slot_mapping.fill_(null_slot)
        made.tiles.fill_(-1)
        for work in (decode_work, tile_work):
            work.rooms.fill_(-1)
            work.split.fill_(-1)
        return made

    def of(self, batch: BatchNumbers, positions: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """The contents of `packed` for a step with positions int32 [position_rows, n] and block tables in these
        `rows`."""
        n, sequences = positions.shape[1], len(rows)
        packed = np.zeros(len(self.packed), np.int32)

        def part(of: Tensor) -> np.ndarray:
            begin = of.storage_offset() - self.packed.storage_offset()
            return packed[begin : begin + of.numel()].reshape(tuple(of.shape))

        part(self.positions)[:, :n] = positions
        part(self.rows)[:sequences] = rows
        slots, starts, tiles = part(self.slot_mapping), part(self.query_start_loc), part(self.tiles)
        slots[:n], slots[n:] = batch.slot_mapping, self.null_slot
        starts[: sequences + 1], starts[sequences + 1 :] = batch.query_start_loc, n
        part(self.seq_lens)[:sequences], part(self.prompts)[:sequences] = batch.seq_lens, batch.prompts
        tiles[: len(batch.tiles)], tiles[len(batch.tiles) :] = batch.tiles, -1

        def fill(work: WorkList, numbers: WorkNumbers) -> None:
            for target, given, rest in (
                (work.parts, numbers.parts, numbers.parts[-1]),
                (work.rooms, numbers.rooms, -1),
                (work.split, numbers.split, -1),
            ):
                there = part(target)
                there[: len(given)], there[len(given) :] = given, rest

        fill(self.decode_work, batch.decode_work)
        fill(self.tile_work, batch.tile_work)
        return packed

    def metadata(self, block_table: Tensor, longest_query: int, longest: int) -> AttentionMetadata:
        """The metadata that kernels read at each replay."""
        return AttentionMetadata(
            slot_mapping=self.slot_mapping,
            block_table=block_table[: len(self.rows)],
            query_start_loc=self.query_start_loc,
            seq_lens=self.seq_lens,
            prompts=self.prompts,
            tiles=self.tiles,
            decode_work=self.decode_work,
            tile_work=self.tile_work,
            tile=self.tiling.tile,
            longest_query=longest_query,
            longest=longest,
        )


@dataclass(frozen=True, slots=True)
class Graph:
    """A captured graph of one size. `numbers` are what it reads of a step, `states` what layers with recurrent states
    read, `adapters` which rows use which adapter slot; without `adapters`, it is for steps that use none. `deep` says
    whether it adds deepstack levels."""

    kind: GraphKind
    tokens: int
    numbers: GraphNumbers
    states: list[StateMetadata]
    adapters: RowTiles | None
    deep: bool
    replay: Callable[[], None]

    @property
    def tiling(self) -> Tiling:
        """How a step is cut that it computes."""
        return self.numbers.tiling

    def of(self, plan: StepPlan, batch: BatchNumbers, positions: np.ndarray, rows: np.ndarray) -> list[np.ndarray]:
        """What `GraphRunner.replay` needs on the device for a plan."""
        moved = [self.numbers.of(batch, positions, rows)]
        if self.states:
            segments = Segment.of(plan.chunks, plan.slots, plan.states.within)
            moved += [states.numbers(segments) for states in self.states]
        if self.adapters is not None:
            moved.append(self.adapters.numbers(np.repeat(plan.adapters.slots, [chunk.count for chunk in plan.chunks])))
        return moved

    @property
    def read(self) -> list[Tensor]:
        """The static tensors that take what `of` returns."""
        tiles = [] if self.adapters is None else [self.adapters.packed]
        return [self.numbers.packed, *(states.packed for states in self.states), *tiles]


class GraphRunner:
    """Replays captured graphs: everything from input embeddings to hidden states, with attention and all-reduces.
    `replays` counts them.

    All ranks of a group choose the same graph, since the choice depends on the plan alone; so a replay issues
    collectives in the order of the capture on every rank. Collectives in a graph have no timeout: a lost rank is
    noticed by its missing heartbeat (see `ranks`).
    """

    def __init__(
        self,
        decoder: Model,
        caches: Caches,
        bounds: CaptureBounds,
        capture: Capture,
        *,
        max_bytes: int,
        agree: Callable[[int], int] = lambda number: number,
        adapters: RankAdapters | None = None,
    ) -> None:
        """Captures graphs, except those that would take the total above `max_bytes`. `agree` takes a number and returns
        the minimum over all ranks. With `adapters` each size gets a second graph, for steps that use some. Once a graph
        of a kind cannot be captured on some rank, no other of that kind is tried.

        The largest is captured first: graphs share a memory pool as large as the largest one needs, and the pool is
        kept as long as any graph is left. So a graph that needs too much memory has to be tried while there is no
        other.
        """
        self.replays = 0
        if decoder.adds_first_level:  # the first level is not among embeddings
            bounds = replace(bounds, levels=bounds.levels + 1)
        self._decoder, self._caches, self._bounds = decoder, caches, bounds
        self._adapters = adapters
        self._null_slot = caches.null_block * caches.block_size
        like = torch.empty(decoder.hidden_size, dtype=decoder.dtype, device=decoder.device)
        self._filled = 0  # leading places of `deep` that hold rows of the replay before
        self._graphs: dict[GraphKind, list[Graph]] = {kind: [] for kind in GraphKind}
        # transformers' models read prompts on the host, and so do layers that choose tokens by an index.
        any_step = not (decoder.decodes_alone or caches.decodes_alone)
        sizes = {
            GraphKind.DECODE: decode_sizes(bounds.sequences),
            GraphKind.VERIFY: verify_sizes(bounds.draft_rows) if bounds.drafts and any_step else [],
            GraphKind.PREFILL: prefill_sizes(bounds.tokens) if any_step else [],
        }
        largest = max(size for each in sizes.values() for size in each)
        self._buffers = Buffers.of(largest, bounds, caches.block_size, like, decoder.entry_size, decoder.exit_size)
        ways = [False] if self._adapters is None else [False, True]
        wanted = [(size, kind, adapted) for kind in GraphKind for size in sizes[kind] for adapted in ways]
        failed = set[tuple[GraphKind, bool]]()
        for size, kind, adapted in sorted(wanted, reverse=True):
            if (kind, adapted) in failed:
                continue
            graph, cause = self._tried(size, capture, kind, adapted=adapted)
            verdict = agree(_FAILS if graph is None else int(capture.held <= max_bytes))
            if graph is not None and verdict > 0:
                self._graphs[kind].insert(0, graph)
            elif verdict == _FAILS:
                failed.add((kind, adapted))
                given = {"kind": kind.name.lower(), "adapters": adapted, "tokens": size}
                _log.warning("steps of a kind run eagerly: they cannot be captured", **given, cause=cause)
            else:
                _log.warning("a graph is left out: it needs too much memory", tokens=size, max_bytes=max_bytes)
            del graph  # the memory of one that is left out is free before the next is captured

    @property
    def sizes(self) -> dict[GraphKind, list[int]]:
        """Tokens of each graph for steps without adapters, the smallest first."""
        return {kind: [graph.tokens for graph in each if graph.adapters is None] for kind, each in self._graphs.items()}

    def __iter__(self) -> Iterator[Graph]:
        return chain.from_iterable(self._graphs.values())

    def find(self, chunks: Sequence[Chunk], *, deep: bool, adapted: bool = False) -> Graph | None:
        """The graph that fits a batch; `deep` and `adapted` say whether the batch has deepstack rows or adapters. None
        where none fits."""
        tokens = sum(chunk.count for chunk in chunks)
        if len(chunks) > self._bounds.sequences:
            return None
        kinds = [GraphKind.PREFILL]
        if tokens == len(chunks) and not deep:
            kinds = [GraphKind.DECODE]
        elif max(chunk.count for chunk in chunks) <= 1 + self._bounds.drafts and not deep:
            kinds = [GraphKind.VERIFY, GraphKind.PREFILL]
        graphs = chain.from_iterable(self._graphs[kind] for kind in kinds)
        fit = (graph for graph in graphs if graph.tokens >= tokens and (graph.adapters is not None) == adapted)
        return next(fit, None)

    def replay(
        self,
        graph: Graph,
        hidden: Tensor,
        moved: Sequence[Tensor],
        tables: DeviceTables,
        longest: int,
        deepstack: Deepstack | None,
        token_ids: Tensor | None = None,
    ) -> Tensor:
        """Runs a graph. It takes input embeddings [n, entry_size], what `Graph.of` returned for the plan, on the
        device, and all block tables, in which no sequence is longer than `longest`; `token_ids` as
        `Decoder.ids_of_layers` returns them. Returns hidden states [n, exit_size], which are valid until the next
        replay."""
        buffers, n = self._buffers, len(hidden)
        buffers.hidden[:n].copy_(hidden)
        if token_ids is not None:
            buffers.token_ids[:n].copy_(token_ids)
        if graph.deep:
            self._put_deepstack(deepstack, n)
        for target, given in zip(graph.read, moved, strict=True):
            target.copy_(given)
        tables.gather(graph.numbers.rows, longest, out=buffers.block_table[: len(graph.numbers.rows)])
        graph.replay()
        self.replays += 1
        return buffers.out[:n]

    def _put_deepstack(self, deepstack: Deepstack | None, tokens: int) -> None:
        """Fills the deepstack buffers: each level is added to all tokens, so places without a row get zeros."""
        self._buffers.deep[:, : self._filled].zero_()
        self._filled = 0
        if deepstack is not None:
            self._buffers.deep[:, deepstack.index] = deepstack.values
            self._filled = tokens

    def _tried(self, tokens: int, capture: Capture, kind: GraphKind, *, adapted: bool) -> tuple[Graph | None, str]:
        """A graph, or None and the reason why there is none."""
        try:
            return self._capture(tokens, capture, kind, adapted=adapted), ""
        except CaptureFailed as error:
            return None, str(error)

    def _capture(self, tokens: int, capture: Capture, kind: GraphKind, *, adapted: bool) -> Graph:
        """Captures a graph of `tokens` tokens over a batch of padding, which replays overwrite."""
        buffers = self._buffers
        sequences = min(tokens, self._bounds.sequences)
        longest, tiling = tokens, self._caches.tiling
        if kind is GraphKind.DECODE:
            longest = 1
        elif kind is GraphKind.VERIFY:  # a program for each token and its drafts, with no more rows than these have
            longest = 1 + self._bounds.drafts
            tiling = replace(tiling, tile=min(tiling.tile, longest), singles=False)
        most = 0 if kind is GraphKind.DECODE else tokens // tiling.tile + sequences
        numbers = GraphNumbers.padding(
            tokens,
            sequences,
            most,
            tiling,
            self._null_slot,
            self._decoder.device,
            position_rows=self._decoder.position_rows,
        )
        metadata = numbers.metadata(buffers.block_table, longest_query=longest, longest=self._bounds.context)
        hidden, out = buffers.hidden[:tokens], buffers.out[:tokens]
        deep = kind is GraphKind.PREFILL and len(buffers.deep) > 0
        levels = Deepstack(None, buffers.deep[:, :tokens]) if deep else None
        states = self._caches.state_metadata(tokens, sequences, decodes_only=kind is GraphKind.DECODE)
        batches = self._caches.batches_over(metadata, states)
        adapters = self._adapters
        tiles = adapters.tiles(tokens) if adapters is not None and adapted else None

        def run() -> None:
            layers, token_ids = self._caches.layers, buffers.token_ids[:tokens]
            with nullcontext() if adapters is None else adapters.over(tiles):
                out.copy_(self._decoder(hidden, numbers.positions, layers, batches, levels, token_ids=token_ids))

        return Graph(kind, tokens, numbers, [*states.values()], tiles, deep, capture(run))
