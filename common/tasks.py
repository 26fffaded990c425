"""Background tasks whose failure is not lost, and work in threads that nobody leaves behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from common import log

_log = log.get("tasks")

T = TypeVar("T")


def start(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Starts a task; an exception that ends it is logged. The caller keeps the task, and cancels it."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_report)
    return task


async def in_thread(work: Callable[..., T], *args: Any) -> T:
    """Runs `work` in a thread, and does not leave before it has ended: it may be writing to memory that is leased."""
    task = asyncio.ensure_future(asyncio.to_thread(work, *args))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()):
        _log.error("a task failed", task=task.get_name(), exc_info=error)
