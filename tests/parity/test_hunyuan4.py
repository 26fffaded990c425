"""Hunyuan V4's text by our decoder: latent attention to the tokens that an index chooses, with sinks and gates, over
several streams, with all that is for models of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from common.checkpoint import Checkpoint, CheckpointError
from llm_service.families.family import SpanRule
from llm_service.families.gates import CutGates
from llm_service.layers import latent_chunks
from llm_service.layers.cpu import selection
from llm_service.layers.group import ALONE, TensorGroup
from llm_service.layers.indexed_latents import IndexedLatentAttention
from llm_service.layers.latent_attention import HeadSinks, LatentAttention
from llm_service.layers.opened_streams import StreamGates
from llm_service.layers.token_index import OrderedLayerNorm
from llm_service.models.decoder import Decoder
from llm_service.models.library_decoder import LibraryDecoder
from llm_service.models.loader import load_decoder
from llm_service.models.trial import try_ours_of
from llm_service.worker.load import check_int8_cache
from llm_service.worker.weights import describe as weights_of
from tests.parity.library_side import GREEDY, Served
from tests.parity.test_known_text_options import _logits
from tests.parity.test_library_ranks import on_ranks
from tests.parity.test_llm_graphs import graphed
from tests.quantized import FORMATS, quantize_checkpoint
from tools.models.drawn_prompts import drawn_prompt
from tools.models.prompts import PROMPTS
from tools.models.reference import TOKENS, Reference
from tools.models.tiny import config_of_recipe, make

KIND, TEXT = "hy_v4_vl", "model.layers."
ASKED = [PROMPTS["text"], PROMPTS["one picture"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(KIND, tmp_path_factory.mktemp("hunyuan"))


@pytest.fixture(scope="module")
def served(folder: Path) -> Served:
    return Served.of(folder)


@pytest.fixture(scope="module")
def said(folder: Path) -> list[list[int]]:
    """What the library says."""
    library = Reference(folder)
    return [library.tokens(library.inputs(parts)) for parts in ASKED]


def test_tokens_are_the_library_s_in_short_steps_beside_others_and_behind_cached_blocks(
    served: Served, said: list[list[int]]
) -> None:
    engine = served.engine(step_tokens=16, prefix_cache=True)
    assert isinstance(engine.decoder, Decoder)
    for _ in range(2):
        assert [outcome.tokens for outcome in engine.run(list(map(served.prompt, ASKED)), GREEDY)] == said
    assert engine.scheduler.counters.prefix_hit_tokens > 0


@pytest.mark.soak
def test_the_library_s_layers_say_the_same_over_our_cache(served: Served, said: list[list[int]]) -> None:
    engine = served.engine(by_library=True, step_tokens=16)
    assert isinstance(engine.decoder, LibraryDecoder)
    assert [outcome.tokens for outcome in engine.run(list(map(served.prompt, ASKED)), GREEDY)] == said


@pytest.mark.parametrize("attention", ["", pytest.param("triton", marks=pytest.mark.soak)])
def test_steps_with_a_token_of_each_sequence_have_graphs(
    folder: Path, served: Served, said: list[list[int]], attention: str
) -> None:
    engine, _ = graphed(folder, attention, library=served.found, text=served.text())
    assert [outcome.tokens for outcome in engine.run(list(map(served.prompt, ASKED)), GREEDY)] == said
    assert engine.runner.graphs is not None
    assert engine.runner.graphs.replays >= TOKENS - 1


def test_drafts_change_no_token(folder: Path, served: Served) -> None:
    """Of what a prompt has said before; an answer of drawn weights seldom repeats anything."""
    parts, library = ["assistant: yes. assistant: yes. assistant: yes."], Reference(folder)
    engine = served.engine(speculative_tokens=4)
    outcome = engine.run([served.prompt(parts)], GREEDY)[0]
    assert outcome.tokens == library.tokens(library.inputs(parts))
    assert engine.scheduler.counters.draft_tokens > 0


@pytest.mark.soak
def test_weights_in_int8_are_rounded_and_say_nearly_the_same(served: Served) -> None:
    plain, engine = served.engine(), served.engine(weight_dtype="int8")
    assert weights_of(engine.decoder, "int8").bits == 8
    whole, rounded = _logits(plain.decoder, KIND), _logits(engine.decoder, KIND)
    assert 0 < (whole - rounded).norm() / whole.norm() < 0.25


@pytest.mark.soak
def test_tokens_of_quantised_weights_are_the_library_s_on_the_weights_that_they_are(
    folder: Path, tmp_path: Path
) -> None:
    """But for those of experts, which checkpoints of this kind have in one tensor."""
    quantized, wide = quantize_checkpoint(folder, FORMATS["int-quantized"], tmp_path, TEXT, experts_too=False)
    served, library = Served.of(quantized), Reference(wide)
    engine = served.engine(step_tokens=80)
    assert isinstance(engine.decoder, Decoder)
    assert weights_of(engine.decoder, "compressed-tensors").bits == 8
    outcome = engine.run([served.prompt(PROMPTS["one picture"])], GREEDY)[0]
    assert outcome.tokens == library.tokens(library.inputs(PROMPTS["one picture"]))


def test_logits_of_two_ranks_are_those_of_one(folder: Path, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its heads' gates and sinks."""
    monkeypatch.setattr(selection, "allows_panels", lambda: False)  # whose kernels take one thread's calls at a time
    checkpoint, text = Checkpoint(folder), served.text()
    assert text is not None

    def logits(group: TensorGroup) -> Tensor:
        return _logits(load_decoder(checkpoint, torch.float32, torch.device("cpu"), group, text=text), KIND)

    expected = logits(ALONE)
    for found in on_ranks(2, logits):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_latents_in_8_bits_are_refused(served: Served) -> None:
    with pytest.raises(CheckpointError, match="not for layers that choose by an index what they see"):
        check_int8_cache(served.engine().decoder)


YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
    "mrope_section": [2, 1, 1],
}


@pytest.mark.parametrize(
    "changed",
    [
        {"indexer_types": ["full"] * 5, "hc_mult": 1},
        {"mlp_layer_types": ["dense"] * 5, "hc_magnitude": 1.0, "hc_eps": 0.05},
        {"n_group": 2, "topk_group": 1, "n_routed_experts": 8, "n_shared_experts": 2, "rms_norm_eps": 0.01},
        {"rope_parameters": YARN},
    ],
    ids=["each chooses, one stream", "no experts", "groups of experts", "scaled places"],
)
def test_other_settings_give_the_library_s_logits(changed: dict[str, Any]) -> None:
    config: Any = config_of_recipe(KIND)
    config.text_config = type(config.text_config)(**config.text_config.to_dict() | changed)
    assert try_ours_of(config, drawn_prompt).spans is SpanRule.NOWHERE


def test_biases_of_latents_are_the_library_s() -> None:
    config: Any = config_of_recipe(KIND)
    config.text_config = type(config.text_config)(**config.text_config.to_dict() | {"attention_bias": True})
    with pytest.raises(CheckpointError, match="biases"):
        try_ours_of(config, drawn_prompt)


def test_the_published_configuration_is_tried_as_it_is() -> None:
    """Shrunk, and of fewer words; all its other defaults are known."""
    config: Any = config_of_recipe(KIND)
    text = config.text_config
    config.text_config = type(text)(vocab_size=text.vocab_size, pad_token_id=text.pad_token_id)
    assert try_ours_of(config, drawn_prompt).spans is SpanRule.NOWHERE


def _first_choice(part: IndexedLatentAttention, asked: Any, cache: Tensor, index: Any, handed: Any) -> list[Tensor]:
    if part.index is None:
        return list(handed.choice)
    made = index.choose(part.index.query(*asked), cache)
    handed.choice = handed.choice or made
    return list(made)


def _unscaled(gates: StreamGates, every: Tensor) -> tuple[Tensor, ...]:
    made = nn.functional.linear(every, gates.weight) * gates.scale.repeat_interleave(gates._count) + gates.base
    return made.sigmoid().split(gates._count, dim=1)


WRONG: dict[str, tuple[Any, str, Any]] = {
    "no sinks": (HeadSinks, "_place", lambda sinks, _: sinks.scores.fill_(-torch.inf)),
    "no sinks where keys are made anew": (latent_chunks, "shares_of", lambda scores, _: scores.softmax(-1)),
    "no gates": (LatentAttention, "opened", lambda part, attended, _: attended),
    "another layer's choice": (IndexedLatentAttention, "_choice", _first_choice),
    "streams that are not normed": (StreamGates, "forward", _unscaled),
    "experts whose gates are not cut": (CutGates, "opened", lambda _, gate, up, sigmoid: gate * sigmoid(gate) * up),
    "keys of an index that are not normed": (OrderedLayerNorm, "forward", lambda _, x: x),
}
ALIKE = (
    *("no sinks where keys are made anew", "another layer's choice", "experts whose gates are not cut"),
    "keys of an index that are not normed",
)
"""The trial tells these as it does the others."""


@pytest.mark.usefixtures("references_once")
@pytest.mark.parametrize(
    "wrong", [pytest.param(each, marks=pytest.mark.soak if each in ALIKE else ()) for each in WRONG]
)
def test_layers_that_compute_otherwise_are_told(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*WRONG[wrong])
    with pytest.raises(CheckpointError, match="the logits of our decoder are not the library's"):
        try_ours_of(config_of_recipe(KIND), drawn_prompt)


@pytest.mark.usefixtures("references_once")
def test_layers_that_compute_as_they_should_pass_beside_the_same_references() -> None:
    assert try_ours_of(config_of_recipe(KIND), drawn_prompt).spans is SpanRule.NOWHERE
