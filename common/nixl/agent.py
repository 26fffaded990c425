"""A service's NIXL agent: its process, the description of its memory for others, and reads of theirs."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter

from common.aio import tasks
from common.nixl.messages import (
    AgentAnswer,
    AgentMemory,
    CannotRegister,
    Connect,
    Disconnect,
    FromAgent,
    Read,
    Register,
)
from common.process.children import Child, ChildDied
from common.shm.arena import SharedBuffer
from common.telemetry import log

MODULE = "common.nixl"
BACKENDS = ("", "UCX", "LIBFABRIC")
"""The values of `--nixl`."""

_START_SECONDS = 60.0
_ANSWER_SECONDS = 5.0
_LONGEST_PAUSE = 30.0

_log = log.get("nixl")


class NixlError(OSError):
    """The agent cannot be had, or a read failed; the message says why, for the operator."""


class NixlAgent:
    """An agent over `buffer`, with one of the library's back ends. `start` and `stop` are called by the owner.

    `memory` is what other agents need to read the buffer; None while there is no agent. A process that ends, or does
    not answer for `answer_seconds`, is replaced, with an agent of another name; if that fails, it is tried again after
    at most `longest_pause` seconds.
    """

    def __init__(
        self,
        buffer: SharedBuffer,
        backend: str,
        *,
        answer_seconds: float = _ANSWER_SECONDS,
        longest_pause: float = _LONGEST_PAUSE,
        module: str = MODULE,
    ) -> None:
        self.memory: AgentMemory | None = None
        self._buffer = buffer
        self._backend = backend
        self._answer_seconds = answer_seconds
        self._longest_pause = longest_pause
        self._module = module
        self._child: Child[FromAgent] | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._ids = 0
        self._asked: dict[int, asyncio.Future[None]] = {}
        self._connected: set[str] = set()
        self._reading: Counter[str] = Counter()
        self._leaving: set[str] = set()

    async def start(self) -> None:
        """Starts the process; raises NixlError if it fails."""
        await self._begin()
        self._keeper = tasks.start_vital(self._keep(), "nixl agent")

    async def stop(self) -> None:
        """Stops the process and its reads."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        child, self._child, self.memory = self._child, None, None
        if child is not None:
            await child.stop(grace=1.0)
        self._lose()

    def is_connected(self, agent: str) -> bool:
        """Whether an agent's memory can be read."""
        return agent in self._connected

    async def connect(self, memory: AgentMemory) -> None:
        """Makes another agent's memory readable; raises NixlError."""
        if memory.backend != self._backend:
            raise NixlError(f"its back end is {memory.backend or 'none'}, and ours {self._backend}")
        self._leaving.discard(memory.agent)
        self._ids += 1
        try:
            await asyncio.shield(self._ask(self._ids, Connect(self._ids, memory)))  # an answer is due, whoever leaves
        except asyncio.CancelledError:
            if memory.agent not in self._connected:
                self._leaving.add(memory.agent)
                self._leave(memory.agent)
            raise
        self._connected.add(memory.agent)

    def disconnect(self, agent: str) -> None:
        """An agent is gone, or no longer needed. Of reads that are under way the library would say that they have
        ended, and go on writing: it is told when they have."""
        if agent in self._connected:
            self._connected.discard(agent)
            self._leaving.add(agent)
            self._leave(agent)

    def _leave(self, agent: str) -> None:
        if agent in self._leaving and agent not in self._reading:
            self._leaving.discard(agent)
            self._send(Disconnect(agent))

    def read(self, memory: AgentMemory, offset: int, target: int, size: int) -> asyncio.Future[None]:
        """Reads bytes at an offset of an agent's memory into ours, at offset `target`.

        The future completes when nothing is written there any more, with NixlError if the bytes have not arrived.
        Callers must shield it: until it completes the place is not free, even if nobody wants the bytes any more.
        """
        if not self.is_connected(memory.agent):
            failed = asyncio.get_running_loop().create_future()
            failed.set_exception(NixlError("the agent is not connected"))
            return failed
        self._ids += 1
        landing = self._ask(self._ids, Read(self._ids, memory.agent, memory.base + offset, target, size))
        self._reading[memory.agent] += 1
        landing.add_done_callback(lambda _: self._landed(memory.agent))
        return landing

    def _landed(self, agent: str) -> None:
        self._reading[agent] -= 1
        if not self._reading[agent]:
            del self._reading[agent]
            self._leave(agent)

    def _ask(self, number: int, question: Connect | Read) -> asyncio.Future[None]:
        """If the process does not answer in time it is killed: only then is nothing in progress any more."""
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._child is None:
            answer.set_exception(NixlError("there is no agent"))
            return answer
        self._asked[number] = answer
        self._send(question)
        timer = tasks.StallTolerantTimer(self._answer_seconds, self._give_up)
        answer.add_done_callback(lambda _: timer.cancel())
        return answer

    def _send(self, message: Connect | Disconnect | Read) -> None:
        if self._child is not None:
            self._child.send(message)

    def _give_up(self) -> None:
        if self._child is not None:
            _log.error("the NIXL agent did not answer in time", seconds=self._answer_seconds)
            self._child.kill()

    async def _begin(self) -> None:
        """Starts a process and waits for its agent's description; raises NixlError."""
        try:
            child: Child[FromAgent] = await Child.start(
                self._module, receives=FromAgent, fds=(self._buffer.fd,), exposed=True
            )
        except OSError as error:
            raise NixlError(f"no process can be had: {error}") from error
        try:
            child.send(Register(f"twinlens-{secrets.token_hex(8)}", self._backend, self._buffer.size))
            async with asyncio.timeout(_START_SECONDS):
                answer = await child.receive()
            if not isinstance(answer, AgentMemory):
                raise NixlError(answer.why if isinstance(answer, CannotRegister) else "it makes no sense")
        except BaseException as error:
            child.kill()
            await child.stop(grace=1.0)
            if isinstance(error, TimeoutError | ChildDied):
                raise NixlError(str(error) or f"no agent after {_START_SECONDS:g} seconds") from error
            raise
        self._child, self.memory = child, answer
        _log.info("memory can be read by NIXL", agent=answer.agent, backend=answer.backend, bytes=answer.size)

    async def _keep(self) -> None:
        """Hears the process for as long as it lives, and replaces it when it does not."""
        while True:
            child = self._child
            assert child is not None
            try:
                while True:
                    self._hear(await child.receive())
            except ChildDied as death:
                _log.error("the NIXL agent's process has ended", cause=str(death))
            self._child = self.memory = None
            try:
                if found := await child.post_mortem():
                    _log.error("post-mortem of the agent", **found)
            finally:
                await child.stop(grace=1.0)
            self._lose()
            await self._revive()

    def _hear(self, message: FromAgent) -> None:
        if not isinstance(message, AgentAnswer):
            raise ChildDied("an answer to no question")
        answer = self._asked.pop(message.id, None)
        if answer is None or answer.done():
            return
        if message.why:
            answer.set_exception(NixlError(message.why))
            answer.exception()  # the caller may have left
        else:
            answer.set_result(None)

    def _lose(self) -> None:
        """The process is gone: nothing is connected, and pending requests fail."""
        self._connected.clear()
        self._leaving.clear()
        while self._asked:
            _, answer = self._asked.popitem()
            if not answer.done():
                answer.set_exception(NixlError("its process has ended"))
                answer.exception()

    async def _revive(self) -> None:
        backoff = tasks.Backoff(self._longest_pause)
        while self._child is None:
            await backoff.wait()
            try:
                await self._begin()
            except NixlError as error:
                _log.error("no NIXL agent", cause=str(error), retry_seconds=backoff.seconds)
