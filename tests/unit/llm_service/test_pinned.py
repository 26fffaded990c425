"""Locked row memory: locked once, and let go of at the end."""

from __future__ import annotations

import gc
from ctypes import c_size_t, c_uint, c_void_p
from types import SimpleNamespace

import pytest
import torch

from common.gpu import cuda_driver
from llm_service.plan import RowSlice
from llm_service.worker.fusion import fuse
from llm_service.worker.row_arena import RowArena

LEVELS, WIDTH, ROWS = 2, 8, 6


class Driver:
    """The driver as far as it is asked here; `code` is what locking answers."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.locked: list[tuple[int, int]] = []
        self.unlocked: list[int] = []

    def cuMemHostRegister_v2(self, address: c_void_p, size: c_size_t, flags: c_uint) -> int:
        assert address.value is not None
        assert flags.value == 1
        self.locked.append((address.value, size.value))
        return self.code

    def cuMemHostUnregister(self, address: c_void_p) -> int:
        assert address.value is not None
        self.unlocked.append(address.value)
        return 0

    def cuGetErrorName(self, _code: object, _name: object) -> int:
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver(0)
    monkeypatch.setattr(cuda_driver, "_library", lambda: made)
    monkeypatch.setattr(torch, "cuda", SimpleNamespace())  # nothing of torch's may be asked
    return made


def arena() -> tuple[RowArena, torch.Tensor]:
    rows = torch.randn(ROWS, LEVELS, WIDTH)
    return RowArena(memoryview(bytearray(rows.numpy().tobytes())), LEVELS, WIDTH, torch.float32), rows


def test_memory_is_locked_once_and_unlocked_when_nobody_has_it_any_more(driver: Driver) -> None:
    made, rows = arena()
    made.pin()
    assert [size for _, size in driver.locked] == [rows.nbytes]
    assert driver.unlocked == []
    del made
    gc.collect()
    assert driver.unlocked == [driver.locked[0][0]]


def test_memory_that_cannot_be_locked_is_used_as_it_is(driver: Driver) -> None:
    driver.code = 2
    made, rows = arena()
    made.pin()
    hidden = torch.zeros(ROWS, WIDTH)
    fuse(hidden, [RowSlice(0, 0, ROWS)], made)
    assert torch.equal(hidden, rows[:, 0])
    del made
    gc.collect()
    assert driver.unlocked == []
