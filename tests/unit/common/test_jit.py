"""The number of threads that was asked for holds, though numba and torch share OpenMP."""

from __future__ import annotations

import os
import subprocess
import sys

_PROGRAM = """
import numba
import numpy as np
import torch
from common.kernels.jit import use_threads

torch.set_num_threads(1)
torch.ones(300, 300) @ torch.ones(300, 300)
use_threads(1)

@numba.njit(parallel=True)
def kernel(out):
    for index in numba.prange(out.shape[0]):
        out[index] += 1

kernel(np.zeros(1000))
print(torch.get_num_threads(), numba.get_num_threads())
"""


def test_one_thread_stays_one_after_a_kernel_has_run() -> None:
    environ = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    run = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**environ, "NUMBA_NUM_THREADS": "2"},
    )
    assert run.stdout.split() == ["1", "1"]
