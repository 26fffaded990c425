"""Captures that fail, among others that go well. `make gpu-check`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from common.gpu.graphs import CaptureFailed, CudaCapture

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda:0")


def waits(x: torch.Tensor) -> None:
    x.sum().item()


def reads_ordinary_memory(x: torch.Tensor) -> None:
    x.copy_(torch.ones(len(x)))


def raises(x: torch.Tensor) -> None:
    x.add_(1)
    if torch.cuda.is_current_stream_capturing():
        raise ValueError("of Python")


@pytest.mark.parametrize("fails", [waits, reads_ordinary_memory, raises])
@torch.inference_mode()
def test_a_capture_that_fails_harms_neither_those_before_it_nor_those_after(
    fails: Callable[[torch.Tensor], None],
) -> None:
    x, capture = torch.zeros(1 << 20, device=GPU), CudaCapture(GPU)
    add = capture(lambda: x.add_(torch.ones_like(x)))
    for _ in range(2):
        with pytest.raises(CaptureFailed):
            capture(lambda: fails(x))
    double = capture(lambda: x.mul_(torch.full_like(x, 2.0)))
    x.zero_()
    for replay in (add, double, add):
        replay()
    assert x.unique().tolist() == [3.0]
    assert torch.randn(8, device=GPU).isfinite().all(), "the generator draws again"
    copied = torch.full((8,), 7.0, pin_memory=True).to(GPU, non_blocking=True)
    assert copied.tolist() == [7.0] * 8
    del add, double
    assert capture.held >= 0
