"""Copies of many megabytes by a few threads, checked on the way for numbers that are not finite."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from common.aio.tasks import wait_until_done
from common.errors import DataLoss
from common.hardware import usable_cores
from common.rows.wire import DType, all_finite, crc32c

_PART = 8 << 20
"""Bytes: prefill may begin with them."""

_BLOCK = 512 << 10
"""Bytes that are copied, and then checked, while they are in a core's cache."""

_THREADS = min(4, usable_cores())

_AT_ONCE = 1 << 20
"""Bytes that are copied faster than a thread is asked to."""


class Copier:
    """Threads that copy rows of `dtype`, several, since one core does not use up the memory's speed.

    A thread copies `part` bytes before it takes the next ones; up to `at_once` bytes are copied without them.
    """

    def __init__(self, dtype: DType, *, part: int = _PART, at_once: int = _AT_ONCE) -> None:
        self._dtype = dtype
        self._part = part
        self._at_once = at_once
        self._threads = ThreadPoolExecutor(_THREADS, "copy")

    async def copy(self, target: memoryview, source: memoryview) -> AsyncGenerator[int, None]:
        """Copies `source` to `target`, of the same size; yields the bytes copied, part by part, in order.

        Raises DataLoss at a part with numbers that are not finite. Once the generator is closed, nobody writes to
        `target` any more.
        """
        if len(target) <= self._at_once:
            yield _copy(target, source, self._dtype)
            return
        part = self._part
        jobs = [
            self._threads.submit(_copy, target[at : at + part], source[at : at + part], self._dtype)
            for at in range(0, len(target), part)
        ]
        try:
            for job in jobs:
                yield await asyncio.wrap_future(job)
        finally:
            await _ended(jobs)

    async def copy_checked(self, target: memoryview, source: memoryview, crc: int) -> int:
        """Copies `source`, whose CRC-32C must be `crc`, to `target`, of the same size; returns that size.

        Raises DataLoss if it differs, or there are numbers that are not finite. On return nobody writes to `target` any
        more.
        """
        job = self._threads.submit(_copy_checked, target, source, crc, self._dtype)
        try:
            return await asyncio.wrap_future(job)
        finally:
            await _ended([job])

    def close(self) -> None:
        """Lets the threads end when they have nothing left to do; no copy may begin any more."""
        self._threads.shutdown(wait=False)


def _copy(target: memoryview, source: memoryview, dtype: DType) -> int:
    """Copies without holding the interpreter; returns how much, or raises DataLoss."""
    with target, source:
        for start in range(0, len(target), _BLOCK):
            with target[start : start + _BLOCK] as block:
                np.copyto(np.frombuffer(block, np.uint8), np.frombuffer(source[start : start + _BLOCK], np.uint8))
                if not all_finite(block, dtype):
                    raise DataLoss("an encoder sent numbers that are not finite")
        return len(target)


def _copy_checked(target: memoryview, source: memoryview, crc: int, dtype: DType) -> int:
    with target, source:
        if crc32c(source) != crc:
            raise DataLoss("rows were damaged on the way")
        return _copy(target, source, dtype)


async def _ended(jobs: Iterable[Future[int]]) -> None:
    """Waits until no thread runs any of these, whatever the result, even if it is cancelled."""
    running = [asyncio.wrap_future(job) for job in jobs if not job.cancel() and not job.done()]
    if running:
        await wait_until_done(asyncio.gather(*running, return_exceptions=True))
