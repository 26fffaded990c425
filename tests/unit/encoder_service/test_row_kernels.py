"""What is done to a vision transformer's rows between products, by our kernels for CPUs: the numbers are those of
torch's operators, but for their rounding, and a row's do not depend on those beside it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from common.cpu import short_rows
from common.cpu.linear import Linear
from encoder_service.models import attention, blocks, row_kernels
from encoder_service.models.attention import Numba
from encoder_service.models.tower import Rotary

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    attention._obstacle("numba", CPU, torch.bfloat16, wanted=True) != "", reason="this processor lacks AVX512-BF16"
)


@pytest.fixture(autouse=True)
def selected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our kernels compute until the test is over."""
    monkeypatch.setattr(row_kernels._state, "kernels", short_rows)
    monkeypatch.setattr(row_kernels._state, "blocks", None)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def angles(count: int, size: int) -> Rotary:
    angle = 3 * torch.randn(count, 1, size, generator=torch.Generator().manual_seed(1))
    return Rotary(angle.cos(), angle.sin())


@pytest.mark.parametrize("dim", [4, 16, 36, 64, 72, 80, 128])
@pytest.mark.parametrize("whole", [False, True], ids=["one table", "a table for each half"])
def test_heads_are_rotated_in_place_and_what_is_beside_them_stays(dim: int, *, whole: bool) -> None:
    heads, rotary = drawn(70, 9, dim), angles(70, dim if whole else dim // 2)
    before = heads.clone()
    assert blocks.turn(heads[:, :6], rotary).data_ptr() == heads.data_ptr()
    assert heads[:, 6:].equal(before[:, 6:])
    expected = blocks.apply_rotary(before[:, :6].float(), rotary)
    torch.testing.assert_close(heads[:, :6].float(), expected, rtol=2**-8, atol=1e-6)


def test_heads_that_are_to_be_fresh_are_a_copy() -> None:
    heads = drawn(5, 2, 16)
    before = heads.clone()
    turned = blocks.turn(heads, angles(5, 8), fresh=True)
    assert heads.equal(before)
    assert not turned.equal(before)


@pytest.mark.parametrize("width", [8, 100, 384, 1152])
def test_a_sum_and_its_norm_are_no_further_off_than_by_torch(width: int) -> None:
    norm = nn.LayerNorm(width, eps=1e-6).bfloat16().requires_grad_(requires_grad=False)
    norm.weight.copy_(drawn(width, seed=2))
    norm.bias.copy_(drawn(width, seed=3))
    x, more = 5 * drawn(70, width) + 3, drawn(70, width, seed=1)
    total, normed = blocks.add_and_norm(x, more, norm)
    assert total.equal(x + more)
    exact = functional.layer_norm(total.double(), (width,), norm.weight.double(), norm.bias.double(), 1e-6)
    assert (normed - exact).pow(2).mean() <= 1.01 * (norm(total) - exact).pow(2).mean()
    torch.testing.assert_close(normed.double(), exact, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("width", [8, 100, 1280])
def test_a_row_over_the_root_of_its_mean_square_is_no_further_off_than_by_torch(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    norm = blocks.RMSNorm(width).bfloat16().requires_grad_(requires_grad=False)
    norm.weight.copy_(drawn(width, seed=2))
    x, more = 5 * drawn(70, width) + 3, drawn(70, width, seed=1)
    total, normed = blocks.add_and_norm(x, more, norm)
    assert total.equal(x + more)
    assert norm(total).equal(normed)
    monkeypatch.setattr(row_kernels._state, "kernels", None)
    exact = functional.rms_norm(total.double(), (width,), norm.weight.double(), norm.epsilon)
    assert (normed - exact).pow(2).mean() <= 1.01 * (norm(total) - exact).pow(2).mean()
    torch.testing.assert_close(normed.double(), exact, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("width", [8, 100, 1536])
@pytest.mark.parametrize("name", ["gelu_pytorch_tanh", "quick_gelu"])
def test_gelu_is_no_further_off_than_by_torch(name: str, width: int) -> None:
    layer, act, x = Linear(8, width, dtype=torch.bfloat16), blocks.activation(name), 3 * drawn(70, 8)
    layer.weight.copy_(drawn(width, 8, seed=1))
    layer.bias.zero_()
    ours, before = blocks.activated(layer, act, x), layer(x)
    exact = act(before.double())
    assert (ours - exact).pow(2).mean() <= 1.01 * (act(before) - exact).pow(2).mean()
    torch.testing.assert_close(ours.double(), exact, rtol=2**-8, atol=1e-4)


def test_gelu_of_any_number_is_one() -> None:
    numbers = torch.tensor([0.0, 12.0, -12.0, 1e30, -1e30, torch.inf, torch.nan, 1e-30]).bfloat16()
    opened = short_rows.gelu(numbers.clone()[None])[0]
    assert opened[:2].tolist() == [0.0, 12.0]
    assert abs(opened[2]) < 1e-10
    assert opened[3].equal(numbers[3])
    assert opened[5].isinf()
    assert opened[6].isnan()
    assert opened[7] != 0


def test_a_row_is_the_same_to_the_bit_in_any_company() -> None:
    x, more, norm = drawn(300, 200), drawn(300, 200, seed=1), nn.LayerNorm(200).bfloat16()
    x[7, 3] = torch.nan
    both = blocks.add_and_norm(x, more, norm)
    rotated, opened = blocks.turn(x.view(300, 5, 40), angles(300, 20), fresh=True), short_rows.gelu(x.clone())
    rotary = angles(300, 20)
    for part in (slice(0, 7), slice(8, 9), slice(9, 300)):
        total, normed = blocks.add_and_norm(x[part], more[part], norm)
        assert total.equal(both[0][part])
        assert normed.equal(both[1][part])
        own = Rotary(rotary.cos[part], rotary.sin[part])
        assert blocks.turn(x[part].view(-1, 5, 40), own, fresh=True).equal(rotated[part])
        assert short_rows.gelu(x[part].clone()).equal(opened[part])


def test_they_compute_bfloat16_on_a_cpu_alone_and_once_the_attention_s_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert row_kernels.kernels_for(drawn(1, 1).float()) is None
    assert row_kernels.kernels_for(torch.empty(1, dtype=torch.bfloat16, device="meta")) is None
    monkeypatch.setattr(row_kernels._state, "kernels", None)
    backend = Numba(wait=True)
    assert row_kernels.kernels_for(drawn(1, 1)) is None
    backend.over([4], CPU)
    assert row_kernels.kernels_for(drawn(1, 1)) is short_rows
