"""Graphs of the towers, replayed on the CPU: the captured callable runs again over the same buffers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from common.checkpoints.checkpoint import Checkpoint
from common.gpu.graphs import CaptureFailed
from common.media.item import Grid
from encoder_service.families import config
from encoder_service.models.attention import Triton, max_segments
from encoder_service.models.tower import PackedTower, load_tower
from encoder_service.worker.graphs import Choice, GraphedTower, GraphsUnavailable, budgets_for
from testkit.checkpoints import TOWERS
from testkit.internvl_checkpoint import make_internvl

CPU = torch.device("cpu")
NEAR = {"rtol": 1e-4, "atol": 1e-4}


class Again:
    """Captures by keeping the callable; a script of `held` bytes stands for the memory of a GPU."""

    def __init__(self, *held: int) -> None:
        self._script = list(held)
        self.runs = 0

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        def replay() -> None:
            self.runs += 1
            run()

        replay()
        return replay

    @property
    def held(self) -> int:
        return self._script.pop(0) if self._script else 0


class Bounds:
    """Attention by a mask that is made from a table of bounds, with static shapes alone: what a graph can hold."""

    def __init__(self, name="bounds"):
        self.name = name

    def over(self, lengths, device):
        made = self.stable(sum(lengths), max(lengths), device, len(lengths))
        made.fill(made.table(lengths))
        return made

    def stable(self, patches, longest, device, most=0):
        return StableBounds(self.name, most or max_segments(patches))


class StableBounds:
    calls: ClassVar[list[tuple[str, int]]] = []
    """Who was called, and the most patches that a segment had."""

    def __init__(self, name: str, most: int) -> None:
        self.backend = name
        self.ends = torch.zeros(most, dtype=torch.int64)

    def holds(self, lengths):
        return len(lengths) <= len(self.ends)

    def table(self, lengths):
        return torch.tensor([*accumulate(lengths)] + [sum(lengths)] * (len(self.ends) - len(lengths)))

    def fill(self, table):
        self.ends.copy_(table)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.calls.append((self.backend, int(self.ends.diff(prepend=torch.zeros(1, dtype=torch.int64)).max())))
        places = torch.arange(len(q))
        segment = torch.searchsorted(self.ends, places, right=True)
        inside = places < self.ends[-1]
        seen = (segment[:, None] == segment[None, :]) & inside[None, :]
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1).masked_fill(~seen, 0)
        return torch.einsum("hqk,khd->qhd", weights, v.masked_fill(~inside[:, None, None], 0))


@pytest.fixture(params=TOWERS)
def tower(request, checkpoints) -> PackedTower:
    return load(checkpoints(request.param))


def load(folder: Path) -> PackedTower:
    checkpoint = Checkpoint(folder)
    tower = load_tower(checkpoint, config.read(checkpoint), CPU, torch.float32)
    tower.backend = Bounds()
    tower.capturable = [tower.backend]
    return tower


def graphed(
    tower: PackedTower,
    *budgets: int,
    capture: Again | None = None,
    max_bytes: int = 1,
    choice: Choice | None = None,
) -> GraphedTower:
    capture = capture or Again()
    return GraphedTower(tower, budgets, capture, max_bytes=max_bytes, device=CPU, dtype=torch.float32, choice=choice)


def patches_of(tower: PackedTower, grids: list[Grid], seed: int = 0) -> Tensor:
    dim = tower.patch_embed.proj.bias, sum(grid.patches for grid in grids)
    inputs = 3 * 2 * (16 if dim[0] is not None else 14) ** 2
    return torch.randn(dim[1], inputs, generator=torch.Generator().manual_seed(seed))


GRID = st.builds(Grid, st.integers(1, 2), st.sampled_from([2, 4, 6, 10]), st.sampled_from([2, 4, 8, 12]))


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(GRID, min_size=1, max_size=3), min_size=2, max_size=4))
@torch.inference_mode()
def test_replays_equal_eager_passes_for_any_mix_one_after_the_other(tower, batches):
    graphs = graphed(tower, 128, 512)
    for seed, grids in enumerate(batches):
        patches = patches_of(tower, grids, seed)
        torch.testing.assert_close(graphs(patches, grids), tower(patches, grids), **NEAR)
    assert graphs.replays + graphs.eager == len(batches)


@torch.inference_mode()
def test_nothing_of_an_earlier_batch_leaks_into_a_replay(tower):
    """Before each replay every buffer is filled with NaN, and so is what pads the batch."""
    graphs = graphed(tower, 256)
    for seed, grids in enumerate([[Grid(1, 10, 12)], [Grid(2, 4, 6), Grid(1, 2, 2)], [Grid(1, 2, 4)]]):
        buffers = graphs._buffers
        for each in (buffers.x, buffers.cos, buffers.sin, buffers.rows):
            each.fill_(torch.nan)
        patches = patches_of(tower, grids, seed)
        torch.testing.assert_close(graphs(patches, grids), tower(patches, grids), **NEAR)
    assert graphs.replays == 3


@torch.inference_mode()
def test_buffers_and_tables_never_move(tower):
    graphs = graphed(tower, 64, 256)

    def addresses() -> list[int]:
        tables = [segments.ends for graph in graphs._graphs for segments in graph.segments]
        buffers = graphs._buffers
        return [each.data_ptr() for each in (buffers.x, buffers.cos, buffers.sin, buffers.rows, *tables)]

    before = addresses()
    for grids in ([Grid(1, 4, 4)], [Grid(1, 10, 12)], [Grid(1, 4, 8), Grid(1, 2, 2)]):
        rows = graphs(patches_of(tower, grids), grids)
        assert rows.isfinite().all()
    assert addresses() == before
    assert graphs.replays == 3


@torch.inference_mode()
def test_batches_are_prepared_ahead_and_rows_outlive_the_next_replay(tower):
    graphs = graphed(tower, 64)
    mixes = [[Grid(1, 4, 8)], [Grid(2, 4, 4)], [Grid(1, 2, 4), Grid(1, 6, 6)]]
    inputs = [patches_of(tower, grids, seed) for seed, grids in enumerate(mixes)]
    ready = [graphs.prepare(grids, CPU) for grids in mixes]
    rows = [graphs.run(patches, each) for patches, each in zip(inputs, ready, strict=True)]
    assert graphs.replays == 3
    for patches, grids, found in zip(inputs, mixes, rows, strict=True):
        torch.testing.assert_close(found, tower(patches, grids), **NEAR)


@torch.inference_mode()
def test_a_replay_runs_one_captured_graph_once(tower):
    capture = Again()
    graphs = graphed(tower, 64, 256, capture=capture)
    assert capture.runs == 2
    grids = [Grid(1, 4, 4)]
    graphs(patches_of(tower, grids), grids)
    assert capture.runs == 3


@torch.inference_mode()
def test_a_batch_is_padded_to_the_smallest_budget_that_fits(tower):
    graphs = graphed(tower, 64, 16, 256)
    assert graphs.budgets == [16, 64, 256]
    for grids, budget in (([Grid(1, 4, 4)], 16), ([Grid(1, 4, 6)], 64), ([Grid(1, 10, 12)], 256)):
        assert graphs.prepare(grids, CPU).graph.patches == budget


@torch.inference_mode()
def test_larger_batches_and_too_many_segments_run_eagerly_with_the_same_result(tower):
    graphs = graphed(tower, 64)
    for grids in ([Grid(1, 10, 12)], [Grid(1, 2, 2)] * 16):
        patches = patches_of(tower, grids)
        torch.testing.assert_close(graphs(patches, grids), tower(patches, grids), **NEAR)
    assert (graphs.replays, graphs.eager) == (0, 2)


def test_graphs_that_need_too_much_memory_are_left_out(checkpoints):
    tower = load(checkpoints("qwen3_vl"))
    graphs = graphed(tower, 16, 64, 256, capture=Again(900, 300, 100), max_bytes=300)
    assert graphs.budgets == [16, 64]


class Refusing(Again):
    """Captures a number of times, and then no more."""

    def __init__(self, captures: int) -> None:
        super().__init__()
        self._captures = captures

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        self._captures -= 1
        if self._captures < 0:
            raise CaptureFailed("operation not permitted when stream is capturing")
        return super().__call__(run)


@torch.inference_mode()
def test_passes_that_cannot_be_captured_run_eagerly(tower):
    graphs = graphed(tower, 16, 64, 256, capture=Refusing(1))
    assert graphs.budgets == [256]
    graphs, grids = graphed(tower, 64, capture=Refusing(0)), [Grid(1, 4, 8)]
    patches = patches_of(tower, grids)
    torch.testing.assert_close(graphs(patches, grids), tower(patches, grids), **NEAR)
    assert (graphs.replays, graphs.eager) == (0, 1)


@torch.inference_mode()
def test_a_back_end_that_cannot_be_captured_is_not_chosen(checkpoints):
    tower = load(checkpoints("qwen3_vl"))
    tower.capturable = [Bounds(), Bounds("other")]

    class Picky(Again):
        def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
            StableBounds.calls.clear()
            made = super().__call__(run)
            if StableBounds.calls[-1][0] == "bounds":
                raise CaptureFailed("operation not permitted when stream is capturing")
            return made

    graphs = graphed(tower, 64, capture=Picky(), choice=Choice(lambda run: 1.0 if run() is None else 2.0))
    assert [segments.backend for graph in graphs._graphs for segments in graph.segments] == ["other"]


@torch.inference_mode()
def test_attention_of_each_graph_is_the_fastest_by_the_clock(checkpoints):
    """The clock says that one back end is faster for segments of up to 100 patches, and the other above."""
    tower = load(checkpoints("qwen2_5_vl"))
    tower.capturable = [Bounds(), Bounds("other")]

    def clock(run: Callable[[], object]) -> float:
        run()
        name, longest = StableBounds.calls[-1]
        return longest if name == "bounds" else 100.0

    graphs = graphed(tower, 64, 256, choice=Choice(clock))
    names = [[segments.backend for segments in graph.segments] for graph in graphs._graphs]
    assert names == [["bounds", "bounds"], ["other", "bounds"]], "windows never have more than 64 patches"


def test_without_a_clock_or_when_time_is_up_the_first_back_end_is_taken(checkpoints):
    tower = load(checkpoints("qwen3_vl"))
    tower.capturable = [Bounds(), Bounds("other")]

    def never(run: Callable[[], object]) -> float:
        raise AssertionError("nothing is measured")

    for choice in (None, Choice(None), Choice(never, seconds=0.0)):
        graphs = graphed(tower, 64, choice=choice)
        graphs.leave_out_slower(CPU)
        assert [segments.backend for graph in graphs._graphs for segments in graph.segments] == ["bounds"]


@torch.inference_mode()
def test_graphs_above_the_first_that_is_slower_than_eager_passes_are_left_out(tower):
    capture, eager = Again(), []

    def clock(run: Callable[[], object]) -> float:
        before = capture.runs
        run()
        if capture.runs > before:
            return 1.0
        eager.append(run)
        return 2.0 - 0.75 * len(eager)

    graphs = graphed(tower, 16, 64, 128, 256, capture=capture, choice=Choice(clock))
    graphs.leave_out_slower(CPU)
    assert graphs.budgets == [16], "1.25 s eagerly at first, then 0.5 s"
    grids = [Grid(1, 10, 12)]
    patches = patches_of(tower, grids)
    torch.testing.assert_close(graphs(patches, grids), tower(patches, grids), **NEAR)
    assert (graphs.replays, graphs.eager) == (0, 1)


@torch.inference_mode()
def test_our_kernel_s_tables_replay(checkpoints):
    """As above, with the tables that a GPU uses."""
    tower = load(checkpoints("qwen2_5_vl"))
    tower.backend = Triton()
    tower.capturable = [tower.backend]
    graphs = graphed(tower, 128)
    for seed, grids in enumerate([[Grid(1, 10, 12)], [Grid(2, 4, 6), Grid(1, 2, 2)]]):
        patches = patches_of(tower, grids, seed)
        eager = tower(patches, grids)
        torch.testing.assert_close(graphs(patches, grids), eager, **NEAR)
    assert graphs.replays == 2


def test_attention_that_cannot_be_captured_is_refused_by_name(checkpoints):
    checkpoint = Checkpoint(checkpoints("qwen3_vl"))
    tower = load_tower(checkpoint, config.read(checkpoint), CPU, torch.float32)
    with pytest.raises(GraphsUnavailable, match="--attention sdpa"):
        graphed(tower, 64)


def test_a_budget_must_be_a_number_of_squares(checkpoints):
    with pytest.raises(GraphsUnavailable, match="multiples of 4"):
        graphed(load(checkpoints("qwen3_vl")), 66)


def test_which_budgets_are_captured(checkpoints):
    tower, gpu = load(checkpoints("qwen3_vl")), torch.device("cuda")
    assert budgets_for(None, tower, CPU, 4096) == []
    assert budgets_for([], tower, gpu, 4096) == []
    assert budgets_for([64, 512], tower, gpu, 4096) == [64, 512]
    assert budgets_for(None, tower, gpu, 600) == [256, 384, 512]
    with pytest.raises(GraphsUnavailable, match="need a GPU"):
        budgets_for([64], tower, CPU, 4096)


TILE = 16
"""Patches of a tile."""


@pytest.fixture(scope="module", params=["qwen2", "qwen3", "llama"])
def tiled(request, tmp_path_factory) -> PackedTower:
    """Each kind of a tower that sees tiles."""
    return load(make_internvl(tmp_path_factory.mktemp(request.param), request.param))


def tiles_of(*grids: Grid, seed: int = 0) -> Tensor:
    drawn = torch.Generator().manual_seed(seed)
    return torch.randn(sum(grid.patches for grid in grids), 3 * 14 * 14, generator=drawn)


TILES = st.builds(
    lambda count, apart: Grid(count, 4, 4) if apart else Grid(1, 4 * count, 4), st.integers(1, 5), st.booleans()
)
"""A video's frames, or a picture's tiles."""


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(TILES, min_size=1, max_size=3), min_size=2, max_size=4))
@torch.inference_mode()
def test_replays_of_tiles_equal_eager_passes_and_nothing_leaks_into_them(tiled, batches):
    graphs = graphed(tiled, *(TILE * count for count in (1, 2, 4, 8)))
    for seed, grids in enumerate(batches):
        for each in (graphs._buffers.x, graphs._buffers.rows):
            each.fill_(torch.nan)
        patches = tiles_of(*grids, seed=seed)
        rows = graphs(patches, grids)
        assert rows.shape == (len(patches) // 4, 1, 64)
        torch.testing.assert_close(rows, tiled(patches, grids), **NEAR)
    assert graphs.replays + graphs.eager == len(batches)
    assert graphs.eager == sum(sum(grid.patches for grid in grids) > 8 * TILE for grids in batches)


@torch.inference_mode()
def test_tiles_are_padded_to_the_smallest_number_that_fits_over_buffers_that_never_move(tiled):
    graphs = graphed(tiled, 4 * TILE, TILE, 2 * TILE)
    assert graphs.budgets == [TILE, 2 * TILE, 4 * TILE]
    buffers = graphs._buffers
    assert buffers.x.shape == (4 * (TILE + 1), 32)
    before = buffers.x.data_ptr(), buffers.rows.data_ptr()
    for count, budget in ((1, 1), (2, 2), (3, 4), (4, 4)):
        ready = graphs.prepare([Grid(1, 4 * count, 4)], CPU)
        assert ready.graph.patches == budget * TILE
        patches = tiles_of(Grid(count, 4, 4), seed=count)
        torch.testing.assert_close(graphs.run(patches, ready), tiled(patches, [Grid(count, 4, 4)]), **NEAR)
    assert (buffers.x.data_ptr(), buffers.rows.data_ptr()) == before
    assert graphs.replays == 4


@torch.inference_mode()
def test_tiles_replay_with_our_kernel_s_tables(tmp_path):
    tower = load(make_internvl(tmp_path))
    tower.backend = Triton()
    tower.capturable = [tower.backend]
    graphs = graphed(tower, 4 * TILE)
    for seed, count in enumerate((3, 1)):
        patches, grids = tiles_of(Grid(count, 4, 4), seed=seed), [Grid(count, 4, 4)]
        torch.testing.assert_close(graphs(patches, grids), tower(patches, grids), **NEAR)
    assert graphs.replays == 2


def test_budgets_are_whole_tiles(tmp_path):
    tower, gpu = load(make_internvl(tmp_path)), torch.device("cuda")
    with pytest.raises(GraphsUnavailable, match="multiples of 16"):
        graphed(tower, 40)
    assert budgets_for(None, tower, gpu, 600) == [256, 384, 512]
    tower.granularity = replace(tower.granularity, patches=1024)  # as published towers have them
    assert budgets_for(None, tower, gpu, 16_384) == [1024, 2048, 3072, 4096]
