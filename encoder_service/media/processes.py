"""The decode processes: which are free, and a replacement for each that ends. `decoder` decides what they do."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from common.aio import tasks
from common.errors import TwinlensError, Unavailable
from common.process.children import Child, ChildDied
from common.telemetry import log
from encoder_service.media.messages import DecoderSettings, FromDecoder, Ready

MODULE = "encoder_service.media"
_LONGEST_PAUSE = 30.0

_log = log.get("decode processes")


class DecodeProcesses:
    """`count` processes that inherit the descriptor `fd` and get these `settings`; each is ready within
    `start_seconds`. `start` and `stop` are called by the owner.

    A process that ends is replaced; if that fails, it is tried again after at most `longest_pause` seconds. If it has
    failed for all of them, they are not `able`: callers get an error at once, until there is one again. `on_change` is
    called whenever that changes.
    """

    def __init__(
        self,
        fd: int,
        settings: DecoderSettings,
        count: int,
        *,
        start_seconds: float,
        longest_pause: float = _LONGEST_PAUSE,
        on_change: Callable[[], None],
    ) -> None:
        self._fd = fd
        self._settings = settings
        self._count = count
        self._start_seconds = start_seconds
        self._longest_pause = longest_pause
        self._on_change = on_change
        self._idle = _Idle()
        self._missing: set[Child[FromDecoder]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.children: set[Child[FromDecoder]] = set()
        self.restarts = 0
        self._unconfined = ""

    async def start(self) -> None:
        """Starts all processes; raises ChildDied if one cannot start."""
        await asyncio.gather(*(self.add() for _ in range(self._count)))

    async def stop(self) -> None:
        """Ends every process and waits until they are gone."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(child.stop(grace=1.0) for child in self.children))
        self.children.clear()

    @property
    def able(self) -> bool:
        """Whether there is a process, or one is being started and may soon be ready."""
        return len(self._missing) < self._count

    async def take(self, key: bytes) -> Child[FromDecoder]:
        """An idle process, if possible one that has the video with this key open. Raises Unavailable if there is none.

        Processes that died while idle are replaced: no media is to blame. The caller returns the process with `put` or
        `replace`.
        """
        while self.able:
            if not (child := await self._idle.get(key)).has_ended:
                return child
            await self.replace(child)
        raise _no_decoder()

    def put(self, child: Child[FromDecoder]) -> None:
        """A process has done its job."""
        self._idle.put(child)

    def opened(self, child: Child[FromDecoder], key: bytes) -> None:
        """A process now has this video open; with an empty key, none that is worth waiting for."""
        self._idle.opened(child, key)

    async def replace(self, child: Child[FromDecoder], *asked: asyncio.Future[FromDecoder]) -> None:
        """Kills a process, which may have been `asked` for answers, and starts a replacement; returns when it is gone,
        even if the caller is cancelled."""
        child.kill()
        self._idle.opened(child, b"")
        self.restarts += 1
        await tasks.wait_until_done(self._keep(self._bury(child, *asked)))

    async def add(self) -> None:
        """Starts a process; raises ChildDied if it cannot work or does not answer, OSError if none can be started."""
        child: Child[FromDecoder] = await Child.start(MODULE, receives=FromDecoder, fds=(self._fd,), exposed=True)
        self.children.add(child)
        child.send(self._settings)
        try:
            await self._ready(child)
        except ChildDied:
            child.kill()
            await child.stop(grace=1.0)
            self.children.discard(child)
            raise
        self._idle.put(child)

    async def _bury(self, child: Child[FromDecoder], *asked: asyncio.Future[FromDecoder]) -> None:
        await asyncio.gather(*asked, return_exceptions=True)
        await child.stop(grace=1.0)
        self.children.discard(child)
        self._keep(self._revive(child))

    def _keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = tasks.start_vital(work, "decode process")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _revive(self, gone: Child[FromDecoder]) -> None:
        """Has another process take the place of one that is gone, as soon as one can be started."""
        backoff = tasks.Backoff(self._longest_pause)
        while True:
            await backoff.wait()
            try:
                await self.add()
            except (ChildDied, OSError) as error:
                _log.error("a decode process does not start", cause=str(error), retry_seconds=backoff.seconds)
                self._note(self._missing | {gone})
            else:
                self._note(self._missing - {gone})
                return

    def _note(self, missing: set[Child[FromDecoder]]) -> None:
        """These are gone, and could not be replaced so far."""
        before, self._missing = self.able, missing
        if not self.able:
            self._idle.fail(_no_decoder())
        if self.able != before:
            self._on_change()

    async def _ready(self, child: Child[FromDecoder]) -> None:
        """Waits until a process is ready; raises ChildDied if it cannot work, or does not answer."""
        try:
            async with asyncio.timeout(self._start_seconds):
                answer = await child.receive()
        except TimeoutError:
            raise ChildDied(f"a decode process has not started within {self._start_seconds:g} seconds") from None
        if not isinstance(answer, Ready):
            raise ChildDied("a decode process did not start")
        if answer.unconfined and not self._unconfined:
            self._unconfined = answer.unconfined
            _log.warning("decode processes are limited, but not confined by seccomp", cause=answer.unconfined)


class _Idle:
    """Processes without a job, the video that each has open, and waiting jobs in order."""

    def __init__(self) -> None:
        self._children: list[Child[FromDecoder]] = []
        self._open: dict[Child[FromDecoder], bytes] = {}
        self._waiting: deque[tuple[bytes, asyncio.Future[Child[FromDecoder]]]] = deque()

    def put(self, child: Child[FromDecoder]) -> None:
        """A process has nothing to do."""
        self._children.append(child)
        self._serve()

    async def get(self, key: bytes) -> Child[FromDecoder]:
        """A process for a job: the one that has its content open, else one that has nothing open, else any. Raises the
        error that `fail` is called with meanwhile."""
        future: asyncio.Future[Child[FromDecoder]] = asyncio.get_running_loop().create_future()
        self._waiting.append((key, future))
        self._serve()
        try:
            return await future
        except asyncio.CancelledError:
            if not (future.cancel() or future.cancelled() or future.exception()):
                self.put(future.result())
            raise

    def fail(self, error: TwinlensError) -> None:
        """There is no process, and none is coming soon: fails waiting jobs."""
        for _, future in self._waiting:
            if not future.done():
                future.set_exception(error)
        self._waiting.clear()

    def opened(self, child: Child[FromDecoder], key: bytes) -> None:
        """A process now has this video open; with an empty key, none that is worth waiting for."""
        self._open.pop(child, None)
        if key:
            self._open[child] = key

    def _serve(self) -> None:
        while self._children and self._waiting:
            key, future = self._waiting.popleft()
            if not future.done():
                child = min(self._children, key=lambda child: (self._open.get(child) != key, child in self._open))
                self._children.remove(child)
                future.set_result(child)


def _no_decoder() -> TwinlensError:
    return Unavailable("no decode process of the encoder is alive; one is being started", reason="NO_DECODER")
