"""The local link: a Unix socket over which a process is handed another's shared memory, to read. Reaching it proves a
shared host, since the kernel connects nobody else. The connection stays open: its end tells each side that the other is
gone. A name with @ is in the abstract name space, another is a file in a folder that both sides were given."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

SECRET_BYTES = 32
GRANT_BYTES = 16
RELEASE = struct.Struct("<Q")
"""After the greeting the reader says only this: the number of a lease that it no longer needs."""

_PREFIX = "twinlens-"
_CREDENTIALS = struct.Struct("3i")
_GREETING_SECONDS = 1.0
_BACKLOG = 64


@dataclass(frozen=True, slots=True)
class SharedArena:
    """What a reader gets: a grant that names the connection, and descriptors of the arena and of the lease board.

    Whoever receives it closes the descriptors.
    """

    grant: bytes
    arena: int
    board: int


def listen(folder: str) -> tuple[socket.socket, str]:
    """A listening socket and its name; in `folder`, or in the abstract name space where that is empty.

    Raises OSError where the folder cannot be used, and says so. `unlink` removes what it leaves in the folder.
    """
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    name = f"{_PREFIX}{secrets.token_hex(8)}"
    try:
        if folder:
            _sweep(Path(folder))
            _listen_in(Path(folder), name, server)
        else:
            name = f"@{name}"
            server.bind(f"\0{name[1:]}")
            server.listen(_BACKLOG)
        server.setblocking(False)
    except BaseException:
        server.close()
        raise
    return server, name


def _listen_in(folder: Path, name: str, server: socket.socket) -> None:
    """The file gets its name when somebody listens behind it: until then another's `_sweep` would take it for dead."""
    hidden = folder / f".{name}"
    try:
        server.bind(str(hidden))
    except OSError as error:
        raise OSError(f"no local socket can be made in {folder} (--local-dir): {error.strerror or error}") from error
    try:
        server.listen(_BACKLOG)
        hidden.rename(folder / name)
    except OSError:
        hidden.unlink()
        raise


def unlink(folder: str, name: str) -> None:
    """Removes a socket's file."""
    if not name.startswith("@"):
        Path(folder, name).unlink(missing_ok=True)


def _sweep(folder: Path) -> None:
    """Removes the sockets of services that were killed: nobody listens there."""
    for path in folder.glob(f"{_PREFIX}*"):
        with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
            try:
                probe.settimeout(_GREETING_SECONDS)
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError:
                continue


def connect(name: str, folder: str, secret: bytes) -> tuple[socket.socket, SharedArena]:
    """Greets the service behind a name and takes what it hands over. Blocks for a few seconds at most.

    The name came over the network, so it may choose nothing but a socket of this project: an abstract one, or a file
    that lies in our own `folder`. Raises OSError where nothing can be had: another host, another user, a wrong secret.
    """
    plain = name.removeprefix("@")
    if not plain.startswith(_PREFIX) or "/" in plain or "\0" in plain:
        raise OSError("this is no name of a local socket")
    if not name.startswith("@") and not folder:
        raise OSError("no folder of local sockets was given")
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        link.settimeout(_GREETING_SECONDS)
        link.connect(f"\0{plain}" if name.startswith("@") else str(Path(folder) / plain))
        if not same_user(link):
            raise OSError("the local socket belongs to another user")
        link.sendall(secret)  # which only those know who may call the service
        grant, descriptors, flags, _ = socket.recv_fds(link, GRANT_BYTES, 2, socket.MSG_CMSG_CLOEXEC)
        if len(grant) != GRANT_BYTES or len(descriptors) != 2 or flags & socket.MSG_CTRUNC:
            for descriptor in descriptors:
                os.close(descriptor)
            raise OSError("the service sent no memory")
        link.setblocking(False)
    except BaseException:
        link.close()
        raise
    return link, SharedArena(grant, *descriptors)


def hand_over(link: socket.socket, shared: SharedArena) -> None:
    """Sends what a reader gets over a connection that has greeted; small enough never to block."""
    socket.send_fds(link, [shared.grant], [shared.arena, shared.board])


def same_user(link: socket.socket) -> bool:
    """Whether the other end is a process of our own user."""
    size = _CREDENTIALS.size
    _, user, _ = _CREDENTIALS.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return bool(user == os.geteuid())
