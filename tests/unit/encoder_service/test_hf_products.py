"""Which linear layers of a tower of transformers are laid out for oneDNN, and what they compute then."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN

from common.cpu.linear import Linear
from encoder_service.models.hf.patches import multiply_patches
from encoder_service.models.hf.products import _LaidOut, lay_out

WIDTH = 16


class Toy(nn.Module):
    """Has every kind of linear layer that may not be replaced, beside some that may."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.bare = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.sliced, self.both, self.unseen = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.one, self.other = (nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.other.weight = self.one.weight
        self.heads = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.twice = self.plain

    def forward(self, x: Tensor) -> Tensor:
        x = self.bare(self.twice(x)) + functional.linear(x, self.sliced.weight[:, :WIDTH], self.sliced.bias)
        x = self.other(self.one(x)) + self.heads(x, x, x)[0]
        x = self.both(x) + x.to(self.both.weight.dtype)
        return self.unseen(x) if x.shape[1] > 6 else x * self.plain.in_features


@torch.inference_mode()
def test_layers_whose_weights_nobody_else_reads_are_laid_out_and_compute_the_same() -> None:
    torch.manual_seed(0)
    toy, x, longer = Toy().eval(), torch.randn(2, 5, WIDTH), torch.randn(2, 9, WIDTH)
    expected = [toy(each) for each in (x, longer)]
    assert lay_out(toy, lambda: toy(x)) == 2
    ours = {name for name, part in toy.named_modules(remove_duplicate=False) if isinstance(part, Linear)}
    assert ours == {"plain", "twice", "bare"}
    assert toy.plain is toy.twice
    assert toy.plain.weight.numel() == 0, "the plain weight is let go of"
    assert {type(toy.sliced), type(toy.both), type(toy.unseen), type(toy.one)} == {nn.Linear}
    for found, each in zip((toy(x), toy(longer)), expected, strict=True):
        torch.testing.assert_close(found, each)


def test_a_pass_that_fails_leaves_the_model_as_it_was() -> None:
    toy = Toy()
    with pytest.raises(RuntimeError, match="shape"):
        lay_out(toy, lambda: toy(torch.zeros(2, 5, WIDTH + 1)))
    assert type(toy.plain) is nn.Linear
    assert toy.plain.weight.numel() == WIDTH * WIDTH


class Activated(nn.Module):
    """Has linear layers with activations behind them, some of which have more to do or are not all that takes them."""

    def __init__(self) -> None:
        super().__init__()
        names = ("first", "gate", "up", "read", "twice", "scaled", "one", "other", "viewed")
        for name in names:
            setattr(self, name, nn.Linear(WIDTH, WIDTH))
        self.gelu, self.tanh, self.silu = nn.GELU(), ACT2FN["gelu_pytorch_tanh"], ACT2FN["silu"]
        self.of_read, self.of_twice, self.of_viewed = nn.GELU(), nn.GELU(), nn.GELU()
        self.more, self.of_two = GeluAndMore(), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.tanh(self.first(self.gelu(x)))
        x = self.silu(self.gate(x)) * self.up(x)
        read = self.read(x)
        x = self.of_read(read) + read
        x = self.of_twice(self.of_twice(self.twice(x)))
        x = self.more(self.scaled(x))
        x = self.of_two(self.one(x)) + self.of_two(self.other(x))
        return self.of_viewed(self.viewed(x).view_as(x))


class GeluAndMore(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * functional.gelu(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_activations_that_alone_take_what_a_layer_computes_are_computed_in_the_same_pass(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    toy = Activated().eval().to(dtype)
    x = torch.randn(3, 5, WIDTH).to(dtype)
    expected = toy(x)
    assert lay_out(toy, lambda: toy(x)) == 9
    kinds = {name: type(part._activation) for name, part in toy.named_children() if isinstance(part, _LaidOut)}
    behind = {"first": nn.GELU, "gate": nn.SiLU, "one": nn.GELU, "other": nn.GELU}
    assert kinds == {name: behind.get(name, type(None)) for name in kinds}
    gone = {name for name, part in toy.named_children() if isinstance(part, nn.Identity)}
    assert gone == {"tanh", "silu", "of_two"}
    assert toy.first._activation.approximate == "tanh"
    close = {"rtol": 0.03, "atol": 0.03} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(toy(x), expected, **close)


@pytest.mark.parametrize("axes", [2, 3])
@torch.inference_mode()
def test_patches_that_are_convolved_one_by_one_are_multiplied(axes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    kind = nn.Conv2d if axes == 2 else nn.Conv3d
    plain = [kind(3, WIDTH, 2, stride=2), kind(3, WIDTH, 2, bias=False), kind(3, WIDTH, 2, padding=1)]
    others = [kind(3, WIDTH, 2, dilation=2), kind(3, 3, 2, groups=3), kind(3, 3, 2, padding=1, padding_mode="circular")]
    model = nn.ModuleList([*plain, *others])
    small, large = torch.randn(5, 3, *(2,) * axes), torch.randn(2, 3, *(6,) * axes)
    expected = [[part(x) for x in (small, large) if part not in others[:1] or x is large] for part in model]
    assert multiply_patches(model) == 4, "all but the one in groups and the one that goes round"
    products, linear = [], functional.linear
    monkeypatch.setattr(functional, "linear", lambda *given: products.append(given) or linear(*given))
    found = [[part(x) for x in (small, large) if part not in others[:1] or x is large] for part in model]
    torch.testing.assert_close(found, expected)
    assert len(products) == 2, "of the small input, by those whose kernel has one place in it"
