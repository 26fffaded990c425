"""A service with nothing behind its frame, as a process of its own: `python -m tests.unit.common.plain_service FLAGS`.

`Tokenize` answers with the length of its text, `Generate` holds its request until the caller leaves. At the text
`STANDS_STILL` all of it stands still for `STILL_SECONDS`, but for gRPC's threads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from common.config import load
from common.process.malloc import keep_large_blocks
from common.rpc.server import GrpcServer, ServerConfig
from common.telemetry import log
from twinlens import v1

STANDS_STILL = "stand still"
STILL_SECONDS = 31.0

_log = log.get("plain")


@dataclass(frozen=True, kw_only=True)
class _Config(ServerConfig):
    def validate(self) -> None:
        self.check_server()


class _Plain(v1.LlmServiceServicer):
    async def Tokenize(self, request: Any, context: Any) -> v1.TokenizeResponse:
        if request.text == STANDS_STILL:
            _log.info(STANDS_STILL)
            time.sleep(STILL_SECONDS)  # noqa: ASYNC251
        return v1.TokenizeResponse(ids=[len(request.text)])

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[v1.GenerateResponse]:
        yield v1.GenerateResponse(started=v1.GenerateStarted(request_id=request.request_id))
        await asyncio.Event().wait()


async def _serve(config: _Config) -> None:
    log.configure(config.log_level, service="plain")
    server = GrpcServer(config, ["twinlens.v1.LlmService"])
    v1.add_LlmServiceServicer_to_server(_Plain(), server.server)
    await server.bind()
    await server.announce()
    await server.wait()
    await server.drain()


if __name__ == "__main__":
    keep_large_blocks()
    asyncio.run(_serve(load(_Config, "PLAIN", "")))
