"""A tower in CUDA graphs: one for each of several budgets of patches, or tiles, valid for any mix of items.

A small batch is mostly launches: hundreds of kernels that a GPU finishes faster than a CPU launches them. A graph of
`PackedTower.encode` launches them all at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, Self

import torch
from torch import Tensor, nn

from common.gpu.device import Clock
from common.gpu.graphs import Capture, CaptureFailed
from common.gpu.transfer import tensors_to_device
from common.media.item import Grid
from common.telemetry import log
from encoder_service.models.attention import Segments, StableSegments
from encoder_service.models.tower import PackedTower, Packing, Pass, Rotary

LADDER = (256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
"""Budgets if none are given: at most half is padding, and above the last one launches do not matter."""

_CHOICE_SECONDS = 20.0
_LAYERS = 8

_log = log.get("graphs")


class GraphsUnavailable(Exception):
    """Graphs were asked for that cannot be; the message says why, for the operator."""


@dataclass(frozen=True, slots=True)
class Buffers:
    """The inputs and outputs of a replay, shared by all budgets: a smaller one uses the beginning.

    `x` [places, width], `cos` and `sin` [places, 1, rotary pairs] float32, `rows` [tokens, levels, out].
    """

    x: Tensor
    cos: Tensor
    sin: Tensor
    rows: Tensor

    @classmethod
    def of(cls, tower: PackedTower, units: int, device: torch.device, dtype: torch.dtype) -> Self:
        """Zeros, for a tower and the units of the largest budget."""
        places = units * tower.granularity.places
        return cls(
            torch.zeros(places, tower.width, device=device, dtype=dtype),
            torch.zeros(places, 1, tower.rotary_pairs, device=device),
            torch.zeros(places, 1, tower.rotary_pairs, device=device),
            torch.zeros(units * tower.granularity.rows, tower.levels, tower.out, device=device, dtype=dtype),
        )


@dataclass(frozen=True, slots=True)
class Graph:
    """One budget: its patches and the places that they take, its segments' tables, and the replay."""

    patches: int
    places: int
    segments: tuple[StableSegments, ...]
    replay: Callable[[], None]

    def holds(self, packing: Packing) -> bool:
        """Whether it can do this batch."""
        return packing.places <= self.places and all(
            segments.holds(lengths) for segments, lengths in zip(self.segments, packing.lengths, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Replay:
    """Everything that a replay needs besides patches: the graph, and the tables of its segments."""

    packing: Packing
    graph: Graph
    tables: tuple[Tensor, ...]


class Captured(Protocol):
    """A graph of a pass over so many patches."""

    @property
    def patches(self) -> int: ...

    @property
    def replay(self) -> Callable[[], None]: ...


class Choice:
    """Chooses by measuring on the device, for at most `seconds` in all; without a clock, nothing is measured. Each
    choice is logged with its reason."""

    def __init__(self, clock: Clock | None, seconds: float = _CHOICE_SECONDS) -> None:
        self._clock = clock
        self._end = time.monotonic() + seconds

    @property
    def _measures(self) -> Clock | None:
        return self._clock if time.monotonic() < self._end else None

    def attention(self, patches: int, able: Mapping[str, StableSegments], heads: Tensor, capture: Capture) -> str:
        """The fastest of several back ends over the same segments, or the first. Queries, keys and values are `heads`,
        [3, places, heads, head_dim]. A back end that cannot be captured is skipped; raises CaptureFailed if none is
        left."""
        clock, first = self._measures, next(iter(able))
        if clock is None or len(able) == 1:
            return first
        times, failed = dict[str, float](), CaptureFailed("there is no attention")
        for name, segments in able.items():
            try:
                times[name] = clock(capture(partial(_repeat, segments, *heads))) / _LAYERS
            except CaptureFailed as error:
                _log.warning("an attention back end cannot be captured", attention=name, cause=str(error))
                failed = error
        if not times:
            raise failed
        chosen = min(times, key=lambda name: times[name])
        taken = {name: round(seconds * 1e6) for name, seconds in times.items()}
        _log.info("attention of a graph is chosen", patches=patches, attention=chosen, microseconds=taken)
        return chosen

    def is_slower(self, graph: Captured, eager: Callable[[], object]) -> bool:
        """Whether a replay takes longer than that pass."""
        if (clock := self._measures) is None:
            return False
        eager()  # the first call sets things up
        replayed, ran = clock(graph.replay), clock(eager)
        taken = {"replay": round(replayed * 1e6), "eager": round(ran * 1e6)}
        _log.info("a graph is compared", patches=graph.patches, kept=replayed <= ran, microseconds=taken)
        return replayed > ran


def _repeat(segments: Segments, q: Tensor, k: Tensor, v: Tensor) -> None:
    """As many layers as make a launch of the graph itself not count."""
    for _ in range(_LAYERS):
        segments(q, k, v)


class GraphedTower:
    """A tower that replays graphs where it can, padded to the next budget; rows of padding are computed and ignored,
    and attention does not reach them. Batches above the largest budget, or with more segments than it has room for, run
    eagerly, with the same result. `replays` and `eager` count passes."""

    def __init__(
        self,
        tower: PackedTower,
        budgets: Sequence[int],
        capture: Capture,
        *,
        max_bytes: int,
        device: torch.device,
        dtype: torch.dtype,
        choice: Choice | None = None,
    ) -> None:
        """Captures a graph for each budget, the largest first, except those that would exceed `max_bytes`, until one
        cannot be captured. With several attention back ends each graph gets that of `choice`, or (None) the first.

        Raises GraphsUnavailable if the tower's attention cannot be captured, or a budget is not a multiple of a square
        or tile.
        """
        self.replays = 0
        self.eager = 0
        self._tower = tower
        self._choice = choice or Choice(None)
        self._buffers = Buffers.of(tower, max(budgets) // tower.granularity.patches, device, dtype)
        self._graphs: list[Graph] = []
        for patches in sorted(set(budgets), reverse=True):
            try:
                graph = self._capture(patches, capture, device)
            except CaptureFailed as error:
                _log.warning("passes run eagerly: they cannot be captured", patches=patches, cause=str(error))
                break
            if capture.held > max_bytes:
                _log.warning("a graph is left out: it needs too much memory", patches=patches, max_bytes=max_bytes)
                del graph
                continue
            self._graphs.insert(0, graph)

    @property
    def budgets(self) -> list[int]:
        """Patches of each graph, the smallest first."""
        return [graph.patches for graph in self._graphs]

    def prepare(self, grids: Sequence[Grid], device: torch.device) -> Replay | Pass:
        """What a pass needs besides patches: with the smallest graph that fits the batch, or without one."""
        packing = self._tower.pack(grids, device)
        for graph in self._graphs:
            if graph.holds(packing):
                each = zip(graph.segments, packing.lengths, strict=True)
                tables = tensors_to_device([segments.table(lengths) for segments, lengths in each], device)
                return Replay(packing, graph, tuple(tables))
        return self._tower.eagerly(packing, device)

    def run(self, patches: Tensor, ready: Replay | Pass) -> Tensor:
        """Patches of the prepared batch → rows [tokens, levels, width], which no later pass changes."""
        tower = self._tower
        if isinstance(ready, Pass):
            self.eager += 1
            return tower.run(patches, ready)
        return tower.unpack(self._replay(tower.embed(patches, ready.packing), ready), ready.packing)

    def __call__(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Patches of a packed batch → rows [tokens, levels, width]."""
        return self.run(patches, self.prepare(grids, patches.device))

    def _replay(self, x: Tensor, ready: Replay) -> Tensor:
        """Rows [tokens, levels, out] of hidden states [places, width]. They are copied out, which takes a hundredth of
        a copy to the host, so that the next replay need not wait until the host has them."""
        buffers, rotary = self._buffers, ready.packing.rotary
        buffers.x[: len(x)].copy_(x)
        buffers.cos[: len(x)].copy_(rotary.cos)
        buffers.sin[: len(x)].copy_(rotary.sin)
        for segments, table in zip(ready.graph.segments, ready.tables, strict=True):
            segments.fill(table)
        ready.graph.replay()
        self.replays += 1
        unit = self._tower.granularity
        return buffers.rows[: len(x) // unit.places * unit.rows].clone()

    def leave_out_slower(self, device: torch.device) -> None:
        """Drops all budgets from the first one whose replay takes longer than an eager pass of a typical batch for it:
        there launches do not matter any more, and padding does. A typical batch is half way from the next smaller
        budget."""
        unit, below = self._tower.granularity, 0
        for index, graph in enumerate(self._graphs):
            middle = max((below + graph.patches) // 2 // unit.patches, 1)
            if self._choice.is_slower(graph, self._eager_pass(middle * unit.places, device)):
                del self._graphs[index:]
                return
            below = graph.patches

    def _eager_pass(self, places: int, device: torch.device) -> Callable[[], object]:
        """One picture of so many places, or as many windows or tiles."""
        tower, buffers = self._tower, self._buffers
        segments = [tower.backend.over(_cut(places, longest), device) for longest in tower.longest]
        rotary = Rotary(buffers.cos[:places], buffers.sin[:places])
        return lambda: tower.encode(buffers.x[:places], rotary, segments)

    def _capture(self, patches: int, capture: Capture, device: torch.device) -> Graph:
        tower, buffers, unit = self._tower, self._buffers, self._tower.granularity
        if patches < unit.patches or patches % unit.patches:
            raise GraphsUnavailable(f"a graph of {patches} patches: budgets must be multiples of {unit.patches}")
        places, rows = (patches // unit.patches * each for each in (unit.places, unit.rows))
        tables = []
        for longest in tower.longest:
            lengths = _cut(places, longest)
            found = [(each.name, each.stable(places, lengths[0], device)) for each in tower.capturable]
            able = {name: stable for name, stable in found if stable is not None}
            if not able:
                raise GraphsUnavailable(f"graphs do not go with --attention {found[0][0]}")
            for stable in able.values():
                stable.fill(stable.table(lengths))
            tables.append(able[self._choice.attention(patches, able, self._heads(places), capture)])
        rotary = Rotary(buffers.cos[:places], buffers.sin[:places])

        def run() -> None:
            buffers.rows[:rows].copy_(tower.encode(buffers.x[:places], rotary, tables))

        return Graph(patches, places, tuple(tables), capture(run))

    def _heads(self, places: int) -> Tensor:
        """Queries, keys and values, [3, places, heads, head_dim], that lie as they do in a layer."""
        like, size = self._buffers.x, self._tower.head_dim
        made = torch.randn(places, 3, self._tower.width // size, size, device=like.device).to(like.dtype)
        return made.transpose(0, 1)


def _cut(places: int, longest: int | None) -> list[int]:
    """As few segments as can be."""
    length = min(longest or places, places)
    return [length] * (places // length) + [places % length] * (places % length > 0)


def budgets_for(wanted: Sequence[int] | None, tower: nn.Module, device: torch.device, batch: int) -> list[int]:
    """The budgets to capture: those `wanted`, or (None) the ladder up to a whole batch, if graphs are possible, in
    whole tiles if the tower has tiles.

    Raises GraphsUnavailable if graphs are wanted and there is no GPU, or the tower is not built from blocks.
    """
    if not isinstance(tower, PackedTower) or device.type != "cuda":
        if wanted:
            raise GraphsUnavailable(
                "CUDA graphs need a GPU" if device.type != "cuda" else "this model's tower cannot go into CUDA graphs"
            )
        return []
    if wanted is not None:
        return list(wanted)
    known = any(each.stable(LADDER[0], LADDER[0], device) is not None for each in tower.capturable)
    unit = tower.granularity.patches
    ladder = sorted({-(-patches // unit) * unit for patches in LADDER})
    return [patches for patches in ladder if patches <= batch] if known else []
