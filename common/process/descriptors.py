"""The descriptors that a service starts with: the three standard streams, which may be closed or lead to a full disk,
and the limit of further ones."""

from __future__ import annotations

import contextlib
import os
import resource
import sys

_OUTPUT, _LAST = 1, 2
_FEWEST, _MOST = 64, 65_536


def prepare(program: str) -> None:
    """Called before anything is opened: redirects closed standard streams to nowhere, in children as well, and raises
    the limit of descriptors as far as allowed. If too few are free to start, ends the program with one line: where
    gRPC's threads find none, they end it by a signal.

    Otherwise the first files opened would get the numbers of closed streams: C libraries would write errors into a
    socket, and uvloop, which never closes these three, would abort. And many systems allow 1024 descriptors by default,
    fewer than a service's connections.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _LAST:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if most == resource.RLIM_INFINITY else min(most, _MOST)
    if resource.RLIM_INFINITY != allowed < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
    if (free := _count_free(_FEWEST)) < _FEWEST:
        sys.exit(
            f"{program}: only {free} more file descriptors may be opened, of at least {_FEWEST} to start: the limit of"
            f" {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} (ulimit -n) is too low"
        )


def _count_free(most: int) -> int:
    """How many descriptors can be opened, counted up to `most`."""
    opened: list[int] = []
    with contextlib.suppress(OSError):
        while len(opened) < most:
            opened.append(os.dup(_LAST))
    for descriptor in opened:
        os.close(descriptor)
    return len(opened)


def say(line: str) -> str:
    """Writes a line to standard output; returns why it could not be written, or nothing. It bypasses Python's buffer,
    which would be retried at exit."""
    try:
        os.write(_OUTPUT, f"{line}\n".encode())
    except OSError as error:
        return error.strerror or type(error).__name__
    return ""
