"""What the kernel has received for a connection, found by its far end."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from common.rpc.tcp_connections import Address, TcpConnections, remote_address
from tests.waiting import until


@contextmanager
def connected(host: str = "127.0.0.1") -> Iterator[tuple[socket.socket, socket.socket, Address]]:
    """Our end, the other one, and how ours sees that."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with (
        socket.create_server((host, 0), family=family) as listening,
        socket.create_connection(listening.getsockname()[:2]) as theirs,
        listening.accept()[0] as ours,
    ):
        yield ours, theirs, (host, theirs.getsockname()[1])


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_bytes_count_whether_or_not_they_were_read(host: str) -> None:
    connections = TcpConnections()
    with connected(host) as (ours, theirs, far):
        assert connections.received(far) == 0
        theirs.sendall(bytes(5000))
        until(lambda: connections.received(far) == 5000, "all has come")
        ours.recv(4000)
        assert connections.received(far) == 5000


def test_a_connection_that_is_gone_has_nothing_and_its_descriptor_may_be_anothers() -> None:
    connections = TcpConnections()
    with connected() as (_, theirs, far):
        theirs.sendall(bytes(10))
        until(lambda: connections.received(far) == 10, "all has come")
    assert connections.received(far) is None
    with connected() as (_, theirs, other):
        theirs.sendall(bytes(20))
        until(lambda: connections.received(other) == 20, "all has come")
        assert connections.received(far) is None


@pytest.mark.parametrize(
    ("peer", "far"),
    [
        ("ipv4:10.0.0.1:80", ("10.0.0.1", 80)),
        ("ipv6:%5B2001:db8::1%5D:443", ("2001:db8::1", 443)),
        ("ipv6:[fe80::1%25eth0]:443", ("fe80::1", 443)),
        ("ipv6:%5B::ffff:10.0.0.1%5D:80", ("10.0.0.1", 80)),
        ("unix:/a/socket", None),
        ("ipv4:nonsense", None),
        ("", None),
    ],
)
def test_a_peer_is_known_by_one_name_however_grpc_spells_it(peer: str, far: Address | None) -> None:
    assert remote_address(peer) == far
