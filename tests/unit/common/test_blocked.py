"""A weight laid out for a CPU: products of few rows by our kernel, of many by oneDNN, from the same memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from common import blocked
from common.blocked import BlockedWeight


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def panelled(outputs: int, inputs: int) -> tuple[torch.Tensor, BlockedWeight]:
    """A weight, and the same laid out; skips where oneDNN has no panels on this processor."""
    weight = noise(outputs, inputs)
    laid_out = BlockedWeight.of(weight, few_rows=True)
    if laid_out is None or laid_out.panels is None:
        pytest.skip("oneDNN lays weights out otherwise here")
    return weight, laid_out


def test_processors_with_avx512_have_panels() -> None:
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("another processor")
    laid_out = BlockedWeight.of(noise(512, 256), few_rows=True)
    assert laid_out is not None
    assert laid_out.panels is not None
    assert laid_out.panels.shape == (8, 256, 64)


@pytest.mark.parametrize("rows", [*range(1, 14), 32, 33])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 64), (192, 200), (300, 65), (1000, 128)])
def test_few_rows_are_multiplied_as_by_torch(outputs: int, inputs: int, rows: int) -> None:
    weight, laid_out = panelled(outputs, inputs)
    x, bias = noise(rows, inputs, seed=1), noise(outputs, seed=2)
    for added in (None, bias):
        out = laid_out.product(x, added)
        assert out.is_contiguous()
        torch.testing.assert_close(out, functional.linear(x, weight, added), rtol=1e-4, atol=1e-4)


def test_a_row_s_product_is_the_same_whatever_is_beside_it() -> None:
    _, laid_out = panelled(192, 200)
    x = noise(32, 200, seed=1)
    alone = torch.cat([laid_out.product(row.unsqueeze(0)) for row in x])
    for together in (2, 3, 7, 11, 32):
        assert torch.equal(laid_out.product(x[:together]), alone[:together])


def test_rows_that_lie_apart_are_taken() -> None:
    weight, laid_out = panelled(64, 64)
    x = noise(5, 200, seed=1)[:, 17:81]
    torch.testing.assert_close(laid_out.product(x), functional.linear(x, weight), rtol=1e-4, atol=1e-4)


def test_what_is_not_a_number_stays_in_its_row() -> None:
    _, laid_out = panelled(64, 64)
    x = noise(3, 64, seed=1)
    x[1, 7] = torch.nan
    assert laid_out.product(x).isnan().all(1).tolist() == [False, True, False]


def test_an_activation_follows_the_product() -> None:
    weight, laid_out = panelled(64, 64)
    x, gelu = noise(3, 64, seed=1), torch.nn.GELU()
    torch.testing.assert_close(
        laid_out.product(x, None, gelu), gelu(functional.linear(x, weight)), rtol=1e-4, atol=1e-4
    )


def test_a_layout_that_is_not_known_is_left_to_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = noise(128, 64)
    monkeypatch.setattr(blocked, "WIDTH", 32)  # as if panels were narrower than oneDNN's
    laid_out = BlockedWeight.of(weight, few_rows=True)
    assert laid_out is not None
    assert laid_out.panels is None
    x = noise(3, 64, seed=1)
    torch.testing.assert_close(laid_out.product(x), functional.linear(x, weight), rtol=1e-4, atol=1e-4)


def test_the_panels_are_the_memory_that_onednn_reads() -> None:
    weight, laid_out = panelled(128, 64)
    assert laid_out.panels is not None
    np.testing.assert_array_equal(laid_out.panels[1, :, 3], weight[67].numpy())
    laid_out.panels[1, :, 3] = 0
    assert not laid_out.product(noise(64, 64, seed=1))[:, 67].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_types_are_not_laid_out(dtype: torch.dtype) -> None:
    assert BlockedWeight.of(noise(64, 64).to(dtype)) is None


def test_a_processor_without_the_registers_has_no_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    laid_out = BlockedWeight.of(noise(512, 256), few_rows=True)
    assert laid_out is not None
    assert laid_out.panels is None


@pytest.mark.parametrize("wrong", [noise(2, 32), noise(2, 128), noise(2, 64).double(), noise(64)])
def test_rows_that_do_not_fit_are_refused(wrong: torch.Tensor) -> None:
    _, laid_out = panelled(128, 64)
    product = laid_out.array_product()
    assert product is not None
    with pytest.raises(ValueError, match="does not fit"):
        product(wrong.numpy())


def test_the_panels_keep_their_memory() -> None:
    weight, laid_out = panelled(128, 64)
    product = laid_out.array_product()
    assert product is not None
    del laid_out
    noise(4, 128, 64)  # would take the memory if it were free
    x = noise(3, 64, seed=1)
    torch.testing.assert_close(torch.from_numpy(product(x.numpy())), x @ weight.T, rtol=1e-4, atol=1e-4)


def test_the_kernel_is_compiled_once() -> None:
    _, laid_out = panelled(128, 64)
    from common.kernels import panels_cpu

    for x, bias in ((noise(1, 64), None), (noise(7, 200)[:, :64], noise(128))):
        laid_out.product(x, bias)
    assert len(panels_cpu._kernel.signatures) == 1


def test_an_empty_weight_is_not_laid_out() -> None:
    assert BlockedWeight.of(torch.empty(0, 64)) is None
