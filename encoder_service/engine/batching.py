"""Chooses which waiting units run next, and on which worker: by patches, oldest first, without starvation.

A unit is one item, or some frame groups of a video. Batches are bounded in patches and in units.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from common.media.item import Grid
from encoder_service.engine.device_pool import Slice
from encoder_service.worker.messages import Piece


@dataclass(slots=True, eq=False)
class Unit:
    """A unit of work. `done` is set once, when no worker can write its rows any more.

    It has an item's frame groups from `first_group` on. `number` is its age; `started_at` is when a worker first got
    it, 0 before; `preprocess` is the time in seconds that its batch's pixels took to become patches; `passed` counts
    how often later units went first. A unit that is `alone` shares a batch with no other: it was there when a worker
    died. `copy` is where its rows are, or are being written, in the worker's own memory; None if they are only in the
    arena, as for units that are not `pooled`.
    """

    key: bytes
    piece: Piece
    patches: int
    priority: int
    number: int
    done: asyncio.Future[None]
    first_group: int = 0
    pooled: bool = True
    alone: bool = False
    started_at: float = 0.0
    preprocess: float = 0.0
    passed: int = 0
    copy: Slice | None = None

    @property
    def groups(self) -> range:
        """Its frame groups."""
        return range(self.first_group, self.first_group + self.piece.grid[0])

    def give_up_copy(self) -> None:
        """Its rows were not written to the worker's own memory."""
        if self.copy is not None:
            self.copy.abandon()
            self.copy = None


_OVERDUE = 32
"""Times that a unit may be passed over by a higher priority; then it goes before any."""


def order(unit: Unit) -> tuple[bool, int, int]:
    """Overdue first, then higher priority, then older."""
    return (unit.passed < _OVERDUE, 0 if unit.passed >= _OVERDUE else -unit.priority, unit.number)


def assemble(waiting: Sequence[Unit], workers: int, budget: int, max_units: int) -> list[list[Unit]]:
    """Batches for `workers` idle workers: at most one each, of at most `budget` patches and `max_units` units.

    The first unit always goes, even if it exceeds the budget; later ones go if they fit. The chosen units are
    distributed largest first, each to the worker with the fewest patches: sizes 1000 100 200 50 on two workers become
    [1000] and [200 100 50].
    """
    if not waiting or workers < 1:
        return []
    chosen = _choose(sorted(waiting, key=order), workers, budget, max_units)
    batches: list[list[Unit]] = [[] for _ in range(workers)]
    loads = [0] * workers
    first, rest = chosen[0], sorted(chosen[1:], key=lambda unit: -unit.patches)
    for unit in (first, *rest):
        index = min(range(workers), key=lambda worker: (loads[worker], worker))
        batch = batches[index]
        fits = not batch or (
            loads[index] + unit.patches <= budget and len(batch) < max_units and not unit.alone and not batch[0].alone
        )
        if fits:
            batch.append(unit)
            loads[index] += unit.patches
            if unit.alone:
                loads[index] = max(loads[index], budget)
    return [batch for batch in batches if batch]


def assemble_full(waiting: Sequence[Unit], budget: int, max_units: int) -> list[Unit]:
    """A batch for a worker that is still busy: empty unless it is so full that later arrivals could hardly be added.

    No unit behind one that must run alone is chosen, since a busy worker that always has a next batch never becomes
    idle.
    """
    if any(unit.alone for unit in waiting):
        return []
    batch = next(iter(assemble(waiting, 1, budget, max_units)), [])
    full = len(batch) < len(waiting) or len(batch) == max_units or sum(unit.patches for unit in batch) >= budget
    return batch if full else []


def cut(grid: Grid, budget: int, workers: int, worth: int) -> list[tuple[int, int]]:
    """Cuts a grid at frame groups into runs [first, end), since attention never crosses these.

    A run has at most `budget` patches, or one group. With several workers there is a run for each, as long as each has
    `worth` patches. 5 groups of 100 patches, budget 250, one worker: (0, 2) (2, 4) (4, 5).
    """
    group = grid.h * grid.w
    max_groups = max(1, budget // group)
    runs = max(-(-grid.t // max_groups), min(workers, grid.t, max(1, grid.patches // worth)))
    step = -(-grid.t // runs)
    return [(first, min(first + step, grid.t)) for first in range(0, grid.t, step)]


def _choose(ordered: Sequence[Unit], workers: int, budget: int, max_units: int) -> list[Unit]:
    chosen, total = list(ordered[:workers]), sum(unit.patches for unit in ordered[:workers])
    for unit in ordered[workers:]:
        if len(chosen) == workers * max_units:
            break
        if total + unit.patches <= workers * budget:
            chosen.append(unit)
            total += unit.patches
    return chosen
