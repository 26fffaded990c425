"""The LoRA adapters that callers had loaded: brought to LLM services that come later, or come back without them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

from common.aio import tasks
from common.errors import Cancelled, DeadlineExceeded, Internal, NotFound, TwinlensError, Unavailable
from common.telemetry import log
from gateway.everywhere import asked
from gateway.services import LlmService, LlmServices, Metadata
from twinlens.v1 import llm_pb2

_log = log.get("adapters")
_SECONDS = 300.0
"""The longest that a service may take to read an adapter from its disk."""
_UNLOAD_SECONDS = 10.0
"""Seconds for unloading, which waits for nothing."""
_LOOK_SECONDS = 1.0
"""Seconds between checks for services that lack something: as often as each is asked what it has."""
_AT_ONCE = 4
"""Services that are brought something at the same time, each one adapter after the other."""
_MOST_FAILURES = 6
"""Attempts of one order at a service that can serve, before it is given up there."""
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0
"""Seconds after a failed attempt: doubled each time, and varied by a fifth so that gateways do not act at once."""
_MOST_KEPT = 1024
"""Adapters; beyond that, the one loaded first is forgotten."""

Change = Callable[[LlmService], Awaitable[object]]
Outcome = Literal["done", "failed", "refused", "given_up"]
_PASSING = (Unavailable, DeadlineExceeded, Cancelled, Internal)
"""Errors that a further attempt may avoid. All others are final."""


def load(name: str, path: str, metadata: Metadata) -> Change:
    """Loads an adapter at a service."""
    request = llm_pb2.LoadAdapterRequest(name=name, path=path)
    return lambda service: service.channels.stub.LoadAdapter(request, timeout=_SECONDS, metadata=tuple(metadata))


def unload(name: str, metadata: Metadata) -> Change:
    """Unloads an adapter at a service."""
    request = llm_pb2.UnloadAdapterRequest(name=name)
    return lambda service: service.channels.stub.UnloadAdapter(
        request, timeout=_UNLOAD_SECONDS, metadata=tuple(metadata)
    )


@dataclass(frozen=True, eq=False, slots=True)
class Kept:
    """An adapter that every service of model `base` should have, from a folder below `--lora-dir`."""

    base: str
    name: str
    path: str


@dataclass(eq=False, slots=True)
class _Service:
    """The state of one service since it last came (`came`): adapters that are settled there, loaded or refused; names
    still to unload; and the result of its last attempts. One change at a time; the last one of a caller ended when it
    had come `changed` times."""

    came: int = 0
    changed: int = -1
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    decided: set[Kept] = field(default_factory=set)
    owed: set[str] = field(default_factory=set)
    failures: int = 0
    due: float = 0.0
    task: asyncio.Task[None] | None = None


class KeptAdapters:
    """The adapters that callers have asked for, in memory, and which of them each service has.

    A service that comes is brought once what it lacks; if somebody unloads an adapter there later, it stays unloaded.
    """

    def __init__(
        self,
        services: LlmServices,
        told: Callable[[str, Outcome], None] = lambda _verb, _outcome: None,
        *,
        look_seconds: float = _LOOK_SECONDS,
        first_pause: float = _FIRST_PAUSE,
    ) -> None:
        self._services = services
        self._told = told
        self._look_seconds = look_seconds
        self._first_pause = first_pause
        self._kept: dict[tuple[str, str], Kept] = {}
        self._states: dict[LlmService, _Service] = {}
        services.is_coming = self._is_coming

    @property
    def count(self) -> int:
        """Adapters that are kept."""
        return len(self._kept)

    @property
    def missing(self) -> int:
        """How many of these are missing at services that can serve, for any reason."""
        return sum(
            kept.base == service.model and kept.name not in service.adapters
            for service in self._services.usable
            for kept in self._kept.values()
        )

    def keep(self, kept: Kept, outcomes: dict[LlmService, TwinlensError | None]) -> None:
        """Keeps an adapter for services that come later, and for those where loading has failed for now."""
        self._kept.pop((kept.base, kept.name), None)
        self._kept[kept.base, kept.name] = kept
        for service, error in outcomes.items():
            state = self._current(service)
            if not isinstance(error, _PASSING) and state.changed == state.came:  # else it was another process
                state.decided.add(kept)
        if len(self._kept) > _MOST_KEPT:
            oldest = self._kept.pop(next(iter(self._kept)))
            _log.warning("an adapter is no longer kept, there are too many", adapter=oldest.name[:128])

    def find(self, base: str, name: str) -> Kept | None:
        """The adapter kept under a name ("": for any model)."""
        return next((kept for (over, own), kept in self._kept.items() if own == name and base in ("", over)), None)

    def forget(self, base: str, name: str) -> bool:
        """Stops keeping an adapter ("": for any model). Returns whether it was kept."""
        keys = [key for key in self._kept if key[1] == name and base in ("", key[0])]
        for key in keys:
            del self._kept[key]
        return bool(keys)

    def owe(self, name: str, outcomes: dict[LlmService, TwinlensError | None]) -> None:
        """Has services where unloading has failed for now unload it later."""
        for service, error in outcomes.items():
            if isinstance(error, _PASSING) and len(owed := self._state(service).owed) < _MOST_KEPT:
                owed.add(name)

    async def change(self, service: LlmService, change: Change, *, loads: str = "") -> TwinlensError | None:
        """Changes one service, after changes in progress there, and updates its state. `loads`: the name being loaded;
        a pending unload of that name comes first."""
        state = self._state(service)
        async with state.changing:
            error: TwinlensError | None = None
            if loads in state.owed:
                error = await self._unload_owed(service, state, loads)
            if error is None:
                error = await self._change(service, change)
            state.changed = service.came
            return error

    async def _unload_owed(self, service: LlmService, state: _Service, name: str) -> TwinlensError | None:
        error = await self._change(service, unload(name, self._services.metadata))
        if error is None or isinstance(error, NotFound):
            state.owed.discard(name)
            return None
        return error

    async def _change(self, service: LlmService, change: Change) -> TwinlensError | None:
        outcome = await asked(service, change)
        if isinstance(outcome, TwinlensError):
            return outcome
        await service.look(self._services.metadata)
        return None

    @asynccontextmanager
    async def brought(self) -> AsyncIterator[None]:
        """Brings services what they lack, for the duration of the context."""
        looking = tasks.start(self._keep_looking(), "bring adapters")
        try:
            yield
        finally:
            looking.cancel()
            under_way = [state.task for state in self._states.values() if state.task is not None]
            for task in under_way:
                task.cancel()
            await asyncio.gather(looking, *under_way, return_exceptions=True)

    async def _keep_looking(self) -> None:
        while True:
            self._look()
            await asyncio.sleep(self._look_seconds)

    def _look(self) -> None:
        """Starts work for services that lack something, if there is room and their pauses are over."""
        for gone in self._states.keys() - set(self._services.services):
            state = self._states.pop(gone)
            if state.task is not None:
                state.task.cancel()
        busy = sum(state.task is not None and not state.task.done() for state in self._states.values())
        for service in self._services.usable:
            state = self._current(service)
            idle = state.task is None or state.task.done()
            if busy < _AT_ONCE and idle and time.monotonic() >= state.due and (state.owed or self._lacking(service)):
                state.task = tasks.start(self._bring(service, state), f"bring adapters to {service.address}")
                busy += 1

    def _state(self, service: LlmService) -> _Service:
        return self._states.setdefault(service, _Service(service.came))

    def _current(self, service: LlmService) -> _Service:
        """A service's state; reset if it has come again."""
        state = self._state(service)
        if state.came != service.came:
            state.came, state.failures, state.due = service.came, 0, 0.0
            state.decided.clear()
        return state

    def _lacking(self, service: LlmService) -> list[Kept]:
        """The adapters that a service lacks. Whatever it has is settled, whoever loaded it, unless it should be
        unloaded."""
        state = self._current(service)
        state.decided &= set(self._kept.values())
        open_ = [each for each in self._kept.values() if each.base == service.model and each not in state.decided]
        state.decided.update(each for each in open_ if each.name in service.adapters - state.owed)
        return [each for each in open_ if each not in state.decided]

    def _is_coming(self, name: str) -> bool:
        """Whether a service that can serve is still to be brought an adapter of this name."""
        if not any(kept.name == name for kept in self._kept.values()):
            return False
        return any(each.name == name for service in self._services.usable for each in self._lacking(service))

    async def _bring(self, service: LlmService, state: _Service) -> None:
        """Unloads and loads what one service should, until something fails for now, or it goes."""
        metadata, came = self._services.metadata, service.came
        for name in sorted(state.owed):
            async with state.changing:
                if name not in state.owed:
                    continue
                error = await self._unload_owed(service, state, name)
                if not self._tried("unload", name, service, state, error):
                    return
                state.owed.discard(name)
        for kept in self._lacking(service):
            async with state.changing:
                if service.came != came:
                    return
                if kept not in self._lacking(service):
                    continue
                error = await self._change(service, load(kept.name, kept.path, metadata))
                if error is not None and error.reason == "ADAPTER_EXISTS":  # another gateway has brought it
                    error = None
                if service.came != came:
                    return
                if not self._tried("load", kept.name, service, state, error):
                    return
                state.decided.add(kept)

    def _tried(self, verb: str, name: str, service: LlmService, state: _Service, error: TwinlensError | None) -> bool:
        """Records the result of an attempt. Returns whether no other follows."""
        outcome: Outcome = "done" if error is None else "refused"
        if isinstance(error, _PASSING):
            state.failures += 1
            outcome = "failed" if state.failures < _MOST_FAILURES else "given_up"
            pause = min(_LONGEST_PAUSE, self._first_pause * 2 ** (state.failures - 1))
            state.due = time.monotonic() + pause * random.uniform(0.8, 1.2)
        if outcome != "failed":
            state.failures = 0
        say = _log.info if error is None else _log.warning
        reason = "OK" if error is None else error.reason
        given = {"change": verb, "adapter": name[:128], "address": service.address}
        say("an adapter change at a service that came later", **given, outcome=outcome, reason=reason)
        self._told(verb, outcome)
        return outcome != "failed"
