"""Triton's interpreter beside a NumPy that it does not know.

Triton 3.6, which torch 2.11 for GPUs is tied to, takes the bounds of loops from arrays that hold one number. NumPy 2.4
refuses that, and earlier ones warned (triton-lang/triton#9171); Triton 3.7 asks for the number itself, and so do tests.
"""

from __future__ import annotations

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
