"""Triton's interpreter, as the tests use it: beside a NumPy that it does not know, and in less time.

Triton 3.6, which torch 2.11 for GPUs is tied to, takes the bounds of loops from arrays that hold one number. NumPy 2.4
refuses that, and earlier ones warned (triton-lang/triton#9171); Triton 3.7 asks for the number itself, and so do tests.
"""

from __future__ import annotations

import functools
import inspect
from importlib import metadata
from typing import Any


def is_too_old() -> bool:
    """Whether kernels with loops cannot be interpreted without `mend`: in services that a test starts, not at all."""
    try:
        return metadata.version("triton").startswith("3.6.")
    except metadata.PackageNotFoundError:
        return False


def mend() -> None:
    """Has it work in this process."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched


def quicken() -> None:
    """Has it look only once which members of Triton's modules it has to replace, and which of NumPy's types are which
    of Triton's: it does so at every call within a kernel, which takes it half of its time."""
    from triton.language import core
    from triton.runtime import interpreter

    look_up = interpreter._get_np_dtype

    @functools.cache
    def builtins(package: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if core.is_builtin(member)]

    @functools.cache
    def number(name: str) -> Any:
        return look_up(core.dtype(name))

    def patch(package: Any, builder: Any, scope: Any) -> None:
        for name in builtins(package):
            if core.is_builtin(member := getattr(package, name)):
                interpreter._patch_attr(package, name, member, builder, scope)

    def numpy_type(of: Any) -> Any:
        element = of.element_ty if isinstance(of, core.block_type) else of
        return number(element.name) if type(element) is core.dtype else look_up(of)

    interpreter._patch_builtin = patch
    interpreter._get_np_dtype = numpy_type
