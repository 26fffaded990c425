"""The descriptors that a service begins with: the three standard streams, one or all of which may be closed or lead to
a disk that is full, and how many more there may be."""

from __future__ import annotations

import os
import resource

_OUTPUT, _LAST = 1, 2
_MOST = 65_536


def prepare() -> None:
    """Before anything is opened: whichever of the three is closed leads nowhere from now on, in children as well, and
    as many descriptors may be open as this process is allowed to allow itself.

    Else what is opened first would have the number of one that is closed. So a socket would be sent what C libraries
    write to standard error, and uvloop, which closes none of the three, would abort the process. And many systems allow
    1024 descriptors to programs that do not ask, fewer than the connections that a service takes.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _LAST:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if most == resource.RLIM_INFINITY else min(most, _MOST)
    if resource.RLIM_INFINITY != allowed < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def say(line: str) -> str:
    """Writes a line to standard output; returns why it could not be written, or nothing. It goes past Python's buffer,
    which would be tried again when the process ends."""
    try:
        os.write(_OUTPUT, f"{line}\n".encode())
    except OSError as error:
        return error.strerror or type(error).__name__
    return ""
