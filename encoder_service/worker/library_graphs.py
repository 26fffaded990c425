"""CUDA graphs of a tower that the library computes: by the shape of an item, and for so many of that shape in one
pass."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.capture_watch import WaitWatch
from common.gpu import Capture
from common.library_classes import first_line
from encoder_service.worker.graphs import LADDER, Choice
from encoder_service.worker.library_batches import ItemTower, Made, are_near, joined, patches_of

_MOST_ITEMS = 16


@dataclass(frozen=True, slots=True)
class ShapeGraph:
    """Of `count` items of one shape: the `floats` that they differ in, one item behind the other, the `rows` of each,
    [count · tokens, levels, width], and the replay from one to the other."""

    count: int
    tokens: int
    patches: int
    floats: Mapping[str, Tensor]
    rows: Tensor
    replay: Callable[[], None]


class ShapeGraphs:
    """Graphs of no more than `max_bytes` together. Fewer items than a graph has are padded by what it had before, whose
    rows nobody reads. `replays` counts passes."""

    def __init__(self, tower: ItemTower, capture: Capture, *, max_bytes: int, choice: Choice | None = None) -> None:
        self.replays = 0
        self._tower, self._capture, self._max_bytes = tower, capture, max_bytes
        self._choice = choice or Choice(None)
        self._graphs: dict[Hashable, list[ShapeGraph]] = {}

    @property
    def budgets(self) -> list[int]:
        """Rows of the graphs, each number once, the least first."""
        return sorted({len(graph.rows) for graphs in self._graphs.values() for graph in graphs})

    def most(self, shape: Hashable) -> int:
        """See `library_batches.Replays`."""
        return max((graph.count for graph in self._graphs.get(shape, ())), default=0)

    def rows(self, items: Sequence[Made]) -> Tensor:
        """See `library_batches.Replays`. No later replay changes them."""
        graph = min(
            (each for each in self._graphs[items[0].shape] if each.count >= len(items)), key=lambda each: each.count
        )
        for name, buffer in graph.floats.items():
            for part, made in zip(buffer.chunk(graph.count), items, strict=False):
                part.copy_(made.inputs[name])
        graph.replay()
        self.replays += 1
        return graph.rows[: len(items) * graph.tokens].clone()

    def add(self, items: Sequence[Made], tokens: int, *, several: bool) -> str:
        """Captures graphs of one item of a shape and, if several may be in a pass, of 2, 4, 8 …, the largest first, as
        far as launches matter. Two different items of it are given, on the device. Returns why there are none; empty
        where there are."""
        first, second = items
        if patches_of(first.inputs) > LADDER[-1]:
            return "an item is so large that launches do not matter"
        if waits := self._waits(first, tokens):
            return f"the library waits for what the device has computed ({waits})"
        counts = [1]
        while several and counts[-1] < _MOST_ITEMS and 2 * counts[-1] * patches_of(first.inputs) <= LADDER[-1]:
            counts.append(2 * counts[-1])
        kept = list[ShapeGraph]()
        for count in reversed(counts):
            try:
                graph = self._captured([first] * count, tokens)
            except RuntimeError as error:
                return f"a pass cannot be captured: {first_line(error)}"[:200]
            if self._capture.held > self._max_bytes:
                del graph
                continue
            kept.append(graph)
        self._graphs[first.shape] = [graph for graph in kept if not self._is_slower(graph, first)]
        if self._graphs[first.shape] and not self._agrees(second, tokens):
            del self._graphs[first.shape]
            return "a replay gives other rows than a pass"
        return "" if self._graphs[first.shape] else "graphs need too much memory, or are slower than passes"

    def _agrees(self, made: Made, tokens: int) -> bool:
        """Whether replays of each graph give an item's own rows: in Python, a pass may have kept those of another."""
        expected = self._tower.rows(made.inputs, tokens, made.kind)
        counts = [graph.count for graph in self._graphs[made.shape]]
        found = [self.rows([made] * count) for count in counts]
        return all(are_near(each, expected) for rows in found for each in rows.split(tokens))

    def _is_slower(self, graph: ShapeGraph, made: Made) -> bool:
        inputs = joined([made.inputs] * graph.count)
        return self._choice.is_slower(graph, lambda: self._tower.rows(inputs, len(graph.rows), made.kind))

    @torch.inference_mode(mode=False)  # where the host's look at a number is hidden from a mode
    @torch.no_grad()
    def _waits(self, made: Made, tokens: int) -> str:
        """What a graph cannot hold of a pass."""
        inputs = {name: value.clone() if isinstance(value, Tensor) else value for name, value in made.inputs.items()}
        watch = WaitWatch()
        with watch:
            self._tower.rows(inputs, tokens, made.kind)
        return watch.waits

    def _captured(self, items: Sequence[Made], tokens: int) -> ShapeGraph:
        """Over buffers of its own, which hold these items."""
        inputs, kind = joined([made.inputs for made in items]), items[0].kind
        floats = {
            name: value.clone()
            for name, value in inputs.items()
            if isinstance(value, Tensor) and value.is_floating_point() and value.dim()
        }
        given = {**inputs, **floats}
        rows = self._tower.rows(given, tokens * len(items), kind).clone()

        def run() -> None:
            rows.copy_(self._tower.rows(given, len(rows), kind))

        patches = len(items) * patches_of(items[0].inputs)
        return ShapeGraph(len(items), tokens, patches, floats, rows, self._capture(run))
