"""A gateway before a scripted LLM service, for what is about HTTP alone: it starts in a second."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.gateway.trio import Door
from tests.launch import gateway
from tests.unit.twinlens.conftest import serving
from tests.unit.twinlens.fakes import FakeLlm
from tests.waiting import until


@dataclass(frozen=True, slots=True)
class Scripted(Door):
    """The gateway, and what remembers its questions."""

    llm: FakeLlm


@contextmanager
def scripted(llm: FakeLlm | None = None, **flags: object) -> Iterator[Scripted]:
    """Both, for the length of the block."""
    llm = llm or FakeLlm()
    with serving(llm=llm) as address, gateway(address, **flags) as running:
        door = Scripted(running, llm)
        until(lambda: door.get("/health/ready").status == 200, "the gateway is ready")
        yield door
