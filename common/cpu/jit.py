"""How our numba kernels are compiled: for this processor, on all threads, and once for all processes."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import re
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Protocol, TextIO

import numba
import numpy as np
from numba.core import event
from numba.core.caching import FunctionCache
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler

from common.telemetry import log

Array = np.ndarray[Any, Any]

FREEDOMS = {"reassoc", "contract", "arcp", "afn", "nsz"}
"""What the compiler may do with sums and products; what is not a number stays so."""
ROUTINE = "twinlens_routine."
"""What the linker's name of each routine begins with."""
PATIENCE_SECONDS = 600.0
"""For whoever compiles the same kernel."""
_LOOK_SECONDS = 0.05
_log = log.get("kernels")
_THREADS: int = numba.get_num_threads()
"""The most that numba has, before anything has told it to use fewer."""


def compiled(
    function: Callable[..., None],
    *,
    parallel: bool = True,
    made_of: Sequence[ModuleType] = (),
    calls: Sequence[Callee] = (),
) -> Any:
    """Compiled at its first call, and kept on disk where a folder for that can be written.

    numba notices changes of the function's own file. What is kept is named after the rest: whether numba divides its
    loops among threads, the sum of this file and those of the modules and packages that else it is `made_of`, and the
    routines that it `calls`.
    """
    function = named(function, parallel=parallel, made_of=made_of, calls=calls)
    options: dict[str, Any] = {"parallel": parallel, "fastmath": FREEDOMS, "nogil": True, "error_model": "numpy"}
    kernel = numba.njit(**options, pipeline_class=KernelCompiler)(function)
    kernel.calls = calls
    with contextlib.suppress(RuntimeError):  # no folder to keep it in
        kernel._cache = Cache(function, calls)
    return kernel


def named(
    function: Callable[..., None],
    *,
    parallel: bool,
    made_of: Sequence[ModuleType] = (),
    calls: Sequence[Callee] = (),
    mark: str = "",
) -> Callable[..., None]:
    """The same function, by the name that what is compiled of it is kept by: see `compiled`."""
    name = f"{function.__name__}_{mark}" if mark else function.__name__
    if not parallel:
        name += "_serial"
    sources = [Path(__file__), *(source for module in made_of for source in _sources(module))]
    found = [source.read_bytes() for source in sources] + [each.py_func.__qualname__.encode() for each in calls]
    name += f"_{zlib.crc32(b''.join(found)):08x}"
    same = FunctionType(function.__code__, function.__globals__, function.__name__, closure=function.__closure__)
    same.__qualname__ = name
    return same


class Callee(Protocol):
    """A routine that kernels call (`common.cpu.routines`)."""

    py_func: Any
    symbol: str


class Cache(FunctionCache):
    """What is compiled is of use though it cannot be kept, on a disk that is full for example, or though what is kept
    cannot be read. `unkept` is why the last one was not."""

    unkept = ""

    def __init__(self, function: Callable[..., None], calls: Sequence[Callee] = ()) -> None:
        super().__init__(function)
        self._calls = calls

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """What is kept; None where it cannot be read, or not all that it calls is ready or kept: without that,
        the linker would end the process."""
        if not all(Typed(routine, ()).load() for routine in self._calls):
            return None
        with contextlib.suppress(OSError):
            return super().load_overload(sig, target_context)

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keeps what was compiled, where there is room.

        Raises RuntimeError where it calls a routine that it was not said to call.
        """
        called = set(re.findall(rf"declare .*@({ROUTINE}[\w.]+)", data.library.get_llvm_str()))
        if unsaid := called - {routine.symbol for routine in self._calls}:
            raise RuntimeError(f"{self._py_func.__qualname__} was not said to call {', '.join(sorted(unsaid))}")
        self.unkept = ""
        try:
            super().save_overload(sig, data)
        except OSError as error:
            self.unkept = f"{self.cache_path}: {error.strerror}"
            _log.warning("a kernel cannot be kept", kernel=self._py_func.__qualname__, cause=self.unkept)


def _sources(module: ModuleType) -> list[Path]:
    """The files of a package, or the one of a module."""
    if hasattr(module, "__path__"):
        return sorted(path for folder in module.__path__ for path in Path(folder).glob("*.py"))
    return [Path(str(module.__file__))]


class KernelCompiler(Compiler):
    """Compiles a kernel without garbage collection, which takes a sixth of the time: of millions of objects few become
    garbage before the kernel is compiled, and each collection goes through all that there are."""

    def compile_extra(self, func: FunctionType) -> Any:
        enabled = gc.isenabled()
        gc.disable()
        try:
            return super().compile_extra(func)
        finally:
            if enabled:
                gc.enable()


class _PartLibrary(JITCodeLibrary):
    """A part's code, for kernels to take in. numba makes machine code of every function, which nobody would call, and
    optimises it with all that it calls, as every kernel does again."""

    @property
    def codegen(self) -> _PartLibrary:
        """Who is told of the function's environment, of which no code here knows."""
        return self

    def set_env(self, name: str, env: Any) -> None:
        """Nothing has to be told, as where a kernel is read from disk."""

    def get_pointer_to_function(self, _: str) -> int:
        """There is none."""
        self._ensure_finalized()
        return 0

    def _optimize_final_module(self) -> None:
        """Leaves that to kernels; each function was optimised by itself."""

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._verify_declare_only_symbols()
        self._finalized = True


class _PartCompiler(Compiler):
    def compile_extra(self, func: FunctionType) -> Any:
        self.state.library = _PartLibrary(self.state.targetctx.codegen(), func.__qualname__)
        return super().compile_extra(func)


BARE: Any = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "pipeline_class": _PartCompiler}
"""Nobody calls parts but kernels."""


def inner(function: Callable[..., Any]) -> Any:
    """A part of a kernel of the same file, which nobody else calls: what Python would call it by is not compiled. What
    a parallel loop does is better such a part: numba looks through the loop's own body many times."""
    options: dict[str, Any] = {"fastmath": FREEDOMS, "nogil": True, "error_model": "numpy", **BARE}
    return numba.njit(**options)(function)


def exact(function: Callable[..., Any]) -> Any:
    """A part of kernels whose sums and products are taken as they are written, in every one of them. The freedoms that
    other parts have are used otherwise in each kernel, and even by whether it was just compiled or read from disk.
    numba gives a part that says nothing the freedoms of whoever calls it first."""
    options: dict[str, Any] = {"fastmath": False, "nogil": True, "error_model": "numpy", **BARE}
    return numba.njit(**options)(function)


@dataclass(frozen=True, slots=True)
class Typed:
    """A kernel with the types of its arguments, as services call it: what can be compiled without calling it.

    A module with kernels has a table `TYPED` of them.
    """

    kernel: Any
    types: tuple[Any, ...]

    @property
    def folder(self) -> Path | None:
        """Where it is kept on disk; None where no folder can be written."""
        kept = self.kernel.stats.cache_path
        return None if kept is None else Path(kept)

    @property
    def unkept(self) -> str:
        """Why what was just compiled could not be kept; empty where it was, or where there is no folder."""
        return getattr(self.kernel._cache, "unkept", "")

    def load(self) -> bool:
        """Makes it ready from what is kept on disk; False, and nothing has changed, where nothing is kept that was
        compiled from this source, for this processor, by this numba."""
        try:
            with event.install_listener("numba:compile", _Refusal()):
                self.kernel.compile(self.types)
        except _NotKept:
            return False
        except Exception:  # noqa: BLE001 - a damaged file raises whatever its bytes make pickle raise
            self._forget()
            return False
        return True

    def compile(self) -> None:
        """Makes it ready, from disk or by compiling it, which takes seconds; then it is kept. Of several processes
        with one folder, ranks of a group for example, one compiles, and the others load what it has kept."""
        for routine in getattr(self.kernel, "calls", ()):
            Typed(routine, ()).compile()
        if self.load():
            return
        with self.alone():
            if not self.load():
                self.kernel.compile(self.types)

    def compile_unless_another_does(self) -> bool:
        """The same, but where another process compiles it now: then False, at once."""
        if self.load():
            return True
        with self.alone(0.0) as mine:
            if mine and not self.load():
                self.kernel.compile(self.types)
            return mine

    @contextlib.contextmanager
    def alone(self, patience: float | None = None) -> Iterator[bool]:
        """A block that one process at a time is in, of those that want this kernel in this folder; any, where it cannot
        be locked, or whoever has the lock is at it for longer than `patience`, in seconds: than any kernel takes, as
        one that is stopped. The block is given whether nobody else is known to be in it."""
        mine = True
        with contextlib.ExitStack() as open_files:
            if self.folder is not None:
                with contextlib.suppress(OSError):
                    name = f"{self.kernel.py_func.__module__}.{self.kernel.py_func.__qualname__}.lock"
                    file = open_files.enter_context((self.folder / name).open("a"))
                    mine = _lock(file, time.monotonic() + (PATIENCE_SECONDS if patience is None else patience))
            yield mine

    def _forget(self) -> None:
        name = self.kernel.py_func.__qualname__
        for file in self.folder.glob(f"*.{name}-*.nb[ic]") if self.folder is not None else ():
            with contextlib.suppress(OSError):
                file.unlink()


def as_compiled(kernels: Iterable[Typed]) -> Iterator[Typed]:
    """Makes kernels ready and yields each when it is. What another process compiles now comes last: of processes that
    want the same ones, each compiles some, and loads the others."""
    later: list[Typed] = []
    for kernel in kernels:
        if kernel.compile_unless_another_does():
            yield kernel
        else:
            later.append(kernel)
    for kernel in later:
        kernel.compile()
        yield kernel


def compile_all(kernels: Iterable[Typed]) -> None:
    """Makes all of them ready, in the order of `as_compiled`."""
    for _ in as_compiled(kernels):
        pass


def _lock(file: TextIO, until: float) -> bool:
    """Locks a file; False where it was another's until that time. Nobody is told when a lock comes free, so it looks
    again."""
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if time.monotonic() >= until:
            return False
        time.sleep(_LOOK_SECONDS)


class _NotKept(Exception):
    pass


class _Refusal(event.Listener):
    """Ends a compilation of the thread that made this before it has begun; all threads are heard of."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def on_start(self, _: Any) -> None:
        if threading.get_ident() == self._thread:
            raise _NotKept

    def on_end(self, _: Any) -> None:
        pass


def find(name: str) -> Typed:
    """The kernel of a name, `module:key`, in the table of its module.

    >>> find("llm_service.layers.cpu.row_kernels:rms_norm_few").kernel.py_func.__name__
    '_rms_norm'
    """
    module, _, key = name.partition(":")
    found: Typed = importlib.import_module(module).TYPED[key]
    return found


class _Used(threading.local):
    """How many threads the kernels take that this thread calls, 0: as many as numba says."""

    threads = 0


_used = _Used()


def threads_used() -> int:
    """How many threads the kernels take that the calling thread calls. numba takes ten microseconds to say so."""
    return _used.threads or int(numba.get_num_threads())


def use_threads(count: int) -> None:
    """How many threads the kernels take at most, and torch, in the thread that calls this.

    numba starts its threads here, at the latest. It then tells OpenMP, which is torch's as well, to use one for every
    core from now on; so torch is told last, and nothing tells OpenMP anything after that.
    """
    import torch  # whoever only compiles needs none of it

    _used.threads = min(count, _THREADS)
    numba.set_num_threads(_used.threads)
    torch.set_num_threads(count)
