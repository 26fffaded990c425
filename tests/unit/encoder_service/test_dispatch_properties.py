"""The dispatcher through any sequence of events: whatever dies, fails or is withdrawn, every unit comes to one end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from unittest import mock

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import Internal, Unavailable
from common.process.children import Child
from encoder_service.engine.batching import Unit
from encoder_service.engine.dispatch import BatchLimits, Dispatcher
from encoder_service.engine.workers import WorkerTimes
from encoder_service.worker.messages import BatchDone, BatchFailed, Piece, WorkerSettings
from tests.unit.encoder_service.fakes import DONE, FakeChild, turns

BUDGET = 100
SETTINGS = WorkerSettings(folder="", device="cpu", dtype="float32", threads=1, staging_bytes=0, store_bytes=0)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.lists(st.integers(1, 60) | st.just(150), min_size=1, max_size=8)),
        st.tuples(st.sampled_from(["done", "fail", "spoil", "kill", "part", "fail_part"]), st.integers(0, 2)),
        st.tuples(st.just("withdraw"), st.integers(0, 40)),
    ),
    max_size=25,
)


class Worker(FakeChild):
    """A fake that knows whether it owes an answer."""

    answered, parts = 0, 0

    @property
    def has(self) -> list[list[int]]:
        """The units (by their place in memory) of each batch that it has not answered: it computes the first, of which
        it may have answered `parts`, from the end on."""
        unanswered = self.batches[self.answered :] if self.alive else []
        found = [[piece.pixels for piece in batch.pieces] for batch in unanswered]
        return [found[0][: len(found[0]) - self.parts], *found[1:]] if found else []

    @property
    def owes(self) -> list[int]:
        """The units of the batch that it computes."""
        return next(iter(self.has), [])

    def answer(self, message: object) -> None:
        self.answered += 1
        self.parts = 0
        self.say(message)

    def answer_part(self, make: Callable[[list[int]], object]) -> None:
        """Answers for the last that it owes, by what `make` says of its place in the batch."""
        last = len(self.owes) - 1
        if last:
            self.parts += 1
            self.say(make([last]))
        else:
            self.answer(make([last]))


class World:
    """A dispatcher over three workers on some device, and what befell each unit."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.children: list[Worker] = []
        self.units: list[Unit] = []
        self.refused = 0
        self.withdrawn: set[int] = set()
        self.unlucky: set[int] = set()
        settings = msgspec.structs.replace(SETTINGS, device=device)
        limits = BatchLimits(budget=BUDGET, max_units=4, seconds=1e6, patience=1e6)
        self.dispatcher = Dispatcher([settings] * 3, (0, 0), limits, WorkerTimes(1e6), on_change=self._count)

    async def child(self, *_: object, **__: object) -> Worker:
        self.children.append(Worker())
        return self.children[-1]

    async def run(self, events: list[tuple[str, Any]]) -> None:
        await self.dispatcher.start()
        try:
            for name, value in events:
                getattr(self, name)(value)
                await turns()
                self.check()
            await self.finish()
        finally:
            await self.dispatcher.stop()

    def submit(self, sizes: list[int]) -> None:
        """What comes together goes together: batches of several."""
        for patches in sizes:
            self._submit(patches)

    def _submit(self, patches: int) -> None:
        at = len(self.units)
        piece = Piece(
            modality="image", pixels=at, frames=1, height=1, width=1, resized=(1, 1), grid=(1, 1, 1), tokens=1, rows=0
        )
        try:
            self.units.append(self.dispatcher.submit(at.to_bytes(2), piece, patches, at % 3))
        except Unavailable:
            assert self.dispatcher.alive == 0
            self.refused += 1

    def done(self, index: int) -> None:
        self._answer(index, DONE)

    def fail(self, index: int) -> None:
        self._blame(self._answer(index, BatchFailed(why="no memory")))

    def spoil(self, index: int) -> None:
        spoilt = BatchDone(not_finite=[0], preprocess_seconds=0, vit_seconds=0)
        self._blame(self._answer(index, spoilt)[:1])

    def part(self, index: int) -> None:
        if busy := self._busy():
            busy[index % len(busy)].answer_part(lambda pieces: msgspec.structs.replace(DONE, pieces=pieces))

    def fail_part(self, index: int) -> None:
        if busy := self._busy():
            worker = busy[index % len(busy)]
            self._blame(worker.owes[-1:])
            worker.answer_part(lambda pieces: BatchFailed(why="no memory", pieces=pieces))

    def kill(self, index: int) -> None:
        if busy := self._busy():
            worker = busy[index % len(busy)]
            self._blame([unit for batch in worker.has for unit in batch])
            worker.kill()

    def withdraw(self, index: int) -> None:
        if index < len(self.units) and self.dispatcher.withdraw(self.units[index]):
            self.withdrawn.add(index)

    def check(self) -> None:
        """No unit is with two workers; batches keep their bounds."""
        self.dispatcher.check_integrity()
        batches = [batch for child in self.children for batch in child.has]
        owed = [unit for batch in batches for unit in batch]
        assert len(owed) == len(set(owed))
        assert sorted(map(id, self.dispatcher.running)) == sorted(id(self.units[unit]) for unit in owed)
        for batch in batches:
            assert len(batch) == 1 or sum(self.units[unit].patches for unit in batch) <= BUDGET
        assert not self.withdrawn & set(owed)
        for child in self.children:
            assert len(child.has) <= (2 if self.device == "cuda" else 1)
            assert len(child.has) < 2 or not any(self.units[unit].alone for batch in child.has for unit in batch)

    async def finish(self) -> None:
        """Workers that do their work bring everything to an end, as it must be."""
        for _ in range(4 * len(self.units) + 4):
            for worker in self._busy():
                worker.answer(DONE)
            await turns()
            self.check()
        for number, unit in enumerate(self.units):
            assert unit.done.done(), "a unit has no end"
            if number in self.withdrawn:
                assert unit.done.cancelled()
            elif number not in self.unlucky:
                assert unit.done.result() is None
            elif error := unit.done.exception():
                assert isinstance(error, Internal | Unavailable)
        self.dispatcher.check_idle()
        assert not self.dispatcher.running

    def _busy(self) -> list[Worker]:
        return [child for child in self.children if child.owes]

    def _answer(self, index: int, message: object) -> list[int]:
        if not (busy := self._busy()):
            return []
        worker = busy[index % len(busy)]
        owed = worker.owes
        worker.answer(message)
        return owed

    def _blame(self, units: list[int]) -> None:
        self.unlucky.update(units)

    def _count(self, alive: int) -> None:
        if not alive:  # what waited is failed as well
            self.unlucky.update(range(len(self.units)))


@settings(max_examples=300, deadline=None)
@given(EVENTS, st.sampled_from(["cpu", "cuda"]))
def test_every_unit_comes_to_one_end_whatever_happens(events: list[tuple[str, Any]], device: str) -> None:
    """Workers on GPUs get their next batch early."""
    world = World(device)
    with mock.patch.object(Child, "start", world.child):
        asyncio.run(world.run(events))
