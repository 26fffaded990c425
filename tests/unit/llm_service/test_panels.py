"""A weight in panels: what it is stored in, that nothing is lost, and products of any number of rows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.nn import functional

from llm_service.layers.cpu import panels
from llm_service.layers.cpu.panels import PanelWeight
from llm_service.layers.linear.quantized_weight import QuantizedWeight
from llm_service.layers.linear.weight_dtype import narrowed


@pytest.fixture(autouse=True)
def any_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is right on each, though it is fast on some alone."""
    monkeypatch.setattr(panels, "wide_vectors", lambda: True)
    monkeypatch.setattr(panels, "fused_vectors", lambda: True)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def from_bfloat16(weight: torch.Tensor) -> torch.Tensor:
    return weight.bfloat16().float()


def from_float16(weight: torch.Tensor) -> torch.Tensor:
    return weight.half().float()


def as_it_is(weight: torch.Tensor) -> torch.Tensor:
    return weight


KINDS: dict[type[np.generic], Callable[[torch.Tensor], torch.Tensor]] = {
    np.uint32: from_bfloat16,
    np.uint16: from_float16,
    np.float32: as_it_is,
}


def panelled(weight: torch.Tensor) -> PanelWeight:
    laid_out = PanelWeight.of(weight)
    assert laid_out is not None
    return laid_out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_that_came_from_16_bits_go_back_to_them(dtype: torch.dtype) -> None:
    weight = noise(130, 7).to(dtype)
    weight[3, 2], weight[4, 2], weight[5, 2] = torch.inf, -0.0, torch.finfo(dtype).smallest_normal / 4
    given = narrowed(weight.float())
    assert given.dtype == dtype
    assert torch.equal(given.view(torch.int16), weight.view(torch.int16))


@pytest.mark.parametrize(("place", "number"), [((0, 0), 1 + 2**-15), ((129, 6), 1 + 2**-15), ((64, 3), torch.nan)])
def test_one_number_that_16_bits_lack_keeps_all_of_them(place: tuple[int, int], number: float) -> None:
    weight = noise(130, 7).bfloat16().float()
    weight[place] = number
    assert narrowed(weight) is weight


@pytest.mark.parametrize("kind", KINDS)
def test_the_shortest_type_that_has_all_numbers_is_stored(kind: type[np.generic]) -> None:
    laid_out = panelled(KINDS[kind](noise(70, 9)))
    assert laid_out.panels.dtype == kind
    assert laid_out.panels.shape == (2, 9, 32 if kind is np.uint32 else 64)


@pytest.mark.parametrize("rows", [*range(1, 14), 18, 19, 24, 25, 29, 31, 100])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 64), (192, 200), (300, 65), (70, 5)])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_multiplied_as_by_torch(kind: type[np.generic], outputs: int, inputs: int, rows: int) -> None:
    weight = KINDS[kind](noise(outputs, inputs))
    laid_out, x, bias = panelled(weight), noise(rows, inputs, seed=1), noise(outputs, seed=2)
    for added in (None, bias):
        out = laid_out.product(x, added)
        assert out.is_contiguous()
        expected = functional.linear(x.double(), weight.double(), None if added is None else added.double())
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-4)


def test_so_many_rows_that_tasks_share_a_panel() -> None:
    weight = from_bfloat16(noise(100, 80))
    x = noise(2500, 80, seed=1)
    expected = functional.linear(x.double(), weight.double())
    torch.testing.assert_close(panelled(weight).product(x).double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_s_product_is_the_same_whatever_is_beside_it_and_however_it_is_stored(kind: type[np.generic]) -> None:
    weight = KINDS[kind](noise(192, 200))
    x, bias = noise(600, 200, seed=1), noise(192, seed=2)
    laid_out = panelled(weight)
    alone = torch.cat([laid_out.product(row.unsqueeze(0), bias) for row in x[:100]])
    for together in (2, 3, 7, 11, 20, 32, 100, 600):
        assert torch.equal(laid_out.product(x[:together], bias)[:100], alone[:together])
    one_lost = torch.cat([weight, torch.full((1, 200), 1 + 2**-15)])  # float32 then, for all
    assert torch.equal(panelled(one_lost).product(x)[:, :192] + bias, laid_out.product(x) + bias)


def test_subnormals_and_infinities_are_multiplied_with_as_they_are() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        weight = torch.zeros(64, 3, dtype=dtype)
        least = torch.finfo(dtype).smallest_normal / 4
        weight[0, 0], weight[1, 1] = least, torch.inf
        given = panelled(weight.float()).product(torch.tensor([[2.0**20, 1.0, 0.0]]))
        assert given[0, 0] == least * 2.0**20
        assert given[0, 1] == torch.inf


@pytest.mark.parametrize("rows", [1, 2, 5, 24, 25, 40])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.06)])
def test_8_bits_give_the_product_with_what_they_were_rounded_to(
    rows: int, dtype: torch.dtype, tolerance: float
) -> None:
    weight, bias, x = noise(70, 133).to(dtype), noise(70, seed=1).to(dtype), noise(rows, 133, seed=2).to(dtype)
    laid_out = PanelWeight.rounded(weight)
    assert laid_out is not None
    assert laid_out.panels.dtype == np.int8
    given = laid_out.product(x, bias)
    assert given.dtype == dtype
    expected = x.float() @ QuantizedWeight.rounded(weight).wide().T + bias.float()
    torch.testing.assert_close(given.float(), expected, rtol=tolerance, atol=tolerance)


def test_rows_that_lie_apart_or_in_more_dimensions_are_taken() -> None:
    weight = noise(64, 64)
    laid_out = panelled(weight)
    for x in (noise(5, 200, seed=1)[:, 17:81], noise(2, 3, 64, seed=2)):
        torch.testing.assert_close(laid_out.product(x), functional.linear(x, weight), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [3, 30])
def test_what_is_not_a_number_stays_in_its_row(rows: int) -> None:
    x = noise(rows, 64, seed=1)
    x[1, 7] = torch.nan
    given = panelled(noise(64, 64)).product(x)
    assert given.isnan().all(1).tolist() == [False, True, *[False] * (rows - 2)]


def test_what_the_kernel_does_not_compute_is_not_laid_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for weight in (noise(64, 64).bfloat16(), noise(64, 64).double(), torch.empty(0, 64), noise(64, 64).to("meta")):
        assert PanelWeight.of(weight) is None
    monkeypatch.undo()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert PanelWeight.rounded(noise(64, 64)) is None
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert PanelWeight.of(noise(64, 64)) is None
    assert PanelWeight.rounded(noise(64, 64)) is None


@pytest.mark.parametrize("wrong", [noise(2, 32), noise(2, 128), noise(2, 64).double(), noise(64)])
def test_rows_that_do_not_fit_are_refused(wrong: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        panelled(noise(128, 64)).array_product()(wrong.numpy())


def test_the_kernel_is_compiled_once_for_each_type() -> None:
    from llm_service.layers.cpu import panel_kernel

    for kind, give in KINDS.items():
        laid_out = panelled(give(noise(128, 64)))
        for x, bias in ((noise(1, 64), None), (noise(40, 200)[:, :64], noise(128))):
            laid_out.product(x, bias)
        assert len(panel_kernel.TYPED[kind.__name__].kernel.signatures) == 1


@pytest.mark.parametrize(
    ("rows", "panels", "threads", "expected"), [(1, 16, 2, 24), (215, 16, 2, 504), (215, 16, 32, 54), (9999, 1, 1, 504)]
)
def test_tasks_are_small_enough_for_all_threads_and_no_smaller(
    rows: int, panels: int, threads: int, expected: int
) -> None:
    from llm_service.layers.cpu.panel_kernel import task_rows

    assert task_rows(rows, panels, threads) == expected
