"""How a client reaches a service: TLS, token, message sizes, keepalive. It knows no message and no RPC."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

from twinlens import credentials
from twinlens._version import __version__

MAX_MESSAGE_BYTES = 70 * 1024 * 1024
"""The largest message either way: a 64 MiB video and room for the rest of its request."""

REQUEST_BYTES = "twinlens-request-bytes"
"""The metadata that tells a service the size of a request before it is sent."""

_LONGEST = 1e9
"""Seconds: 31 years."""

_SOCKETS = ("unix:", "unix-abstract:")

_SERVICE_CONFIG = json.dumps({"loadBalancingConfig": [{"round_robin": {}}]})

_OPTIONS: list[tuple[str, str | int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # The transport's own ping timeout, a minute by default, decides when a silent peer is given up.
    ("grpc.http2.ping_timeout_ms", 5_000),
    # A name is resolved again once a connection is lost. gRPC's default is at most once in half a minute, in which all
    # known addresses may have been replaced.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    ("grpc.service_config", _SERVICE_CONFIG),
    # With gRPC's own retries, a stream read by a thread may wait forever, whatever its deadline, if the service stops
    # as the call reaches it: one in 20 did (1.70 to 1.85). Without them the caller gets UNAVAILABLE.
    ("grpc.enable_retries", 0),
    ("grpc.primary_user_agent", f"twinlens/{__version__}"),
]


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS settings, as PEM files. `Tls()` trusts the public roots.

    `ca_file` holds the roots to trust instead. `cert_file` and `key_file`, given together, are a client certificate.
    `server_name` is the name expected in the service's certificate if it is not the address's host.
    """

    ca_file: str | Path | None = None
    cert_file: str | Path | None = None
    key_file: str | Path | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file must be given together")

    def credentials(self) -> grpc.ChannelCredentials:
        """Reads the files. Raises OSError for one that cannot be read, ValueError for one that holds something else."""
        self.check(lambda field: field)
        return grpc.ssl_channel_credentials(
            root_certificates=_read(self.ca_file),
            private_key=_read(self.key_file),
            certificate_chain=_read(self.cert_file),
        )

    def check(self, named: Callable[[str], str]) -> None:
        """Raises as `credentials`; `named` turns a field's name into the one used in messages."""
        if self.ca_file is not None:
            credentials.certificates(self.ca_file, named("ca_file"))
        if self.cert_file is not None and self.key_file is not None:
            credentials.certificates(self.cert_file, named("cert_file"))
            credentials.private_key(self.key_file, named("key_file"))
            credentials.check_pair(self.cert_file, self.key_file, named("cert_file"), named("key_file"))


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A service's address, and how to connect to it.

    `address` is anything that gRPC resolves: host:port, dns:///name:port, unix:/path. `token` is sent with every call
    as `authorization: Bearer …`; without TLS it is refused (ValueError) for other machines, unless `plaintext_token`
    says that the network is trusted. `tls` None means plaintext. A proxy from the environment (`https_proxy`,
    `http_proxy`) is only used for other machines.
    """

    address: str
    token: str | None = None
    tls: Tls | None = None
    plaintext_token: bool = False

    def __post_init__(self) -> None:
        if not self.address:
            raise ValueError("an address is needed, for example 127.0.0.1:7002")
        if self.address.startswith(("http://", "https://")):
            raise ValueError(f"an address is HOST:PORT: {self.address} is a web address")
        if not self.address.startswith(_SOCKETS) and _port(self.address) > 65535:  # gRPC would take another one
            raise ValueError(f"{self.address} has an impossible port")
        if self.token and not (self.token.isascii() and self.token.isprintable()):
            raise ValueError("a token is one line of ASCII characters")
        if self.token and self.tls is None and not self.plaintext_token and not is_local(self.address):
            raise ValueError(
                "a token would cross the network unencrypted: use TLS, or plaintext_token for a network that you trust"
            )

    @property
    def names_port(self) -> bool:
        """Whether the address has a port, or is a socket; gRPC uses 443 otherwise."""
        return self.address.startswith(_SOCKETS) or (":" in self.address and _port(self.address) > 0)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata of every call."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()

    def open(self) -> grpc.Channel:
        """A channel for threads. Nothing connects until the first call."""
        if self.tls is None:
            return grpc.insecure_channel(self.address, options=self._options())
        return grpc.secure_channel(self.address, self.tls.credentials(), options=self._options())

    def open_async(self) -> grpc.aio.Channel:
        """A channel for the running event loop. Nothing connects until the first call."""
        if self.tls is None:
            return grpc.aio.insecure_channel(self.address, options=self._options())
        return grpc.aio.secure_channel(self.address, self.tls.credentials(), options=self._options())

    def _options(self) -> list[tuple[str, str | int]]:
        options = [*_OPTIONS, ("grpc.enable_http_proxy", 0 if is_local(self.address) else 1)]
        if self.tls is not None and self.tls.server_name is not None:
            options.append(("grpc.ssl_target_name_override", self.tls.server_name))
        return options


def capped(timeout: float) -> float:
    """Seconds as gRPC can take them: a deadline centuries from now, or none at all, it takes for one that has passed.

    >>> capped(2.5), capped(float("inf"))
    (2.5, 1000000000.0)
    """
    return min(timeout, _LONGEST)


def is_local(address: str) -> bool:
    """Whether an address can only mean this machine.

    >>> is_local("127.0.0.1:7002"), is_local("dns:///localhost:7002"), is_local("encoder:7001")
    (True, True, False)
    """
    if address.startswith(_SOCKETS):
        return True
    host = address.removeprefix("dns:").removeprefix("ipv4:").removeprefix("ipv6:").lstrip("/")
    host = host.rpartition(":")[0] or host
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _port(address: str) -> int:
    """The port that an address ends with; 0 where it names none.

    >>> _port("127.0.0.1:7002"), _port("dns:///encoder"), _port("[::1]:99999")
    (7002, 0, 99999)
    """
    port = address.rpartition(":")[2]
    return int(port) if port.isdecimal() else 0


def _read(path: str | Path | None) -> bytes | None:
    return None if path is None else Path(path).read_bytes()
