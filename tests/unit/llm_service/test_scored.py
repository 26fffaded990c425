"""Attention by scores, against transformers' for heads with sinks, and plain torch for soft caps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from llm_service.layers.attention import scored, torch_backend
from llm_service.layers.attention.general_backend import attend_to_chosen, gathers
from llm_service.layers.attention.scored import attend_by_scores
from llm_service.layers.sparse_attention.index import mask_of
from testkit import reference  # noqa: F401 - makes transformers importable beside a CPU torch
from tests.layer_cases import noise

from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as of_gemma2  # isort: skip
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as of_gpt_oss  # isort: skip

HEADS, KV_HEADS, WIDTH, TOKENS, SEEN, SCALE = 6, 2, 8, 21, 34, 0.4


def _theirs(heads: list[Tensor], mask: Tensor, softcap: float | None, sinks: Tensor | None) -> Tensor:
    layer = SimpleNamespace(num_key_value_groups=HEADS // KV_HEADS, training=False, sinks=sinks)
    given = [each.transpose(0, 1)[None] for each in heads]
    hidden = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)[None, None]
    if sinks is None:
        out: Tensor = of_gemma2(layer, *given, hidden, scaling=SCALE, softcap=softcap)[0][0]
    else:
        out = of_gpt_oss(layer, *given, hidden, scaling=SCALE)[0][0]
    return out


@pytest.mark.parametrize("room", [1, 1 << 20])
@pytest.mark.parametrize(("softcap", "has_sinks"), [(None, True), (2.0, False), (0.1, False)])
def test_scores_are_weighed_as_transformers_does(
    softcap: float | None, has_sinks: bool, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scored, "_ROOM", room)
    query, key, value = noise(TOKENS, HEADS, WIDTH), noise(SEEN, KV_HEADS, WIDTH), noise(SEEN, KV_HEADS, WIDTH)
    sinks = noise(HEADS) if has_sinks else None
    mask = torch.ones(TOKENS, SEEN, dtype=torch.bool).tril(SEEN - TOKENS).triu(-4)
    given = attend_by_scores(query, key, value, mask, scale=SCALE, softcap=softcap, sinks=sinks)
    expected = _theirs([query, key, value], mask, softcap, sinks)
    torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-6)
    without = attend_by_scores(query, key, value, mask, scale=SCALE)
    assert (without - expected).abs().max() > 1e-2


@pytest.mark.parametrize("room", [1, 4 * HEADS * SEEN * 3, 1 << 20])
def test_queries_with_a_mask_are_attended_some_at_a_time_on_gpus(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_backend, "_ROOM", room)
    query, key, value = noise(TOKENS, HEADS, WIDTH), noise(SEEN, KV_HEADS, WIDTH), noise(SEEN, KV_HEADS, 5)
    mask = torch.ones(TOKENS, SEEN, dtype=torch.bool).tril(SEEN - TOKENS).triu(-4)
    out = torch.empty(TOKENS, HEADS, 5)
    torch_backend.attend_by_mask(out, query, key, value, mask, SCALE)
    torch.testing.assert_close(out, attend_by_scores(query, key, value, mask, scale=SCALE), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("many", [1, 9], ids=["gathered", "masked"])
def test_what_is_chosen_is_weighed_beside_sinks_as_well(many: int) -> None:
    """Of one token what it has chosen is gathered; of many with few heads all is read."""
    query, key, value = noise(many, HEADS, WIDTH), noise(SEEN, KV_HEADS, WIDTH), noise(SEEN, KV_HEADS, 5)
    chosen, sinks = torch.tensor([0, 3, 4, 9, 30, -1]).expand(many, -1), noise(HEADS) * 3
    assert gathers(chosen.unsqueeze(1), SEEN, HEADS // KV_HEADS) == (many == 1)
    out = torch.empty(many, HEADS, 5)
    attend_to_chosen(out, query, key, value, torch.arange(SEEN), chosen, SCALE, sinks)
    mask = mask_of(chosen, SEEN)
    torch.testing.assert_close(out, attend_by_scores(query, key, value, mask, scale=SCALE, sinks=sinks))
