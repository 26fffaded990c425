"""Compiles kernels and keeps them on disk: `python -m llm_service.layers.cpu.compile MODULE:KEY…`, started by the
process that wants them, never by hand. It takes only the time that nobody else wants; of several with one folder one
compiles for all. A kernel is kept in one move: one that is killed has lost a kernel at most."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from common.processes import die_with_parent, leave_signals_to_parent
from llm_service.layers.cpu.jit import find

_NICE = 19


def main(names: list[str]) -> None:
    """Makes sure that all of them are kept."""
    die_with_parent()
    leave_signals_to_parent()
    os.nice(_NICE)
    kernels = [find(name) for name in names]
    with _alone({folder for kernel in kernels if (folder := kernel.folder) is not None}):
        for kernel in kernels:
            kernel.compile()


@contextlib.contextmanager
def _alone(folders: set[Path]) -> Iterator[None]:
    """A block that one process at a time is in, for each of these folders; any, where they cannot be locked."""
    with contextlib.ExitStack() as open_files:
        for folder in sorted(folders):
            with contextlib.suppress(OSError):
                file = open_files.enter_context((folder / "compiling.lock").open("a"))
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    main(sys.argv[1:])
