"""The number of threads that was asked for holds, though numba and torch share OpenMP; what has changed is compiled
anew."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numba
import numpy as np
import pytest
from numba.core.codegen import JITCodeLibrary

from common.cpu import jit
from common.cpu.jit import Typed, as_compiled, compiled, inner
from tests.full_disk import no_room_for_files
from tests.waiting import until

_PROGRAM = """
import numba
import numpy as np
import torch
from common.cpu.jit import use_threads

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
    """numba looks at the function's own file; what the function is made of may be in others, of a package or alone."""
    part, alone = types.ModuleType("part"), types.ModuleType("alone")
    (tmp_path / "part").mkdir()
    part.__path__, alone.__file__ = [str(tmp_path / "part")], str(tmp_path / "alone.py")
    (tmp_path / "part" / "first.py").write_text("first")
    names = []
    for text, other in (("one", "one"), ("one", "one"), ("other", "one"), ("other", "other")):
        (tmp_path / "part" / "second.py").write_text(text)
        (tmp_path / "alone.py").write_text(other)

        def kernel() -> None: ...

        names.append(compiled(kernel, made_of=[part, alone]).py_func.__qualname__)
    assert names[0] == names[1]
    assert len(set(names)) == 3


def _double(out: Any) -> None:
    for place in range(out.shape[0]):
        out[place] *= 2


def _halve(out: Any) -> None:
    for place in range(out.shape[0]):
        out[place] /= 2


@inner
def _thrice(out: Any, place: Any) -> None:
    out[place] *= 3


def _by_a_part(out: Any) -> None:
    for place in range(out.shape[0]):
        _thrice(out, place)


def typed() -> Typed:
    """As a process that has just begun has it."""
    return Typed(compiled(_double, parallel=False), (numba.float32[::1],))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_loading_compiles_nothing() -> None:
    first = typed()
    assert not first.load()
    assert not first.kernel.signatures, "it was compiled"
    first.compile()
    again, numbers = typed(), np.ones(3, np.float32)
    assert again.load()
    again.kernel(numbers)
    assert numbers.tolist() == [2, 2, 2]
    assert not again.kernel.stats.cache_misses


@pytest.mark.usefixtures("folder")
def test_machine_code_is_made_of_a_kernel_and_not_of_its_parts_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    write = JITCodeLibrary._finalize_specific

    def watched(library: JITCodeLibrary) -> None:
        written.append(library.name)
        write(library)

    monkeypatch.setattr(JITCodeLibrary, "_finalize_specific", watched)
    kernel = compiled(_by_a_part, parallel=False)
    for numbers in (np.ones(3, np.float32), np.ones(2, np.float32)):
        kernel(numbers)
        assert set(numbers) == {3}
    assert written[-1] == kernel.py_func.__qualname__
    assert _thrice.py_func.__qualname__ not in written


def test_what_is_damaged_on_disk_is_compiled_anew(folder: Path) -> None:
    typed().compile()
    kept = [*folder.rglob("*.nb?")]
    assert {file.suffix for file in kept} == {".nbi", ".nbc"}
    for file in kept:
        for damage in (b"", file.read_bytes()[:-20], bytes(range(256))):
            file.write_bytes(damage)
            damaged = typed()
            assert not damaged.load()
            damaged.compile()
            assert typed().load()


@pytest.mark.usefixtures("folder")
def test_what_another_processor_s_is_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    typed().compile()
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(numba.config, "CPU_NAME", "nehalem")
        assert not typed().load()
    assert typed().load()


@pytest.mark.usefixtures("folder")
def test_what_there_is_no_room_for_computes_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(jit, "_log", SimpleNamespace(warning=lambda _, kernel, cause: said.append(cause)))
    crowded, numbers = typed(), np.ones(3, np.float32)
    with no_room_for_files():
        crowded.compile()
    assert crowded.unkept.endswith(": File too large")
    assert said == [crowded.unkept]
    crowded.kernel(numbers)
    assert numbers.tolist() == [2, 2, 2]
    assert not typed().load()
    roomy = typed()
    roomy.compile()
    assert not roomy.unkept
    assert typed().load()


@pytest.mark.usefixtures("folder")
def test_what_may_not_be_read_is_compiled_anew() -> None:
    typed().compile()
    unreadable = typed()
    assert unreadable.folder is not None
    (index,) = unreadable.folder.glob("*.nbi")
    index.unlink()
    index.mkdir()
    assert not unreadable.load()
    unreadable.compile()
    assert unreadable.kernel.signatures
    assert unreadable.unkept


def test_without_a_folder_nothing_is_kept() -> None:
    made: dict[str, Any] = {}
    exec("def nowhere(out):\n    out[0] = 1\n", made)
    kernel = Typed(compiled(made["nowhere"], parallel=False), (numba.float32[::1],))
    assert kernel.folder is None
    assert not kernel.load()
    kernel.compile()
    assert kernel.kernel.signatures


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("calls", [False, True], ids=["makes it ready", "calls it, as tests do"])
def test_who_comes_while_another_compiles_waits_and_loads_what_is_kept_then(
    monkeypatch: pytest.MonkeyPatch, calls: bool
) -> None:
    first, second, looked = typed(), typed(), threading.Event()
    load = Typed.load

    def seen(kernel: Typed) -> bool:
        there = load(kernel)
        looked.set()
        return there

    monkeypatch.setattr(Typed, "load", seen)
    with ThreadPoolExecutor(1) as threads:
        with first.alone():
            waits = threads.submit(second.kernel, np.ones(3, np.float32)) if calls else threads.submit(second.compile)
            assert looked.wait(180)
            first.kernel.compile(first.types)
        waits.result()
    assert sum(second.kernel.stats.cache_hits.values()) == 1


@pytest.mark.usefixtures("folder")
def test_what_another_compiles_comes_last_and_is_loaded() -> None:
    first, second, other = typed(), typed(), Typed(compiled(_halve, parallel=False), (numba.float32[::1],))
    ready: list[Typed] = []
    with ThreadPoolExecutor(1) as threads:
        with first.alone():
            done = threads.submit(lambda: ready.extend(as_compiled([second, other])))
            until(lambda: other.kernel.overloads, "the other one is compiled meanwhile")
            assert not second.kernel.overloads
            first.kernel.compile(first.types)
        done.result()
    assert ready == [other, second]
    assert sum(second.kernel.stats.cache_hits.values()) == 1


@pytest.mark.usefixtures("folder")
def test_who_compiles_for_too_long_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "PATIENCE_SECONDS", 0.1)
    first, second = typed(), typed()
    with ThreadPoolExecutor(1) as threads, first.alone():
        threads.submit(second.compile).result()
    assert not second.kernel.stats.cache_hits
    assert second.kernel.overloads


@pytest.mark.soak
def test_several_processes_compile_into_one_folder(folder: Path) -> None:
    name = "llm_service.layers.cpu.row_kernels:rms_norm_few"
    command = [sys.executable, "-m", "common.cpu.compile", name]
    environ = {**os.environ, "NUMBA_CACHE_DIR": str(folder), "TWINLENS_PARENT": str(os.getpid())}
    running = [subprocess.Popen(command, env=environ) for _ in range(2)]
    assert [process.wait() for process in running] == [0, 0]
    loads = f"from common.cpu.jit import find; assert find({name!r}).load()"
    subprocess.run([sys.executable, "-c", loads], env=environ, check=True)
