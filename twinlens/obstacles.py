"""What is between a client and a service, derived from gRPC's text about a failed connection."""

from __future__ import annotations

from enum import Enum


class Obstacle(Enum):
    """Why a service could not be reached; the value says it in words."""

    NOBODY_LISTENS = "nothing listens there"
    UNKNOWN_HOST = "no host has that name"
    CLOSED = "the connection was closed at once, as if TLS, or a client certificate, is required"
    NO_TLS = "what listens there does not speak TLS"
    UNTRUSTED = "its certificate is not signed by trusted roots"
    OTHER_NAME = "its certificate is for another name"
    NO_GRPC = "what listens there does not speak gRPC"
    SILENT = "nothing answers there, as behind a firewall or on a dead host"


_SAID = {
    "Connection refused": Obstacle.NOBODY_LISTENS,
    "hostname lookup error": Obstacle.UNKNOWN_HOST,
    "Domain name not found": Obstacle.UNKNOWN_HOST,
    "WRONG_VERSION_NUMBER": Obstacle.NO_TLS,
    "CERTIFICATE_VERIFY_FAILED": Obstacle.UNTRUSTED,
    "Hostname Verification Check failed": Obstacle.OTHER_NAME,
    "Failed parsing HTTP/2": Obstacle.NO_GRPC,
    "Socket closed": Obstacle.CLOSED,
    "Connection timed out": Obstacle.SILENT,
    "connect() timed out": Obstacle.SILENT,
    "tcp handshaker shutdown": Obstacle.SILENT,
    "before receiving SETTINGS frame": Obstacle.SILENT,
    "ping timeout": Obstacle.SILENT,
    "Connection reset by peer": Obstacle.CLOSED,
}
"""Phrases in gRPC's text. gRPC does not promise these; if they change, its own text is shown."""


def obstacle_in(details: str) -> Obstacle | None:
    """The obstacle that gRPC's text tells of, or None.

    >>> obstacle_in("connections to all backends failing; last error: … Connection refused")
    <Obstacle.NOBODY_LISTENS: 'nothing listens there'>
    """
    return next((obstacle for said, obstacle in _SAID.items() if said in details), None)
