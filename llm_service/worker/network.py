"""Which network interface leads to another host: what Gloo and NCCL want to be told."""

from __future__ import annotations

import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915


def interface_towards(host: str, port: int) -> str:
    """The name of the interface that packets to a host leave by, such as eth0; lo towards this host itself.

    Raises OSError where there is no way to it.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # nothing is sent: the kernel looks the route up
        own = str(probe.getsockname()[0])
    for _, name in socket.if_nameindex():
        if _address(name) == own:
            return name
    return "lo" if own in ("127.0.0.1", "::1") else _first_but_lo()


def _address(interface: str) -> str:
    """An interface's IPv4 address; empty where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            found = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return ""
    return socket.inet_ntoa(found[20:24])


def _first_but_lo() -> str:
    return next((name for _, name in socket.if_nameindex() if name != "lo"), "lo")
