"""Threads of our kernels, whose number changes while a service runs."""

from __future__ import annotations

import os
import subprocess
import sys

_PROGRAM = """
import numba, torch
from common.cpu.jit import use_threads
for count in (2, 1, 2):
    use_threads(count)
    print(numba.get_num_threads(), torch.get_num_threads())
"""


def test_threads_that_were_given_up_are_taken_again() -> None:
    """In a process of its own: numba is told at its start how many it may have at most."""
    environ = {**os.environ, "NUMBA_NUM_THREADS": "2"}
    said = subprocess.run([sys.executable, "-c", _PROGRAM], env=environ, check=True, capture_output=True, text=True)
    assert said.stdout.split("\n")[:3] == ["2 2", "1 1", "2 2"]
