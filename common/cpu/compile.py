"""Compiles kernels and keeps them on disk: `python -m common.cpu.compile MODULE:KEY…`, started by the
process that wants them, never by hand. It leaves the cores to who serves, but not all of them: until it is through,
torch computes, which takes longer. A kernel is kept in one move: one that is killed has lost a kernel at most."""

from __future__ import annotations

import os
import sys

from common.cpu.jit import as_compiled, find
from common.process.parent_link import die_with_parent, leave_signals_to_parent

_NICE = 5
"""A quarter of a core beside a thread that wants all of it. At 19 it is a hundredth, and a service that is never idle
would wait for its kernels for half an hour."""


def main(names: list[str]) -> None:
    """Makes sure that all of them are kept; ends with one line where they cannot be."""
    die_with_parent()
    leave_signals_to_parent()
    os.nice(_NICE)
    for kernel in as_compiled([find(name) for name in names]):
        if kernel.unkept:  # nor could the others
            sys.exit(kernel.unkept)


if __name__ == "__main__":
    main(sys.argv[1:])
