"""A device worker: loads the tower, then computes batch after batch until its parent is gone."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from common import log
from common.arena import SharedBuffer
from common.checkpoint import CheckpointError
from common.processes import ParentLink, die_with_parent, leave_signals_to_parent
from encoder_service.worker.ahead import ahead, in_turn
from encoder_service.worker.messages import Batch, BatchDone, BatchFailed, Begin, Failed, ToWorker

if TYPE_CHECKING:
    from encoder_service.worker.runner import Prepared, Runner


def main(link_fd: int, staging_fd: int, store_fd: int) -> None:
    """Serves batches until the parent is gone."""
    die_with_parent()
    leave_signals_to_parent()
    link: ParentLink[Any] = ParentLink(link_fd, ToWorker)
    begin = link.receive()
    assert isinstance(begin, Begin)
    log.configure(begin.log_level, service="encoder")
    gc.disable()  # what is imported stays: collections would look through it again and again
    from common.device_memory import DeviceMemoryError  # torch takes a second to import
    from encoder_service.models.attention_choice import AttentionUnavailable
    from encoder_service.worker.graphs import GraphsUnavailable
    from encoder_service.worker.runner import Runner

    staging = SharedBuffer.attach(staging_fd, begin.staging_bytes)
    store = SharedBuffer.attach(store_fd, begin.store_bytes)
    try:
        runner = Runner(begin, staging, store)
        link.send(runner.warm_up())
    except (AttentionUnavailable, CheckpointError, GraphsUnavailable, DeviceMemoryError) as error:
        link.send(Failed(why=str(error)))
        return
    except (OSError, KeyError, RuntimeError) as error:
        link.send(Failed(why=f"{type(error).__name__}: {error}"))
        return
    gc.freeze()
    gc.enable()
    take = ahead if runner.device.type == "cuda" else in_turn
    for prepared in take(_batches(link), runner.prepare):
        link.send(_answer(runner, prepared))


def _answer(runner: Runner, prepared: Future[Prepared]) -> BatchDone | BatchFailed:
    """What came of a batch. Raises RuntimeError where the device computes nothing more in this process."""
    try:
        return runner.compute(prepared.result())
    except RuntimeError as error:  # out of memory, or a kernel that failed
        if not runner.is_usable():
            raise
        return BatchFailed(why=f"{type(error).__name__}: {error}")


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
