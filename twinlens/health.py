"""Asks a gRPC server's standard health service, without the package that has its stubs.

The protocol is `grpc.health.v1`: the request's field 1 is a service name, the response's field 1 an enum. Both take a
few bytes, which are encoded and decoded here.
"""

from __future__ import annotations

from enum import IntEnum
from typing import cast

import grpc

from twinlens.channel import Endpoint, capped
from twinlens.errors import FailedCall, error_from

_METHOD = "/grpc.health.v1.Health/Check"


class Health(IntEnum):
    """A server's answer about a service; numbers are the protocol's."""

    UNKNOWN = 0
    SERVING = 1
    NOT_SERVING = 2
    SERVICE_UNKNOWN = 3


def check(endpoint: Endpoint, service: str = "", *, timeout: float = 5.0) -> Health:
    """How a service is, within `timeout` seconds; "" asks for the server as a whole. Raises TwinlensError."""
    request = _request(service)
    with endpoint.open() as channel:
        call: grpc.UnaryUnaryMultiCallable[bytes, Health]
        call = channel.unary_unary(_METHOD, response_deserializer=_response)
        try:
            return call(request, timeout=capped(timeout), metadata=endpoint.metadata)
        except grpc.RpcError as error:
            raise error_from(cast(FailedCall, error)) from None


def _request(service: str) -> bytes:
    """Field 1, length-delimited: a tag, the length, the name. No service of ours needs 128 bytes."""
    name = service.encode()
    if len(name) > 127:
        raise ValueError("a service name has at most 127 bytes")
    return bytes((0x0A, len(name))) + name if name else b""


def _response(message: bytes) -> Health:
    """Field 1, a varint: a tag and the value. An absent field is zero; anything else is a status that we do
    not know.

    >>> _response(bytes((0x08, 1)))
    <Health.SERVING: 1>
    """
    if len(message) == 2 and message[0] == 0x08 and message[1] <= max(Health):
        return Health(message[1])
    return Health.UNKNOWN
