"""Routines are compiled once for all kernels that call them, and are there before such a kernel comes from disk."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest

from common.cpu import routines
from common.cpu.jit import Typed, compiled, inner
from common.cpu.routines import Routine, parallel_for, threaded
from common.cpu.vectors.claims import count_up

_PROGRAM = """
import numba
import numpy as np
from common.cpu.jit import Typed
from tests.unit.common.test_routines import counting

kernel, numbers = counting(), np.zeros(1, np.int64)
print(kernel.load())
kernel.kernel(numbers)
print(numbers[0])
"""
_KINDS = (numba.int64[::1],)


def _count(place: Any, times: Any) -> None:
    for _ in range(times):
        count_up(place)


COUNT = Routine(_count)
_count_times = COUNT.call


def _count_to_three(out: Any) -> None:
    _count_times((out.ctypes.data, 3))


def counting() -> Typed:
    """As a process that has just begun has it."""
    return Typed(compiled(_count_to_three, parallel=False, calls=[COUNT]), _KINDS)


@inner
def _add(index: Any, out: Any, more: Any) -> None:
    out[index] += index + more[0]


def _add_all(out: Any, more: Any) -> None:
    for _ in range(2):
        parallel_for(_add, (out, (more, 0)), len(out))


@inner
def _take_too_much(index: Any, out: Any) -> None:
    out[index] = len(np.empty(1 << 60, np.int64))


def _fail(out: Any) -> None:
    parallel_for(_take_too_much, (out,), len(out))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where kernels are kept that are made from now on, and routines, for other processes as well."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    fresh = Routine(_count)
    monkeypatch.setitem(globals(), "COUNT", fresh)
    monkeypatch.setitem(globals(), "_count_times", fresh.call)
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_a_kernel_calls_it_whether_either_was_just_compiled_or_kept() -> None:
    assert not counting().load()
    assert not COUNT.signatures
    kernel, numbers = counting(), np.zeros(1, np.int64)
    kernel.compile()
    assert COUNT.signatures
    kernel.kernel(numbers)
    assert numbers[0] == 3
    run = subprocess.run([sys.executable, "-c", _PROGRAM], check=True, stdout=subprocess.PIPE, text=True)
    assert run.stdout.split() == ["True", "3"]


def test_a_kernel_is_not_loaded_without_what_it_calls(folder: Path) -> None:
    """The linker would end the process."""
    counting().compile()
    for kept in folder.rglob("*_count_serial*.nb?"):
        kept.unlink()
    run = subprocess.run([sys.executable, "-c", _PROGRAM], check=True, stdout=subprocess.PIPE, text=True)
    assert run.stdout.split() == ["False", "3"]


@pytest.mark.usefixtures("folder")
def test_a_kernel_says_what_it_calls() -> None:
    silent = compiled(_count_to_three, parallel=False)
    with pytest.raises(RuntimeError, match=r"was not said to call .*_count"):
        silent.compile(_KINDS)


def test_another_file_of_a_routine_makes_it_and_its_kernels_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    names = []
    for number in (1, 1, 2):
        (tmp_path / "other_routine.py").write_text(f"def routine(place): pass  # {number}\n")
        sys.modules.pop("other_routine", None)
        routine = Routine(importlib.import_module("other_routine").routine)
        names.append((routine.symbol, compiled(_count_to_three, calls=[routine]).py_func.__qualname__))
    assert names[0] == names[1]
    assert names[0][0] != names[2][0]
    assert names[0][1] != names[2][1]


def test_a_part_is_called_with_every_number_and_what_is_given() -> None:
    for count in (0, 1, 5, 1000):
        out = np.zeros(count, np.int64)
        threaded(_add_all)(out, 7)
        assert out.tolist() == [2 * (index + 7) for index in range(count)]


def test_a_part_without_memory_is_told() -> None:
    with pytest.raises(MemoryError, match="no memory"):
        threaded(_fail)(np.zeros(3, np.int64))


def test_what_starts_threads_is_compiled_ahead_as_well() -> None:
    assert routines.TYPED["start"].kernel is routines.START
