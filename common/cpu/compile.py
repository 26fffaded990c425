"""Compiles kernels and stores them on disk: `python -m common.cpu.compile MODULE:KEY…`. Processes that need kernels
start it; it is not for users. It leaves most of the cores to serving, but not all: torch, which is slower, computes
until it is done. Each kernel is stored atomically, so a kill loses one kernel at most."""

from __future__ import annotations

import os
import sys

from common.cpu.jit import as_compiled, find
from common.process.parent_link import die_with_parent, leave_signals_to_parent

_NICE = 5
"""It gets a quarter of a core beside a busy thread. At 19 it would get a hundredth, and a service that is never idle
would wait for its kernels for half an hour."""


def main(names: list[str]) -> None:
    """Compiles those kernels that are not stored yet. Ends with one line of error where they cannot be stored."""
    die_with_parent()
    leave_signals_to_parent()
    os.nice(_NICE)
    for kernel in as_compiled([find(name) for name in names]):
        if kernel.unkept:  # nor could the others be
            sys.exit(kernel.unkept)


if __name__ == "__main__":
    main(sys.argv[1:])
