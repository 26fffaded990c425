"""A mixture of experts: the way for GPUs gives what the way for CPUs gives."""

from __future__ import annotations

import pytest
import torch

from llm_service.layers.moe.sparse_mlp import SparseMLP
from llm_service.layers.tensor_parallel import ALONE


def filled(experts: int, per_token: int) -> SparseMLP:
    layer = SparseMLP(experts, per_token, 32, 24, ALONE, torch.float32).requires_grad_(requires_grad=False)
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    return layer


@pytest.mark.parametrize(("experts", "per_token"), [(6, 2), (4, 4), (16, 1)])
@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_experts_in_one_product_are_those_in_turn(experts: int, per_token: int, tokens: int) -> None:
    """Among them are experts that no token goes to."""
    layer = filled(experts, per_token)
    x = torch.randn(tokens, 32, generator=torch.Generator().manual_seed(1))
    weights, chosen = layer.gate(x).softmax(-1).topk(per_token, dim=-1)
    weights = weights / weights.sum(-1, keepdim=True)
    together = layer._together(x, weights, chosen)
    torch.testing.assert_close(together, layer._in_turn(x, weights, chosen), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer(x), together, rtol=1e-5, atol=1e-5)


def test_a_token_of_padding_spoils_no_other() -> None:
    layer = filled(6, 2)
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(2))
    padded = torch.cat([x, torch.full((3, 32), torch.nan)])
    weights, chosen = layer.gate(padded).softmax(-1).topk(2, dim=-1)
    given = layer._together(padded, weights, chosen)[:5]
    torch.testing.assert_close(given, layer._together(x, weights[:5], chosen[:5]), rtol=1e-5, atol=1e-5)
