"""Addresses of this machine that a test knows before anybody listens there, or while nobody does any more. One that was
merely free once is the kernel's to give to whoever asks for any: to a service of another test, for example."""

from __future__ import annotations

import socket


def held_address() -> str:
    """`127.0.0.1:port`, where nobody listens, and where the kernel lets nobody listen who does not ask for that port,
    until this process ends. Whoever asks for it can have it, again and again: as all servers, we set SO_REUSEADDR."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    host, port = holder.getsockname()
    holder.detach()  # it stays bound, and is not closed when this object goes
    return f"{host}:{port}"
