"""Encoders that say what a test scripted for them, over real gRPC, and an encoder cache behind them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from common.errors import Unavailable
from common.media.content_key import content_key
from common.media.item import Modality, Options
from common.rows.wire import DType, RowLayout, crc32c
from common.rpc.bearer_tokens import AcceptedTokens
from common.rpc.calls import CallInterceptor, current
from common.rpc.server import PINGS
from llm_service.encoders.breaker import RetryBudget
from llm_service.encoders.encoder_cache import CacheEntry, EncoderCache
from llm_service.encoders.pool import EncoderPool
from llm_service.encoders.receiver import RowReceiver
from llm_service.encoders.settings import EncoderSettings
from llm_service.request import MediaItem, Request, SamplingParams, TextPrompt
from tests import waiting
from twinlens import v1

DIGEST = "the digest of our model"
LAYOUT = RowLayout(levels=2, width=8, dtype=DType.FLOAT32)  # rows of 64 bytes
ROWS, RUN = 12, 4

Say = Callable[["Call"], Awaitable[None]]


def key_of(data: bytes, salt: str = "salt") -> bytes:
    return content_key(DIGEST, Modality.IMAGE, data, Options(), salt)


def content(data: bytes, first: int = 0, count: int = ROWS) -> bytes:
    """The rows of an item, each row told apart from all others; every number in them is finite."""
    noise = b"".join(hashlib.sha512(data + b"%d" % row).digest() for row in range(first, first + count))
    return (np.frombuffer(noise, "<u4") & 0x3FFFFFFF).tobytes()


@dataclass
class Call:
    """One Encode call at a scripted encoder, and what can be said in it."""

    data: bytes
    request: v1.EncodeRequest
    context: Any
    ending: asyncio.Task[None] | None = None

    async def header(self, **changes: Any) -> None:
        given = {
            "key": key_of(self.data, self.request.cache_salt),
            "modality": v1.MODALITY_IMAGE,
            "grid": v1.Grid(t=1, h=4, w=12),
            "tokens": ROWS,
            "width": 8,
            "levels": 2,
            "dtype": v1.DATA_TYPE_FLOAT32,
            **changes,
        }
        await self.context.write(v1.EncodeResponse(header=v1.EncodeHeader(**given)))

    async def rows(self, first: int, count: int = RUN, **changes: Any) -> None:
        data = content(self.data, first, count)
        given = {"first_row": first, "count": count, "data": data, "crc32c": crc32c(data), **changes}
        await self.context.write(v1.EncodeResponse(rows=v1.EncodeRows(**given)))

    async def done(self) -> None:
        await self.context.write(v1.EncodeResponse(done=v1.EncodeDone()))

    async def breaks(self, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> None:
        await self.context.abort(code, "host 10.0.0.1 in /srv/encoder fell over")


async def well(call: Call) -> None:
    await call.context.write(v1.EncodeResponse(progress=v1.EncodeProgress(stage="queue")))
    await call.header()
    start = call.request.first_rows[0] if call.request.first_rows else 0
    for first in range(start, ROWS, RUN):
        await call.rows(first)
    await call.done()


@dataclass
class ScriptedEncoder(v1.EncoderServiceServicer):
    """Says in each call what its script says; the last line of the script is repeated."""

    script: list[Say] = field(default_factory=lambda: [well])
    digest: str = DIGEST
    address: str = ""
    calls: list[Call] = field(default_factory=list)
    open: int = 0
    deadlines: list[float] = field(default_factory=list)
    server: Any = None
    begun: int = 0
    questions: int = 0

    def dies(self, calls: int = 1) -> Say:
        """A line of a script: the encoder has begun on the item in so many calls, and ends with all of them."""

        async def die(call: Call) -> None:
            await call.header()
            self.begun += 1
            if self.begun == calls:
                call.ending = asyncio.create_task(self.server.stop(None))
            await asyncio.Event().wait()

        return die

    async def GetInfo(self, request: Any, context: Any) -> v1.EncoderServiceGetInfoResponse:
        self.questions += 1
        return v1.EncoderServiceGetInfoResponse(digest=self.digest)

    async def GetLoad(self, request: Any, context: Any) -> v1.EncoderServiceGetLoadResponse:
        return v1.EncoderServiceGetLoadResponse()

    async def Encode(self, request: v1.EncodeRequest, context: Any) -> None:
        call = Call(request.items[0].data, request, context)
        say = self.script[min(len(self.calls), len(self.script) - 1)]
        self.calls.append(call)
        self.deadlines.append(context.time_remaining())
        if request.digest != self.digest:
            raise Unavailable("the encoder serves another model than the caller expects", reason="OTHER_MODEL")
        self.open += 1
        try:
            await current().accept(context)
            await say(call)
        finally:
            self.open -= 1


@dataclass
class Bench:
    """Scripted encoders, a cache, and a receiver between them."""

    encoders: list[ScriptedEncoder]
    cache: EncoderCache
    pool: EncoderPool
    receiver: RowReceiver

    async def usable(self, count: int) -> None:
        await eventually(lambda: sum(replica.usable for replica in self.pool.replicas) == count)

    async def land(self, *files: bytes, deadline: float | None = None) -> list[CacheEntry]:
        return await self.take(request(*files, deadline=deadline))

    async def take(self, wanted: Request) -> list[CacheEntry]:
        """Entries for all items of a request, in order; rows go on landing in the background."""
        return await self.receiver.acquire(await self.receiver.fetch_headers(wanted))

    async def whole(self, data: bytes) -> bytes:
        """The rows of an item, after its entry is complete; the entry is released."""
        return await self.whole_of(request(data))

    async def whole_of(self, wanted: Request) -> bytes:
        """The same of a request's only item."""
        (entry,) = await self.take(wanted)
        try:
            await settled(entry)
            if entry.error is not None:
                raise entry.error
            return bytes(self.cache.buffer.slice(entry.place))
        finally:
            self.cache.release(entry)

    def first_and_second(self, data: bytes) -> tuple[ScriptedEncoder, ScriptedEncoder]:
        """The encoder that is asked first for an item, and the other."""
        first, second, *_ = self.by_rank(data)
        return first, second

    def by_rank(self, data: bytes) -> list[ScriptedEncoder]:
        """The encoders in the order in which they are asked for an item."""
        identity = key_of(data)
        return sorted(self.encoders, key=lambda e: hashlib.sha256(identity + e.address.encode()).digest())


async def eventually(holds: Callable[[], object]) -> None:
    await waiting.eventually(holds, "what the test waits for")


async def settled(entry: CacheEntry) -> None:
    await eventually(lambda: entry.error is not None or entry.complete)


def request(*files: bytes, deadline: float | None = None, salt: str = "salt") -> Request:
    media = tuple(MediaItem(Modality.IMAGE, data, field=f"here[{n}]", index=n) for n, data in enumerate(files))
    return Request(
        "name", TextPrompt("x"), media, SamplingParams(max_tokens=1), salt=salt, priority=3, deadline=deadline
    )


@asynccontextmanager
async def bench(
    *encoders: ScriptedEncoder,
    rows: int = 64,
    silence: float = 30.0,
    patience: float = 1.0,
    budget: RetryBudget | None = None,
    header_seconds: float = 30.0,
    streams: int = 2048,
    **options: Any,
) -> AsyncIterator[Bench]:
    """Starts servers for the encoders, which take so many `streams` of one connection and with which `options` are
    agreed; asserts at the end that no call and no place is left."""
    async with AsyncExitStack() as stack:
        for encoder in encoders:
            limits = (*PINGS, ("grpc.max_concurrent_streams", streams))
            server = grpc.aio.server(interceptors=[CallInterceptor(AcceptedTokens())], options=limits)
            v1.add_EncoderServiceServicer_to_server(_Driven(encoder), server)
            encoder.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
            encoder.server = server
            await server.start()
            stack.push_async_callback(server.stop, None)
        cache = EncoderCache(rows * LAYOUT.row_bytes, LAYOUT)
        stack.callback(cache.close)
        settings = EncoderSettings(digest=DIGEST, layout=LAYOUT, merge=2, timeout=30.0, silence=silence, **options)
        pool = EncoderPool([encoder.address for encoder in encoders], settings)
        await pool.start()
        stack.push_async_callback(pool.stop)
        yield Bench(list(encoders), cache, pool, RowReceiver(pool, cache, patience, budget, header_seconds))
        await eventually(lambda: not any(encoder.open for encoder in encoders))
        await eventually(lambda: not any(replica.in_flight for replica in pool.replicas))
        cache.check_idle()


class _Driven(v1.EncoderServiceServicer):
    """A scripted encoder behind the frame, which drives generators; the script itself writes to the stream."""

    def __init__(self, script: ScriptedEncoder) -> None:
        self._script = script

    async def GetInfo(self, request: Any, context: Any) -> v1.EncoderServiceGetInfoResponse:
        return await self._script.GetInfo(request, context)

    async def GetLoad(self, request: Any, context: Any) -> v1.EncoderServiceGetLoadResponse:
        return await self._script.GetLoad(request, context)

    async def Encode(self, request: Any, context: Any) -> AsyncIterator[v1.EncodeResponse]:
        await self._script.Encode(request, context)
        if False:
            yield v1.EncodeResponse()


async def hangs_before_the_header(call: Call) -> None:
    await asyncio.Event().wait()


async def hangs_after_the_header(call: Call) -> None:
    await call.header()
    await asyncio.Event().wait()


async def breaks_in_the_middle(call: Call) -> None:
    await call.header()
    await call.rows(0)
    await call.breaks()


async def damages_rows(call: Call) -> None:
    await call.header()
    await call.rows(0)
    await call.rows(RUN, data=b"\0" * RUN * 64)


async def is_full(call: Call) -> None:
    status = v1.Status(code=8, message="full", reason="QUEUE_FULL", retry_after_ms=200)
    await call.context.write(v1.EncodeResponse(error=v1.EncodeError(status=status)))
