"""The front's side of the ranks' row mirrors (`worker/mirror`): orders to fill them, and their results.

Every rank carries orders out in sequence, before all steps planned later. When the engine ends, its mirrors are lost;
`on_lost` tells those that keep account of rows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from common.aio.tasks import wait_until_done
from common.errors import DataLoss
from llm_service.engine.messages import PullEnded
from llm_service.worker.messages import InvalidateRows, MirrorOrder, Pulled, PullRows, UnmapPool


class Mirrors:
    """`send` passes an order to the engine, or drops it if there is none."""

    def __init__(self, send: Callable[[MirrorOrder], None]) -> None:
        self.reachable: Sequence[str] = ()
        self.on_lost: Callable[[], None] = lambda: None
        self._send = send
        self._ids = 0
        self._waiting: dict[int, asyncio.Future[Pulled]] = {}

    async def pull(self, *, region: str, handle: bytes, source: int, target: int, size: int, row_sum: int) -> Pulled:
        """Has every rank copy rows; see `PullRows`. Returns only when all ranks have answered, since they write until
        then.

        Raises DataLoss if there is no engine, or it ends meanwhile.
        """
        if not self.reachable:
            raise DataLoss("the engine has ended")
        self._ids += 1
        answer: asyncio.Future[Pulled] = asyncio.get_running_loop().create_future()
        self._waiting[self._ids] = answer
        self._send(
            PullRows(
                id=self._ids,
                region=region,
                handle=handle,
                source=source,
                target=target,
                size=size,
                row_sum=row_sum,
            )
        )
        await wait_until_done(answer)
        return answer.result()

    def invalidate(self, offset: int, size: int) -> None:
        """These bytes of the arena are given to new rows."""
        if self.reachable:
            self._send(InvalidateRows(offset, size))

    def unmap(self, region: str) -> None:
        """A pool is gone."""
        self._send(UnmapPool(region))

    def opened(self, reachable: Sequence[str]) -> None:
        """An engine is ready. All its ranks can read the memory of these devices; none if they keep no mirrors."""
        self.reachable = reachable

    def ended(self, answer: PullEnded) -> None:
        """The ranks have answered."""
        if not (waiting := self._waiting.pop(answer.id)).done():
            waiting.set_result(Pulled(answer.end))

    def lost(self) -> None:
        """The engine is gone."""
        had, self.reachable = self.reachable, ()
        while self._waiting:
            _, answer = self._waiting.popitem()
            answer.set_exception(DataLoss("the engine ended while rows were copied to it"))
            answer.exception()  # the caller may have been cancelled
        if had:
            self.on_lost()
