"""Background tasks whose failure is not lost."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from common import log

_log = log.get("tasks")


def start(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Starts a task; an exception that ends it is logged. The caller keeps the task, and cancels it."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_report)
    return task


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()):
        _log.error("a task failed", task=task.get_name(), exc_info=error)
