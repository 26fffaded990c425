"""What to do about a call that failed, in the flags of the command line."""

from __future__ import annotations

import grpc

from twinlens.channel import Endpoint
from twinlens.errors import NotReachableError, TwinlensError
from twinlens.obstacles import Obstacle


def why(error: TwinlensError, endpoint: Endpoint, *, of_encoder: bool = False) -> str:
    """What happened and what helps, in one line. `of_encoder`: the flags of `status` for encoders are named."""
    prefix = "--encoder-" if of_encoder else "--"
    if not isinstance(error, NotReachableError):
        return f"{error}{_remedy(error, prefix)}"
    if error.obstacle is None:
        return error.message
    remedy = _way_round(error.obstacle, endpoint, prefix)
    return f"{error.obstacle.value}; {remedy}" if remedy else error.obstacle.value


def _way_round(obstacle: Obstacle, endpoint: Endpoint, prefix: str) -> str:
    match obstacle:
        case Obstacle.NOBODY_LISTENS if not endpoint.names_port:
            return "an address is HOST:PORT, and this one names no port"
        case Obstacle.NOBODY_LISTENS:
            return "is it started? Encoders listen on port 7001, LLM services on 7002, unless told otherwise"
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
            return f"where it is a proxy that wants TLS, say {prefix}ca-file, or {prefix}tls"
        case Obstacle.UNKNOWN_HOST | Obstacle.NO_GRPC:
            return ""


def _remedy(error: TwinlensError, prefix: str) -> str:
    if error.code is grpc.StatusCode.UNAUTHENTICATED:
        return f"; {prefix}token-file" + (" or TWINLENS_TOKEN gives one" if prefix == "--" else " gives one")
    if error.code is grpc.StatusCode.UNIMPLEMENTED and not error.reason:
        return "; is this the address of another service? Encoders listen on port 7001, LLM services on 7002"
    if error.code is grpc.StatusCode.RESOURCE_EXHAUSTED and not error.reason:  # gRPC's own word for a message's size
        return "; the pictures and videos of one request are too large together"
    hint = f"; try again in {error.retry_after:g} s" if error.retry_after is not None else ""
    if error.reason == "NO_ENCODER":
        hint += "; `twinlens status` shows which encoders the LLM service knows"
    return hint
