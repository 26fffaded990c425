"""A device worker: loads the tower, then computes batch after batch until its parent is gone."""

from __future__ import annotations

import contextlib
import gc
import sys
import traceback
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from common.checkpoints.checkpoint import CheckpointError
from common.gpu.late_compiles import LateCompiles
from common.process import stacks
from common.process.parent_link import ParentLink, die_with_parent, leave_signals_to_parent
from common.shm.arena import SharedBuffer
from common.telemetry import log
from encoder_service.worker.ahead import Hungry, ahead, one_by_one
from encoder_service.worker.messages import Batch, BatchDone, BatchFailed, StartFailed, ToWorker, WorkerSettings

if TYPE_CHECKING:
    from encoder_service.worker.runner import BegunBatch, PreparedBatch, Runner


def main(link_fd: int, staging_fd: int, store_fd: int) -> None:
    """Serves batches until the parent is gone."""
    die_with_parent()
    leave_signals_to_parent()
    stacks.write_when_asked()
    link: ParentLink[Any] = ParentLink(link_fd, ToWorker)
    settings = link.receive()
    assert isinstance(settings, WorkerSettings)
    log.configure(settings.log_level, service="encoder")
    gc.disable()  # imported objects stay, and each collection would visit them again
    from common.gpu.device_memory import DeviceMemoryError  # torch takes a second to import
    from encoder_service.models.attention import AttentionUnavailable
    from encoder_service.worker.graphs import GraphsUnavailable

    staging = SharedBuffer.attach(staging_fd, settings.staging_bytes)
    store = SharedBuffer.attach(store_fd, settings.store_bytes)
    try:
        runner = _runner(settings, staging, store)
        link.send(runner.warm_up())
    except (AttentionUnavailable, CheckpointError, GraphsUnavailable, DeviceMemoryError) as error:
        link.send(StartFailed(why=str(error)))
        return
    except (OSError, KeyError, RuntimeError) as error:
        link.send(StartFailed(why=f"{type(error).__name__}: {error}"))
        return
    late_compiles = LateCompiles()
    if runner.device.type == "cuda":
        late_compiles.watch()
    gc.freeze()
    gc.enable()
    # A GPU's worker gets its next batch early, as soon as that is full: one thread makes its patches on a stream of its
    # own, and another launches its tower behind the current one, whose rows leave meanwhile. On a CPU all of that would
    # compete for the same cores.
    take = ahead if runner.device.type == "cuda" else one_by_one
    for begun in take(take(_batches(link), runner.parts), partial(_begun, runner)):
        answer = _answer(runner, begun)
        if isinstance(answer, BatchDone):
            answer.late_compiles = late_compiles.take()
        link.send(answer)


def _runner(settings: WorkerSettings, staging: SharedBuffer, store: SharedBuffer) -> Runner:
    """That of a family of ours, or of a model that transformers computes."""
    if settings.hf is None:
        from encoder_service.worker.runner import Runner

        return Runner(settings, staging, store)
    from encoder_service.worker.hf.runner import HfRunner

    return HfRunner(settings, staging, store)


def _begun(runner: Runner, part: Future[PreparedBatch], _: Hungry) -> Iterator[BegunBatch]:
    """What was prepared, or its failure, once the device computes it."""
    yield runner.compute(part.result())


def _answer(runner: Runner, begun: Future[BegunBatch]) -> BatchDone | BatchFailed:
    """The result of a part of a batch. Raises RuntimeError if the device cannot be used any more in this process."""
    try:
        return runner.finish(begun.result())
    except RuntimeError as error:  # out of memory, or a kernel that failed
        from encoder_service.worker.runner import PassFailed

        if not runner.is_usable():
            raise
        _free(error)  # the pieces will be retried, one by one
        if isinstance(error, PassFailed):
            return BatchFailed(why=str(error), pieces=list(error.places))
        return BatchFailed(why=f"{type(error).__name__}: {error}")


def _free(error: BaseException) -> None:
    """Frees the memory of a failed pass, and torch's cached memory if there was too little."""
    import torch

    from common.gpu.device import release_memory

    causes = [error]
    while (cause := causes[-1].__cause__) is not None:
        causes.append(cause)
    for each in causes:
        for frame, _ in traceback.walk_tb(each.__traceback__):
            if frame.f_code is not one_by_one.__code__:  # a generator that waits to go on would end with its frame
                with contextlib.suppress(RuntimeError):  # it still runs
                    frame.clear()
    if any(isinstance(each, torch.OutOfMemoryError) for each in causes):
        release_memory()


def _batches(link: ParentLink[Any]) -> Iterator[Batch]:
    """Every batch, as it comes, until the parent is gone."""
    while True:
        try:
            batch = link.receive()
        except EOFError:
            return
        assert isinstance(batch, Batch)
        yield batch


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
