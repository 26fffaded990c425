"""Gated short convolutions: as transformers', of shares, and in any pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from common.checkpoints.checkpoint import CheckpointError
from llm_service.layers.cache_spec import Segment, StateCache
from llm_service.layers.recurrent.short_convolution import ShortConvolution
from llm_service.layers.tensor_parallel import ALONE, TensorGroup
from llm_service.model_config.text import TextConfig
from llm_service.models.filling import InMemory, targets
from testkit import reference  # noqa: F401 - makes transformers importable beside a CPU torch

from transformers.models.lfm2.modeling_lfm2 import Lfm2Config, Lfm2MLP, Lfm2ShortConv  # isort: skip

CPU = torch.device("cpu")
HIDDEN, TOKENS, WIDTH = 24, 40, 4
TEXT: dict[str, Any] = {
    "model_type": "lfm2",
    "vocab_size": 32,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "layer_types": ["conv"],
    "conv_L_cache": WIDTH,
}


@pytest.fixture(scope="module")
def theirs() -> nn.Module:
    torch.manual_seed(0)
    return Lfm2ShortConv(Lfm2Config(**TEXT), 0).eval().requires_grad_(requires_grad=False)


def made(theirs: nn.Module, group: TensorGroup = ALONE) -> ShortConvolution:
    ours = ShortConvolution(TextConfig.of(TEXT), group, torch.float32)
    tensors = theirs.state_dict()
    for name, (_, place) in targets(ours):
        place(InMemory(tensors.pop(name)))
    assert not tensors
    return ours


def mixed(ours: ShortConvolution, x: torch.Tensor, cache: StateCache, segments: list[Segment]) -> torch.Tensor:
    return ours.out(ours.mix(ours.project(x, (x, x)), cache, ours.state_backend().batch(segments)))


def empty(ours: ShortConvolution, slots: int) -> StateCache:
    cache = ours.cache_spec().new_cache(slots, CPU)
    for each in cache.tensors:
        each.fill_(torch.nan)  # whoever had it before
    return cache


@torch.inference_mode()
def test_ranks_share_the_channels_of_those_of_transformers(theirs: nn.Module) -> None:
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))
    expected = theirs(x.unsqueeze(0))[0]
    for size in (1, 2, 4):
        ranks = [made(theirs, TensorGroup(rank, size)) for rank in range(size)]
        parts = [mixed(rank, x, empty(rank, 1), [Segment(0, TOKENS, 0, fresh=True)]) for rank in ranks]
        torch.testing.assert_close(sum(parts), expected, rtol=1e-5, atol=1e-6)


@torch.inference_mode()
def test_a_sequence_in_pieces_and_in_company_is_what_it_is_alone(theirs: nn.Module) -> None:
    """Pieces shorter than what the convolution sees among them, and one that goes on from a snapshot."""
    ours = made(theirs)
    one, other = torch.randn(2, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(2))
    expected = mixed(ours, one, empty(ours, 1), [Segment(0, TOKENS, 0, fresh=True)])
    cache, found, begin = empty(ours, 4), list[torch.Tensor](), 0
    for count in (1, 1, 2, 16, 1, 19):
        fresh, end = begin == 0, begin + count
        both = torch.cat([other[begin:end], one[begin:end]])
        pieces = [Segment(0, count, 2, fresh=fresh), Segment(count, 2 * count, 1, fresh=fresh)]
        if count == 16:  # the state behind four tokens of it is kept
            pieces[1:] = [Segment(16, 20, 1, fresh=False, copy=3), Segment(20, 32, 1, fresh=False)]
        found.append(mixed(ours, both, cache, pieces)[count:])
        begin = end
    torch.testing.assert_close(torch.cat(found), expected, rtol=1e-5, atol=1e-6)
    again = mixed(ours, one[8:], cache, [Segment(0, TOKENS - 8, 3, fresh=False)])
    torch.testing.assert_close(again, expected[8:], rtol=1e-5, atol=1e-6)


def test_a_slot_holds_as_many_tokens_as_the_convolution_sees_before_one(theirs: nn.Module) -> None:
    (tensor,) = made(theirs, TensorGroup(1, 2)).cache_spec().tensors
    assert tensor == ((HIDDEN // 2, WIDTH - 1), torch.float32)


def test_biases_are_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match="short convolutions with biases are not supported"):
        TextConfig.of({**TEXT, "conv_bias": True})


def test_what_is_between_two_products_is_as_large_as_transformers_makes_it() -> None:
    for settings in ({}, {"block_ffn_dim_multiplier": 1.5}, {"block_auto_adjust_ff_dim": False}):
        text = {**TEXT, "intermediate_size": 1000, "block_multiple_of": 32, **settings}
        assert TextConfig.of(text).intermediate_size == Lfm2MLP(Lfm2Config(**text)).w1.out_features
