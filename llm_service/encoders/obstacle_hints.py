"""Hints why an encoder does not answer, and which option of this service may help."""

from __future__ import annotations

import grpc

from common.rpc.channel import ChannelSecurity
from twinlens.obstacles import Obstacle, obstacle_in


def hint(code: grpc.StatusCode, details: str, security: ChannelSecurity) -> str:
    """Why a check of an encoder failed, and which option of this service may help; for our own log."""
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return "it needs a token, or a different one: --encoder-token-file"
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return "it is not an encoder: by default encoders listen on port 7001, LLM services on 7002"
    if code is not grpc.StatusCode.UNAVAILABLE or (obstacle := obstacle_in(details)) is None:
        return f"{code.name}: {details}"
    remedy = _option(obstacle, security)
    return f"{obstacle.value}: {remedy}" if remedy else obstacle.value


def _option(obstacle: Obstacle, security: ChannelSecurity) -> str:
    match obstacle:
        case Obstacle.CLOSED if not security.ca:
            return "--encoder-ca turns TLS on"
        case Obstacle.CLOSED if not security.cert:
            return "--encoder-cert and --encoder-key show a certificate"
        case Obstacle.CLOSED:
            return "it may not trust the certificate of --encoder-cert"
        case Obstacle.NO_TLS:
            return "without --encoder-ca no TLS is used"
        case Obstacle.UNTRUSTED:
            return "--encoder-ca says which roots to trust"
        case Obstacle.OTHER_NAME:
            return "it must name the host that --encoders names"
        case Obstacle.NOBODY_LISTENS | Obstacle.UNKNOWN_HOST | Obstacle.NO_GRPC | Obstacle.SILENT:
            return ""
