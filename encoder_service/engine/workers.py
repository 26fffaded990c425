"""The device worker processes: started together, replaced when they die. `dispatch` decides what they compute."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from common.aio import tasks
from common.process.children import Child, ChildDied
from common.telemetry import log
from encoder_service.engine.batching import Unit
from encoder_service.engine.device_pool import DevicePool, DevicePools
from encoder_service.worker.messages import FromWorker, StartFailed, WorkerReady, WorkerSettings

MODULE = "encoder_service.worker"
_log = log.get("workers")


class WorkerError(Exception):
    """A worker cannot start; the message says why, for the operator."""


@dataclass(frozen=True, slots=True)
class WorkerTimes:
    """Bounds in seconds."""

    start: float
    """A worker that has not loaded its tower after these is killed."""
    stall: float = 1.0
    """A timer that is so late shows that this process stood still, and says nothing about the worker."""
    longest_pause: float = 30.0
    """From one try to replace a worker to the next, at most."""


@dataclass(slots=True, eq=False)
class WorkerSlot:
    """The slot of one worker: its current process, its device pool, and the batch that it computes: `sent`, of which
    `batch` is not answered yet.

    `began` is when it began on these (`loop.time`), `timer` kills a worker that takes too long, `worked` counts the
    seconds of earlier batches. A worker that `looks_ahead` gets its next batch, `ahead`, early, to prepare it. `stall`
    is as in `WorkerTimes`.
    """

    index: int
    stall: float
    child: Child[FromWorker] | None = None
    pool: DevicePool | None = None
    sent: list[Unit] = field(default_factory=list)
    batch: list[Unit] = field(default_factory=list)
    began: float = 0.0
    timer: asyncio.TimerHandle | None = None
    looks_ahead: bool = False
    ahead: list[Unit] = field(default_factory=list)
    worked: float = 0.0
    ending: asyncio.Task[None] | None = None

    @property
    def units(self) -> list[Unit]:
        """All units of the worker."""
        return [*self.batch, *self.ahead]

    @property
    def busy_seconds(self) -> float:
        """Seconds in which it had a batch to compute, up to now; a batch being prepared does not count yet."""
        return self.worked + self.computing_seconds

    @property
    def computing_seconds(self) -> float:
        """Seconds since it began to compute its next answer; 0 if there is none."""
        return 0.0 if self.timer is None else asyncio.get_running_loop().time() - self.began

    @property
    def may_have_next(self) -> bool:
        """Whether it computes, and could prepare another batch meanwhile. A unit that may kill it runs alone."""
        busy = self.child is not None and bool(self.batch) and not self.batch[0].alone
        return busy and self.looks_ahead and not self.ahead

    def give(self, batch: list[Unit]) -> None:
        """Gives a batch to the worker."""
        self.sent = self.batch = batch

    def begin(self, seconds: float) -> None:
        """From now on the worker owes an answer to its batch, or the rest of it; it is killed if that takes longer."""
        assert self.child is not None
        self.began = asyncio.get_running_loop().time()
        self._watch(self.child, seconds)

    def _watch(self, child: Child[FromWorker], seconds: float) -> None:
        due = asyncio.get_running_loop().time() + seconds
        self.timer = asyncio.get_running_loop().call_at(due, self._give_up, child, seconds, due)

    def _give_up(self, child: Child[FromWorker], seconds: float, due: float) -> None:
        """If this process itself stood still, the answer may be waiting to be read, or the worker may have stood still
        as well: it gets its time again."""
        if asyncio.get_running_loop().time() > due + self.stall:
            self._watch(child, seconds)
            return
        _log.error("a batch takes too long", worker=self.index, seconds=seconds, units=len(self.batch))
        self.ending = tasks.start(self._end(child, self.batch), "end a worker")

    async def _end(self, child: Child[FromWorker], batch: list[Unit]) -> None:
        """Kills a worker after asking it where it hangs, unless it has answered by then."""
        if found := await child.stacks():
            _log.error("post-mortem of the worker", worker=self.index, **found)
        if self.batch is batch:
            child.kill()

    def take(self, pieces: Sequence[int] = ()) -> list[Unit]:
        """Removes and returns the units at these indices of the batch, or all that are left. When none is left, the
        next batch becomes the current one."""
        self.worked = self.busy_seconds
        taken = [self.sent[piece] for piece in pieces] or self.batch
        self.batch = [unit for unit in self.batch if unit not in taken]
        if not self.batch:
            self.give(self.ahead)
            self.ahead = []
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        return taken

    def take_all(self) -> list[Unit]:
        """Removes and returns all units of the worker."""
        return [*self.take(), *self.take()]


class Workers:
    """One process for each of `settings`, which runs `module` and inherits the descriptors `fds`. `start` and `stop`
    are called by the owner.

    `on_reply` gets each message of a worker; it raises ChildDied for an invalid one. `on_death` is called when a worker
    is gone and no longer writes anywhere, `on_ready` when a replacement is ready. Any other exception of these three is
    a defect, and `die` ends the process.
    """

    def __init__(
        self,
        settings: Sequence[WorkerSettings],
        fds: tuple[int, int],
        pools: DevicePools,
        times: WorkerTimes,
        *,
        module: str,
        on_reply: Callable[[WorkerSlot, FromWorker], None],
        on_death: Callable[[WorkerSlot], None],
        on_ready: Callable[[WorkerSlot], None],
        die: Callable[[], None],
    ) -> None:
        self.settings = settings
        self.slots = [
            WorkerSlot(at, times.stall, looks_ahead=each.device.startswith("cuda")) for at, each in enumerate(settings)
        ]
        self._fds = fds
        self._pools = pools
        self._times = times
        self._module = module
        self._on_reply = on_reply
        self._on_death = on_death
        self._on_ready = on_ready
        self._die = die
        self._keepers: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Starts all workers; raises WorkerError if one cannot start."""
        await asyncio.gather(*(self._start(slot) for slot in self.slots))
        self._keepers = [tasks.start_vital(self._keep(slot), "worker keeper", self._die) for slot in self.slots]

    async def stop(self) -> None:
        """Ends every worker and returns when the processes are gone."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        for slot in self.slots:
            self._pools.lose(slot.pool)
        children = [slot.child for slot in self.slots if slot.child is not None]
        for child in children:
            child.kill()
        await asyncio.gather(*(child.stop(grace=1.0) for child in children))
        for slot in self.slots:
            slot.child = None

    @property
    def alive(self) -> int:
        """Workers that can compute."""
        return sum(slot.child is not None for slot in self.slots)

    @property
    def busy_seconds(self) -> float:
        """Seconds in which workers had a batch, summed over workers."""
        return sum(slot.busy_seconds for slot in self.slots)

    @property
    def idle(self) -> list[WorkerSlot]:
        """Workers that wait for a batch."""
        return [slot for slot in self.slots if slot.child is not None and not slot.batch]

    @property
    def looking_ahead(self) -> list[WorkerSlot]:
        """Workers that compute and could prepare another batch, the earliest first."""
        return sorted((slot for slot in self.slots if slot.may_have_next), key=lambda slot: slot.began)

    async def _start(self, slot: WorkerSlot) -> None:
        child: Child[FromWorker] = await Child.start(self._module, receives=FromWorker, fds=self._fds, stacks=True)
        try:
            child.send(self.settings[slot.index])
            answer = await self._first_answer(child)
        except ChildDied as death:
            status = (await child.post_mortem()).get("status", str(death))
            await child.stop(grace=1.0)
            raise WorkerError(f"a worker ended before it was ready: {status}") from None
        except BaseException:
            child.kill()
            await child.stop(grace=1.0)
            raise
        if isinstance(answer, WorkerReady):
            slot.child, slot.pool = child, self._pools.open(answer.pool)
            _log.info("a worker is ready", worker=slot.index, attention=answer.attention, graphs=answer.graphs)
            return
        await child.stop(grace=1.0)
        raise WorkerError(answer.why if isinstance(answer, StartFailed) else "a worker did not start")

    async def _first_answer(self, child: Child[FromWorker]) -> FromWorker:
        try:
            async with asyncio.timeout(self._times.start):
                return await child.receive()
        except TimeoutError:
            raise WorkerError(f"a worker has not started within {self._times.start:g} seconds") from None

    async def _keep(self, slot: WorkerSlot) -> None:
        """Reads a worker's messages as long as it lives, and replaces it afterwards."""
        while True:
            assert slot.child is not None
            try:
                while True:
                    self._on_reply(slot, await slot.child.receive())
            except ChildDied as death:
                _log.error("a worker died", worker=slot.index, cause=str(death), units=len(slot.batch))
            self._pools.lose(slot.pool)
            child, slot.child = slot.child, None
            if found := await child.post_mortem():
                _log.error("post-mortem of the worker", worker=slot.index, **found)
            await child.stop(grace=1.0)
            self._on_death(slot)
            await self._revive(slot)

    async def _revive(self, slot: WorkerSlot) -> None:
        backoff = tasks.Backoff(self._times.longest_pause)
        while slot.child is None:
            await backoff.wait()
            try:
                await self._start(slot)
            except (ChildDied, WorkerError, OSError) as error:
                why = str(error)
                _log.error("a worker does not start", worker=slot.index, cause=why, retry_seconds=backoff.seconds)
        _log.info("a worker is back", worker=slot.index)
        self._on_ready(slot)
