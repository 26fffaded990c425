"""Finds linear layers of a transformers tower whose output goes only into an activation, which oneDNN then computes in
the same pass."""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode


@dataclass(slots=True)
class _Output:
    """For one call of a linear layer: the modules that computed an activation of its output, and how often something
    else used it."""

    tensor: weakref.ref[Tensor]
    layer: int
    activated: list[tuple[nn.Module, str]] = field(default_factory=list)
    others: int = 0

    @property
    def alone(self) -> bool:
        """Whether one activation took it, and nothing else did."""
        return len(self.activated) == 1 and not self.others


class Watch(TorchFunctionMode):
    """While entered, records what uses the outputs of `layers` of a model."""

    def __init__(self, model: nn.Module, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        self._layers = {id(layer._parameters["weight"]): id(layer) for layer in layers}
        self._parts = [part for part in model.modules() if _may_be_activation(part)]
        self._outputs: list[_Output] = []
        self._alive: dict[int, _Output] = {}
        self._within: nn.Module | None = None
        self._calls = Counter[int]()
        self._hooks = ExitStack()

    def __enter__(self) -> Self:
        for part in self._parts:
            for hook in (part.register_forward_pre_hook(self._begins), part.register_forward_hook(self._ends)):
                self._hooks.callback(hook.remove)
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._hooks.close()
        self._alive.clear()

    def _begins(self, part: nn.Module, given: Any) -> None:  # noqa: ARG002
        self._within = part

    def _ends(self, part: nn.Module, given: Any, found: Any) -> None:  # noqa: ARG002
        self._within = None

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Of each operator that is called: the result."""
        given = kwargs or {}
        name = _activation(func, given)
        if self._within is not None:
            self._calls[id(self._within)] += 1
        for tensor in _tensors((*args, *given.values())):
            output = self._alive.get(id(tensor))
            if output is None or output.tensor() is not tensor:  # another one had its place
                continue
            if name and self._within is not None:
                output.activated.append((self._within, name))
            else:
                output.others += 1
        found = func(*args, **given)
        if func is functional.linear and (layer := self._layers.get(id(args[1]))) is not None:
            self._alive[id(found)] = _Output(weakref.ref(found), layer)
            self._outputs.append(self._alive[id(found)])
        return found

    def activations(self, layers: Collection[int]) -> dict[int, nn.Module]:
        """The activation behind each of these layers (by `id`) whose output nothing else uses, in the form of
        `Linear`."""
        outputs = defaultdict[int, list[_Output]](list)
        for output in self._outputs:
            outputs[output.layer].append(output)
        found = {
            layer: each
            for layer, each in outputs.items()
            if layer in layers and all(output.alone for output in each) and len(_names(each)) == 1
        }
        while True:
            computed = Counter(id(output.activated[0][0]) for each in found.values() for output in each)
            whole = {part for part, times in computed.items() if times == self._calls[part]}
            kept = {
                layer: each
                for layer, each in found.items()
                if all(id(output.activated[0][0]) in whole for output in each)
            }
            if len(kept) == len(found):
                return {layer: _module(*_names(each)) for layer, each in kept.items()}
            found = kept

    def left_out(self, layers: Collection[int]) -> list[nn.Module]:
        """The modules whose activations these layers compute."""
        parts = {id(part): part for output in self._outputs if output.layer in layers for part, _ in output.activated}
        return list(parts.values())


def _names(outputs: Iterable[_Output]) -> set[str]:
    return {output.activated[0][1] for output in outputs}


def _may_be_activation(part: nn.Module) -> bool:
    """Whether a module has no parameters, children or hooks."""
    own = part._modules or part._parameters or part._buffers
    return not (own or part._forward_hooks or part._forward_pre_hooks)


_GELU = "gelu"


def _activation(func: Any, given: Mapping[str, Any]) -> str:
    """The activation that an operator computes, if oneDNN has it; "" for any other."""
    if func is functional.gelu:
        return f"{_GELU} {given.get('approximate', 'none')}"
    return "silu" if func is functional.silu else ""


def _module(name: str) -> nn.Module:
    kind, _, approximate = name.partition(" ")
    return nn.GELU(approximate=approximate) if kind == _GELU else nn.SiLU()


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    """The tensors among an operator's arguments, and in their lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
