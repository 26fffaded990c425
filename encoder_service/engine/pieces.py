"""One item's work for the device workers: cut at frame groups, queued as its frames come, told of as its rows land."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from common.arena import Range
from common.tasks import wait_until_done
from common.wire import RowLayout
from encoder_service.engine.batching import Unit, cut
from encoder_service.engine.dispatch import Dispatcher
from encoder_service.engine.flight import Flight
from encoder_service.engine.progress import Progress
from encoder_service.item import Plan
from encoder_service.worker.messages import Piece

_WORTH_CUTTING = 2048
"""Patches below which a run of frame groups is not worth a worker, or a start before the others, of its own."""


class Pieces:
    """The pieces of one item: `pixels` is where its frames are, or will be, `rows` where its rows are to go."""

    def __init__(
        self, dispatcher: Dispatcher, layout: RowLayout, flight: Flight, plan: Plan, pixels: Range, rows: Range
    ) -> None:
        self._dispatcher = dispatcher
        self._row_bytes = layout.row_bytes
        self._flight = flight
        self._plan = plan
        self._pixels = pixels
        self._rows = rows
        self._frames_per_group = len(plan.frames) // plan.grid.t

    async def run(self, frames: Progress, batch_patches: int) -> None:
        """Queues each piece when its frames are there; returns or raises when no worker can write rows any more.

        The first piece that fails is the end of `frames`: those that are still to come are of no use.
        """
        units = self._flight.units
        try:
            cuts = self._cut(frames, batch_patches)
            self._flight.cut(len(cuts))
            for first, end in cuts:
                await frames.reach(end * self._frames_per_group)
                self._submit(first, end, frames)
            await asyncio.wait([unit.done for unit in units], return_when=asyncio.FIRST_EXCEPTION)
            if errors := _errors(units):
                raise errors[0]
        finally:
            for unit in units:
                self._dispatcher.withdraw(unit)
            await wait_until_done(asyncio.gather(*(unit.done for unit in units), return_exceptions=True))
            _errors(units)  # one is raised; nobody asks for the others

    def _cut(self, frames: Progress, batch_patches: int) -> list[tuple[int, int]]:
        """Runs of frame groups [first, end). Smaller ones where frames are still to come: so work can begin, and what
        waits goes to a worker in one batch all the same."""
        coming = frames.count < len(self._plan.frames)
        budget = min(batch_patches, _WORTH_CUTTING) if coming else batch_patches
        return cut(self._plan.grid, budget, self._dispatcher.alive, _WORTH_CUTTING)

    def _submit(self, first: int, end: int, frames: Progress) -> None:
        flight, grid = self._flight, self._plan.grid
        first_row = first * self._plan.tokens // grid.t

        def on_done(_: asyncio.Future[None]) -> None:
            for error in _errors([unit]):
                frames.fail(error)
            flight.unit_done(unit, first_row)

        unit = self._dispatcher.submit(
            flight.key, self._piece(first, end), (end - first) * grid.h * grid.w, flight.priority, first
        )
        unit.done.add_done_callback(on_done)
        flight.submitted(unit)

    def _piece(self, first: int, end: int) -> Piece:
        """Frame groups [first, end)."""
        plan = self._plan
        frame_bytes = plan.height * plan.width * 3
        tokens = plan.tokens // plan.grid.t
        return Piece(
            modality=self._flight.item.modality.value,
            pixels=self._pixels.offset + first * self._frames_per_group * frame_bytes,
            frames=(end - first) * self._frames_per_group,
            height=plan.height,
            width=plan.width,
            resized=plan.resized,
            grid=(end - first, plan.grid.h, plan.grid.w),
            tokens=(end - first) * tokens,
            rows=self._rows.offset + first * tokens * self._row_bytes,
        )


def _errors(units: Iterable[Unit]) -> list[BaseException]:
    """What units have failed with so far, in their order."""
    ended = (unit.done for unit in units if unit.done.done() and not unit.done.cancelled())
    return [error for done in ended if (error := done.exception())]
