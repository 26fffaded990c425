"""transformers' text model split over ranks by its own plan: two threads, whose shares together are the whole."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from common.checkpoints.checkpoint import CheckpointError
from common.hf.small_models import made_up
from llm_service.layers.tensor_parallel import TensorGroup
from llm_service.models.hf.decoder import HfDecoder
from llm_service.models.hf.partition import partition_model
from llm_service.models.hf.text import text_alone
from llm_service.models.trial import try_config
from llm_service.models.trial_chunks import logits_in_chunks
from tests.parity.thread_ranks import on_ranks
from tools.models.drawn_prompts import drawn_prompt
from tools.models.tiny import config_of_recipe

CPU = torch.device("cpu")

PLANS = (
    "llava",  # columns and rows
    "aya_vision",  # a head that is the table of tokens, and scaled logits
    "glm4v",  # what is gathered behind columns, and cut before rows
    "ernie4_5_vl_moe",  # experts, two groups of them
    "aria",  # experts whose weights lie the other way round
    "gemma3",  # norms of single heads; rows that see each other
    "kimi_k25",  # heads that are not split
    "minimax_m3_vl",  # heads that are gathered again
)


@pytest.mark.parametrize("kind", PLANS)
def test_logits_of_two_ranks_are_those_of_one(kind: str) -> None:
    config = config_of_recipe(kind)
    whole = made_up(config, text_alone)
    prompt = drawn_prompt(whole)
    models = [copy.deepcopy(whole) for _ in range(2)]
    axes = 3 if hasattr(whole.base_model, "get_rope_index") else 1
    positions = torch.arange(len(prompt.ids)).expand(3, -1)
    cuts = [(0, 20), (20, len(prompt.ids))]

    def logits(model: Any, group: TensorGroup) -> tuple[Tensor, int]:
        decoder = HfDecoder(model, torch.float32, CPU, axes=axes, group=group)
        count = sum(each.numel() for each in decoder.weights().parameters())
        return logits_in_chunks(decoder, prompt, positions, cuts, []), count

    with torch.inference_mode():
        expected, all_weights = logits(whole, TensorGroup())
    for found, weights in on_ranks(2, lambda group: logits(models[group.rank], group)):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert weights < 0.85 * all_weights


def test_a_model_without_a_plan_is_refused() -> None:
    model = made_up(config_of_recipe("cosmos3_omni"), text_alone)
    with pytest.raises(CheckpointError, match=r"transformers has no plan for \w+ on more than one rank"):
        partition_model(model, TensorGroup(0, 2))


def test_heads_that_ranks_cannot_split_are_refused() -> None:
    """Two heads of keys over four ranks: half a head is nobody's."""
    model = made_up(config_of_recipe("llava"), text_alone)
    with pytest.raises(CheckpointError, match="heads cannot be split over 4 ranks"):
        HfDecoder(model, torch.float32, CPU, group=TensorGroup(0, 4))


def test_a_style_that_is_not_known_is_refused() -> None:
    model = made_up(config_of_recipe("llava"), text_alone)
    model._tp_plan = {**model.tp_plan, "model.language_model.layers.*.mlp.up_proj": "sequence_parallel"}
    with pytest.raises(CheckpointError, match="sequence_parallel, which is not known here"):
        partition_model(model, TensorGroup(0, 2))


def tried(group: TensorGroup) -> tuple[int, int]:
    """The heads of a trial's small model."""
    config = config_of_recipe("llava")
    text = config.text_config
    text.num_attention_heads, text.num_key_value_heads, text.head_dim = 16, 4, 8
    try_config(config, drawn_prompt, group)
    return text.num_attention_heads, text.num_key_value_heads


def test_a_trial_keeps_as_many_heads_as_ranks_split_and_tells_a_wrong_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tried(TensorGroup()) == (4, 1)
    monkeypatch.setattr(TensorGroup, "join", lambda _, x, total: functional.pad(x, (0, total - x.shape[1])))
    with pytest.raises(CheckpointError, match="over 2 ranks llava gives other logits in chunks than of a whole prompt"):
        tried(TensorGroup(0, 2))
