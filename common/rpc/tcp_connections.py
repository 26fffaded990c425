"""How many bytes the kernel has received for each connection of this process. gRPC hands over a message when it is
complete, and does not tell what it holds until then; the bytes received on a socket are a bound. Frames with a single
byte, which take many times their content in memory, count with their headers."""

from __future__ import annotations

import functools
import ipaddress
import socket
import struct
from pathlib import Path
from urllib.parse import unquote

_INFO_BYTES = 136
_RECEIVED_AT = 128  # tcpi_bytes_received of struct tcp_info, an unsigned number of 64 bits

Address = tuple[str, int]


class TcpConnections:
    """This process's TCP connections by their remote end. A descriptor may be reused at any time, so its owner is
    checked each time."""

    def __init__(self) -> None:
        self._found: dict[Address, int] = {}
        self._seen: dict[int, Address | None] = {}

    def received(self, far: Address) -> int | None:
        """Bytes received from there since the connection began; None if there is no such connection, or the kernel does
        not tell."""
        descriptor = self._found.get(far)
        if descriptor is not None:
            end, received = _look(descriptor)
            if end == far:
                return received
        descriptor = self._search(far)
        return None if descriptor is None else _look(descriptor)[1]

    def _search(self, far: Address) -> int | None:
        """Looks through the descriptors that are new since the last time, then through all of them."""
        for known in (set(self._seen), set[int]()):
            present = _descriptors()
            for gone in set(self._seen) - present:
                self._found.pop(self._seen.pop(gone) or ("", 0), None)
            for descriptor in present - known:
                end = self._seen[descriptor] = _look(descriptor)[0]
                if end is not None:
                    self._found[end] = descriptor
            if far in self._found and _look(self._found[far])[0] == far:
                return self._found[far]
        return None


@functools.lru_cache(4096)
def remote_address(peer: str) -> Address | None:
    """What gRPC calls a peer, as (host, port); None for one that is not on a TCP connection.

    >>> remote_address("ipv4:127.0.0.1:40000"), remote_address("ipv6:%5B::1%5D:40000"), remote_address("unix:/socket")
    (('127.0.0.1', 40000), ('::1', 40000), None)
    """
    kind, _, rest = peer.partition(":")
    host, _, port = unquote(rest).rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    return _address(host.strip("[]"), int(port))


@functools.lru_cache(4096)
def _address(host: str, port: int) -> Address | None:
    """One spelling for each address: of IPv4 inside IPv6, the inner one; no zone."""
    try:
        ip = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    inner = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return str(inner or ip), port


def _descriptors() -> set[int]:
    try:
        return {int(each.name) for each in Path("/proc/self/fd").iterdir()}
    except OSError:
        return set()


def _look(descriptor: int) -> tuple[Address | None, int | None]:
    """The remote end of a descriptor, if it is a TCP connection, and the bytes received."""
    try:
        one = socket.socket(fileno=descriptor)
    except OSError:
        return None, None
    try:
        if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_STREAM:
            return None, None
        host, port = one.getpeername()[:2]
        info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    except OSError:
        return None, None
    finally:
        one.detach()  # it is gRPC's, or somebody else's
    whole = len(info) == _INFO_BYTES
    return _address(host, port), struct.unpack_from("=Q", info, _RECEIVED_AT)[0] if whole else None
