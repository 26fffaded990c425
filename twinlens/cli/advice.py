"""Advice about a failed call, in terms of command-line flags."""

from __future__ import annotations

import re
from collections.abc import Sequence

import grpc

from twinlens.channel import Endpoint
from twinlens.errors import NotReachableError, TwinlensError
from twinlens.obstacles import Obstacle

_UNEXPLAINED = {
    grpc.StatusCode.UNIMPLEMENTED: "; is it another service's address? Encoders listen on 7001, LLM services on 7002",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "; the pictures and videos of one request are too large together",
    grpc.StatusCode.DEADLINE_EXCEEDED: "; there was no answer in time",
    grpc.StatusCode.NOT_FOUND: "; the server has no service of that name",
}
"""What helps if gRPC itself ended a call."""

_BY_REASON = {
    "NO_ENCODER": "; `twinlens status` shows which encoders the LLM service knows",
    "UNKNOWN_MODEL": "; `twinlens status` shows which one is served",
}


def why(error: TwinlensError, endpoint: Endpoint, *, of_encoder: bool = False, sources: Sequence[str] = ()) -> str:
    """What happened and what helps, in one line. `of_encoder`: names the flags of `status` for encoders. `sources` are
    the files and addresses at the beginning of the message, one for each part."""
    prefix = "--encoder-" if of_encoder else "--"
    if not isinstance(error, NotReachableError):
        return f"{_named(error, sources)}{_remedy(error, prefix)}"
    if error.obstacle is None:
        return error.message
    remedy = _way_round(error.obstacle, endpoint, prefix)
    return f"{error.obstacle.value}; {remedy}" if remedy else error.obstacle.value


def _way_round(obstacle: Obstacle, endpoint: Endpoint, prefix: str) -> str:
    match obstacle:
        case Obstacle.NOBODY_LISTENS | Obstacle.UNKNOWN_HOST if not endpoint.names_port:
            return "an address is HOST:PORT, and this one names no port"
        case Obstacle.NOBODY_LISTENS:
            return "is it started? By default encoders listen on port 7001, LLM services on 7002"
        case Obstacle.CLOSED if endpoint.tls is None:
            return f"for TLS say {prefix}ca-file, or {prefix}tls where its certificate is a public one"
        case Obstacle.CLOSED if endpoint.tls is not None and endpoint.tls.cert_file:
            return f"it may not trust the certificate of {prefix}cert-file"
        case Obstacle.CLOSED:
            return f"for a client certificate say {prefix}cert-file and {prefix}key-file"
        case Obstacle.NO_TLS:
            flags = "--encoder-plaintext" if prefix != "--" else "no --tls, and none of the flags for certificates"
            return f"say {flags}"
        case Obstacle.UNTRUSTED:
            return f"{prefix}ca-file says which roots to trust"
        case Obstacle.OTHER_NAME:
            return f"{prefix}server-name says which name to expect"
        case Obstacle.NO_GRPC if endpoint.tls is None:
            return (
                f"where it is a proxy that wants TLS, say {prefix}ca-file, or {prefix}tls; a gateway's port is for HTTP"
            )
        case Obstacle.UNKNOWN_HOST | Obstacle.NO_GRPC | Obstacle.SILENT:
            return ""


def _named(error: TwinlensError, sources: Sequence[str]) -> str:
    """The error; a file or address that it is about stands in the place of the field that held it."""
    part = re.search(r"\.parts\[(\d+)\]\.media", error.field)
    if part is None or int(part[1]) >= len(sources):
        return str(error)
    return f"{error.reason or error.code.name}: {error.message} ({sources[int(part[1])]})"


def _remedy(error: TwinlensError, prefix: str) -> str:
    if error.code is grpc.StatusCode.UNAUTHENTICATED:
        return f"; {prefix}token-file" + (" or TWINLENS_TOKEN gives one" if prefix == "--" else " gives one")
    if not error.reason and error.code in _UNEXPLAINED:
        return _UNEXPLAINED[error.code]
    hint = f"; try again in {error.retry_after:g} s" if error.retry_after is not None else ""
    return hint + _BY_REASON.get(error.reason, "")
