"""A proxy between the two services that speaks gRPC and lies: it flips, drops, doubles, reorders, delays and cuts."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from common.rpc.server import PINGS

_SERVICE = "/twinlens.v1.EncoderService/"
_LARGE = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class LyingProxy:
    """Passes every call on to an encoder. What an `Encode` stream says is spoilt with probability `share` an event;
    `done` counts what was done to it."""

    def __init__(self, target: str, seed: int, share: float) -> None:
        self.done: Counter[str] = Counter()
        self.share = share
        self.address = ""
        self._target = target
        self._random = random.Random(seed)

    @contextmanager
    def running(self) -> Iterator[LyingProxy]:
        """Serves in a thread of its own for the length of the block."""
        loop, ready = asyncio.new_event_loop(), threading.Event()
        over = asyncio.Event()

        async def serve() -> None:
            async with grpc.aio.insecure_channel(self._target, options=_LARGE) as channel:
                server = grpc.aio.server(options=[*_LARGE, *PINGS])
                server.add_generic_rpc_handlers((_Handlers(self, channel),))
                self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
                await server.start()
                ready.set()
                await over.wait()
                await server.stop(None)

        thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
        thread.start()
        try:
            assert ready.wait(180)
            yield self
        finally:
            loop.call_soon_threadsafe(over.set)
            thread.join()
            loop.close()

    async def spoilt(self, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """The events of a stream, and what becomes of them."""
        held: list[bytes] = []
        async for event in events:
            if self._random.random() >= self.share:
                yield event
            else:
                async for other in self._spoil(event, held):
                    yield other
            while held and self._random.random() < 0.5:
                yield held.pop()
        for event in held:
            yield event

    async def _spoil(self, event: bytes, held: list[bytes]) -> AsyncIterator[bytes]:
        how = self._random.choice(["flip", "flip", "drop", "double", "reorder", "delay", "truncate", "cut"])
        self.done[how] += 1
        if how == "flip":
            spoilt = bytearray(event)
            spoilt[self._random.randrange(len(event))] ^= 1 << self._random.randrange(8)
            yield bytes(spoilt)
        elif how == "double":
            yield event
            yield event
        elif how == "reorder":
            held.append(event)
        elif how == "delay":
            await asyncio.sleep(self._random.random() * 0.3)
            yield event
        elif how == "truncate":
            yield event[: self._random.randrange(len(event))]
        elif how == "cut":
            raise _Cut


class _Cut(Exception):
    """The stream ends here."""


class _Handlers(grpc.GenericRpcHandler):
    """Every method, with messages as bytes."""

    def __init__(self, proxy: LyingProxy, channel: grpc.aio.Channel) -> None:
        self._proxy = proxy
        self._channel = channel

    def service(self, details: Any) -> Any:
        method = details.method

        async def unary(request: bytes, context: Any) -> bytes:
            try:
                return await self._channel.unary_unary(method)(request, metadata=context.invocation_metadata())
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details() or "", tuple(error.trailing_metadata() or ()))
                raise

        async def stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
            call = self._channel.unary_stream(method)(request, metadata=context.invocation_metadata())
            try:
                async for event in self._proxy.spoilt(call):
                    yield event
            except _Cut:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details() or "", tuple(error.trailing_metadata() or ()))
            finally:
                call.cancel()

        if method == f"{_SERVICE}Encode":
            return grpc.unary_stream_rpc_method_handler(stream)
        return grpc.unary_unary_rpc_method_handler(unary)
