"""A shared store for those who need a real one, and a dispatcher over workers that are none."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import fields, replace

import msgspec
import pytest

from common.process.children import Child
from encoder_service.engine.dispatch import Dispatcher
from tests import valkey_server
from tests.unit.encoder_service.fakes import LIMITS, SETTINGS, TIMES, FakeChild


@pytest.fixture(scope="package")
def running() -> Iterator[valkey_server.Server]:
    """A server that lives as long as the tests of this folder."""
    with valkey_server.server() as made:
        yield made


@pytest.fixture
def server(running: valkey_server.Server) -> valkey_server.Server:
    """The same, empty."""
    with running.client() as client:
        client.flushall()
    return running


Start = Callable[..., Awaitable[tuple[Dispatcher, list[FakeChild], list[int]]]]


@pytest.fixture
async def start(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    """Starts a dispatcher over fake workers; `children` grows as workers are replaced."""
    made: list[Dispatcher] = []

    async def starts(workers: int = 1, device: str = "cpu", **given) -> tuple[Dispatcher, list[FakeChild], list[int]]:
        children: list[FakeChild] = []
        alive: list[int] = []

        async def child(*_, **__) -> FakeChild:
            children.append(FakeChild())
            return children[-1]

        monkeypatch.setattr(Child, "start", child)
        limits, times = (
            replace(plain, **{each.name: given.pop(each.name) for each in fields(plain) if each.name in given})
            for plain in (LIMITS, TIMES)
        )
        settings = [msgspec.structs.replace(SETTINGS, device=device)] * workers
        made.append(Dispatcher(settings, (0, 0), limits, times, **{"on_change": alive.append, **given}))
        await made[-1].start()
        return made[-1], children, alive

    yield starts
    for each in made:
        await each.stop()
