"""Engines that say what a test has them say: in the place of processes, behind the real front."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from common.process.children import ChildDied
from llm_service.engine.messages import Ready
from llm_service.engine_client import client as client_module
from llm_service.engine_client.client import EngineClient

START_SECONDS = 100.0
STEP_SECONDS = 50.0


@dataclass
class Holder:
    """Holds no rows; notes under its request's id what it is told."""

    id: int = 0
    needed: list[int] = field(default_factory=list)
    let_go: list[int] = field(default_factory=list)

    def rows_needed(self) -> None:
        self.needed.append(self.id)

    def rows_read(self) -> None:
        pass

    def released(self) -> None:
        self.let_go.append(self.id)


class ScriptedEngine:
    """One engine process, as `Child` shows it. `heard` is what it was told, `killed` whether it was, `ended` the status
    after its end."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.killed = False
        self.ended = ""
        self.process = SimpleNamespace(pid=os.getpid())  # which is held up, and not frozen, where a test is slow
        self._says: asyncio.Queue[Any] = asyncio.Queue()

    def send(self, message: Any) -> None:
        self.heard.append(deepcopy(message))

    def told(self, kind: type) -> list[Any]:
        """What it heard of one kind."""
        return [message for message in self.heard if isinstance(message, kind)]

    def says(self, message: Any) -> None:
        self._says.put_nowait(message)

    def serves(self, max_context: int = 100, prefix_caching: bool = False) -> None:
        """It is loaded."""
        self.says(
            Ready(max_context=max_context, kv_blocks=8, step_tokens=64, prefix_caching=prefix_caching, devices=["cpu"])
        )

    def dies(self) -> None:
        self.says(ChildDied("the process has ended"))

    async def receive(self) -> Any:
        message = await self._says.get()
        if isinstance(message, Exception):
            raise message
        return message

    async def post_mortem(self) -> dict[str, str]:
        self.killed = True
        return {"status": self.ended} if self.ended else {}

    async def stop(self) -> None:
        pass


class ScriptedSpareEngine:
    """Gives the engines of a script, one after the other; an error in it is raised. Then there is none for ever."""

    def __init__(self, script: list[ScriptedEngine | Exception]) -> None:
        self._script = deque(script)

    async def take(self) -> ScriptedEngine:
        if not self._script:
            await asyncio.Event().wait()
        if isinstance(engine := self._script.popleft(), Exception):
            raise engine
        return engine

    def prepare(self) -> None:
        pass

    async def stop(self) -> None:
        pass


def front_of(
    monkeypatch: pytest.MonkeyPatch,
    *script: ScriptedEngine | Exception,
    on_ready: Callable[[bool], None] = lambda _: None,
    handover_seconds: float = 0.0,
    drafts: int = 0,
) -> EngineClient:
    """A front over these engines, not yet started."""
    monkeypatch.setattr(client_module, "SpareEngine", lambda *_, **__: ScriptedSpareEngine(list(script)))
    settings: Any = SimpleNamespace(speculative_tokens=drafts, block_size=16)  # the rest is passed on unread
    return EngineClient(
        settings,
        -1,
        on_ready,
        start_seconds=START_SECONDS,
        step_seconds=STEP_SECONDS,
        handover_seconds=handover_seconds,
    )
