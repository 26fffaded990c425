"""Models that no family is for, whose text our decoder computes all the same: ids and tokens are transformers' own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from common.hf import small_models
from common.hf.classes import blank_of, class_of, state_tokens
from common.hf.stored_names import names_within
from llm_service.families import registry
from llm_service.families.family import Family
from llm_service.families.sight import SpanRule
from llm_service.layers.self_attention.layer import SelfAttention
from llm_service.layers.self_attention.tempered import TemperedAttention
from llm_service.layers.tensor_parallel import TensorGroup
from llm_service.model_config.text import TextConfig
from llm_service.models import trial, trial_chunks
from llm_service.models.decoder import Decoder
from llm_service.models.hf.decoder import HfDecoder
from llm_service.models.hf.names import own_names
from llm_service.models.known_text import known_text
from llm_service.models.trial import try_ours_of
from testkit.attention_cases import otherwise
from testkit.hf_side import GREEDY, Served, compare, with_text
from tools.models.compare import OURS
from tools.models.drawn_prompts import drawn_prompt
from tools.models.prompts import PROMPTS
from tools.models.reference import TOKENS, Reference
from tools.models.tiny import config_of_recipe, make

Rename = Callable[[str], str]

LAYOUTS: dict[str, Rename] = {
    "as transformers has them": lambda name: re.sub(r"^language_model\.model", "model.language_model", name),
    "as they were published first": lambda name: name,
    "as a release between wrote them": lambda name: re.sub(
        r"^language_model\.model", "model.language_model.model", name
    ),
}


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llava", tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def served(llava: Path) -> Served:
    return Served.of(llava)


KINDS = (
    "llava",
    pytest.param("internvl", marks=pytest.mark.soak),
    pytest.param("cosmos3_omni", marks=pytest.mark.soak),  # levels of deepstack; positions on three axes
    "gemma3",  # windows shorter than prompts, rows that see each other, norms behind parts, gelu, two rotary bases
    "lfm3_vl",  # short convolutions, gates of heads, rotary positions of half of the pairs
    pytest.param("glm4v_moe", marks=pytest.mark.soak),  # experts in groups
    pytest.param("glm4v", marks=pytest.mark.soak),  # rotary pairs are neighbours; gates and what they open, one matrix
    pytest.param(
        "granite_docling", marks=pytest.mark.soak
    ),  # embeddings, attention, what parts add, and logits that are multiplied
    "kimi_k25",  # latent attention, dense layers before those with experts
    "cohere2_vision",  # feed-forward parts beside attention, norms that take means off, layers that are not rotated
    pytest.param("phi4_multimodal", marks=pytest.mark.soak),  # an adapter of its own for pictures
    pytest.param("cosmos3_edge", marks=pytest.mark.soak),  # feed-forward parts without gates
    pytest.param("dots3_note", marks=pytest.mark.soak),  # latents in windows, and where an index chooses
    pytest.param("mistral_large4", marks=pytest.mark.soak),  # latents, and what an index chose, of an earlier layer
    pytest.param("minimax_m3_vl", marks=pytest.mark.soak),  # an index that chooses blocks, heads for themselves
    pytest.param("glm5_next", marks=pytest.mark.soak),  # Kimi Delta Attention, pools that layers choose together
    pytest.param("hy_v4_vl", marks=pytest.mark.soak),  # sinks and gates of latent attention, several streams
    pytest.param("exaone4_5", marks=pytest.mark.soak),  # norms behind parts alone
    pytest.param("deepseek_ocr2", marks=pytest.mark.soak),  # experts that count by their probabilities
    pytest.param("aria", marks=pytest.mark.soak),  # matrices of experts the other way round, none apart
)
SCALED: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 64},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of transformers' processors
def test_ids_and_tokens_are_those_of_transformers_whatever_the_chunks_and_the_company(
    kind: str, tmp_path: Path
) -> None:
    assert {"one picture", "two of different sizes", OURS} <= compare(Served.of(make(kind, tmp_path)))


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["molmo2", "gemma3n", "minimax_m3_vl", "mistral_large4", "glm5_next"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of transformers' processors
def test_sequences_that_were_preempted_go_on_as_they_would_have(kind: str, tmp_path: Path) -> None:
    served, library = Served.of(make(kind, tmp_path)), Reference(tmp_path)
    expected = [library.tokens(library.inputs(parts)) for parts in PROMPTS.values()]
    prompts = [served.prompt(parts) for parts in PROMPTS.values()]
    longest = max(len(prompt.layout.ids) for prompt in prompts)
    engine = served.engine(blocks=(longest + TOKENS) // 16 + 3, step_tokens=1024, prefix_cache=True)
    assert isinstance(engine.decoder, Decoder)
    outcomes = engine.run([*prompts, *prompts], GREEDY)
    assert [outcome.tokens for outcome in outcomes] == [*expected, *expected]
    assert engine.scheduler.counters.preemptions > 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of transformers' processors
@pytest.mark.soak
def test_experts_each_with_tensors_of_its_own_give_transformers_tokens(tmp_path: Path) -> None:
    served, library = Served.of(make("qwen3_omni_moe_thinker", tmp_path)), Reference(tmp_path)
    assert any(".experts.1.up_proj." in name for name in Checkpoint(tmp_path).tensors)
    expected = [library.tokens(library.inputs(parts)) for parts in PROMPTS.values()]
    engine = served.engine(step_tokens=16, max_running=2)
    assert isinstance(engine.decoder, Decoder)
    outcomes = engine.run([served.prompt(parts) for parts in PROMPTS.values()], GREEDY)
    assert [outcome.tokens for outcome in outcomes] == expected


def test_either_decoder_gives_the_same_tokens(served: Served) -> None:
    prompts = [served.prompt(parts) for parts in PROMPTS.values()]
    engines = served.engine(), served.engine(by_hf=True)
    assert [type(engine.decoder) for engine in engines] == [Decoder, HfDecoder]
    ours, theirs = ([outcome.tokens for outcome in engine.run(prompts, GREEDY)] for engine in engines)
    assert ours == theirs


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_are_found_by_their_names_in_every_layout(
    llava: Path, served: Served, layout: str, tmp_path: Path
) -> None:
    tensors = load_file(llava / "model.safetensors")
    assert any(name.startswith("language_model.model.") for name in tensors)
    renamed = {LAYOUTS[layout](name): tensor for name, tensor in tensors.items()}
    renamed[LAYOUTS[layout]("language_model.model.layers.0.self_attn.rotary_emb.inv_freq")] = torch.ones(8)
    for file in llava.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    prompt = served.prompt(PROMPTS["one picture"])
    engine = Served.of(tmp_path).engine()
    assert isinstance(engine.decoder, Decoder)
    assert engine.run([prompt], GREEDY)[0].tokens == served.engine().run([prompt], GREEDY)[0].tokens


@pytest.mark.parametrize(
    "stored",
    [
        *(pytest.param(each, marks=pytest.mark.soak) for each in ("both alike", "the table alone", "the head alone")),
        "both, and they differ",
    ],
)
def test_a_head_that_should_be_the_table_is_what_the_checkpoint_has(stored: str, tmp_path: Path) -> None:
    """InternVL's configuration says that they are one, and its larger checkpoints have both."""
    folder = make("internvl", tmp_path)
    assert Checkpoint(folder).config.get("tie_word_embeddings", True)
    tensors = load_file(folder / "model.safetensors")
    (table,) = (name for name in tensors if name.endswith("embed_tokens.weight"))
    head = "language_model.lm_head.weight"
    assert head not in tensors
    match stored:
        case "both alike":
            tensors[head] = tensors[table].clone()
        case "both, and they differ":
            tensors[head] = torch.randn(tensors[table].shape, generator=torch.Generator().manual_seed(3))
        case "the head alone":
            tensors[head] = tensors.pop(table)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert {"one picture", OURS} <= compare(Served.of(folder))


def test_the_log_says_once_whose_decoder_computes(llava: Path, served: Served) -> None:
    with capture_logs() as told:
        assert known_text(Checkpoint(llava), served.found) is not None
    assert [(line["event"], line["kind"]) for line in told] == [("our decoder computes the text", "llama")]


@pytest.mark.parametrize(
    "kind", ["yarn", *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("linear", "llama3"))]
)
def test_rotary_positions_that_reach_further_give_transformers_tokens(kind: str, tmp_path: Path) -> None:
    rope = {"rope_type": kind, "rope_theta": 10_000.0, **SCALED[kind]}
    folder = with_text(make("llava", tmp_path), rope_parameters=rope)
    assert {"one picture", OURS} <= compare(Served.of(folder))


YARN = {"rope_type": "yarn", "rope_theta": 1e6, **SCALED["yarn"], "mscale": 1.0, "mscale_all_dim": 1.0}
SCALED_QUERIES: dict[str, Any] = {
    "model_type": "ministral3",
    "rope_parameters": YARN | {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16},
}


def test_queries_grow_with_their_places_where_a_context_is_long_enough_to_show_it(tmp_path: Path) -> None:
    """None of so many tokens shows it, and one of 16 does."""
    folder = with_text(make("mistral3", tmp_path), **SCALED_QUERIES)
    served = Served.of(folder)
    engines = [served.engine(max_context=bound) for bound in (16, 17)]
    mixers = [engine.decoder.mixers()[0] for engine in engines]
    assert [type(mixer) for mixer in mixers] == [SelfAttention, TemperedAttention]
    assert {"one picture", OURS} <= compare(served)


def test_a_window_in_all_layers_gives_transformers_tokens(tmp_path: Path) -> None:
    folder = with_text(make("mistral3", tmp_path), sliding_window=24)
    assert {"one picture", OURS} <= compare(Served.of(folder))


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("gemma3", tmp_path_factory.mktemp("gemma3"))


@pytest.mark.parametrize(
    "rope",
    [{"rope_type": "linear", "factor": 8.0}, pytest.param({"rope_type": "default"}, marks=pytest.mark.soak)],
)
def test_layers_with_a_window_have_a_rotary_base_of_their_own(rope: dict[str, Any], tmp_path: Path) -> None:
    """As configurations are saved now; first they had `rope_scaling`, and `rope_local_base_freq` beside it."""
    local = {"rope_type": "default", "rope_theta": 1000.0}
    both = {"full_attention": rope | {"rope_theta": 1e5}, "sliding_attention": local}
    folder = with_text(make("gemma3", tmp_path), rope_parameters=both)
    served, library = Served.of(folder), Reference(folder)
    assert "one picture" in compare(served)
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"]
    del text["rope_parameters"]
    text |= {"rope_theta": 1e5, "rope_local_base_freq": 1000.0, "rope_scaling": rope}
    (folder / "config.json").write_text(json.dumps(config))
    expected = library.tokens(library.inputs(PROMPTS["text"]))
    assert Served.of(folder).engine().run([served.prompt(PROMPTS["text"])], GREEDY)[0].tokens == expected
    now, first = (
        TextConfig.of({**text, "model_type": "gemma3_text", **more}) for more in ({"rope_parameters": both}, {})
    )
    assert (now.rotary, now.window_rotary) == (first.rotary, first.window_rotary)


def test_no_chunk_ends_within_rows_that_see_each_other(gemma3: Path) -> None:
    served = Served.of(gemma3)
    engine = served.engine(step_tokens=20)
    assert not engine.runner.chunk_rule.may_end_in_run
    assert engine.decoder.spans is SpanRule.EVERYWHERE
    assert served.engine(by_hf=True).runner.chunk_rule == engine.runner.chunk_rule


@pytest.mark.parametrize("wrong", [{"window": 0}, {"spans": SpanRule.NOWHERE}, {"scale": 0.3}])
def test_layers_that_attend_otherwise_are_told(
    wrong: dict[str, Any], gemma3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert trial.try_ours(gemma3).spans is SpanRule.EVERYWHERE
    right = SelfAttention.cache_spec
    monkeypatch.setattr(
        SelfAttention, "cache_spec", lambda part: replace(spec := right(part), kind=otherwise(spec.kind, **wrong))
    )
    with pytest.raises(CheckpointError, match="the logits of our decoder are not transformers'"):
        trial.try_ours(gemma3)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of transformers' processors
def test_a_part_of_a_head_may_be_rotated_and_biases_be_left_out(tmp_path: Path) -> None:
    folder = make("glm_ocr", tmp_path)
    rope = json.loads((folder / "config.json").read_text())["text_config"]["rope_parameters"]
    with_text(folder, rope_parameters=rope | {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]})
    assert {"one picture", OURS} <= compare(Served.of(folder))


def test_heads_that_divide_the_whole_width_are_tried_as_wide_as_they_are() -> None:
    """GLM-4.1V states no width of a head, and sections that fill half of one."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [8, 12, 12]}
    config = config_of_recipe("glm4v")
    text = config.text_config
    text.hidden_size, text.num_attention_heads, text.num_key_value_heads = 1024, 8, 2
    text.rope_parameters = rope
    assert try_ours_of(config, drawn_prompt).spans is SpanRule.NOWHERE
    assert (text.num_attention_heads, text.hidden_size) == (4, 512)


def test_queries_keys_and_values_may_be_one_matrix() -> None:
    """Phi-4 multimodal's towers are among the parts of its text."""
    config = config_of_recipe("phi4_multimodal")
    state_tokens(config)
    assert try_ours_of(config, drawn_prompt).spans is SpanRule.NOWHERE


@pytest.mark.parametrize("square", ["down_proj", "gate_up_proj"])
@pytest.mark.parametrize("kind", ["aria", "deepseek_ocr2", "kimi_k25", "muse_spark", "qwen3_omni_moe_thinker"])
def test_square_matrices_of_experts_lie_as_transformers_has_them(
    kind: str, square: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Mistral Large 4's published ones are: nothing but the family says which way round."""
    monkeypatch.setitem(small_models._SMALL, "moe_intermediate_size", 64)
    config = config_of_recipe(kind)
    text = config.text_config
    wide = text.moe_hidden_size if kind == "muse_spark" else text.hidden_size
    size = "intermediate_size" if kind == "aria" else "moe_intermediate_size"
    setattr(text, size, wide if square == "down_proj" else wide // 2)
    assert try_ours_of(config, drawn_prompt).spans is SpanRule.NOWHERE
    stacked = class_of(config)(config).state_dict()
    shapes = {tensor.shape[1:] for name, tensor in stacked.items() if name.endswith(f".experts.{square}")}
    assert [one == other for one, other in shapes] == [True]


@pytest.mark.parametrize("stacked", ["gate_and_up_projs", "down_projs"])
def test_stacked_experts_that_transformers_transposes_are_those_of_transformers(stacked: str) -> None:
    """As NeMo keeps those of Nemotron 3.5 Transcribe, under names that our decoder has none for."""
    model = blank_of(config_of_recipe("nemo_speechlm"))
    name = f"llm.model.layers.1.mixer.experts.{stacked}"
    assert name in names_within(model, [name])
    with pytest.raises(CheckpointError, match=f"transformers makes another tensor of {name} when it loads it"):
        own_names(model, [name])


def test_lfm_2_has_other_names_and_no_gates() -> None:
    """LFM3, which is compared as a whole, has both."""
    config = config_of_recipe("lfm2_vl")
    assert try_ours_of(config, drawn_prompt).spans is SpanRule.NOWHERE


def test_a_text_that_asks_for_what_our_decoder_lacks_is_that_of_transformers(tmp_path: Path) -> None:
    folder = with_text(make("llava", tmp_path), hidden_act="gelu")
    served = Served.of(folder)
    with capture_logs() as told:
        assert known_text(Checkpoint(folder), served.found) is None
    why = "activation gelu is not supported"
    assert [(line["event"], line["cause"]) for line in told] == [("transformers computes the text", why)]


def test_a_text_of_which_our_decoder_gives_other_logits_is_that_of_transformers(
    llava: Path, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that our decoder needs is there, so its trial alone tells."""
    right = SelfAttention.cache_spec
    monkeypatch.setattr(
        SelfAttention, "cache_spec", lambda part: replace(spec := right(part), kind=replace(spec.kind, scale=0.3))
    )
    with capture_logs() as told:
        assert known_text(Checkpoint(llava), served.found) is None
        decoder = Served.of(llava).engine().decoder
    assert isinstance(decoder, HfDecoder)
    said = [line["cause"] for line in told if line["event"] == "transformers computes the text"]
    assert len(said) == 2
    assert all(why.startswith("the logits of our decoder are not transformers': they differ by ") for why in said)


def test_where_another_rank_cannot_transformers_computes_on_all(
    llava: Path, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TensorGroup, "all_reduce_min", lambda _, number: 0)
    with capture_logs() as told:
        assert known_text(Checkpoint(llava), served.found) is None
    assert [line["cause"] for line in told] == ["another rank cannot"]


def test_a_text_that_computes_otherwise_is_that_of_transformers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """HyperCLOVA X has Llama's tensors by their names, and scales what comes of them."""
    monkeypatch.setitem(registry.TEXT_FAMILIES, "hyperclovax", Family({}))
    config = config_of_recipe("hyperclovax_vision_v2")
    config.text_config.use_post_norm = False
    with pytest.raises(CheckpointError, match="the logits of our decoder are not transformers': they differ by"):
        try_ours_of(config, drawn_prompt)


def test_a_mask_of_ours_that_were_another_is_told(llava: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial.try_ours(llava)
    right = trial_chunks.PagedChunk
    monkeypatch.setattr(trial_chunks, "PagedChunk", lambda context, *others: right(max(0, context - 1), *others))
    with pytest.raises(CheckpointError, match="the logits of our decoder are not transformers'"):
        trial.try_ours(llava)


@pytest.mark.parametrize("what", ["chunks", "answer"])
def test_logits_of_ours_that_are_no_numbers_are_told(what: str, llava: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a prompt's chunks alone, or in an answer alone."""
    right = trial.logits_in_chunks

    def given(decoder: Decoder, prompt: Any, positions: Any, cuts: Any, spans: Any, **more: Any) -> torch.Tensor:
        found = right(decoder, prompt, positions, cuts, spans, **more)
        return found * torch.nan if (what == "answer" if more else what == "chunks" and len(cuts) > 1) else found

    monkeypatch.setattr(trial, "logits_in_chunks", given)
    with pytest.raises(CheckpointError, match="the logits of our decoder are not transformers'"):
        trial.try_ours(llava)
