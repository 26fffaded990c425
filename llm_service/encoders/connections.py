"""The connections to one encoder: streams use the one with the fewest, and calls about the encoder itself one of their
own, where they never queue."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from common.errors import Unavailable
from common.rpc.channel import ChannelSecurity
from common.rpc.channel_set import ChannelSet
from common.rpc.request_budget import STATED
from common.telemetry import tracing
from llm_service.encoders.stream import UNREACHABLE, Call, Event, read_event
from twinlens.v1.encoder_pb2_grpc import EncoderServiceStub

_ENCODE = "/twinlens.v1.EncoderService/Encode"


@dataclass(slots=True)
class _Connection:
    """One connection, and how many streams are open on it."""

    encode: grpc.aio.UnaryStreamMultiCallable[bytes, Event]
    open: int = 0


class Connections:
    """Long-lived connections to the encoder at `address`, whose certificate must have `name`; `count` are for streams.

    Raises OSError if the files of a certificate cannot be read.
    """

    def __init__(self, address: str, name: str, security: ChannelSecurity, count: int) -> None:
        self._security = security
        self._channels = ChannelSet(address, name, security, count)
        self._connections = [_connection(channel) for channel in self._channels.calls]
        self.stub = EncoderServiceStub(self._channels.own)

    def __len__(self) -> int:
        return len(self._connections)

    def connect(self) -> None:
        """Connects the ones for streams."""
        self._channels.connect()

    async def connected(self) -> None:
        """Waits until all those for streams are connected. Raises UsageError if they are being closed."""
        await self._channels.connected()

    @contextmanager
    def encode(self, request: bytes, timeout: float) -> Iterator[Call]:
        """Opens a stream for a serialized EncodeRequest, with `timeout` in seconds; it is cancelled if the context is
        left early. The request's size is announced, so that an encoder without room can refuse before it is sent.

        Raises Unavailable if the connections are being closed: open streams may continue, new ones cannot.
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
        await self._channels.close(grace)


def _connection(channel: grpc.aio.Channel) -> _Connection:
    encode: Any = channel.unary_stream(_ENCODE, response_deserializer=read_event)
    return _Connection(encode)
