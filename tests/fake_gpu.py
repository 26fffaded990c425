"""A GPU of which there is no more than the devices, types and shapes of tensors (torch's fake ones): whatever asks the
device for a number, mixes devices, or starts a kernel over memory of the host fails, as it would where there is one, or
is written down. Kernels compute nothing. It takes a torch that was built for CUDA, and no driver."""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

from llm_service.layers import transfer
from llm_service.layers.gdn import choose as gdn

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


@contextmanager
def fake_gpu(*movers: types.ModuleType) -> Iterator[list[str]]:
    """In the block tensors are fake, and kernels of ours only look at where their tensors are; their names are what is
    given. `movers` are modules that have `to_device` by name."""
    launched: list[str] = []

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **_: Any) -> None:
        name = self.fn.__name__
        assert all(each.device == GPU for each in args if isinstance(each, torch.Tensor)), f"{name} reads the host's"
        assert all(int(size) > 0 for size in grid), f"{name} has no program"
        assert all(int(size) < 1 << 16 for size in grid[1:]), f"{name} has more programs than can be counted"
        launched.append(name)

    def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
        return [torch.empty(each.shape, dtype=transfer._TYPES[each.dtype], device=device) for each in arrays]

    with ExitStack() as stack:
        enter = stack.enter_context
        enter(mock.patch.object(InterpretedFunction, "run", launch))
        for module in (transfer, *movers):
            enter(mock.patch.object(module, "to_device", to_device))
        enter(mock.patch.object(gdn, "runs", return_value=True))
        enter(mock.patch("torch.cuda.get_device_properties", return_value=_HOPPER))
        enter(mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)))
        enter(mock.patch("torch.cuda.Event", mock.MagicMock))
        enter(FakeTensorMode(allow_non_fake_inputs=True))
        enter(torch.inference_mode())
        yield launched
