"""CUDA graphs of a tower that transformers computes: by shape of items, and for so many of that shape in one pass."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.gpu.graphs import Capture
from common.hf.classes import first_line
from encoder_service.worker.graphs import LADDER, Choice
from encoder_service.worker.hf.batches import ItemTower, Made, joined, patches_of
from encoder_service.worker.op_trace import Trace

_MOST_ITEMS = 16


@dataclass(frozen=True, slots=True)
class ShapeGraph:
    """A graph of `count` items of one shape: the `floats` in which they differ, item by item, the `rows` of each,
    [count · tokens, levels, width], and the replay between them. Rows are valid if the trace `holds`."""

    count: int
    tokens: int
    patches: int
    floats: Mapping[str, Tensor]
    rows: Tensor
    trace: Trace
    replay: Callable[[], None]

    def differing_look(self) -> str:
        """After a replay, the operator by which the host would have read other values than at capture; empty if there
        is none. Waits for the device if the host read any."""
        if not self.trace.looks:
            return ""
        holds = self.trace.holds.tolist()
        return next((name for name, same in zip(self.trace.looks, holds, strict=True) if not same), "")


class ShapeGraphs:
    """Graphs of at most `max_bytes` together. With fewer items than a graph has, the last one is repeated. Items for
    which the host would read other values than at capture are computed by a pass. `replays` counts valid replays."""

    def __init__(self, tower: ItemTower, capture: Capture, *, max_bytes: int, choice: Choice | None = None) -> None:
        self.replays = 0
        self._tower, self._capture, self._max_bytes = tower, capture, max_bytes
        self._choice = choice or Choice(None)
        self._graphs: dict[Hashable, list[ShapeGraph]] = {}

    @property
    def budgets(self) -> list[int]:
        """Rows of the graphs, each number once, the least first."""
        return sorted({len(graph.rows) for graphs in self._graphs.values() for graph in graphs})

    @property
    def looks(self) -> list[str]:
        """Operators by which the host reads values that depend on an item's content, each once: replays wait for
        these."""
        return sorted({name for graphs in self._graphs.values() for graph in graphs for name in graph.trace.looks})

    def most(self, shape: Hashable) -> int:
        """See `batches.Replays`."""
        return max((graph.count for graph in self._graphs.get(shape, ())), default=0)

    def rows(self, items: Sequence[Made]) -> Tensor:
        """See `batches.Replays`. No later replay changes them."""
        graph = min(
            (each for each in self._graphs[items[0].shape] if each.count >= len(items)), key=lambda each: each.count
        )
        self._replay(graph, items)
        if graph.differing_look():
            inputs = joined([made.inputs for made in items])
            return self._tower.rows(inputs, len(items) * graph.tokens, items[0].kind)
        self.replays += 1
        return graph.rows[: len(items) * graph.tokens].clone()

    def _replay(self, graph: ShapeGraph, items: Sequence[Made]) -> None:
        for name, buffer in graph.floats.items():
            for place, part in enumerate(buffer.chunk(graph.count)):
                part.copy_(items[min(place, len(items) - 1)].inputs[name])
        graph.replay()

    def add(self, items: Sequence[Made], tokens: int, *, several: bool) -> str:
        """Captures graphs of one item of a shape and, if `several` may share a pass, of 2, 4, 8 …, the largest first,
        as far as launches matter. Two different items of the shape are given, on the device. Returns why there are
        none; empty if there are."""
        first, second = items
        if patches_of(first.inputs) > LADDER[-1]:
            return "an item is so large that launches do not matter"
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
        for graph in self._graphs[first.shape]:
            if why := self._differs(graph, first, second):
                del self._graphs[first.shape]
                return why
        return "" if self._graphs[first.shape] else "graphs need too much memory, or are slower than passes"

    def _differs(self, graph: ShapeGraph, first: Made, second: Made) -> str:
        """Why a replay of other items than those captured differs, in any bit, from their pass; empty if it does
        not."""
        items = [second, *[first, second] * graph.count][: graph.count]
        expected = self._tower.rows(joined([made.inputs for made in items]), len(graph.rows), first.kind)
        self._replay(graph, items)
        if name := graph.differing_look():
            return f"transformers waits for what depends on an item's content ({name})"
        if torch.equal(graph.rows, expected):
            return ""
        apart = float((graph.rows - expected).float().norm() / expected.float().norm())
        return f"a replay gives other rows than a pass ({apart:.0e} of their length)"

    def _is_slower(self, graph: ShapeGraph, made: Made) -> bool:
        inputs = joined([made.inputs] * graph.count)
        return self._choice.is_slower(graph, lambda: self._tower.rows(inputs, len(graph.rows), made.kind))

    def _captured(self, items: Sequence[Made], tokens: int) -> ShapeGraph:
        """A graph over buffers of its own, which hold these items."""
        inputs, kind, count = joined([made.inputs for made in items]), items[0].kind, len(items)
        with torch.inference_mode(mode=False):  # tensors made in that mode cannot be written to outside it
            given = {name: value.clone() if isinstance(value, Tensor) else value for name, value in inputs.items()}
        floats = {
            name: value
            for name, value in given.items()
            if isinstance(value, Tensor) and value.is_floating_point() and value.dim()
        }
        trace = Trace(lambda: self._tower.rows(given, tokens * count, kind), list(floats.values()))
        rows = trace().clone()

        def run() -> None:
            rows.copy_(trace())

        patches = len(items) * patches_of(items[0].inputs)
        return ShapeGraph(count, tokens, patches, floats, rows, trace, self._capture(run))
