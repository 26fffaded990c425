"""Memory that other processes map, by the CPU's twin of the driver, and the sums that rows are announced with."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common import hardware
from common.gpu.device_memory import DeviceMemoryError, as_unsigned, check_row_bytes, driver, row_sum
from tests.device_twin import TwinMemory, environ

CPU = torch.device("cpu")
ROW = 24


def rows(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (count * ROW,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_a_cpu_has_none_unless_a_test_gives_it_the_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceMemoryError, match="needs a GPU"):
        driver(CPU)
    monkeypatch.setitem(hardware.MEMORY_DRIVERS, "cpu", "tests.device_twin:TwinMemory")
    assert isinstance(driver(CPU), TwinMemory)


def test_without_a_driver_library_the_reason_is_told() -> None:
    if hardware.cuda_device_count():
        pytest.skip("there is a GPU")
    with pytest.raises(DeviceMemoryError, match="CUDA driver"):
        driver(torch.device("cuda:0"))


@pytest.fixture
def other_process() -> Iterator[bytes]:
    """The handle of a pool that another process has made, with rows(3) at 128; the process ends with the test."""
    script = (
        "import sys; from tests.unit.common.test_device_memory import *\n"
        "pool = TwinMemory().create(CPU, 4096); pool.write(128, rows(3))\n"
        "print(pool.handle.hex(), flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    with child:
        yield bytes.fromhex(child.stdout.readline())
        child.communicate()


def test_another_process_s_pool_is_read_and_nothing_beyond_it(other_process: bytes) -> None:
    mapping, target = TwinMemory().open(CPU, other_process), torch.zeros(3 * ROW, dtype=torch.uint8)
    mapping.read(128, target)
    assert torch.equal(target, rows(3))
    for offset in (-1, 4096 - 3 * ROW + 1):
        with pytest.raises(DeviceMemoryError):
            mapping.read(offset, target)
    mapping.close()


def test_a_pool_whose_owner_is_gone_cannot_be_opened() -> None:
    pool = TwinMemory().create(CPU, 4096)
    pool.close()
    with pytest.raises(DeviceMemoryError):
        TwinMemory().open(CPU, pool.handle)


def test_a_pool_keeps_to_its_size() -> None:
    pool = TwinMemory().create(CPU, 4096)
    for offset in (-1, 4097 - ROW):
        with pytest.raises(DeviceMemoryError):
            pool.write(offset, rows(1))
    pool.close()


def test_child_processes_of_a_service_get_the_twin_from_the_environment_alone() -> None:
    script = (
        "import torch; from common.gpu.device_memory import driver; print(driver(torch.device('cpu')).reachable([]))"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], env=environ("TWIN-7"), capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "['TWIN-7']"


@given(st.integers(1, 40), st.integers(0, 1 << 30))
def test_a_sum_tells_what_is_not_the_same(count: int, seed: int) -> None:
    data = rows(count, seed)
    known = row_sum(data, ROW)
    assert row_sum(data.clone(), ROW) == known
    for at in {0, count * ROW // 2, count * ROW - 1}:
        data[at] ^= 0x10
        assert row_sum(data, ROW) != known
        data[at] ^= 0x10


def test_a_sum_knows_the_order_of_rows_and_old_rows_from_new_ones() -> None:
    data = rows(4)
    swapped = data.view(4, ROW)[[0, 2, 1, 3]].reshape(-1)
    assert len({int(row_sum(each, ROW)) for each in (data, swapped, rows(4, 1), torch.zeros_like(data))}) == 4


@given(st.integers(1, 9), st.integers(0, 1 << 30))
def test_a_sum_is_what_the_contract_says(count: int, seed: int) -> None:
    data, total = rows(count, seed), 0
    for number, row in enumerate(data.view(count, ROW)):
        words = sum(int.from_bytes(bytes(row[at : at + 4].tolist()), "little", signed=True) for at in range(0, ROW, 4))
        signed = (words + (1 << 31)) % (1 << 32) - (1 << 31)
        total += (2 * number + 1) * signed
    assert as_unsigned(int(row_sum(data, ROW))) == total % (1 << 64)


def test_rows_that_are_no_whole_words_are_refused() -> None:
    check_row_bytes(ROW)
    with pytest.raises(DeviceMemoryError, match="rows of 26 bytes"):
        check_row_bytes(26)


def test_a_sum_travels_as_an_unsigned_number() -> None:
    assert (as_unsigned(-1), as_unsigned(5)) == ((1 << 64) - 1, 5)
