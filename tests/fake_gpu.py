"""A GPU of which there is no more than the devices, types, shapes and strides of tensors (torch's fake ones): what asks
the device for a number, mixes devices, or starts a kernel over memory of the host, or over tensors that lie otherwise
than it takes them to, fails, as it would where there is one, or is written down. Kernels compute nothing. It takes a
torch that was built for CUDA, and no driver."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass, replace
from itertools import product
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

from common.checkpoints.tensors import SliceReader
from common.gpu import transfer
from llm_service.layers.gdn import choose as gdn
from llm_service.layers.gpu import index_trial, int8_weight, lora_tiles, scaled_weight
from llm_service.layers.gpu.int8_weight import Int8Weight
from llm_service.layers.gpu.quantized_weight import GpuWeight
from llm_service.layers.kda import choose as kda
from llm_service.layers.linear.quantized_weight import QuantizedWeight
from llm_service.layers.mamba2 import choose as mamba2
from llm_service.models import eagle, quantized
from llm_service.models.float_formats import SlicedWeight
from tests import kernel_layout

GPU = torch.device("cuda:0")
_HOPPER = types.SimpleNamespace(multi_processor_count=132)


class OnHost(TorchDispatchMode):
    """The operators that read or write the host's memory, or bring something to or from it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves((args, kwargs, made)) if isinstance(each, torch.Tensor)]
        if any(each.device.type == "cpu" for each in tensors):
            self.seen.append(func.__name__.partition(".")[0])
        return made


class Crossings(TorchDispatchMode):
    """The operators that bring something from the host to the GPU, or back."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves((args, kwargs, made)) if isinstance(each, torch.Tensor)]
        if len({each.device.type for each in tensors}) > 1:
            self.seen.append(func.__name__.partition(".")[0])
        return made


class Recording:
    """A `Capture` that notes what of a run is not for a graph."""

    held = 0

    def __init__(self) -> None:
        self.on_host: list[str] = []

    def __call__(self, run: Any) -> Any:
        with OnHost() as watch:
            run()
        self.on_host += watch.seen
        return run


class _Stored:
    """A tensor of a checkpoint, whose parts are read as they are."""

    def __init__(self, stored: Any) -> None:
        self._stored = stored

    def __getitem__(self, index: Any) -> Tensor:
        with unset_fake_temporarily():
            return self._stored[index]

    def get_shape(self) -> list[int]:
        return self._stored.get_shape()

    def get_dtype(self) -> str:
        return self._stored.get_dtype()


def _to(module: nn.Module, device: torch.device) -> nn.Module:
    """As a module does it, which swaps tensors: fake ones cannot be swapped."""
    for part in module.modules():
        for name, given in part._parameters.items():
            if given is not None and given.device != device:
                part._parameters[name] = nn.Parameter(given.to(device), requires_grad=False)
        for name, given in part._buffers.items():
            part._buffers[name] = None if given is None else given.to(device)
    return module


def _with_numbers(read: Callable[..., Any]) -> Callable[..., Any]:
    """What reads a quantised weight, or which words a head has, as numbers are."""

    def made(*given: Any) -> Any:
        with unset_fake_temporarily():
            return read(*given)

    return made


def _on_device(weight: QuantizedWeight, device: torch.device) -> QuantizedWeight:
    """With codes that remember which numbers they are of."""
    there = replace(weight, codes=weight.codes.to(device))
    there.codes.numbers = weight  # type: ignore[attr-defined]
    return there


def _numbers(weight: QuantizedWeight) -> QuantizedWeight:
    """On the host and not fake: how a weight is laid out depends on its numbers. Where it was rounded from fake ones,
    ones."""
    kept: QuantizedWeight | None = getattr(weight.codes, "numbers", None)
    if kept is not None:
        return kept
    sizes = weight.codes.shape, weight.scale.shape
    with unset_fake_temporarily():
        codes, scale = torch.ones(sizes[0], dtype=torch.uint8), torch.ones(sizes[1], dtype=weight.scale.dtype)
    return replace(weight, codes=codes, scale=scale)


def _faked(made: Any) -> Any:
    """A dataclass with its tensors on the GPU, and those of dataclasses in it."""
    if isinstance(made, Tensor):
        return made.to(GPU)
    if not is_dataclass(made) or isinstance(made, type):
        return made
    return replace(made, **{each.name: _faked(getattr(made, each.name)) for each in fields(made)})


def _laid_out(lay_out: Callable[..., Any]) -> Callable[..., Any]:
    """What lays weights out, by their numbers."""

    def made(parts: Sequence[Any], *order: Tensor | None) -> Any:
        several = [each if isinstance(each, list) else [each] for each in parts]
        numbers = [[_numbers(each) for each in every] for every in several]
        with unset_fake_temporarily():
            given = numbers if isinstance(parts[0], list) else [each for (each,) in numbers]
            found = lay_out(given, *order)
        return _faked(found)

    return made


def _moved(arrays: Sequence[np.ndarray], ends: Sequence[int], device: torch.device) -> Tensor:
    """One copy from memory of the host, as it is seen."""
    there = torch.empty(ends[-1], dtype=torch.uint8, device=device)
    return there.copy_(torch.empty(ends[-1], dtype=torch.uint8, device="cpu"))


@contextmanager
def fake_gpu() -> Iterator[list[str]]:
    """In the block tensors are fake, and kernels of ours only look at where and how their tensors lie; their names are
    what is given. A checkpoint is loaded outside `torch.inference_mode`."""
    launched: list[str] = []

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **constants: Any) -> None:
        name = self.fn.__name__
        assert all(each.device == GPU for each in args if isinstance(each, torch.Tensor)), f"{name} reads the host's"
        assert all(int(size) > 0 for size in grid), f"{name} has no program"
        assert all(int(size) < 1 << 16 for size in grid[1:]), f"{name} has more programs than can be counted"
        kernel_layout.check(name, self.arg_names, args, constants)
        launched.append(name)

    def waits(*_: Any) -> None:
        raise AssertionError("the host waits for the device")

    read = SliceReader.__getitem__
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(mock.patch.object(InterpretedFunction, "run", launch))
        enter(mock.patch.object(transfer, "_moved", _moved))
        enter(mock.patch.object(transfer, "_bytes_of", lambda each: np.empty(each.nbytes, np.uint8)))
        enter(mock.patch.object(SliceReader, "__getitem__", lambda reader, name: _Stored(read(reader, name))))
        enter(mock.patch.object(nn.Module, "to", _to))
        for module in (gdn, kda, mamba2):
            enter(mock.patch.object(module, "runs", return_value=True))
        for owner, name in ((quantized, "quantised_weight"), (SlicedWeight, "__getitem__"), (eagle, "_meanings")):
            enter(mock.patch.object(owner, name, _with_numbers(getattr(owner, name))))
        enter(mock.patch.object(QuantizedWeight, "to", _on_device))
        for owner, name in product((GpuWeight, Int8Weight), ("of", "of_experts")):
            enter(mock.patch.object(owner, name, _laid_out(getattr(owner, name))))
        for name in ("runs_on", "_is_right", "_are_right"):  # found out by numbers of the device
            enter(mock.patch.object(scaled_weight, name, return_value=True))
        enter(mock.patch.object(int8_weight, "_is_right", return_value=True))
        for owner, name in ((index_trial, "gives_scores"), (lora_tiles, "computes")):
            enter(mock.patch.object(owner, name, return_value=True))
        enter(mock.patch("torch.cuda.get_device_properties", return_value=_HOPPER))
        enter(mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)))
        enter(mock.patch("torch.cuda.Event", mock.MagicMock))
        enter(mock.patch("torch.cuda.set_device"))
        enter(mock.patch("torch.cuda.synchronize", waits))
        enter(FakeTensorMode(allow_non_fake_inputs=True))
        enter(torch.inference_mode())
        yield launched
