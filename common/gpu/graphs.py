"""CUDA graphs: how work on a GPU is captured and done again; what is worth capturing is decided elsewhere."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import torch


class CaptureFailed(RuntimeError):
    """A pass cannot be captured, and the device goes on; the message says what went wrong first."""


class Capture(Protocol):
    """Makes a callable into one that does the same again over the same memory, whatever that holds by then. Without a
    GPU, what is captured can be tried by running it again. Raises CaptureFailed where it cannot."""

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]: ...

    @property
    def held(self) -> int:
        """Bytes of device memory that captured graphs hold together."""
        ...


class CudaCapture:
    """Real graphs, over one memory pool: they never run at the same time, so they may share what they need.

    torch gives a pool's memory back when the last of its graphs is gone, and fails an assertion of its own where such a
    pool is used again while anything of it is left. The next graph then gets another one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._alive = weakref.WeakSet[torch.cuda.CUDAGraph]()
        self._broken = list[torch.cuda.CUDAGraph]()
        self._stream = torch.cuda.Stream(device)
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        self._before = torch.cuda.memory_reserved(device)

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        before = torch.cuda.current_stream(self._device)
        if not self._alive:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            # Libraries set themselves up, and Triton compiles, at the first call: not while a graph is captured.
            self._stream.wait_stream(before)
            with torch.cuda.stream(self._stream):
                run()
                run()
            before.wait_stream(self._stream)
            # Other threads may touch the device meanwhile: NCCL's watchdog asks for the state of its events.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                run()
        except Exception as error:
            torch.cuda.set_stream(before)  # a capture that fails leaves its stream the current one
            first = first_of(error)
            if isinstance(first, torch.OutOfMemoryError):
                raise first from None
            self._abandon(graph)
            said = str(first).strip().partition("\n")[0]
            raise CaptureFailed(f"{type(first).__name__}: {said}") from error
        self._alive.add(graph)
        return graph.replay

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """Raises RuntimeError where the device is of no use any more. The end of a capture that has become invalid
        raises before allocators and generator know of it: the device's would keep blocks that other streams had, the
        generator refuse to draw. The one for locked memory cannot be told: it refuses to begin anew with that pool, and
        goes on asking the graph which stream is its own."""
        torch.cuda.synchronize(self._device)
        here = self._device
        index = torch.cuda.current_device() if here == torch.device("cuda") else here.index
        with suppress(RuntimeError):  # that end was none of a capture, or went well
            torch._C._cuda_endAllocateToPool(index, self._pool)
            torch._C._cuda_releasePool(index, self._pool)
            self._broken.append(graph)
        self._pool = torch.cuda.graph_pool_handle()
        generator = torch.cuda.default_generators[index]
        with suppress(RuntimeError):
            generator.graphsafe_set_state(generator.clone_state())

    @property
    def held(self) -> int:
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self._device) - self._before


def first_of(error: BaseException) -> BaseException:
    """What was raised before all others: a capture's end hides what has made it invalid."""
    while error.__context__ is not None:
        error = error.__context__
    return error
