"""Routines: functions that kernels call by symbol. Each is compiled once for all kernels that call it, and cached on
disk as they are, so that shared code is not compiled with every kernel."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, event, types
from numba.core.ccallback import CFunc
from numba.extending import intrinsic

from common.cpu import phases, vectors
from common.cpu.jit import FREEDOMS, ROUTINE, Cache, KernelCompiler, Typed, compiled, inner, named
from common.cpu.phases import counts_of, take
from common.cpu.vectors.llvm import FLAG, WORD, Value, declared

_WORK = ir.FunctionType(ir.VoidType(), [WORD, WORD])


class _Kept(CFunc):
    """A function that says when it is compiled, as kernels do, and not read from disk."""

    def _compile_uncached(self) -> Any:
        with event.trigger_event("numba:compile"):
            return cast(Any, super())._compile_uncached()


class Routine:
    """A function of integers, addresses among them, without a result. `Typed` takes it as a kernel without types.
    `parallel` and `made_of` are as in `compiled`; `mark` distinguishes routines of the same function."""

    def __init__(
        self,
        function: Callable[..., None],
        *,
        parallel: bool = False,
        made_of: Sequence[ModuleType] = (),
        mark: str = "",
    ) -> None:
        self.py_func = named(
            function, parallel=parallel, made_of=[*made_of, sys.modules[function.__module__]], mark=mark
        )
        self.symbol = f"{ROUTINE}{self.py_func.__module__}.{self.py_func.__qualname__}"
        self.signatures: list[Any] = []
        """One signature once it is ready, as kernels have them."""
        self._takes = types.UniTuple(types.intp, len(inspect.signature(function).parameters))
        options = {"nopython": True, "parallel": parallel, "fastmath": FREEDOMS, "error_model": "numpy"}
        self._compiled = cast(Any, _Kept(self.py_func, (self._takes.types, types.void), {}, options, KernelCompiler))
        with contextlib.suppress(RuntimeError):  # no folder to keep it in
            self._compiled._cache = Cache(self.py_func)
        self._cache = self._compiled._cache
        self.stats = SimpleNamespace(cache_path=self._cache.cache_path)
        self.call: Any = intrinsic(self._called)
        """The function that kernels call, with a tuple of arguments."""

    def compile(self, _: tuple[Any, ...] = ()) -> None:
        """Makes it ready, from disk or by compiling it, for this process and every kernel that calls it."""
        if self.signatures:
            return
        self._compiled.compile()
        llvmlite.binding.add_symbol(self.symbol, self._compiled.address)
        self.signatures.append(self._takes.types)

    def _called(self, _: Any, given: Any) -> Any:
        """Calls it with a tuple of arguments."""

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Value:
            self.compile()
            words = cgutils.unpack_tuple(builder, context.cast(builder, values[0], signature.args[0], self._takes))
            builder.call(declared(builder, self.symbol, ir.VoidType(), [WORD] * len(words)), words)
            return context.get_dummy_value()

        return types.void(given), generate


def _call_work(_: Any, _work: Any, _index: Any, _given: Any) -> Any:
    """Calls the function at an address with a number and another address."""

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Value:
        builder.call(builder.inttoptr(values[0], _WORK.as_pointer()), values[1:])
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), generate


def _count_threads(_: Any) -> Any:
    """The number of threads of a parallel loop, as numba's own loops find it. The compiled form of
    `numba.get_num_threads` cannot be cached on disk."""

    def generate(_context: Any, builder: Any, _signature: Any, _values: Any) -> Value:
        return builder.call(declared(builder, "get_num_threads", WORD, []), [])

    return types.intp(), generate


call_work: Any = intrinsic(_call_work)
count_threads: Any = intrinsic(_count_threads)


@inner
def _call_all(thread: Any, counts: Any, work: Any, given: Any, count: Any) -> None:
    """One thread's part of `_start`."""
    index = take(counts, 0, thread, count)
    while index >= 0:
        call_work(work, index, given)
        index = take(counts, 0, thread, count)


def _start(work: Any, given: Any, count: Any) -> None:
    """Calls the function at the address `work` with each number below `count`, on all threads, which `take` them."""
    threads = min(count_threads(), count)
    counts = counts_of(1, threads)
    for thread in numba.prange(threads):
        _call_all(np.intp(thread), counts, work, given, count)


def _parallel_for(context: Any, work: Any, given: Any, _count: Any) -> Any:
    """Calls `work`, a part of the kernel, with each number below `count` and a tuple of other arguments, on all
    threads; returns when all calls have returned. If other programs keep a thread waiting, the others do its share. The
    body of `numba.prange` is compiled four times, that of this twice.

    Raises MemoryError if a call ran out of memory.
    """
    resolved = work.get_call_type(context, (types.intp, *map(types.unliteral, given.types)), {})
    taken = types.Tuple(resolved.args[1:])

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Value:
        START.compile()
        arguments = context.cast(builder, values[1], signature.args[1], taken)
        failed = cgutils.alloca_once_value(builder, FLAG(0))
        place = cgutils.alloca_once_value(builder, cgutils.pack_struct(builder, [arguments, failed]))
        compiled = work.dispatcher.overloads[resolved.args]
        context.active_code_library.add_linking_library(compiled.library)
        name = builder.module.get_unique_name("work")
        function = ir.Function(builder.module, _WORK, name)
        function.linkage = "internal"
        _write_work(context, function, compiled.fndesc, resolved, place.type)
        words = builder.ptrtoint(function, WORD), builder.ptrtoint(place, WORD), values[2]
        builder.call(declared(builder, START.symbol, ir.VoidType(), [WORD] * len(words)), words)
        with builder.if_then(cgutils.is_not_null(builder, builder.load(failed)), likely=False):
            context.call_conv.return_user_exc(builder, MemoryError, ("a part had no memory",))
        return context.get_dummy_value()

    return types.void(work, given, types.intp), generate


def _write_work(context: Any, function: Any, compiled: Any, signature: Any, place: Any) -> None:
    """Writes the function that threads call: it loads the arguments, and the place to report a failure, from an
    address."""
    index, given = function.args
    builder = ir.IRBuilder(function.append_basic_block())
    arguments, failed = cgutils.unpack_tuple(builder, builder.load(builder.inttoptr(given, place)))
    taken = [index, *cgutils.unpack_tuple(builder, arguments)]
    status, _ = context.call_internal_no_propagate(builder, compiled, signature, taken)
    with builder.if_then(status.is_error, likely=False):
        builder.store(FLAG(1), failed)
    builder.ret_void()


START = Routine(_start, parallel=True, made_of=[phases, vectors])
"""Called by every kernel that calls `parallel_for`."""
parallel_for: Any = intrinsic(_parallel_for)


def threaded(function: Callable[..., None], made_of: Sequence[ModuleType] = (), calls: Sequence[Routine] = ()) -> Any:
    """`compiled`, of a kernel that calls `parallel_for`, and these."""
    return compiled(function, parallel=False, made_of=made_of, calls=[START, *calls])


TYPED = {"start": Typed(START, ())}
