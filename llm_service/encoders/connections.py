"""The connections to one encoder: streams go over the one that has the fewest, calls about itself over one of their
own, where they wait behind nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from common import tracing
from common.errors import Unavailable
from common.rpc.channel import ChannelSecurity, open_channel
from common.rpc.request_budget import STATED
from llm_service.encoders.stream import UNREACHABLE, Call, Event, read_event
from twinlens.v1.encoder_pb2_grpc import EncoderServiceStub

_ENCODE = "/twinlens.v1.EncoderService/Encode"


@dataclass(slots=True)
class _Connection:
    """One connection, and how many streams are open on it."""

    channel: grpc.aio.Channel
    encode: grpc.aio.UnaryStreamMultiCallable[bytes, Event]
    open: int = 0


class Connections:
    """Long-lived connections to the encoder at `address`, whose certificate must have `name`; `count` are for streams.

    Raises OSError where the files of a certificate cannot be read.
    """

    def __init__(self, address: str, name: str, security: ChannelSecurity, count: int) -> None:
        self._security = security
        self._connections = [_connection(open_channel(address, security, name=name)) for _ in range(count)]
        self._own = open_channel(address, security, name=name)
        self.stub = EncoderServiceStub(self._own)

    def __len__(self) -> int:
        return len(self._connections)

    def connect(self) -> None:
        """Begins to connect those for streams that are not."""
        for connection in self._connections:
            connection.channel.get_state(try_to_connect=True)

    async def connected(self) -> None:
        """Returns when streams can go over each. Raises UsageError where they are being closed."""
        for connection in self._connections:
            await connection.channel.channel_ready()

    @contextmanager
    def encode(self, request: bytes, timeout: float) -> Iterator[Call]:
        """Opens a stream for a serialized EncodeRequest, with `timeout` in seconds; it is cancelled when the block is
        left early. The encoder is told how large the request is, so that one without room says so before it is sent.

        Raises Unavailable where the connections are being closed: streams that are open may go on, no other begins.
        """
        connection = min(self._connections, key=lambda connection: connection.open)
        try:
            metadata = (*self._security.metadata, *tracing.outgoing(), (STATED, str(len(request))))
            call: Call = connection.encode(request, timeout=timeout, metadata=metadata)
        except grpc.aio.UsageError as error:
            raise Unavailable("the encoder could not be reached", reason=UNREACHABLE) from error
        connection.open += 1
        try:
            yield call
        finally:
            connection.open -= 1
            call.cancel()

    async def close(self, grace: float | None) -> None:
        """Closes all connections; calls under way have `grace` seconds to end."""
        channels = [self._own, *(connection.channel for connection in self._connections)]
        await asyncio.gather(*(channel.close(grace) for channel in channels))


def _connection(channel: grpc.aio.Channel) -> _Connection:
    encode: Any = channel.unary_stream(_ENCODE, response_deserializer=read_event)
    return _Connection(channel, encode)
