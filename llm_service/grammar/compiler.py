"""Compiles structures for the front, in bounded time: in processes of their own, which are killed when time is over.

Answers are remembered, refusals among them, and who asks for what is being compiled waits for that, so that a structure
that takes too long does so once a minute at most: it may have been the machine that stood still. One that nobody waits
for any more is not begun on. The processes are started when the first structure comes; of two, one can serve while the
other is being replaced.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from common import log
from common.errors import Exhausted, InvalidInput, Unavailable
from common.processes import Child, ChildDied
from llm_service.grammar.messages import Compile, Compiled, FromCompiler, Prepared, Refused, Vocabulary
from llm_service.request import Structure

_PROCESSES = 2
_REMEMBERED = 256
"""Answers kept: a grammar may be as large as its structure, 64 KiB by default."""
_WAITING = 256
"""Structures that wait for a process; further ones are refused."""
_START_SECONDS = 30.0
_DOUBT_SECONDS = 60.0
"""For how long a structure that took too long is refused untried."""

T = TypeVar("T")

_log = log.get("grammar")


@dataclass(slots=True, eq=False)
class _Job:
    """A structure on its way, and how many wait for it; once a process has `begun` on it, it is seen through."""

    structure: Structure
    task: asyncio.Task[Compiled | Refused] | None = None
    waiting: int = 0
    begun: bool = False


class Compiler:
    """Owns the processes. `seconds` is the longest that a structure may take; one that took longer is refused untried
    for a while."""

    def __init__(self, vocabulary: Vocabulary, *, seconds: float) -> None:
        self._vocabulary = vocabulary
        self._seconds = seconds
        self._known: OrderedDict[Structure, Compiled | Refused] = OrderedDict()
        self._asked: dict[Structure, _Job] = {}
        self._idle: asyncio.Queue[Child[FromCompiler] | None] = asyncio.Queue()
        self._children: set[Child[FromCompiler]] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._started = False

    async def grammar(self, structure: Structure) -> str:
        """The structure in llguidance's form. Raises InvalidInput where it makes no sense or takes too long,
        Exhausted where too many wait, Unavailable where no process can be started."""
        answer = self._known.get(structure)
        if answer is None:
            answer = await self._answer(self._asked.get(structure) or self._begin(structure))
        if isinstance(answer, Refused):
            raise InvalidInput(answer.why, reason="BAD_STRUCTURE", field=f"sampling.{structure.kind}")
        return answer.grammar

    async def stop(self) -> None:
        """Ends the processes."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(child.stop(grace=0.0) for child in self._children))

    async def _answer(self, job: _Job) -> Compiled | Refused:
        """What comes of a job. A caller who leaves does not leave a process in the middle of a conversation."""
        assert job.task is not None
        job.waiting += 1
        try:
            return await asyncio.shield(job.task)
        finally:
            job.waiting -= 1
            if not job.waiting and not job.begun:
                job.task.cancel()
                self._over(job)

    def _begin(self, structure: Structure) -> _Job:
        if len(self._asked) >= _WAITING:
            raise Exhausted("too many structures wait to be compiled", reason="TOO_MANY_STRUCTURES")
        job = self._asked[structure] = _Job(structure)
        job.task = self._spawn(self._ask(job), "compile a structure")
        job.task.add_done_callback(lambda _: self._over(job))
        return job

    def _over(self, job: _Job) -> None:
        if self._asked.get(job.structure) is job:
            del self._asked[job.structure]

    async def _ask(self, job: _Job) -> Compiled | Refused:
        structure = job.structure
        if not self._started:
            self._started = True
            for _ in range(_PROCESSES):
                self._spawn(self._start(), "start a compiler")
        child = await self._idle.get()
        job.begun = True
        if child is None:
            self._spawn(self._start(), "start a compiler")
            raise Unavailable("structures cannot be compiled now", reason="STRUCTURE_UNAVAILABLE")
        answer: FromCompiler
        try:
            child.send(Compile(structure.kind, structure.text))
            async with asyncio.timeout(self._seconds):
                answer = await child.receive()
        except (ChildDied, TimeoutError):
            answer = Refused(f"the {structure.kind} takes too long to compile")
            self._spawn(self._replace(child), "replace a compiler")
            asyncio.get_running_loop().call_later(_DOUBT_SECONDS, self._known.pop, structure, None)
        else:
            self._idle.put_nowait(child)
        assert isinstance(answer, Compiled | Refused)
        self._known[structure] = answer
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return answer

    async def _start(self) -> None:
        """Adds a process to those that are idle, or None for one that could not be started."""
        child: Child[FromCompiler] | None = None
        try:
            child = await Child.start("llm_service.grammar", receives=FromCompiler, exposed=True)
            self._children.add(child)
            child.send(self._vocabulary)
            async with asyncio.timeout(_START_SECONDS):
                assert isinstance(await child.receive(), Prepared)
        except (ChildDied, OSError) as error:  # a TimeoutError among them
            _log.error("a process that compiles structures could not be started", cause=str(error))
            if child is not None:
                await self._end(child)
            self._idle.put_nowait(None)
        else:
            self._idle.put_nowait(child)

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
