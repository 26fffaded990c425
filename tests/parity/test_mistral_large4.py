"""Mistral Large 4's text by our decoder: latents and choices that layers share, and learned positions. All that is
for models of ours is in test_indexed_texts."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from common.hf.classes import class_of, config_of, speaking
from common.hf.models import text_of
from common.hf.small_models import made_up
from llm_service.families.sight import SpanRule
from llm_service.layers.mla.sparse import SparseLatentAttention
from llm_service.layers.moe.routers import GroupedRouter
from llm_service.layers.rotary.learned import LearnedGrowth, LearnedRotary
from llm_service.layers.sparse_attention.token_indexer import TokenIndexer
from llm_service.layers.tensor_parallel import ALONE
from llm_service.model_config import text as text_config
from llm_service.models.decoder import Decoder
from llm_service.models.filling import fill_plain
from llm_service.models.hf.names import named_tensors
from llm_service.models.hf.text import text_alone
from llm_service.models.trial import try_ours_of
from llm_service.models.trial_chunks import logits_in_chunks
from llm_service.models.trial_prompts import TrialPrompt
from testkit.hf_side import GREEDY, Served
from tools.models.drawn_prompts import drawn_prompt
from tools.models.prompts import PROMPTS
from tools.models.reference import Reference
from tools.models.tiny import config_of_recipe, make

KIND = "mistral_large4"


@pytest.mark.soak
def test_weights_are_found_by_transformers_own_names_and_where_experts_are_stacked(tmp_path: Path) -> None:
    """Checkpoints are published, and saved, with other names, and each expert's matrices apart."""
    folder = make(KIND, tmp_path / "published")
    assert any(".experts.0.w1." in name for name in Checkpoint(folder).tensors)
    model = class_of(config_of(folder)).from_pretrained(folder, dtype=torch.float32)
    shutil.copytree(folder, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = {name: each.clone() for name, each in model.state_dict().items()}
    assert any(name.endswith(".mlp.experts.gate_up_proj") for name in tensors)
    save_file(tensors, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    served, library = Served.of(tmp_path / "model"), Reference(folder)
    engine = served.engine()
    assert isinstance(engine.decoder, Decoder)
    outcome = engine.run([served.prompt(PROMPTS["one picture"])], GREEDY)[0]
    assert outcome.tokens == library.tokens(library.inputs(PROMPTS["one picture"]))


ALL_OWN: Mapping[str, Any] = {"kv_source_layers": [*range(6)], "indexer_types": ["full"] * 6}


@pytest.mark.parametrize(
    "settings",
    [
        ALL_OWN | {"no_rope_layers": [1] * 6, "n_group": 2, "topk_group": 1},
        ALL_OWN | {"no_rope_layers": [0] * 6, "mlp_layer_types": ["sparse"] * 6},
        {"no_rope_layers": [1, 1, 1, 0, 1, 0], "kv_source_layers": [*range(6)]},
        {"kv_source_layers": [0, 1, 1, 3, 1, 3], "indexer_types": ["full"] * 6},
    ],
    ids=["nothing shared, experts in groups", "nothing rotated", "choices shared", "latents shared"],
)
def test_layers_of_other_kinds_give_transformers_logits(settings: dict[str, Any]) -> None:
    config: Any = config_of_recipe(KIND)
    stated = config.text_config.to_dict() | {"n_routed_experts": 8} | settings
    config.text_config = type(config.text_config)(**stated)
    assert try_ours_of(config, drawn_prompt).spans is SpanRule.NOWHERE


def test_the_published_configuration_is_tried_as_it_is() -> None:
    """Shrunk, and of fewer words; all its other defaults are known."""
    config: Any = config_of_recipe(KIND)
    config.text_config = type(config.text_config)(vocab_size=config.text_config.vocab_size)
    assert try_ours_of(config, drawn_prompt).spans is SpanRule.NOWHERE


def _wider(given: Any) -> Any:
    return torch.float64 if given is torch.float32 else given


class _InDouble(TorchFunctionMode):
    """What asks for float32 gets float64."""

    def __torch_function__(self, asked: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if asked is Tensor.float:
            return args[0].double()
        named = {name: _wider(each) for name, each in (kwargs or {}).items()}
        return asked(*map(_wider, args), **named)


@pytest.fixture
def in_double() -> Iterator[None]:
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    with _InDouble():
        yield
    torch.set_default_dtype(usual)


@torch.inference_mode()
@pytest.mark.usefixtures("in_double")
def test_in_double_precision_a_long_text_has_transformers_logits() -> None:
    """In float32 rounding turns some choices of an index. transformers' experts are multiplied one by one, as their
    product of all is for shorter numbers alone."""
    count, config = 300, config_of_recipe(KIND)
    config.text_config.index_topk = 32
    model = made_up(config, text_alone).double()
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    ids = torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(3))
    none = torch.empty(0, dtype=torch.int64)
    rows = torch.empty(1, 0, config.text_config.hidden_size, dtype=torch.float64)
    prompt = TrialPrompt(ids, none, rows, rows[0], none.bool(), {})
    rotary = model.model.language_model.rotary_emb
    rotary.inv_freq = type(rotary)(config.text_config).inv_freq
    expected = speaking(model)(input_ids=ids.unsqueeze(0), use_cache=False).logits[0]
    made = Decoder(text_config.TextConfig.of(text_of(model), count), ALONE, torch.float64, torch.device("cpu"))
    decoder = fill_plain(made, named_tensors(model))
    for cuts in ([(0, count)], [(0, 100), (100, 290), (290, count)]):
        found = logits_in_chunks(decoder, prompt, torch.arange(count).expand(3, -1), cuts, [])
        assert found.dtype == expected.dtype == torch.float64
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9 * float(expected.abs().max()))


def _without_growth(heads: Callable[[int], bool]) -> Any:
    right = LearnedGrowth.forward
    return lambda part, query, places: query if heads(query.shape[1]) else right(part, query, places)


def _first_choice(part: SparseLatentAttention, asked: Any, cache: Tensor, index: Any, handed: Any) -> list[Tensor]:
    if part.index is None:
        return list(handed.choice)
    made = index.choose(part.index.query(*asked), cache)
    handed.choice = handed.choice or made
    return list(made)


def _by_sigmoids(router: GroupedRouter, x: Tensor) -> tuple[Tensor, Tensor]:
    weights, chosen = nn.functional.linear(x, router.weight).sigmoid().topk(2)
    return weights / weights.sum(1, keepdim=True), chosen


def _unnormed(right: Any, part: TokenIndexer, *given: Any) -> Any:
    part._modules["q_input_norm"] = nn.Identity()
    return right(part, *given)


def _all_rotated(right: Any, part: TokenIndexer, *given: Any) -> Any:
    part._rotated = True
    return right(part, *given)


INDEX_HEADS = 24
WRONG: dict[str, tuple[Any, str, Any]] = {
    "queries do not grow": (LearnedGrowth, "forward", _without_growth(lambda heads: heads < INDEX_HEADS)),
    "those of the index do not": (LearnedGrowth, "forward", _without_growth(lambda heads: heads == INDEX_HEADS)),
    "pairs turn as stated": (LearnedRotary, "_place", lambda part, _: part._frequencies.copy_(part._stated)),
    "another layer's choice": (SparseLatentAttention, "_choice", _first_choice),
    "another layer's latents": (text_config, "latent_sources", lambda _: (0, 1, 0, 3, 1, 3)),
    "experts scored by sigmoids": (GroupedRouter, "forward", _by_sigmoids),
    "the input of the index is not normed": (TokenIndexer, "ask", _unnormed),
    "the index is rotated everywhere": (TokenIndexer, "ask", _all_rotated),
}
ALIKE = (
    *("queries do not grow", "those of the index do not", "pairs turn as stated"),
    *("another layer's choice", "experts scored by sigmoids"),
    *("the input of the index is not normed", "the index is rotated everywhere"),
)
"""The trial tells these as it does the others."""


@pytest.mark.usefixtures("references_once")
@pytest.mark.parametrize(
    "wrong", [pytest.param(each, marks=pytest.mark.soak if each in ALIKE else ()) for each in WRONG]
)
def test_layers_that_compute_otherwise_are_told(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, made = WRONG[wrong]
    if name == "ask":
        right, by = TokenIndexer.ask, made
        made = lambda part, *given: by(right, part, *given)  # noqa: E731
    monkeypatch.setattr(owner, name, made)
    with pytest.raises(CheckpointError, match="the logits of our decoder are not transformers'"):
        try_ours_of(config_of_recipe(KIND), drawn_prompt)


@pytest.mark.usefixtures("references_once")
def test_layers_that_compute_as_they_should_pass_beside_the_same_references() -> None:
    assert try_ours_of(config_of_recipe(KIND), drawn_prompt).spans is SpanRule.NOWHERE
