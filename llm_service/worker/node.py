"""A host that lends its devices to an LLM service on another one: it keeps its share of the ranks running.

It has no gRPC port: requests go to the first host. When the group ends, because a rank or the engine was lost, this
host's ranks end with it, and are started again to join the next one.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence

import msgspec

from common.aio import tasks
from common.process.children import Child, ChildDied
from common.telemetry import log
from llm_service.settings import Joined, RankPlace

_RESTART_SECONDS = 0.5
_log = log.get("node")


async def lend(first: RankPlace, start_seconds: float, log_level: str) -> None:
    """Runs this host's ranks, the first of which is given, until SIGTERM or SIGINT."""
    log.configure(log_level, service="llm-node")
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    keeping = tasks.start_vital(_keep(first, start_seconds), "ranks of this host")
    await stop.wait()
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)


async def _keep(first: RankPlace, start_seconds: float, *, pause: float = _RESTART_SECONDS) -> None:
    """Runs this host's ranks for ever; from one life to the next it waits `pause` seconds."""
    while True:
        try:
            await _run(first, start_seconds)
        except (ChildDied, OSError) as error:  # or memory for a process was short for a moment
            _log.warning("the group has ended; this host joins the next one", cause=str(error))
        await asyncio.sleep(pause)


async def _run(first: RankPlace, start_seconds: float) -> None:
    """One life of this host's ranks; raises ChildDied when one of them has ended, or has not joined the group in time,
    and takes the others with it."""
    arena_fd = os.memfd_create("twinlens-rows")
    children: list[Child[Joined]] = []
    try:
        for rank in range(first.rank, first.rank + first.ranks_per_host):
            child: Child[Joined] = await Child.start("llm_service.worker", receives=Joined, fds=(arena_fd,))
            children.append(child)
            child.send(msgspec.structs.replace(first, rank=rank))
        await _joined(children, start_seconds)
        print(f"ready ranks={first.rank}-{first.rank + first.ranks_per_host - 1}", flush=True)  # noqa: T201 - what it prints when it serves
        ends = [asyncio.ensure_future(child.receive()) for child in children]
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
            await asyncio.gather(*ends, return_exceptions=True)
        done.pop().result()
    finally:
        for child in children:
            child.kill()
            await child.stop()
        os.close(arena_fd)


async def _joined(children: Sequence[Child[Joined]], start_seconds: float) -> None:
    """Waits until all of them have joined their group, which waits for the first host."""
    try:
        async with asyncio.timeout(start_seconds):
            for child in children:
                await child.receive()
    except TimeoutError:
        raise ChildDied(f"a rank had not joined after {start_seconds:g} seconds") from None
