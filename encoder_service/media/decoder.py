"""The pool of decode processes: bounded time, bounded memory, and a new process for each that dies.

A job's ranges in the staging arena belong to its caller, who gets them back only when no process can still write there:
on a timeout or a cancelled call the process is killed, and awaited, first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from common import log, tasks
from common.arena import Range, SharedBuffer
from common.errors import InvalidInput, TwinlensError, Unavailable
from common.processes import Child, ChildDied
from encoder_service.item import Inspection, Plan
from encoder_service.media.messages import (
    Begin,
    Decode,
    Decoding,
    FromDecoder,
    Inspect,
    Inspected,
    Ready,
    Refused,
)
from encoder_service.media.turns import Idle, Turn

MODULE = "encoder_service.media"
_ATTEMPTS = 2
_PATIENCE = 0.5
"""Seconds that a job may go on after its caller has left, before its process is killed."""

_LONGEST_PAUSE = 30.0

_log = log.get("decoder")


class DecoderPool:
    """`processes` decode processes over one staging arena; each is ready within `start_seconds`, and has `seconds` for
    a job. `start` and `stop` are its owner's.

    One that is gone is replaced. Where that has failed for all of them, the pool is not `able`: jobs raise Unavailable
    at once, until a process is there again. `on_change` is called whenever that may have changed.
    """

    def __init__(
        self,
        staging: SharedBuffer,
        *,
        processes: int,
        threads: int,
        seconds: float,
        start_seconds: float,
        memory_bytes: int,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._staging = staging
        self._seconds = seconds
        self._start_seconds = start_seconds
        self._begin = Begin(staging_bytes=staging.size, memory_bytes=memory_bytes, threads=threads)
        self._count = processes
        self._videos = asyncio.Semaphore(max(1, processes - 1))
        self._children: set[Child[FromDecoder]] = set()
        self._missing: set[Child[FromDecoder]] = set()
        self._on_change = on_change
        self._idle = Idle()
        self._tasks: set[asyncio.Task[None]] = set()
        self.restarts = 0

    async def start(self) -> None:
        """Starts every process; raises ChildDied where one cannot start."""
        await asyncio.gather(*(self._add() for _ in range(self._count)))

    async def stop(self) -> None:
        """Ends every process and waits until they are gone."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(child.stop(grace=1.0) for child in self._children))
        self._children.clear()

    @property
    def able(self) -> bool:
        """A process is there, or is being started and may well be soon."""
        return len(self._missing) < self._count

    async def turn(self, *, video: bool) -> Turn:
        """Waits until an item's job may be done.

        Videos take long, to look into as well: where there are several processes, one is kept for everything else. A
        turn is taken before memory for the job is, so that videos that wait do not hold what others need.
        """
        if not video:
            return Turn(None)
        await self._videos.acquire()
        return Turn(self._videos)

    async def inspect(self, data: Range, *, key: bytes, video: bool, field: str) -> Inspection:
        """Parses the header of encoded bytes, in a `turn`. A video's process keeps it open under `key`, until it has
        another one to look at.

        Raises InvalidInput where they cannot be read, and Unavailable where no process is there.
        """
        answer = await self._job(Inspect(key=key, video=video, offset=data.offset, size=data.size), field)
        if not isinstance(answer, Inspected):
            raise ChildDied("an answer to another question")
        return Inspection(answer.width, answer.height, answer.frames, answer.fps)

    async def decode(
        self,
        data: Range,
        pixels: Range,
        plan: Plan,
        *,
        key: bytes,
        video: bool,
        field: str,
        on_frames: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Decodes the plan's frames into `pixels`, in a `turn`; raises as `inspect`.

        `on_frames` is told how many are there, as they come; where a process dies, they may come again, alike.
        """
        job = Decode(
            key=key,
            video=video,
            offset=data.offset,
            size=data.size,
            pixels=pixels.offset,
            frames=list(plan.frames),
            height=plan.height,
            width=plan.width,
        )
        await self._job(job, field, on_frames)

    async def _job(
        self, job: Inspect | Decode, field: str, on_frames: Callable[[int], None] = lambda _: None
    ) -> FromDecoder:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                answer = await self._ask(await self._process(job.key), job, on_frames)
            except ChildDied:
                _log.warning("a decode process died", attempt=attempt)
                continue
            except TimeoutError:
                raise InvalidInput("the media takes too long to decode", reason="MEDIA_TOO_SLOW", field=field) from None
            if isinstance(answer, Refused):
                _log.info("media refused", why=answer.why)
                raise _unreadable(field)
            return answer
        raise _unreadable(field)

    async def _process(self, key: bytes) -> Child[FromDecoder]:
        """An idle process. Those that have ended without a job are replaced: no media is to blame."""
        while self.able:
            if not (child := await self._idle.get(key)).has_ended:
                return child
            await self._replace(child)
        raise _no_decoder()

    async def _ask(
        self, child: Child[FromDecoder], job: Inspect | Decode, on_frames: Callable[[int], None]
    ) -> FromDecoder:
        """One question to one process. The process is idle again, or gone, when this returns or raises."""
        self._idle.opened(child, job.key if job.video and isinstance(job, Inspect) else b"")
        child.send(job)
        asked = asyncio.ensure_future(child.receive())
        try:
            async with tasks.Patience(self._seconds):
                while isinstance(answer := await asyncio.shield(asked), Decoding):
                    on_frames(answer.frames)
                    asked = asyncio.ensure_future(child.receive())
        except asyncio.CancelledError:
            with suppress(asyncio.CancelledError):
                await asyncio.wait({asked}, timeout=_PATIENCE)
            if _ended(asked):
                self._idle.put(child)
            else:
                await self._replace(child, asked)
            raise
        except (ChildDied, TimeoutError):
            await self._replace(child, asked)
            raise
        self._idle.put(child)
        return answer

    async def _replace(self, child: Child[FromDecoder], *asked: asyncio.Future[FromDecoder]) -> None:
        """Kills a process and has another take its place; returns when it is gone, even if the caller is cancelled."""
        child.kill()
        self._idle.opened(child, b"")
        self.restarts += 1
        await tasks.outlast(self._keep(self._bury(child, *asked)))

    async def _bury(self, child: Child[FromDecoder], *asked: asyncio.Future[FromDecoder]) -> None:
        await asyncio.gather(*asked, return_exceptions=True)
        await child.stop(grace=1.0)
        self._children.discard(child)
        self._keep(self._revive(child))

    def _keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = tasks.start(work, "decode process")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _revive(self, gone: Child[FromDecoder]) -> None:
        """Has another process take the place of one that is gone, as soon as one can be started."""
        pause = 0.0
        while True:
            await asyncio.sleep(pause)
            pause = min(max(1.0, 2 * pause), _LONGEST_PAUSE)
            try:
                await self._add()
            except (ChildDied, OSError) as error:
                _log.error("a decode process does not start", why=str(error), retry_seconds=pause)
                self._missing.add(gone)
                if not self.able:
                    self._idle.fail(_no_decoder())
                self._on_change()
            else:
                self._missing.discard(gone)
                self._on_change()
                return

    async def _add(self) -> None:
        fds = (self._staging.fd,)
        child: Child[FromDecoder] = await Child.start(MODULE, receives=FromDecoder, fds=fds, exposed=True)
        self._children.add(child)
        child.send(self._begin)
        try:
            await self._ready(child)
        except ChildDied:
            child.kill()
            await child.stop(grace=1.0)
            self._children.discard(child)
            raise
        self._idle.put(child)

    async def _ready(self, child: Child[FromDecoder]) -> None:
        """Returns when a process can work; raises ChildDied where it cannot, or says nothing."""
        try:
            async with asyncio.timeout(self._start_seconds):
                if not isinstance(await child.receive(), Ready):
                    raise ChildDied("a decode process did not start")
        except TimeoutError:
            raise ChildDied(f"a decode process has not started within {self._start_seconds:g} seconds") from None


def _ended(asked: asyncio.Future[FromDecoder]) -> bool:
    """The last answer of a job has come."""
    if not asked.done() or asked.cancelled() or asked.exception() is not None:
        return False
    return not isinstance(asked.result(), Decoding)


def _unreadable(field: str) -> TwinlensError:
    return InvalidInput("the media cannot be decoded", reason="MEDIA_UNREADABLE", field=field)


def _no_decoder() -> TwinlensError:
    return Unavailable("no decode process of the encoder is alive; one is being started", reason="NO_DECODER")
