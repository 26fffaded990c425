"""Short convolutions by Triton's kernels in their interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from testkit import convolution_cases
from testkit.convolution_cases import COUNTS, SIZES, Case


@pytest.mark.parametrize(("size", "dtype"), [*zip(SIZES, (torch.float16, torch.float32), strict=True)], ids=str)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_sequences_of_a_batch_are_what_torch_makes_of_them(
    size: tuple[int, int], counts: tuple[int, ...], dtype: torch.dtype
) -> None:
    convolution_cases.check(Case.drawn(size, sum(counts), dtype), counts)


def test_states_that_a_run_passes_are_copied() -> None:
    convolution_cases.check_copies(Case.drawn(SIZES[1], 210, torch.float32))


@pytest.mark.parametrize("counts", [(1, 66, 5), (1, 1, 1)], ids=str)
def test_padding_touches_nothing(counts: tuple[int, ...]) -> None:
    convolution_cases.check_padding(Case.drawn(SIZES[1], sum(counts) + 3, torch.float32), counts)
