"""Of the processes of a suite that want one of our kernels at the same time, one compiles it: services make theirs
ready before they serve (`Typed.compile`), tests call them."""

from __future__ import annotations

from typing import Any


def take_turns() -> None:
    """Has whoever calls a kernel that is not ready wait for the process that compiles it, and take what is kept."""
    from numba.core.dispatcher import Dispatcher

    from common.cpu.jit import Typed

    compile_for = Dispatcher._compile_for_args

    def in_turn(self: Any, *given: Any, **named: Any) -> Any:
        kernel = Typed(self, tuple(map(self.typeof_pyval, given)))
        if kernel.folder is None or kernel.load():
            return compile_for(self, *given, **named)
        with kernel.alone():
            return compile_for(self, *given, **named)

    if compile_for.__name__ != in_turn.__name__:
        Dispatcher._compile_for_args = in_turn
