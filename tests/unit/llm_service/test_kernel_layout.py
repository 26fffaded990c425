"""Launches with tensors that lie otherwise than a kernel takes them to are found in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from llm_service.layers.attention.triton_kernels import store_kernel
from tests.kernel_layout import LAYOUTS


def store(key: torch.Tensor, slots: torch.Tensor, stride: int) -> torch.Tensor:
    """What is stored of keys [n, 2, 8]."""
    kept = torch.zeros(4, 2, 8)
    kinds = {"WIDTH": 16, "HEAD_DIM": 16, "FP8": False, "SCALED": False}
    store_kernel[(len(key),)](key, key, kept, kept.clone(), kept, slots, stride, stride, 16, **kinds)
    return kept


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_within_which_something_lies_are_found(layout: str) -> None:
    key, slots = torch.randn(3, 2, 8), torch.tensor([2, 0, 3])
    for lying, places in ((LAYOUTS[layout](key), slots), (key, LAYOUTS["cut"](slots))):
        with pytest.raises(AssertionError, match="store_kernel takes"):
            store(lying, places, lying.stride(0))


def test_rows_that_are_apart_are_right_where_the_kernel_is_told_by_how_much() -> None:
    wide, slots = torch.randn(3, 5, 8), torch.tensor([2, 0, 3])
    assert torch.equal(store(wide[:, 1:3], slots, 40)[slots], wide[:, 1:3])
    with pytest.raises(AssertionError, match="takes key"):
        store(wide[:, 1:3], slots, 16)
