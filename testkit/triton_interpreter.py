"""Triton's interpreter, as the tests use it: beside a NumPy that it does not know, in less time, with a GPU's products.

Triton 3.6, which torch 2.11 for GPUs is tied to, takes the bounds of loops from arrays that hold one number. NumPy 2.4
refuses that, and earlier ones warned (triton-lang/triton#9171); Triton 3.7 asks for the number itself, and so do tests.
"""

from __future__ import annotations

import functools
import inspect
import math
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
    _patch_once(interpreter)
    _make_types_once(core)


def round_products() -> None:
    """Has products of float32 be those of tensor cores, which see ten bits of a number's fraction ("tf32"), or of what
    is left as well ("tf32x3"); has bfloat16 multiplied, and rounded to the nearest; has products of e4m3 and of int8
    computed by BLAS, which give the same numbers as NumPy's own loops."""
    import numpy as np
    from triton._C.libtriton import ir
    from triton.runtime import interpreter

    tl, precisions = interpreter.tl, ir.INPUT_PRECISION
    plain, convert = interpreter.InterpreterBuilder.create_dot, interpreter._convert_float

    def seen(numbers: Any) -> Any:
        return (np.ascontiguousarray(numbers).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)

    e4m3 = convert(np.arange(256, dtype=np.uint8), tl.float8e4nv, tl.float32, None).view(np.float32)

    def widened(factor: Any) -> Any:
        if factor.dtype.scalar != tl.bfloat16:
            return factor
        return interpreter.TensorHandle((factor.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def product(self: Any, a: Any, b: Any, d: Any, precision: Any, inexact: Any) -> Any:
        of = a.dtype.scalar
        if of == b.dtype.scalar == tl.float8e4nv:
            made = np.matmul(e4m3[a.data.view(np.uint8)], e4m3[b.data.view(np.uint8)])
            return interpreter.TensorHandle(made + d.data, d.dtype.scalar)
        if of == b.dtype.scalar == tl.int8:  # whole numbers below 2⁵³, so that no sum is rounded
            made = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64)).astype(np.int32)
            return interpreter.TensorHandle(made + d.data, d.dtype.scalar)
        a, b = widened(a), widened(b)
        if a.data.dtype != np.float32 or precision == precisions.IEEE:
            return plain(self, a, b, d, precision, inexact)
        left, right = seen(a.data), seen(b.data)
        made = np.matmul(left, right)
        if precision == precisions.TF32x3:
            made += np.matmul(left, seen(b.data - right)) + np.matmul(seen(a.data - left), right)
        return interpreter.TensorHandle(made + d.data, d.dtype.scalar)

    def converted(numbers: Any, source: Any, to: Any, mode: Any) -> Any:
        if (source, to) != (tl.float32, tl.bfloat16):
            return convert(numbers, source, to, mode)
        bits = np.ascontiguousarray(numbers).view(np.uint32)
        nearest = (bits + (0x7FFF + (bits >> 16 & 1)).astype(np.uint32)) >> 16
        return np.where(np.isnan(numbers), bits >> 16 | 0x40, nearest).astype(np.uint16)

    interpreter.InterpreterBuilder.create_dot, interpreter._convert_float = product, converted


def _patch_once(interpreter: Any) -> None:
    """Has what a kernel calls find Triton's modules as they are, where the kernel itself has replaced their members."""
    replace, language = interpreter._patch_lang, (interpreter.tl, interpreter.tl.core)
    scope, restore = interpreter._LangPatchScope, interpreter._LangPatchScope.restore
    replaced: set[int] = set()  # modules of the language whose members are, by `id`

    @functools.cache
    def modules(function: Any) -> frozenset[int]:
        return frozenset(id(each) for each in function.__globals__.values() if any(each is known for known in language))

    def patch(function: Any) -> Any:
        if replaced and modules(function) <= replaced:
            return scope()
        made = replace(function)
        replaced.update(modules(function))
        return made

    def restored(self: Any) -> None:
        restore(self)
        replaced.clear()

    interpreter._patch_lang, scope.restore = patch, restored


def _make_types_once(core: Any) -> None:
    """Has types and tensors of one shape share what is said of that, values that have one shape are not made to, and
    sums are not looked at for an overflow that is told to nobody."""
    from triton.language.semantic import TritonSemantic

    look_for_overflow = TritonSemantic.binary_op_sanitize_overflow_impl
    make_type, fit, constexpr = core.block_type.__init__, TritonSemantic.broadcast_impl_value, core.constexpr

    @functools.cache
    def of_type(sizes: tuple[int, ...]) -> tuple[Any, int, str]:
        make_type(made := object.__new__(core.block_type), core.int1, list(sizes))
        return made.shape, made.numel, str(made.shape)

    @functools.cache
    def of_tensor(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        return core.tuple([constexpr(size) for size in sizes]), constexpr(math.prod(sizes))

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(size.value if isinstance(size, constexpr) else size for size in shape)
        self.element_ty = element_ty
        self.shape, self.numel, said = of_type(sizes)
        self.name = f"<{said}, {element_ty}>"

    def tensor(self: Any, handle: Any, type: Any) -> None:  # noqa: A002 - Triton's name
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = of_tensor(tuple(type.shape.values) if type.is_block() else ())

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if left.is_block() and right.is_block() and left.shape is right.shape:
            return lhs, rhs
        return fit(self, lhs, rhs)

    def sanitize(self: Any, lhs: Any, rhs: Any, operation: Any) -> None:
        if self.builder.options.debug:  # or nobody looks at what is found
            look_for_overflow(self, lhs, rhs, operation)

    core.block_type.__init__, core.tensor.__init__ = block_type, tensor
    TritonSemantic.broadcast_impl_value, TritonSemantic.binary_op_sanitize_overflow_impl = broadcast, sanitize
