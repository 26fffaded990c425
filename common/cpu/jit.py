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
"""What the compiler may assume of sums and products. NaN stays NaN."""
ROUTINE = "twinlens_routine."
"""The prefix of a routine's symbol."""
PATIENCE_SECONDS = 600.0
"""How long to wait for another process that compiles the same kernel."""
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
    """Compiled at its first call, and cached on disk if there is a writable folder.

    numba notices changes of the function's own file. The name of the cache file covers the rest: whether numba
    parallelises its loops, the hash of this file and of the modules and packages that it is `made_of`, and the routines
    that it `calls`.
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
    """The same function, under the name by which its compiled form is cached: see `compiled`."""
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
    """numba's cache, in which a failure to write, as on a full disk, or to read is no error: the kernel is used
    uncached. `unkept` is the last failure."""

    unkept = ""

    def __init__(self, function: Callable[..., None], calls: Sequence[Callee] = ()) -> None:
        super().__init__(function)
        self._calls = calls

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Loads a compiled kernel. None if it cannot be read, or a routine that it calls is neither ready nor cached:
        the linker would end the process."""
        if not all(Typed(routine, ()).load() for routine in self._calls):
            return None
        with contextlib.suppress(OSError):
            return super().load_overload(sig, target_context)

    def save_overload(self, sig: Any, data: Any) -> None:
        """Stores a compiled kernel if there is space.

        Raises RuntimeError if it calls a routine that is not among its `calls`.
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
    """Compiles a kernel without garbage collection, which takes a sixth of the time: few of millions of objects become
    garbage before the kernel is compiled, and each collection traverses all of them."""

    def compile_extra(self, func: FunctionType) -> Any:
        enabled = gc.isenabled()
        gc.disable()
        try:
            return super().compile_extra(func)
        finally:
            if enabled:
                gc.enable()


class _PartLibrary(JITCodeLibrary):
    """The code of a part, for kernels to link. numba would also generate machine code for every function, which nobody
    would call, and optimise it with all that it calls, as every kernel does again."""

    @property
    def codegen(self) -> _PartLibrary:
        """The object that is told of the function's environment, which no code here uses."""
        return self

    def set_env(self, name: str, env: Any) -> None:
        """Ignores it, as where a kernel is read from disk."""

    def get_pointer_to_function(self, _: str) -> int:
        """There is no machine code."""
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
"""Only kernels call parts."""


def inner(function: Callable[..., Any]) -> Any:
    """A part of a kernel in the same file: no wrappers for calls from Python are compiled. The body of a parallel loop
    should be such a part, because numba analyses the loop's own body many times."""
    options: dict[str, Any] = {"fastmath": FREEDOMS, "nogil": True, "error_model": "numpy", **BARE}
    return numba.njit(**options)(function)


def exact(function: Callable[..., Any]) -> Any:
    """A part whose sums and products are computed as written, in every kernel. Other parts inherit the compiler's
    freedoms, which are used differently from kernel to kernel, and even between a compiled kernel and one read from
    disk: numba gives a part without flags those of its first caller."""
    options: dict[str, Any] = {"fastmath": False, "nogil": True, "error_model": "numpy", **BARE}
    return numba.njit(**options)(function)


@dataclass(frozen=True, slots=True)
class Typed:
    """A kernel with the types of its arguments as services call it, so that it can be compiled without a call.

    Each module with kernels has a table `TYPED` of them.
    """

    kernel: Any
    types: tuple[Any, ...]

    @property
    def folder(self) -> Path | None:
        """Its folder on disk; None if no folder is writable."""
        kept = self.kernel.stats.cache_path
        return None if kept is None else Path(kept)

    @property
    def unkept(self) -> str:
        """Why the kernel just compiled could not be stored; empty if it was, or if there is no folder."""
        return getattr(self.kernel._cache, "unkept", "")

    def load(self) -> bool:
        """Loads it from disk. False, with no effect, if nothing is stored that was compiled from this source, for this
        processor, by this numba."""
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
        """Loads it from disk, or compiles it, which takes seconds, and stores it. If several processes share a folder,
        as ranks of a group do, one compiles and the others load the result."""
        for routine in getattr(self.kernel, "calls", ()):
            Typed(routine, ()).compile()
        if self.load():
            return
        with self.alone():
            if not self.load():
                self.kernel.compile(self.types)

    def compile_unless_another_does(self) -> bool:
        """The same; but if another process is compiling it, returns False at once."""
        if self.load():
            return True
        with self.alone(0.0) as mine:
            if mine and not self.load():
                self.kernel.compile(self.types)
            return mine

    @contextlib.contextmanager
    def alone(self, patience: float | None = None) -> Iterator[bool]:
        """A block that only one process at a time enters for this kernel and folder. It is entered anyway if there is
        nothing to lock, or if the lock is held for longer than `patience` seconds: longer than any kernel takes, so its
        holder may be stopped. The block is given whether this process is alone in it, as far as is known."""
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
    """Makes kernels ready and yields each when it is. Those that another process is compiling come last: processes that
    want the same kernels share the work."""
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
    """Locks a file; False if another process held it until then. There is no notification of a lock's release, so it
    polls."""
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
    """The number of threads of kernels that this thread calls; 0: numba's default."""

    threads = 0


_used = _Used()


def threads_used() -> int:
    """How many threads the kernels take that the calling thread calls. numba takes ten microseconds to say so."""
    return _used.threads or int(numba.get_num_threads())


def use_threads(count: int) -> None:
    """The most threads that kernels, and torch, use when this thread calls them.

    numba starts its threads here at the latest. It then sets OpenMP, which torch shares, to one thread per core; so
    torch is set last, and nothing sets OpenMP after that.
    """
    import torch  # processes that only compile need no torch

    _used.threads = min(count, _THREADS)
    numba.set_num_threads(_used.threads)
    torch.set_num_threads(count)
