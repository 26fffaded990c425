"""Graphs of a tower of transformers by shape, replayed on the CPU: what is captured runs again over its buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from common.media.item import Grid
from encoder_service.worker.graphs import Choice
from encoder_service.worker.hf.batches import ByShape, Made, shape_of
from encoder_service.worker.hf.graphs import ShapeGraphs

CPU = torch.device("cpu")


class Again:
    """Captures by keeping the callable; a script of `held` bytes stands for the memory of a GPU."""

    def __init__(self, *held: int) -> None:
        self._script = list(held)
        self.runs = 0

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        def replay() -> None:
            self.runs += 1
            run()

        return replay

    @property
    def held(self) -> int:
        return self._script.pop(0) if self._script else 0


class Toy:
    """Three rows for each item; `change` of the rows of a pass [items, 3, 1, width]."""

    def __init__(self, change: Callable[[Tensor], Tensor] = lambda rows: rows) -> None:
        self._change = change
        self.passes = 0

    def rows(self, inputs: Mapping[str, Any], tokens: int, modality: str = "image") -> Tensor:
        self.passes += 1
        rows = inputs["pixel_values"].flatten(1)[:, :12].view(-1, 3, 1, 4) * inputs["sizes"].view(-1, 1, 1, 1)
        return self._change(rows).flatten(0, 1)


def item(seed: int, size: int = 5, side: int = 224) -> Made:
    """Of 256 patches as graphs count them, where a side has 224 pixels."""
    pixels = torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(seed))
    inputs = {"pixel_values": pixels, "sizes": torch.tensor([size])}
    return Made("image", inputs, shape=shape_of("image", inputs))


def captured(toy: Toy, capture: Again | None = None, *, several: bool = True, size: int = 5) -> ShapeGraphs:
    graphs = ShapeGraphs(toy, capture or Again(), max_bytes=300)
    assert graphs.add((item(100, size), item(101, size)), 3, several=several) == ""
    return graphs


@torch.inference_mode()
def test_replays_give_each_item_its_rows_and_nothing_of_an_earlier_one_leaks() -> None:
    toy, capture = Toy(), Again()
    graphs = captured(toy, capture)
    assert graphs.budgets == [3 * count for count in (1, 2, 4, 8, 16)]
    before, passes = graphs.replays, []
    for count in (1, 3, 16, 2, 5):
        items = [item(seed) for seed in range(count)]
        for graph in graphs._graphs[items[0].shape]:
            graph.floats["pixel_values"].fill_(torch.nan)
        toy.passes = 0
        runs = capture.runs
        rows = graphs.rows(items)
        passes.append((capture.runs - runs, toy.passes))
        assert torch.equal(rows, torch.cat([Toy().rows(each.inputs, 3) for each in items]))
    assert passes == [(1, 0)] * 5, "one graph for each, and nothing of the tower's Python"
    assert graphs.replays - before == 5


@torch.inference_mode()
def test_rows_outlive_the_next_replay_and_buffers_never_move() -> None:
    graphs = captured(Toy())
    shape = item(0).shape

    def addresses() -> list[int]:
        return [part.data_ptr() for each in graphs._graphs[shape] for part in (each.rows, *each.floats.values())]

    before, first = addresses(), graphs.rows([item(0)])
    kept = first.clone()
    graphs.rows([item(1)])
    assert torch.equal(first, kept)
    assert addresses() == before


@torch.inference_mode()
def test_a_tower_replays_what_it_has_and_computes_the_rest() -> None:
    toy, capture = Toy(), Again()
    graphs = captured(toy, capture)
    tower, runs = ByShape(toy, ["image"], 10_000, graphs), capture.runs
    items = [item(seed) for seed in range(18)] + [item(18, size=6), item(19, side=112)]
    rows = tower.run(items, tower.prepare([Grid(1, 1, 3)] * len(items), CPU))
    assert torch.equal(rows, torch.cat([Toy().rows(each.inputs, 3) for each in items]))
    assert capture.runs - runs == 2, "sixteen, and two"


@torch.inference_mode()
def test_where_items_are_computed_one_by_one_graphs_are_of_one() -> None:
    toy = Toy()
    graphs = captured(toy, several=False)
    tower = ByShape(toy, [], 10_000, graphs)
    before = graphs.replays
    tower.run([item(0), item(1)], [3, 3])
    assert (graphs.budgets, graphs.replays - before) == ([3], 2)


def waits(rows: Tensor) -> Tensor:
    return rows * float(rows.abs().max())


@torch.inference_mode()
def test_what_waits_for_the_device_has_no_graphs() -> None:
    graphs = ShapeGraphs(Toy(waits), Again(), max_bytes=1)
    why = graphs.add((item(0), item(1)), 3, several=True)
    assert why == "transformers waits for what depends on an item's content (aten::_local_scalar_dense)"
    assert (graphs.budgets, graphs.most(item(0).shape)) == ([], 0)


def drops_empty(rows: Tensor) -> Tensor:
    """Items without a number other than 0, as some towers do with what fills a prompt's pictures up."""
    kept = rows[(rows != 0).flatten(1).any(1)]
    return kept if len(kept) == len(rows) else torch.full_like(rows, 7.0)


@torch.inference_mode()
def test_an_item_that_the_host_would_see_otherwise_is_computed_by_a_pass() -> None:
    tower = Toy(drops_empty)
    graphs, empty = captured(tower), item(0)
    empty.inputs["pixel_values"].zero_()
    for items, replays in (([item(1), empty], 0), ([item(1), item(2), item(3)], 1), ([empty], 0), ([item(4)], 1)):
        before = graphs.replays
        rows = graphs.rows(items)
        expected = tower.rows({name: torch.cat([each.inputs[name] for each in items]) for name in empty.inputs}, 3)
        assert torch.equal(rows, expected)
        assert graphs.replays - before == replays


class Remembers(Toy):
    """A tower whose Python keeps what an item gave."""

    kept: Tensor | None = None

    def rows(self, inputs: Mapping[str, Any], tokens: int, modality: str = "image") -> Tensor:
        rows = super().rows(inputs, tokens, modality)
        if self.kept is None or self.kept.shape != rows.shape:
            self.kept = rows
        return rows + self.kept.flip(0)


@torch.inference_mode()
def test_rows_that_a_pass_computes_otherwise_each_time_have_no_graphs() -> None:
    graphs = ShapeGraphs(Remembers(), Again(), max_bytes=1)
    assert "a replay gives other rows than a pass" in graphs.add((item(0), item(1)), 3, several=False)
    assert graphs.budgets == []


class Frozen(Again):
    """A capture that has the rows of one item in it."""

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        return lambda: None


@torch.inference_mode()
def test_replays_are_tried_by_another_item() -> None:
    graphs = ShapeGraphs(Toy(), Frozen(), max_bytes=1)
    assert graphs.add((item(0), item(1)), 3, several=False).startswith("a replay gives other rows than a pass (")
    assert (graphs.budgets, graphs.most(item(0).shape)) == ([], 0)


@torch.inference_mode()
def test_a_capture_that_fails_is_told() -> None:
    class Fails(Again):
        def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    graphs = ShapeGraphs(Toy(), Fails(), max_bytes=1)
    why = graphs.add((item(0), item(1)), 3, several=False)
    assert why == "a pass cannot be captured: operation not permitted when stream is capturing"


@torch.inference_mode()
def test_graphs_that_need_too_much_memory_or_time_are_left_out() -> None:
    assert captured(Toy(), Again(900, 400, 300, 200, 100)).budgets == [3, 6, 12]
    times = iter([2.0, 1.0, 1.0, 2.0, 1.0, 2.0])  # a replay, a pass; the larger graph first
    graphs = ShapeGraphs(Toy(), Again(), max_bytes=1, choice=Choice(lambda run: (run(), next(times))[1]))
    assert graphs.add((item(0, side=448), item(1, side=448)), 3, several=True) == "", "of 1024 patches"
    assert graphs.budgets == [3, 6]


@torch.inference_mode()
def test_items_so_large_that_launches_do_not_matter_have_none() -> None:
    large = [item(seed, side=1024) for seed in range(2)]
    assert "so large" in ShapeGraphs(Toy(), Again(), max_bytes=1).add(large, 3, several=True)
