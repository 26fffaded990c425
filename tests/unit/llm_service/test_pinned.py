"""Locked row memory: locked once, let go of at the end, and not written to while a copy reads from it."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch

from llm_service.plan import RowSlice
from llm_service.worker.fusion import RowArena, fuse

LEVELS, WIDTH, ROWS = 2, 8, 6


class Runtime:
    """The CUDA runtime as far as it is asked here; `code` is what locking answers."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.locked: list[tuple[int, int]] = []
        self.unlocked: list[int] = []

    def cudaHostRegister(self, address: int, size: int, _flags: int) -> int:
        self.locked.append((address, size))
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        self.unlocked.append(address)
        return 0


class Event:
    """What a copy's end is told by."""

    log: list[str]

    def record(self) -> None:
        self.log.append("begun")

    def synchronize(self) -> None:
        self.log.append("waited")


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime(0)
    Event.log = []
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(cudart=lambda: made, Event=Event))
    return made


def arena() -> tuple[RowArena, torch.Tensor]:
    rows = torch.randn(ROWS, LEVELS, WIDTH)
    return RowArena(memoryview(bytearray(rows.numpy().tobytes())), LEVELS, WIDTH, torch.float32), rows


def test_memory_is_locked_once_and_unlocked_when_nobody_has_it_any_more(runtime: Runtime) -> None:
    made, rows = arena()
    made.pin()
    assert [size for _, size in runtime.locked] == [rows.nbytes]
    assert runtime.unlocked == []
    del made
    gc.collect()
    assert runtime.unlocked == [runtime.locked[0][0]]


def test_memory_that_cannot_be_locked_is_used_as_it_is(runtime: Runtime) -> None:
    runtime.code = 2
    made, rows = arena()
    made.pin()
    hidden = torch.zeros(ROWS, WIDTH)
    fuse(hidden, [RowSlice(0, 0, ROWS)], made)
    assert torch.equal(hidden, rows[:, 0])
    del made
    gc.collect()
    assert runtime.unlocked == []


def test_what_is_begun_is_waited_for_once(runtime: Runtime) -> None:
    made, _ = arena()
    made.pin()
    made.settle()
    assert Event.log == []
    fuse(torch.zeros(ROWS, WIDTH), [RowSlice(0, 0, 2), RowSlice(2, 0, 3)], made)
    made.settle()
    made.settle()
    assert Event.log == ["begun", "waited"]
    fuse(torch.zeros(ROWS, WIDTH), [], made)
    made.settle()
    assert Event.log == ["begun", "waited"]
    assert runtime.locked
