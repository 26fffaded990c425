"""Compiles structures for the front in bounded time: in processes of their own, which are killed when time is over."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter, OrderedDict
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from common.aio import tasks
from common.errors import Exhausted, InvalidInput, Unavailable
from common.process.children import Child, ChildDied
from common.process.cpu_time_limit import CpuTimeLimit, ProcessStalled
from common.telemetry import log
from llm_service.grammar.fair_queue import FairQueue
from llm_service.grammar.foresight import refusal
from llm_service.grammar.messages import (
    Answer,
    Broke,
    Compile,
    Compiled,
    CompileStarted,
    FromCompiler,
    Lost,
    Outcome,
    Ready,
    Refused,
    StructureLimits,
    TooSlow,
    Vocabulary,
)
from llm_service.request import Structure

_PROCESSES = 2
_ATTEMPTS = 2
_REMEMBERED_BYTES = 16 << 20
"""Bytes of structures and grammars whose outcomes are cached; a grammar may be as large as its structure, 64 KiB by
default."""
_WAITING = 256
"""Structures that may wait for a process; further ones are refused. One caller may have half of them."""
_START_SECONDS = 30.0
_STILL_SECONDS = 0.7
_MARGIN_SECONDS = 1.0
"""The kernel kills a process whose time is over. If it has not done so after so many more seconds, it is killed
here."""
_DOUBT_SECONDS = 60.0
"""For how long a structure that took too long is refused untried."""
_SHORT = 4096
"""Characters of a structure that is checked on the event loop, in about a millisecond."""

T = TypeVar("T")

Name: TypeAlias = tuple[str, Structure]
"""A tenant's salt, and the structure."""

_log = log.get("grammar")


@dataclass(slots=True, eq=False)
class _Job:
    """A structure on its way for a caller, and how many wait for it; once a process has `begun` on it, it is seen
    through."""

    name: Name
    caller: str
    task: asyncio.Task[Answer] | None = None
    waiting: int = 0
    begun: bool = False


class Compiler:
    """Owns the processes, which start with the first structure. Callers take turns, and no caller uses all processes at
    a time. `seconds` bounds a structure's processor time; a structure that took longer is refused without a try for a
    while. If a process was killed from outside or hung, the structure is not at fault: it is tried once more in another
    process, and then its caller is asked to retry.

    Outcomes are cached, refusals included, and requests for a structure that is being compiled wait for it; tenants do
    not share any of this. A structure whose callers have all left is not begun.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        limits: StructureLimits,
        *,
        seconds: float,
        still_seconds: float = _STILL_SECONDS,
        doubt_seconds: float = _DOUBT_SECONDS,
        waiting: int = _WAITING,
        remembered_bytes: int = _REMEMBERED_BYTES,
    ) -> None:
        self._vocabulary = vocabulary
        self._limits = limits
        self._seconds = seconds
        self._still_seconds = still_seconds
        self._doubt_seconds = doubt_seconds
        self._waiting = waiting
        self._remembered_bytes = remembered_bytes
        self._known: OrderedDict[Name, Answer] = OrderedDict()
        self._known_bytes = 0
        self._asked: dict[Name, _Job] = {}
        self._queue: FairQueue[Child[FromCompiler] | None] = FairQueue(_PROCESSES - 1)
        self._children: set[Child[FromCompiler]] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._started = False

    async def grammar(self, structure: Structure, salt: str = "", caller: str = "") -> Compiled:
        """The structure in llguidance's form; waits its turn among this caller's structures. Raises InvalidInput if it
        is invalid or takes too much, Exhausted if too many wait, Unavailable if no process can be started, or those
        that tried were killed or hung."""
        name = (salt, structure)
        answer = self._known.get(name)
        if answer is None:
            answer = await self._answer(self._asked.get(name) or self._begin(name, caller))
        else:
            self._known.move_to_end(name)
        if isinstance(answer, Refused):
            reason = "STRUCTURE_TOO_LARGE" if answer.too_large else "BAD_STRUCTURE"
            raise InvalidInput(answer.why, reason=reason, field=f"sampling.{structure.kind}")
        return answer

    async def stop(self) -> None:
        """Ends the processes."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(child.stop(grace=0.0) for child in self._children))

    async def _answer(self, job: _Job) -> Answer:
        """The outcome of a job. It goes on if the caller leaves, so that no process is left in the middle of a
        message."""
        assert job.task is not None
        job.waiting += 1
        try:
            return await asyncio.shield(job.task)
        finally:
            job.waiting -= 1
            if not job.waiting and not job.begun:
                job.task.cancel()
                self._over(job)

    def _begin(self, name: Name, caller: str) -> _Job:
        asked = Counter(job.caller for job in self._asked.values())
        if len(self._asked) >= self._waiting or asked[caller] >= max(1, self._waiting // 2):
            raise Exhausted("too many structures wait to be compiled", reason="TOO_MANY_STRUCTURES")
        job = self._asked[name] = _Job(name, caller)
        job.task = self._spawn(self._ask(job), "compile a structure")
        job.task.add_done_callback(lambda _: self._over(job))
        return job

    def _over(self, job: _Job) -> None:
        if self._asked.get(job.name) is job:
            del self._asked[job.name]

    async def _ask(self, job: _Job) -> Answer:
        structure = job.name[1]
        if len(structure.text) <= _SHORT:
            why = refusal(structure, self._limits)
        else:
            why = await tasks.to_thread(refusal, structure, self._limits)
        answer = Refused(why, too_large=True) if why else await self._compile(job)
        self._remember(job.name, answer)
        return answer

    def _remember(self, name: Name, answer: Answer) -> None:
        self._known[name] = answer
        self._known_bytes += _size(name, answer)
        while self._known_bytes > self._remembered_bytes:
            self._forget(next(iter(self._known)))

    def _forget(self, name: Name) -> None:
        if (answer := self._known.pop(name, None)) is not None:
            self._known_bytes -= _size(name, answer)

    async def _compile(self, job: _Job) -> Answer:
        kind, lost, unbegun = job.name[1].kind, 0, 0
        while lost < _ATTEMPTS and unbegun <= _PROCESSES:
            match await self._try(job):
                case Compiled() | Refused() as answer:
                    return answer
                case TooSlow():
                    self._doubt(job.name)
                    return Refused(f"the {kind} takes too long to compile")
                case Broke():
                    self._doubt(job.name)
                    return Refused(f"the {kind} takes too much memory to compile")
                case Lost(begun):
                    lost, unbegun = lost + begun, unbegun + (not begun)
                    _log.warning("a process that compiles structures was ended, or stood still", begun=begun)
        raise _unavailable()

    def _doubt(self, name: Name) -> None:
        """The outcome of this structure is only valid for a while."""
        asyncio.get_running_loop().call_later(self._doubt_seconds, self._forget, name)

    async def _try(self, job: _Job) -> Outcome:
        """The outcome of one attempt; its process is idle or being replaced afterwards."""
        child = await self._take(job)
        try:
            outcome, usable = await self._work(child, job.name[1])
        finally:
            self._queue.leave(job.caller)
        if usable:
            self._queue.put(child)
        else:
            self._spawn(self._replace(child), "replace a compiler")
        return outcome

    async def _take(self, job: _Job) -> Child[FromCompiler]:
        """An idle process, for the duration of the caller's turn; one that has died while idle is replaced."""
        if not self._started:
            self._started = True
            for _ in range(_PROCESSES):
                self._spawn(self._start(), "start a compiler")
        while True:
            child = await self._queue.get(job.caller)
            job.begun = True
            if child is not None and not child.has_ended:
                return child
            self._queue.leave(job.caller)
            if child is None:
                self._spawn(self._start(), "start a compiler")
                raise _unavailable()
            self._spawn(self._replace(child), "replace a compiler")

    async def _work(self, child: Child[FromCompiler], structure: Structure) -> tuple[Outcome, bool]:
        """Has a process compile a structure. Returns the outcome, and whether the process can be used again."""
        child.send(Compile(structure.kind, structure.text, self._seconds, self._limits))
        begun = False
        try:
            async with CpuTimeLimit(
                child.process.pid, self._seconds + _MARGIN_SECONDS, still=self._still_seconds
            ) as limit:
                while isinstance(said := await child.receive(), CompileStarted):
                    limit.passed_to(said.pid)
                    begun = True
        except ChildDied:
            return Lost(begun), False
        except ProcessStalled:
            return Lost(), False
        except TimeoutError:
            return TooSlow(), False
        return (Lost(), False) if isinstance(said, Ready) else (said, True)

    async def _start(self) -> None:
        """Adds a new process to the idle ones, or None if it could not be started."""
        child: Child[FromCompiler] | None = None
        try:
            child = await Child.start("llm_service.grammar", receives=FromCompiler, exposed=True)
            self._children.add(child)
            child.send(self._vocabulary)
            async with asyncio.timeout(_START_SECONDS):
                assert isinstance(await child.receive(), Ready)
        except (ChildDied, OSError) as error:  # a TimeoutError among them
            _log.error("a process that compiles structures could not be started", cause=str(error))
            if child is not None:
                await self._end(child)
            self._queue.put(None)
        else:
            self._queue.put(child)

    async def _replace(self, child: Child[FromCompiler]) -> None:
        await self._end(child)
        await self._start()

    async def _end(self, child: Child[FromCompiler]) -> None:
        child.kill()
        await child.stop()
        self._children.discard(child)

    def _spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _size(name: Name, answer: Answer) -> int:
    """The approximate size of a cached outcome in bytes."""
    salt, structure = name
    return sum(
        map(sys.getsizeof, (salt, structure.text, answer.grammar if isinstance(answer, Compiled) else answer.why))
    )


def _unavailable() -> Unavailable:
    return Unavailable("structures cannot be compiled now", reason="STRUCTURE_UNAVAILABLE")
