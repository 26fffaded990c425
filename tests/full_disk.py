"""A disk that is full, as far as this process and those that it starts meanwhile can tell."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_room_for_files() -> Iterator[None]:
    """Inside the block a write to a file fails: "File too large"; one to a pipe or a socket goes on."""
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))
