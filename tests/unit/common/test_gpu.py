"""A capture that fails says what went wrong first, and leaves torch as it was."""

from __future__ import annotations

import contextlib
import gc
import itertools
import weakref
from unittest import mock

import pytest
import torch

from common.gpu.device import use_gpu
from common.gpu.graphs import CaptureFailed, CudaCapture

GPU = torch.device("cuda:0")


class Graph:
    """Its end fails where a pass has made the capture invalid, as torch's does."""

    invalid = False

    def capture_begin(self, *_: object, **__: object) -> None: ...

    def capture_end(self) -> None:
        if self.invalid:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    def replay(self) -> None: ...


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> mock.MagicMock:
    """What is asked of a GPU; graphs are torch's own."""
    asked = mock.MagicMock()
    names = ("Stream", "synchronize", "empty_cache", "memory_reserved", "graph_pool_handle", "current_stream")
    for name in (*names, "set_stream", "current_device"):
        monkeypatch.setattr(torch.cuda, name, getattr(asked, name))
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "default_generators", (asked.generator,))
    for name in ("_host_emptyCache", "_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, name, getattr(asked, name), raising=False)
    monkeypatch.setattr(Graph, "invalid", False)
    return asked


def test_the_first_error_of_a_capture_is_told(device: mock.MagicMock, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = 0

    def run() -> None:
        nonlocal runs
        runs += 1
        if runs == 3:
            monkeypatch.setattr(Graph, "invalid", True)
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nand more")

    with pytest.raises(CaptureFailed, match=r"operation not permitted when stream is capturing$"):
        CudaCapture(GPU)(run)
    device.set_stream.assert_called_once_with(device.current_stream())
    device._cuda_endAllocateToPool.assert_called_once_with(0, device.graph_pool_handle())
    device._cuda_releasePool.assert_called_once_with(0, device.graph_pool_handle())
    device.generator.graphsafe_set_state.assert_called_once_with(device.generator.clone_state())


def test_the_next_graph_has_a_pool_of_its_own(device: mock.MagicMock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's allocator for locked memory still records to the one of a capture whose end has failed."""
    device.graph_pool_handle.side_effect = itertools.count(1)
    begun, capture = list[object](), CudaCapture(GPU)
    monkeypatch.setattr(Graph, "capture_begin", lambda *given, **_: begun.append(given[1]))
    kept = [capture(mock.Mock())]
    monkeypatch.setattr(Graph, "invalid", True)
    with pytest.raises(CaptureFailed):
        capture(mock.Mock())
    monkeypatch.setattr(Graph, "invalid", False)
    kept += [capture(mock.Mock()) for _ in range(2)]
    first, failed, *later = begun
    assert first == failed != later[0] == later[1]
    assert len(kept) == 3


@pytest.mark.parametrize("ends", [False, True])
def test_a_graph_stays_as_long_as_torch_asks_it_for_its_stream(
    ends: bool, device: mock.MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = list[weakref.ref[Graph]]()
    monkeypatch.setattr(Graph, "capture_begin", lambda graph, *_, **__: graphs.append(weakref.ref(graph)))
    monkeypatch.setattr(Graph, "invalid", not ends)
    if ends:
        device._cuda_endAllocateToPool.side_effect = RuntimeError
    capture, runs = CudaCapture(GPU), itertools.count()

    def run() -> None:
        if next(runs) == 2:
            raise ValueError("of Python")

    with contextlib.suppress(CaptureFailed):
        capture(run)
    gc.collect()
    assert (graphs[0]() is None) == ends
    assert next(runs) == 3
    del capture


def test_a_capture_that_ended_has_nothing_to_be_undone(device: mock.MagicMock) -> None:
    device._cuda_endAllocateToPool.side_effect = RuntimeError("not recording to this pool")
    with pytest.raises(CaptureFailed, match="ValueError: of Python"):
        CudaCapture(GPU)(mock.Mock(side_effect=[None, None, ValueError("of Python")]))
    device._cuda_releasePool.assert_not_called()


def test_a_device_that_is_of_no_use_any_more_ends_the_start(device: mock.MagicMock) -> None:
    capture = CudaCapture(GPU)
    device.synchronize.side_effect = [None, RuntimeError("an illegal memory access")]
    with pytest.raises(RuntimeError, match="an illegal memory access") as raised:
        capture(mock.Mock(side_effect=[None, None, RuntimeError("first")]))
    assert not isinstance(raised.value, CaptureFailed)


def test_too_little_memory_is_told_as_such(device: mock.MagicMock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Graph, "invalid", True)
    with pytest.raises(torch.OutOfMemoryError, match="tried to allocate"):
        CudaCapture(GPU)(mock.Mock(side_effect=[None, None, torch.OutOfMemoryError("tried to allocate")]))


def test_a_gpu_that_is_used_has_a_context_that_the_driver_finds(
    device: mock.MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", device.set_device)
    use_gpu(GPU)
    assert device.mock_calls == [mock.call.set_device(GPU), mock.call.synchronize(GPU)]
