"""The number of threads that was asked for holds, though numba and torch share OpenMP; what has changed is compiled
anew."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

from common.kernels.jit import compiled

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


def test_what_is_kept_on_disk_is_of_the_same_code(tmp_path: Path) -> None:
    """numba looks at the function's own file; what the function is made of may be in another."""
    part = types.ModuleType("part")
    part.__file__ = str(tmp_path / "part.py")
    names = []
    for text in ("one", "one", "other"):
        Path(part.__file__).write_text(text)

        def kernel() -> None: ...

        names.append(compiled(kernel, made_of=part).py_func.__qualname__)
    assert names[0] == names[1] != names[2]
