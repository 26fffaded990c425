"""Records a pass as the list of its operators, which are replayed without the Python code that called them: what a CUDA
graph can hold of a pass whose host reads sizes and masks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

_READING = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
"""Tags of operators whose result, or its shape, the host waits for."""
_INDEXING = frozenset({"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"})
"""Operators that wait if an index is a mask. They copy a host index to the device, like copies themselves."""
_FROM_HOST = _INDEXING | {"aten::copy_"}
_MOST_CHECKS = 64


class UntraceableError(RuntimeError):
    """Why a pass is not repeated by its operators alone."""


@dataclass(slots=True)
class _Constant:
    """A tensor that is the same in all passes."""

    value: Tensor


@dataclass(frozen=True, slots=True)
class _Varying:
    """The number of a tensor that follows from the sources."""

    number: int


@dataclass(frozen=True, slots=True)
class _Step:
    """An operator, its arguments, and the numbers of the tensors among its results."""

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: dict[str, Any]
    results: Sequence[int | None]


class Trace:
    """The operators of one pass that depend on its sources. Everything else is kept as constant, so all passes must
    agree in it: sizes, masks, grids.

    If the host has read something that depends on sources, `holds` bool [checks] says of the last run whether it would
    have read the same; if not, the rows are not those of a pass. `looks` names these operators.
    """

    def __init__(self, run: Callable[[], Tensor], sources: Sequence[Tensor]) -> None:
        """Runs it once, on the current content of the sources. Raises UntraceableError."""
        with torch.inference_mode(mode=False), torch.no_grad():  # inference mode would hide the host's reads
            recorder = _Recorder(sources)
            with recorder:
                made = run()
            self.looks = recorder.looks
            self.holds = recorder.holds[: len(self.looks)]
            self._result = recorder.number_of(made)
        self._sources, self._steps = list(sources), recorder.steps
        last = {number: at for at, step in enumerate(self._steps) for number in _numbers(step)}
        self._over: dict[int, list[int]] = {}
        for number, at in last.items():
            if number != self._result:
                self._over.setdefault(at, []).append(number)

    def __len__(self) -> int:
        return len(self._steps)

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """The result of the pass for the current content of the sources."""
        values: dict[int, Tensor] = dict(enumerate(self._sources))

        def filled(given: Any) -> Any:
            return tree_map_only(
                _Constant | _Varying,
                lambda each: each.value if isinstance(each, _Constant) else values[each.number],
                given,
            )

        for at, step in enumerate(self._steps):
            made = tree_leaves(step.function(*filled(step.args), **filled(step.kwargs)))
            values |= {number: each for number, each in zip(step.results, made, strict=True) if number is not None}
            del made
            for number in self._over.get(at, ()):
                del values[number]
        return values[self._result]


def _numbers(step: _Step) -> Iterator[int]:
    yield from (number for number in step.results if number is not None)
    yield from (each.number for each in tree_leaves((step.args, step.kwargs)) if isinstance(each, _Varying))


class _Recorder(TorchDispatchMode):
    """Computes as usual, and records the steps. A storage varies from the first operator on that writes to it something
    that depends on the sources."""

    def __init__(self, sources: Sequence[Tensor]) -> None:
        super().__init__()
        self.steps: list[_Step] = []
        self.looks: list[str] = []
        self.holds = torch.ones(_MOST_CHECKS, dtype=torch.bool, device=sources[0].device)
        self._device = sources[0].device
        self._count = 0
        self._tensors: dict[int, tuple[weakref.ref[Tensor], int, int]] = {}
        self._storages: dict[int, StorageWeakRef] = {}  # keeps addresses from being reused
        self._varying: dict[int, int] = {}
        """Storages and the number of a tensor in each."""
        self._constants: dict[int, list[_Constant]] = {}
        """Constants that steps have read of other storages, as long as nothing has written to these."""
        for source in sources:
            self._made(source)
            self._name(source)

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Computes as without. Raises UntraceableError."""
        given = kwargs or {}
        name = func._schema.name
        if torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, given):
            raise UntraceableError(f"{name} draws")
        tensors = _tensors((args, given))
        written = _written(func, args, given)
        if name in _INDEXING:
            args = (args[0], self._without_masks(args[1], name), *args[2:])
            tensors = _tensors((args, given))
        elif name == "aten::masked_select":
            return self._selected(*args)
        elif self._reads(func, tensors, written):
            for each in tensors:
                if self._varies(each):
                    self._check(each, name)
            self._keep(written)
            return self._constant(func(*args, **given), tensors)
        elif name == "aten::_to_copy" and self._varies(args[0]) and not _is_host(args[0]):
            made = func(*args, **given)
            if _is_host(made):
                self._check(args[0], name)
                return self._constant(made, ())
        if not any(map(self._varies, tensors)) or name.startswith("aten::new_") or name.endswith("_like"):
            self._keep(written)
            return self._constant(func(*args, **given), tensors)
        return self._step(func, args, given, written)

    def _step(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], written: Sequence[Tensor]) -> Any:
        for each in written:
            if not self._varies(each):
                self._begin_to_vary(each)
        moves = getattr(getattr(func, "_schema", None), "name", "") in _FROM_HOST
        named_args, named_kwargs = tree_map_only(Tensor, lambda each: self._argument(each, moves=moves), (args, kwargs))
        made = func(*args, **kwargs)
        numbers: list[int | None] = []
        for each in tree_leaves(made):
            if isinstance(each, Tensor):
                self._made(each)
            numbers.append(self._name(each) if isinstance(each, Tensor) else None)
        self.steps.append(_Step(func, named_args, named_kwargs, numbers))
        return made

    def _reads(self, func: Any, tensors: Sequence[Tensor], written: Sequence[Tensor]) -> bool:
        """Whether the host reads what it returns, or writes to."""
        there = any(not _is_host(each) for each in tensors)
        return not _READING.isdisjoint(func.tags) or (there and any(map(_is_host, written)))

    def _constant(self, made: Any, given: Sequence[Tensor]) -> Any:
        """A constant that depends on no source, or has been checked."""
        before = {_address(each) for each in given}
        for each in _tensors(made):
            if _address(each) not in before:
                self._made(each)
        return made

    def _without_masks(self, indices: Sequence[Tensor | None], name: str) -> list[Tensor | None]:
        """Each mask as the numbers of its places."""
        out: list[Tensor | None] = []
        for index in indices:
            if index is not None and index.dtype == torch.bool and not index.dim():
                raise UntraceableError(f"{name} has a mask of one")
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                out.append(index)
                continue
            if self._varies(index):
                self._check(index, name)
            out += index.nonzero().unbind(1)
        return out

    def _selected(self, given: Tensor, mask: Tensor) -> Tensor:
        """`masked_select`."""
        if self._varies(mask):
            self._check(mask, "aten::masked_select")
        shape = torch.broadcast_shapes(given.shape, mask.shape)
        places = mask.expand(shape).nonzero().unbind(1)
        args, varies = (given, shape, *places), self._varies(given)
        made: Tensor = self._step(_at, args, {}, ()) if varies else self._constant(_at(*args), (given, mask))
        return made

    def _check(self, read: Tensor, name: str) -> None:
        """Has each run compare what the host has read. What follows from that is as constant as the rest."""
        if len(self.looks) == _MOST_CHECKS:
            raise UntraceableError(f"the host looks too often at what follows from an item's content ({name})")
        given = _Constant(self.holds), len(self.looks), self._argument(read), _Constant(read.clone())
        self.steps.append(_Step(_compare, given, {}, (None,)))
        self.looks.append(name)

    def _argument(self, given: Tensor, *, moves: bool = False) -> _Constant | _Varying:
        if self._varies(given):
            return _Varying(self.number_of(given))
        if moves and _is_host(given) and self._device.type != "cpu":
            return _Constant(given.to(self._device))
        kept = _Constant(given)
        self._constants.setdefault(_address(given), []).append(kept)
        return kept

    def number_of(self, given: Tensor) -> int:
        """The number of a varying tensor. Another view of a known storage is made by a step. Raises UntraceableError
        for one that does not depend on the sources."""
        known, number, address = self._tensors.get(id(given), (None, 0, 0))
        if known is not None and known() is given and address == _address(given):
            return number
        if not self._varies(given) or given.is_conj() or given.is_neg():
            raise UntraceableError("the pass gives what does not follow from its item")
        base, window = _Varying(self._varying[_address(given)]), _place(given)
        number = self._name(given)
        self.steps.append(_Step(_window, (base, *window), {}, (number,)))
        return number

    def _varies(self, tensor: Tensor) -> bool:
        return _address(tensor) in self._varying

    def _made(self, tensor: Tensor) -> None:
        """Its storage is of this pass."""
        self._storages.setdefault(_address(tensor), StorageWeakRef(tensor.untyped_storage()))

    def _name(self, tensor: Tensor) -> int:
        number, self._count = self._count, self._count + 1
        self._tensors[id(tensor)] = weakref.ref(tensor), number, _address(tensor)
        self._varying.setdefault(_address(tensor), number)
        return number

    def _keep(self, written: Sequence[Tensor]) -> None:
        """Copies constants that steps have read of these, since they are written to."""
        for each in written:
            if _address(each) not in self._storages:
                raise UntraceableError("transformers writes to what it keeps")
            if self._varies(each):
                raise UntraceableError("transformers overwrites what follows from its item")
            self._kept(each)

    def _kept(self, tensor: Tensor) -> Tensor:
        """All of a storage, copied."""
        whole = _whole(tensor).clone()
        for constant in self._constants.pop(_address(tensor), ()):
            constant.value = _window(whole, *_place(constant.value))
        return whole

    def _begin_to_vary(self, tensor: Tensor) -> None:
        """The tensor is about to be written to for the first time: each run begins with its current content."""
        if _address(tensor) not in self._storages:
            raise UntraceableError("transformers writes what follows from its item to what it keeps")
        whole = self._kept(tensor)
        number, self._count = self._count, self._count + 1
        self.steps.append(_Step(torch.clone, (_Constant(whole),), {}, (number,)))
        self._varying[_address(tensor)] = number


def _tensors(tree: Any) -> list[Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, Tensor)]


def _is_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _address(tensor: Tensor) -> int:
    if tensor.layout != torch.strided:  # a weight in a library's layout, which nobody writes to
        return -id(tensor)
    address: int = tensor.untyped_storage()._cdata
    return address


def _place(tensor: Tensor) -> tuple[torch.dtype, Sequence[int], Sequence[int], int]:
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())


def _whole(tensor: Tensor) -> Tensor:
    """All numbers of its storage."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    return _window(tensor, tensor.dtype, (count,), (1,), 0)


def _window(base: Tensor, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], offset: int) -> Tensor:
    """Into the storage of another tensor."""
    made = torch.empty(0, dtype=dtype, device=base.device)
    return made.set_(base.untyped_storage(), offset, shape, strides)


def _at(given: Tensor, shape: Sequence[int], *places: Tensor) -> Tensor:
    return given.expand(shape)[places]


def _compare(holds: Tensor, at: int, value: Tensor, seen: Tensor) -> None:
    holds[at].copy_((value == seen).all())


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that it writes to."""
    named = zip(func._schema.arguments, args, strict=False)
    by_name = {each.name: each for each in func._schema.arguments}
    given = [*named, *((by_name[name], value) for name, value in kwargs.items())]
    return _tensors([value for each, value in given if each.alias_info is not None and each.alias_info.is_write])


def _draws(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether it takes random numbers: attention that drops nothing out does not."""
    for each, value in zip(func._schema.arguments, args, strict=False):
        if each.name == "dropout_p":
            return bool(value)
    dropped: float = kwargs.get("dropout_p", 0.0 if "dropout_p" in str(func._schema) else 1.0)
    return bool(dropped)
