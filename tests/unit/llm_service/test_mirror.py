"""A rank's mirror of the row arena, over the CPU's twin of device memory: what lands, and what is forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.gpu.device_memory import DeviceMemoryError, as_unsigned, row_sum
from common.shm.arena import SharedBuffer
from llm_service.plan import RowSlice
from llm_service.worker.messages import InvalidateRows, Pulled, PullRows, UnmapPool
from llm_service.worker.mirror import ByteRanges, Mirror
from llm_service.worker.row_arena import RowArena
from tests.device_twin import TwinMapping, TwinMemory, TwinPool

CPU = torch.device("cpu")
LEVELS, WIDTH = 2, 4
ROW = LEVELS * WIDTH * 4
SIZE = 64 * ROW


@dataclass
class Bench:
    """A pool with 16 rows, an arena of zeros, and its mirror."""

    pool: TwinPool
    rows: torch.Tensor
    mirror: Mirror
    arena: RowArena

    def pull(self, first: int = 0, count: int = 4, at: int = 8, **changes: object) -> PullRows:
        data = self.rows[first : first + count].reshape(-1).view(torch.uint8)
        pull = PullRows(
            id=1,
            region="pool",
            handle=self.pool.handle,
            source=first * ROW,
            target=at * ROW,
            size=count * ROW,
            row_sum=as_unsigned(int(row_sum(data, ROW))),
        )
        return msgspec.structs.replace(pull, **changes)

    def obey(self, order: PullRows | InvalidateRows | UnmapPool) -> Pulled:
        return self.mirror.obey(order, lambda number: number)

    def read(self, row: int, count: int) -> torch.Tensor:
        return torch.cat(self.arena.read(RowSlice(0, row * ROW, count)))


@pytest.fixture
def bench() -> Iterator[Bench]:
    pool, memory = TwinMemory().create(CPU, 1 << 16), SharedBuffer.create("test", SIZE)
    rows = torch.randn(16, LEVELS, WIDTH, generator=torch.Generator().manual_seed(0))
    pool.write(0, rows.reshape(-1).view(torch.uint8))
    mirror = Mirror(TwinMemory(), CPU, SIZE, ROW, torch.float32)
    yield Bench(pool, rows, mirror, RowArena(memory.view, LEVELS, WIDTH, torch.float32, mirror))
    mirror.obey(UnmapPool("pool"), lambda number: number)
    pool.close()


def test_pulled_rows_are_read_from_the_mirror_and_the_others_from_the_arena(bench: Bench) -> None:
    assert bench.obey(bench.pull(first=2, count=4, at=8)) is Pulled.LANDED
    found = bench.read(6, 8)
    assert torch.equal(found[2:6], bench.rows[2:6])
    assert not found[:2].any()
    assert not found[6:].any()


def test_a_pull_is_copied_and_checked_beside_steps(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the stream of steps, to wait for it would be to wait for those in flight."""
    happened: list[str] = []

    @contextmanager
    def beside() -> Iterator[None]:
        happened.append("begin")
        yield
        happened.append("end")

    def summed(rows: torch.Tensor, row_bytes: int) -> torch.Tensor:
        happened.append("check")
        return row_sum(rows, row_bytes)

    def agree(number: int) -> int:
        happened.append("agree")
        return number

    monkeypatch.setattr("llm_service.worker.mirror.row_sum", summed)
    monkeypatch.setattr(TwinMapping, "read", lambda *_: happened.append("copy"))
    mirror = Mirror(TwinMemory(), CPU, SIZE, ROW, torch.float32, beside)
    mirror.obey(bench.pull(), agree)
    assert happened == ["begin", "copy", "check", "end", "agree"]
    mirror.obey(UnmapPool("pool"), lambda number: number)


def test_a_place_that_is_given_to_other_rows_is_read_from_the_arena_again(bench: Bench) -> None:
    bench.obey(bench.pull(count=4, at=8))
    bench.obey(InvalidateRows(9 * ROW, 2 * ROW))
    found = bench.read(8, 4)
    assert torch.equal(found[[0, 3]], bench.rows[[0, 3]])
    assert not found[1:3].any()


def test_a_pool_that_the_driver_does_not_let_go_of_ends_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """As may be where the encoder has died."""

    def refuses(mapping: TwinMapping) -> None:
        raise DeviceMemoryError("invalid handle")

    bench.obey(bench.pull(count=4, at=8))
    with monkeypatch.context() as patched:
        patched.setattr(TwinMapping, "close", refuses)
        (opened,) = bench.mirror._open.values()
        assert bench.obey(UnmapPool("pool")) is Pulled.LANDED
    opened.close()
    assert bench.obey(bench.pull(count=4, at=8)) is Pulled.LANDED


def test_rows_that_are_not_as_announced_do_not_land(bench: Bench) -> None:
    bench.pool.write(ROW, torch.zeros(4, dtype=torch.uint8))
    assert bench.obey(bench.pull()) is Pulled.DAMAGED
    assert not bench.read(8, 4).any()


def test_numbers_that_are_not_finite_do_not_land(bench: Bench) -> None:
    bench.rows[1, 1, 3] = float("nan")
    bench.pool.write(0, bench.rows.reshape(-1).view(torch.uint8))
    assert bench.obey(bench.pull()) is Pulled.DAMAGED


def test_what_one_rank_does_not_get_no_rank_takes(bench: Bench) -> None:
    assert bench.mirror.obey(bench.pull(), lambda _: Pulled.UNREACHABLE) is Pulled.UNREACHABLE
    assert not bench.read(8, 4).any()


@pytest.mark.parametrize(
    ("changes", "end"),
    [
        ({"target": SIZE - ROW}, Pulled.DAMAGED),
        ({"target": -ROW}, Pulled.DAMAGED),
        ({"size": ROW - 2}, Pulled.DAMAGED),
        ({"size": 0}, Pulled.DAMAGED),
        ({"source": 1 << 16}, Pulled.UNREACHABLE),
        ({"source": -ROW}, Pulled.UNREACHABLE),
        ({"row_sum": 1}, Pulled.DAMAGED),
    ],
)
def test_orders_that_point_outside_are_refused(bench: Bench, changes: dict[str, int], end: Pulled) -> None:
    assert bench.obey(bench.pull(**changes)) is end
    assert bench.obey(bench.pull()) is Pulled.LANDED


def test_a_pool_is_opened_once_and_closed_when_it_is_gone(bench: Bench) -> None:
    assert bench.obey(bench.pull()) is Pulled.LANDED
    bench.obey(bench.pull(handle=b"not looked at", at=20))
    assert torch.equal(bench.read(20, 4), bench.rows[:4])
    bench.obey(UnmapPool("pool"))
    bench.pool.close()
    assert bench.obey(bench.pull()) is Pulled.UNREACHABLE
    assert torch.equal(bench.read(8, 4), bench.rows[:4]), "what landed stays"
    assert bench.obey(UnmapPool("never seen")) is Pulled.LANDED


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40), st.integers(1, 12)), max_size=40))
def test_spans_are_a_set(steps: list[tuple[bool, int, int]]) -> None:
    ranges, plain = ByteRanges(), set[int]()
    for put, begin, size in steps:
        if put:
            ranges.add(begin, begin + size)
            plain |= set(range(begin, begin + size))
        else:
            ranges.remove(begin, begin + size)
            plain -= set(range(begin, begin + size))
        pieces = list(ranges.split(3, 50))
        assert [at for begin, end, _ in pieces for at in range(begin, end)] == list(range(3, 50))
        assert {at for begin, end, here in pieces if here for at in range(begin, end)} == {
            at for at in plain if 3 <= at < 50
        }
        assert all(one < two for one, two in zip(ranges.ends, ranges.begins[1:], strict=False)), "runs do not touch"
