"""Gemma 4's text by our decoder, in the forms that were published: ids, tokens and logits are transformers' own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from common.hf.classes import blank_of
from common.hf.models import describe
from llm_service.families.sight import SpanRule
from llm_service.layers.cache_spec import PagedKV, SharedKV
from llm_service.layers.cpu import selection
from llm_service.layers.decoder_layer import DecoderLayer
from llm_service.layers.embeddings.per_layer import LayerEnd
from llm_service.layers.mixer import HandedOn
from llm_service.layers.moe.dense_hybrid import NormedRouter
from llm_service.layers.self_attention.layer import SelfAttention
from llm_service.layers.tensor_parallel import ALONE, TensorGroup
from llm_service.model_config.text import TextConfig
from llm_service.models.decoder import Decoder
from llm_service.models.known_text import known_text
from llm_service.models.loader import load_decoder
from llm_service.models.trial import try_config, try_ours_of
from llm_service.models.trial_chunks import logits_in_chunks
from llm_service.request import Pooling
from llm_service.worker.input_batch import Inputs
from testkit.hf_side import GREEDY, Served, compare
from testkit.local_engine import Prompt
from tests.parity.graphed import graphed
from tests.parity.thread_ranks import on_ranks
from tools.models.compare import OURS
from tools.models.drawn_prompts import drawn_prompt
from tools.models.prompts import PROMPTS
from tools.models.recipes import RECIPES
from tools.models.recipes.recipe import Recipe
from tools.models.recipes.spans import GEMMA4_DENSE, GEMMA4_EXPERTS
from tools.models.reference import Reference
from tools.models.tiny import config_of, make_by

CPU = torch.device("cpu")
FORMS: dict[str, Recipe] = {
    "inputs": RECIPES["gemma4"],
    "dense": GEMMA4_DENSE,
    "experts": GEMMA4_EXPERTS,
    "unified": RECIPES["gemma4_unified"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The form with inputs of single layers."""
    return make_by(FORMS["inputs"], tmp_path_factory.mktemp("gemma4"))


@pytest.fixture(scope="module")
def served(folder: Path) -> Served:
    return Served.of(folder)


@pytest.mark.soak
@pytest.mark.parametrize("form", ["unified", "experts", "dense"])
def test_ids_and_tokens_are_those_of_transformers_whatever_the_chunks_and_the_company(
    form: str, tmp_path: Path
) -> None:
    """The form with inputs of single layers is compared among transformers' models."""
    served = Served.of(make_by(FORMS[form], tmp_path))
    assert {"one picture", OURS} <= compare(served, FORMS[form].step_tokens)


def test_a_first_token_that_sees_those_behind_it_is_embedded_as_it_is_beside_them(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its layers that share keys and values compute no other place of such a prompt, if they can."""
    prompt = _from_its_picture_on(served.prompt(PROMPTS["one picture"]))
    engines = [served.engine(step_tokens=512) for _ in range(2)]
    assert isinstance(engines[0].decoder, Decoder)
    assert engines[0].decoder.config.shared_layers
    monkeypatch.setattr(engines[1].runner._inputs, "keeps_all", lambda _: True)
    found, whole = (engine.embed([prompt], Pooling.CLS)[0] for engine in engines)
    assert np.abs(found - whole).max() < 1e-5 < np.abs(whole).max()


def _from_its_picture_on(prompt: Prompt) -> Prompt:
    """Without what stands before that."""
    layout = prompt.layout
    first = layout.spans[0].runs[0].begin
    places = np.frombuffer(layout.positions, np.int32).reshape(3, -1)[:, first:] - first
    spans = [
        replace(span, runs=tuple(structs.replace(run, begin=run.begin - first) for run in span.runs))
        for span in layout.spans
    ]
    return replace(prompt, layout=replace(layout, ids=layout.ids[first:], positions=places.tobytes(), spans=spans))


def test_no_row_sees_those_behind_it_where_the_configuration_says_nothing_of_that() -> None:
    config = config_of(FORMS["inputs"])
    assert try_ours_of(config, drawn_prompt).spans is SpanRule.IN_WINDOWS
    config = config_of(FORMS["inputs"])
    config.text_config.use_bidirectional_attention = None
    assert try_ours_of(config, drawn_prompt).spans is SpanRule.NOWHERE


def test_the_size_without_towers_lets_rows_see_each_other_beyond_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers computes a prompt over its ordinary cache."""
    assert try_ours_of(config_of(FORMS["unified"]), drawn_prompt).spans is SpanRule.BEYOND_WINDOWS
    assert try_config(config_of(FORMS["unified"]), drawn_prompt).spans is SpanRule.BEYOND_WINDOWS
    right = SelfAttention.cache_spec

    def within(part: SelfAttention) -> PagedKV | SharedKV:
        spec = right(part)
        if isinstance(spec, SharedKV):
            return spec
        return replace(spec, kind=replace(spec.kind, sight=spec.kind.sight.with_spans(SpanRule.EVERYWHERE)))

    monkeypatch.setattr(SelfAttention, "cache_spec", within)
    with pytest.raises(CheckpointError, match="the logits of our decoder are not transformers'"):
        try_ours_of(config_of(FORMS["unified"]), drawn_prompt)


def test_layers_that_share_keys_keep_none(served: Served) -> None:
    engine = served.engine()
    assert isinstance(engine.decoder, Decoder)
    specs = [mixer.cache_spec() for mixer in engine.decoder.mixers()]
    assert specs[4:] == [SharedKV(3), SharedKV(2)]
    caches = engine.runner.caches
    assert caches.layers[4] is caches.layers[3]
    assert sorted(kind.shape.layers for kind in caches.paged.values()) == [1, 3]
    assert {spec.head_dim for spec in specs if isinstance(spec, PagedKV)} == {16, 32}


def _without_scalar(end: LayerEnd, x: Tensor, given: Tensor | None) -> Tensor:
    scalar, end.layer_scalar = end.layer_scalar, None
    try:
        return _RIGHT_END(end, x, given)
    finally:
        end.layer_scalar = scalar


_RIGHT_END = LayerEnd.forward


def _without_scales(router: NormedRouter, x: Tensor) -> tuple[Tensor, Tensor]:
    weights, chosen = _RIGHT_ROUTER(router, x)
    return weights / router.per_expert_scale[chosen], chosen


_RIGHT_ROUTER = NormedRouter.forward

WRONG: dict[str, tuple[str, type, str, Callable[..., Any]]] = {
    "layers are not multiplied": ("dense", LayerEnd, "forward", _without_scalar),
    "inputs of other layers": (
        "inputs",
        LayerEnd,
        "forward",
        lambda end, x, given: _RIGHT_END(end, x, None if given is None else given.flip(1)),
    ),
    "rows have inputs of their token": ("inputs", Decoder, "ids_of_layers", lambda _, ids, __: ids),
    "keys of another layer": (
        "inputs",
        DecoderLayer,
        "forward",
        lambda layer, *given, kept, **more: _RIGHT_LAYER(layer, *given, kept=HandedOn(_Last(kept.keys)), **more),
    ),
    "values are rotated": (
        "dense",
        SelfAttention,
        "parts",
        lambda part, rotated, heads: (*_RIGHT_PARTS(part, rotated, heads)[:2], _RIGHT_PARTS(part, rotated, heads)[1]),
    ),
    "experts are not scaled": ("experts", NormedRouter, "forward", _without_scales),
}
_RIGHT_LAYER, _RIGHT_PARTS = DecoderLayer.forward, SelfAttention.parts


class _Last(dict[int, Any]):
    """Keys that are a tenth too large."""

    def __init__(self, kept: dict[int, Any]) -> None:
        super().__init__()
        self._kept = kept

    def __getitem__(self, window: int) -> Any:
        key, value = self._kept[window]
        return 1.1 * key, value

    def __setitem__(self, window: int, both: Any) -> None:
        self._kept[window] = both


@pytest.mark.usefixtures("references_once")
@pytest.mark.parametrize("what", WRONG)
def test_the_trial_tells_what_would_be_wrong(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    form, owner, name, wrong = WRONG[what]
    monkeypatch.setattr(owner, name, wrong)
    config = config_of(FORMS[form])
    with pytest.raises(CheckpointError, match="the logits of our decoder are not transformers'"):
        try_ours_of(config, drawn_prompt)


@pytest.mark.usefixtures("references_once")
@pytest.mark.parametrize("changed", [{"logit_cap": None}, {"attention_scale": None}])
def test_the_trial_tells_what_is_not_read(changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    right = TextConfig.of
    monkeypatch.setattr(TextConfig, "of", lambda *given: replace(right(*given), **changed))
    config = config_of(FORMS["dense"])
    with pytest.raises(CheckpointError, match="the logits of our decoder are not transformers'"):
        try_ours_of(config, drawn_prompt)


@pytest.mark.usefixtures("references_once")
@pytest.mark.parametrize("form", ["inputs", "dense", "experts"])
def test_what_is_right_passes_beside_the_same_references(form: str) -> None:
    try_ours_of(config_of(FORMS[form]), drawn_prompt)


@pytest.mark.parametrize("form", ["inputs", "experts"])
def test_logits_of_two_ranks_are_those_of_one(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "allows_panels", lambda: False)  # whose kernels take one thread's calls at a time
    checkpoint = Checkpoint(make_by(FORMS[form], tmp_path))
    text = known_text(checkpoint, describe(tmp_path))
    assert text is not None
    prompt = drawn_prompt(blank_of(config_of(FORMS[form])))
    positions, end = torch.arange(len(prompt.ids)).expand(3, -1), len(prompt.ids)

    def logits(group: TensorGroup) -> Tensor:
        decoder = load_decoder(checkpoint, torch.float32, CPU, group, text=text)
        with torch.inference_mode():
            return logits_in_chunks(decoder, prompt, positions, [(0, 20), (20, end)], prompt.runs)

    expected = logits(ALONE)
    for found in (*on_ranks(2, logits), *(on_ranks(2, logits, expert_parallel=True) if form == "experts" else ())):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_replays_look_up_the_inputs_of_layers(folder: Path, served: Served) -> None:
    library = Reference(folder)
    expected = [library.tokens(library.inputs(parts)) for parts in PROMPTS.values()]
    engine, _ = graphed(folder, step_tokens=80, hf=served.found, text=served.text())
    assert [outcome.tokens for outcome in engine.run(list(map(served.prompt, PROMPTS.values())), GREEDY)] == expected
    graphs = engine.runner.graphs
    assert graphs is not None
    assert 0 < graphs.replays < engine.scheduler.counters.steps


PUBLISHED: dict[str, dict[str, Any]] = {
    "E2B": {
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "num_hidden_layers": 35,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 20,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 256,
        "sliding_window": 512,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
    },
    "E4B": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 42,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 18,
        "hidden_size_per_layer_input": 256,
        "sliding_window": 512,
    },
    "31B": {
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 60,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "sliding_window": 1024,
        "use_bidirectional_attention": "vision",
    },
    "26B-A4B": {
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "num_hidden_layers": 30,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "sliding_window": 1024,
        "use_bidirectional_attention": "vision",
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
    },
}


@pytest.mark.parametrize(
    "name", [each if each in ("E2B", "26B-A4B") else pytest.param(each, marks=pytest.mark.soak) for each in PUBLISHED]
)
def test_shapes_like_the_published_ones_pass_their_trial(name: str) -> None:
    config = config_of(FORMS["dense"])
    words = {each: getattr(config.text_config, each) for each in ("vocab_size", "pad_token_id", "bos_token_id")}
    more = {"num_attention_heads": 8, "final_logit_softcapping": 30.0, "tie_word_embeddings": True, **words}
    shape = {"vocab_size_per_layer_input": words["vocab_size"], **more, **PUBLISHED[name]}
    config.text_config = type(config.text_config)(**shape)
    expected = SpanRule.IN_WINDOWS if "use_bidirectional_attention" in shape else SpanRule.NOWHERE
    assert try_ours_of(config, drawn_prompt).spans is expected


def test_layers_that_share_keys_compute_what_is_wanted_alone(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a prompt's chunks none but the last, and of that one the last token; beside others as many as are drawn."""
    prompts = [served.prompt(parts) for parts in PROMPTS.values()]
    assert served.text() is not None
    rows: list[list[int]] = []
    right, forward = DecoderLayer.forward, Decoder.forward

    def noted(layer: DecoderLayer, x: Tensor, *given: Any, **more: Any) -> Any:
        rows[-1].append(len(x))
        return right(layer, x, *given, **more)

    def begun(*given: Any, **more: Any) -> Tensor:
        rows.append([])
        return forward(*given, **more)

    monkeypatch.setattr(DecoderLayer, "forward", noted)
    monkeypatch.setattr(Decoder, "forward", begun)
    found = [outcome.tokens for outcome in served.engine(step_tokens=80, max_running=2).run(prompts, GREEDY)]
    assert all(step[4:] == [min(step[0], step[4])] * 2 for step in rows)
    assert {(step[0] > 2, step[4] <= 2) for step in rows} == {(True, True), (False, True)}
    monkeypatch.setattr(Inputs, "at_places", lambda *_: None)
    assert [outcome.tokens for outcome in served.engine(step_tokens=80, max_running=2).run(prompts, GREEDY)] == found
    assert any(step[4] > 2 for step in rows)


@pytest.mark.parametrize("form", ["inputs", pytest.param("experts", marks=pytest.mark.soak)])
def test_the_text_as_a_model_of_its_own_proposes_what_it_says(form: str, tmp_path: Path) -> None:
    folder, alone = make_by(FORMS[form], tmp_path / "model"), tmp_path / "text"
    alone.mkdir()
    config = json.loads((folder / "config.json").read_text())["text_config"]
    (alone / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors").items()
    text = {name.replace("language_model.", ""): each for name, each in tensors if "vision" not in name}
    save_file(text, alone / "model.safetensors", {"format": "pt"})
    served = Served.of(folder)
    prompt = served.prompt(PROMPTS["text"])
    expected = served.engine().run([prompt], GREEDY)[0].tokens
    engine = served.engine(speculative_tokens=4, draft_model=alone)
    assert engine.run([prompt], GREEDY)[0].tokens == expected
    counters = engine.scheduler.counters
    assert counters.accepted_draft_tokens == counters.draft_tokens > 0


def test_keys_that_a_checkpoint_has_of_layers_that_share_are_not_read(
    folder: Path, served: Served, tmp_path: Path
) -> None:
    """As published ones have them."""
    prompt = served.prompt(PROMPTS["one picture"])
    expected = served.engine().run([prompt], GREEDY)[0].tokens
    tensors, before = load_file(folder / "model.safetensors"), "model.language_model.layers."
    unread = [f"{before}{layer}.self_attn.{part}.weight" for layer in (4, 5) for part in ("k_proj", "v_proj", "k_norm")]
    assert f"{before}3.self_attn.k_norm.weight" in tensors
    assert not tensors.keys() & set(unread)
    tensors |= {name: torch.full((32, 64)[: 1 if "norm" in name else 2], torch.nan) for name in unread}
    copied = shutil.copytree(folder, tmp_path / "model")
    save_file(tensors, copied / "model.safetensors", {"format": "pt"})
    engine = Served.of(copied).engine()
    assert isinstance(engine.decoder, Decoder)
    assert engine.run([prompt], GREEDY)[0].tokens == expected
