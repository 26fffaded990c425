"""What a device worker says of a batch that failed, and when it ends instead."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
import torch

from common.gpu import device
from encoder_service.worker.__main__ import _answer, one_by_one
from encoder_service.worker.messages import BatchDone, BatchFailed
from encoder_service.worker.runner import PassFailed, PreparedBatch, Runner, _failing


class Broken:
    """A runner whose device fails; `usable` says whether it would do something else after that."""

    def __init__(self, *, usable: bool) -> None:
        self._usable = usable

    def finish(self, begun: object) -> object:
        raise RuntimeError("a kernel failed")

    def is_usable(self) -> bool:
        return self._usable


def failed() -> Future[object]:
    future: Future[object] = Future()
    future.set_exception(RuntimeError("no memory for patches"))
    return future


def failed_pass() -> Future[object]:
    future: Future[object] = Future()
    future.set_exception(PassFailed([2, 3], RuntimeError("no memory for scores")))
    return future


def begun() -> Future[object]:
    future: Future[object] = Future()
    future.set_result(None)
    return future


def test_a_batch_that_failed_is_told_and_the_worker_goes_on() -> None:
    assert _answer(Broken(usable=True), begun()) == BatchFailed(why="RuntimeError: a kernel failed")
    assert _answer(Broken(usable=True), failed()) == BatchFailed(why="RuntimeError: no memory for patches")


def test_of_a_batch_in_parts_those_fail_whose_pass_failed() -> None:
    told = BatchFailed(why="RuntimeError: no memory for scores", pieces=[2, 3])
    assert _answer(Broken(usable=True), failed_pass()) == told


def test_memory_of_a_pass_that_had_too_little_is_free_before_its_pieces_come_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held: list[weakref.ref[torch.Tensor]] = []
    left: list[bool] = []
    monkeypatch.setattr(device, "release_memory", lambda: left.append(any(each() is not None for each in held)))

    def compute() -> None:
        patches = torch.zeros(8)
        held.append(weakref.ref(patches))
        raise torch.OutOfMemoryError("CUDA out of memory.")

    future: Future[object] = Future()
    try:
        with _failing(PreparedBatch([], None, None, 0.0, [2, 3])):
            compute()
    except PassFailed as error:
        future.set_exception(error)
    assert _answer(Broken(usable=True), future) == BatchFailed(
        why="OutOfMemoryError: CUDA out of memory.", pieces=[2, 3]
    )
    assert left == [False]


@pytest.mark.parametrize("make", [begun, failed, failed_pass])
def test_a_worker_whose_gpu_computes_nothing_more_ends_so_that_another_takes_its_place(make) -> None:
    with pytest.raises(RuntimeError):
        _answer(Broken(usable=False), make())


def test_a_gpu_that_fails_whatever_is_asked_of_it_is_not_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = object.__new__(Runner)
    runner.device = torch.device("cpu")
    assert runner.is_usable()
    runner.device = torch.device("cuda:1")
    asked = []
    monkeypatch.setattr(torch.cuda, "synchronize", asked.append)
    assert runner.is_usable()
    assert asked == [torch.device("cuda:1")]

    def refuse(_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    assert not runner.is_usable()


def test_parts_behind_one_that_failed_are_computed() -> None:
    class Runner(Broken):
        def finish(self, begun: object) -> BatchDone:
            return BatchDone([], 0.0, 0.0)

    def prepare(job: int, hungry: object) -> Iterator[int]:
        if job == 1:
            raise RuntimeError("no memory for patches")
        yield job

    def begun(part: Future[int], hungry: object) -> Iterator[int]:
        yield part.result()

    runner = Runner(usable=True)
    answers = [_answer(runner, future) for future in one_by_one(one_by_one(range(3), prepare), begun)]
    assert [type(answer) for answer in answers] == [BatchDone, BatchFailed, BatchDone]
