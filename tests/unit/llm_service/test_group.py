"""What ranks find together, each in a thread: the first of the highest values, and sums by symmetric memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from common.checkpoints.checkpoint import CheckpointError
from llm_service.layers.gpu import symmetric_sum
from llm_service.layers.gpu.symmetric_sum import SymmetricSum, with_symmetric_memory
from llm_service.layers.tensor_parallel import TensorGroup

CPU = torch.device("cpu")
CAPACITY, ONE_SHOT = 1 << 15, 1 << 13


class Meeting:
    """Threads that exchange tensors; each knows its rank."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=180)
        self._given: list[Tensor] = [torch.empty(0)] * size
        self.group_name = "ranks"
        self.local = threading.local()

    def size(self) -> int:
        return len(self._given)

    def all_of(self, x: Tensor) -> Tensor:
        self._given[self.local.rank] = x.clone()
        self._barrier.wait()
        found = torch.stack(self._given)
        self._barrier.wait()
        return found

    def each(self, compute: Callable[[TensorGroup], Any]) -> list[Any]:
        """What each rank's thread returns."""

        def run(rank: int) -> Any:
            self.local.rank = rank
            return compute(TensorGroup(rank, self.size(), self))  # type: ignore[arg-type]

        with ThreadPoolExecutor(self.size()) as pool:
            return list(pool.map(run, range(self.size())))


@pytest.fixture(params=[2, 3])
def meeting(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Meeting:
    met = Meeting(request.param)

    def all_reduce(x: Tensor, op: Any = dist.ReduceOp.SUM, group: Meeting | None = None) -> None:
        ways = {dist.ReduceOp.SUM: torch.sum, dist.ReduceOp.MAX: torch.amax, dist.ReduceOp.MIN: torch.amin}
        x.copy_(ways[op](met.all_of(x), 0))

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    return met


def highest(meeting: Meeting, logits: Tensor) -> list[list[int]]:
    total = logits.shape[1]
    return meeting.each(lambda group: group.first_of_highest(logits[:, group.vocab_partition(total)], total).tolist())


@pytest.mark.parametrize("words", [1, 2, 3, 4, 7, 1000])
def test_ranks_find_the_token_that_one_finds(meeting: Meeting, words: int) -> None:
    """Of values that are often the same, below zero as well; with one word, one rank has all and the others none."""
    logits = torch.randint(-3, 3, (64, words), generator=torch.Generator().manual_seed(words)).float()
    logits[:8] -= 100
    logits[8] = -torch.inf
    assert highest(meeting, logits) == [logits.argmax(-1).tolist()] * meeting.size()


@pytest.mark.parametrize(
    ("row", "first"),
    [
        ([0.0, -0.0, 0.0, -0.0], 0),
        ([-0.0, 0.0, -0.0, 0.0], 0),
        ([1.0, torch.inf, torch.nan, torch.inf], 2),
        ([1.0, -torch.nan, torch.nan, 5.0], 1),
        ([-torch.inf, -torch.inf, -1e38, -1e38], 2),
        ([1e-45, 0.0, -1e-45, 3e-45], 3),
    ],
)
def test_zeros_are_equal_and_what_is_no_number_is_above_all(meeting: Meeting, row: list[float], first: int) -> None:
    assert torch.tensor(row).argmax() == first
    assert highest(meeting, torch.tensor([row])) == [[first]] * meeting.size()


@pytest.fixture
def kernels(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """torch's operators on a CPU, by the meeting; which ones were called."""
    called: list[str] = []

    def took(name: str) -> None:
        if meeting.local.rank == 0:
            called.append(name)

    def one_shot(place: Tensor, x: Tensor, op: str, name: str) -> Tensor:
        assert (op, name) == ("sum", "ranks")
        took("one shot")
        return meeting.all_of(place.copy_(x)).sum(0)

    def in_place(kind: str) -> Callable[[Tensor, str, str], Tensor]:
        def sum_(place: Tensor, op: str, name: str) -> Tensor:
            assert (op, name) == ("sum", "ranks")
            took(kind)
            return place.copy_(meeting.all_of(place).sum(0))

        return sum_

    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("one_shot_all_reduce_copy", one_shot, "CPU")
    library.impl("two_shot_all_reduce_", in_place("two shot"), "CPU")
    library.impl("multimem_all_reduce_", in_place("multicast"), "CPU")
    monkeypatch.setattr(symmetric_memory, "empty", torch.empty)
    monkeypatch.setattr(symmetric_memory, "rendezvous", lambda *_: SimpleNamespace(multicast_ptr=0))
    monkeypatch.setattr(symmetric_sum, "CAPACITY", CAPACITY)
    monkeypatch.setattr(symmetric_sum, "ONE_SHOT", ONE_SHOT)
    yield called
    library._destroy()


@pytest.mark.parametrize("multicast", [0, 1 << 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_small_is_summed_by_reading_each_others_memory(
    meeting: Meeting, kernels: list[str], monkeypatch: pytest.MonkeyPatch, multicast: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(symmetric_memory, "rendezvous", lambda *_: SimpleNamespace(multicast_ptr=multicast))
    other = "multicast" if multicast else "two shot"
    near = ONE_SHOT // (meeting.size() - 1) // dtype.itemsize
    sizes = {8: ["one shot"], near: ["one shot"], near + 8: [other], CAPACITY // dtype.itemsize: [other]}
    sizes |= {CAPACITY // dtype.itemsize + 8: [], 0: [], 3: []}  # too long, nothing, not whole
    for columns, taken in sizes.items():
        kernels.clear()

        def summed(group: TensorGroup, columns: int = columns) -> tuple[Tensor, Tensor]:
            assert group.process_group is not None
            sums = SymmetricSum(group.process_group, CPU, dtype)
            x = (torch.arange(columns) % 16).to(dtype) + group.rank
            return group.with_sums(sums).sum(x), x

        expected = sum((torch.arange(columns) % 16).to(dtype) + rank for rank in range(meeting.size()))
        for found, _ in meeting.each(summed):
            assert torch.equal(found, expected)
        assert kernels == taken


def test_other_types_and_places_are_left_to_the_group(meeting: Meeting, kernels: list[str]) -> None:
    def taken(group: TensorGroup) -> list[bool]:
        assert group.process_group is not None
        sums = SymmetricSum(group.process_group, CPU, torch.float32)
        given = torch.zeros(8, 8), torch.zeros(8, 8).bfloat16(), torch.zeros(8, 8)[:, :4], torch.zeros(8, 8)[:4]
        return [sums.takes(x) for x in given]

    assert meeting.each(taken) == [[True, False, False, True]] * meeting.size()
    assert not kernels


def test_a_group_that_sums_as_before_goes_on_with_it(meeting: Meeting, kernels: list[str]) -> None:
    groups = meeting.each(lambda group: with_symmetric_memory(group, torch.float32, CPU))
    assert all(isinstance(group.sums, SymmetricSum) for group in groups)
    assert kernels == ["one shot", "one shot", "two shot"]


def refusals(meeting: Meeting, dtype: torch.dtype = torch.float32) -> list[str]:
    def refused(group: TensorGroup) -> str:
        with pytest.raises(CheckpointError) as raised:
            with_symmetric_memory(group, dtype, CPU)
        return str(raised.value)

    return meeting.each(refused)


def test_sums_that_differ_on_one_rank_are_refused_by_all(
    meeting: Meeting, kernels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = SymmetricSum.sum
    monkeypatch.setattr(SymmetricSum, "sum", lambda self, x: right(self, x) + (meeting.local.rank == 1))
    assert refusals(meeting) == ["--symmetric-memory: sums differ from those of NCCL on these GPUs"] * meeting.size()


def test_memory_that_one_rank_does_not_get_is_refused_by_all(
    meeting: Meeting, kernels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def empty(*sizes: int, **of: Any) -> Tensor:
        if meeting.local.rank == 1:
            raise RuntimeError("these GPUs are not joined\nC++ stack")
        return torch.empty(*sizes, **of)

    monkeypatch.setattr(symmetric_memory, "empty", empty)
    said = refusals(meeting)
    assert said.pop(1) == "--symmetric-memory: these GPUs are not joined"
    assert said == ["--symmetric-memory: another rank has none"] * (meeting.size() - 1)


def test_a_type_that_is_not_summed_is_named(meeting: Meeting, kernels: list[str]) -> None:
    assert set(refusals(meeting, torch.float16)) == {"--symmetric-memory: there are no sums in torch.float16"}
