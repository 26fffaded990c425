"""Requests that are ended from outside: all of them, whatever state one of them is in."""

from __future__ import annotations

import asyncio

from common.errors import Unavailable
from gateway.dialect import dialect_of
from gateway.request_context import BodyBudget, BodyLease, RequestContext


def test_one_whose_time_has_just_run_out_hinders_no_other() -> None:
    async def run() -> None:
        context = RequestContext("a", [], BodyLease(BodyBudget(10)), dialect_of("/v1/models"))
        cleaning, over = asyncio.Event(), asyncio.Event()

        async def serve() -> None:
            context.limit = asyncio.timeout(0)
            async with context.limit:
                try:
                    await asyncio.Event().wait()
                finally:
                    cleaning.set()
                    await over.wait()

        task = asyncio.create_task(serve())
        await cleaning.wait()
        cause = Unavailable("the gateway stops")
        context.end(cause)
        assert context.cause is cause
        over.set()
        (ended,) = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(ended, TimeoutError)

    asyncio.run(run())
