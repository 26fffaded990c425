"""Which linear layers of a library's tower are laid out for oneDNN, and what they compute then."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from common.linear import Linear
from encoder_service.models.library_products import lay_out

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
