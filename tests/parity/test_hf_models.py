"""Models that transformers computes, through our prompt, scheduler and paged cache: its ids and its tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from common.checkpoints.checkpoint import Checkpoint
from common.hf import classes as hf_classes
from common.hf import models as hf_models
from common.hf import small_models
from common.hf.classes import load
from common.hf.towers import without_text
from encoder_service.models.hf.tower import flat_rows
from llm_service.layers.attention.backend import PagedChunk
from llm_service.models.hf import decoder as hf_decoder
from llm_service.models.hf.loader import load_hf_decoder
from llm_service.models.hf.text import text_alone
from llm_service.worker.caches import Caches
from testkit.hf_side import GREEDY, Served, compare
from testkit.local_engine import LocalEngine, make_prompt
from tools.models.compare import OURS
from tools.models.prompts import PROMPTS, SOUND, VIDEO, picture, sounding_prompts
from tools.models.recipes import RECIPES
from tools.models.recipes.recipe import TEXT, VISION, part, whole
from tools.models.tiny import config_of_recipe, make, make_by

SUITE = (
    "llava_onevision",  # videos
    "mistral3",  # a tokenizer of pieces
    "idefics3",  # marks between rows
    "aya_vision",  # windows
    "llama4",  # chunks, queries scaled by their places; rows that the tower does not project
    "gemma3",  # rows that see each other
    "gemma4",  # these in windows alone; inputs of layers; keys of two shapes
    "ernie4_5_vl_moe",  # experts by modality; positions on three axes
    "minicpmv4_6",  # layers with states
    "granite4_vision",  # levels of rows for layers of their own
    "hunyuan_vl",  # positions on four axes, from a picture's own corner; marks that a processor wants around it
    "chameleon",  # rows from the table of tokens; what is set around texts too
    "qwen2_5_omni_thinker",  # sounds, videos and pictures; positions that depend on marks around them
)
"""One of each class; `make models` compares all."""
FEW = "llava_onevision", "gemma4", "ernie4_5_vl_moe", "minicpmv4_6", "qwen2_5_omni_thinker"
"""Of these, each with what no other has: the rest of the classes take as long again."""


def test_videos_whose_frames_are_placed_by_what_is_known_of_them_are_compared(tmp_path: Path) -> None:
    """transformers' processor looks that up, and has it if it is asked to give it back alone."""
    assert {"one picture", VIDEO, OURS} <= compare(Served.of(make("cosmos3_edge", tmp_path)))


def test_marks_around_media_are_looked_up_in_tables_of_their_own() -> None:
    """Gemma 3n's, of the marks behind media."""
    model = small_models.made_up(config_of_recipe("gemma3n"), text_alone)
    base, config = model.base_model, model.config
    ids = torch.tensor([config.eoi_token_id, 65, config.eoa_token_id])
    found = hf_decoder.HfDecoder(model, torch.float32, torch.device("cpu")).embed_tokens(ids)
    tables = base.embed_vision, base.get_input_embeddings(), base.embed_audio
    for row, id, table in zip(found, ids, tables, strict=True):
        torch.testing.assert_close(row, table(id.unsqueeze(0))[0])


_CUT: dict[str, Any] = {"step_tokens": 16, "max_running": 3}


def test_a_family_of_ours_and_transformers_make_the_same_of_one_checkpoint(checkpoints: Callable[..., Path]) -> None:
    """Rows with levels of deepstack, and positions in time, height and width; the text by our decoder, as it is served,
    and by transformers. The tower holds nothing of the text."""
    folder = checkpoints("qwen3_vl")
    theirs = Served.of(folder)
    assert (theirs.found.levels, theirs.found.axes) == (3, 3)
    assert theirs.text() is not None
    tower, stored = load(folder, without_text, torch.float32, torch.device("cpu")), Checkpoint(folder).tensors
    held = sum(each.numel() for each in tower.parameters())
    of_tower = [each for name, each in stored.items() if ".visual." in name]
    assert held == sum(math.prod(each.shape) for each in of_tower)
    prompts = {name: theirs.prompt(parts) for name, parts in PROMPTS.items()}
    ours = {name: make_prompt(folder, parts) for name, parts in PROMPTS.items()}
    for name, prompt in prompts.items():
        assert prompt.layout.ids == ours[name].layout.ids
        assert (prompt.layout.positions, prompt.layout.mrope_delta) == (
            ours[name].layout.positions,
            ours[name].layout.mrope_delta,
        )
        for one, other in zip(prompt.rows, ours[name].rows, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    native = LocalEngine(folder).run(list(ours.values()), GREEDY)
    for options in ({}, _CUT, {"by_hf": True}, {"by_hf": True, **_CUT}):
        said = theirs.engine(**options).run(list(prompts.values()), GREEDY)
        assert [outcome.tokens for outcome in said] == [outcome.tokens for outcome in native]


@pytest.mark.soak
def test_tokens_of_mistral_3_with_mistral_4_s_text_are_those_of_transformers(tmp_path: Path) -> None:
    """As it is published: latent attention, experts, queries that are scaled by their places."""
    latent = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
    experts = {"n_routed_experts": 4, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1}
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}
    rope |= {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1, "partial_rotary_factor": 0.5}
    text = part("mistral4", {**TEXT, "num_key_value_heads": 4}, **latent, **experts, rope_parameters=lambda *_: rope)
    config = whole(
        "mistral3",
        vision_config=part("pixtral", {**VISION, "image_size": 112}),
        text_config=text,
        image_token_index="<image>",
        spatial_merge_size=2,
    )
    folder = make_by(replace(RECIPES["mistral3"], config=config), tmp_path)
    assert {*PROMPTS, OURS} <= compare(Served.of(folder))


@pytest.fixture(scope="module")
def halved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in 16 bits, as models are published."""
    return make("llava", tmp_path_factory.mktemp("llava"), dtype=torch.bfloat16)


@pytest.mark.soak
def test_weights_in_16_bits_give_transformers_tokens_in_float32(halved: Path) -> None:
    assert {str(each.dtype) for each in load_file(halved / "model.safetensors").values()} == {"torch.bfloat16"}
    assert "one picture" in compare(Served.of(halved))


def test_in_16_bits_logits_are_as_near_to_float32_s_as_those_of_transformers(halved: Path) -> None:
    ids = torch.arange(60) % 50 + 40
    whole = hf_classes.class_of(hf_classes.config_of(halved))
    with torch.inference_mode():
        exact, theirs = (
            whole.from_pretrained(halved, dtype=dtype)(input_ids=ids.unsqueeze(0)).logits[0].float()
            for dtype in (torch.float32, torch.bfloat16)
        )
        cpu = torch.device("cpu")
        found = hf_models.describe(halved)
        decoder = load_hf_decoder(Checkpoint(halved), found, torch.bfloat16, cpu)
        caches = Caches(decoder.mixers(), 8, 16, decoder.dtype, cpu, attention=decoder.backend)
        batches = caches.batches([PagedChunk(0, len(ids), [0, 1, 2, 3])], [0])
        positions = torch.arange(len(ids)).expand(3, -1)
        embedded = decoder.embed_tokens(ids)
        hidden = decoder(embedded, positions, caches.layers, batches, None, token_ids=ids)
        assert embedded.dtype == hidden.dtype == torch.bfloat16
        ours = decoder.logits(hidden)
    mine, other = ((each - exact).norm(dim=1).median() for each in (ours, theirs))
    assert 0 < mine <= 1.2 * other


def test_rows_of_a_wrong_number_or_width_are_an_error() -> None:
    two = [torch.zeros(1, 3, 8), torch.zeros(2, 8)]
    assert flat_rows(two, 8).shape == (5, 8)
    for wrong in (torch.zeros(3, 7), [], [torch.zeros(3, 8), torch.zeros(3, 7)], [None]):
        with pytest.raises(RuntimeError, match="something else than rows"):
            flat_rows(wrong, 8)


def test_a_tower_that_gives_other_rows_than_there_are_places_fails(served: Served) -> None:
    pixels = np.asarray(picture(5, 64, 64))
    tokens = sum(part.rows for part in served.processor.replacement(pixels))
    with pytest.raises(RuntimeError, match=f"gives {tokens} rows, and its processor has places for {tokens + 1}"):
        served.tower.rows(served.processor.inputs(pixels), tokens + 1)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served.of(make("llava_onevision", tmp_path_factory.mktemp("llava_onevision")))


@pytest.mark.parametrize(
    "kind", [kind if kind in FEW else pytest.param(kind, marks=pytest.mark.soak) for kind in SUITE]
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of transformers' processors
def test_ids_and_tokens_are_those_of_transformers_whatever_the_chunks_and_the_company(
    kind: str, tmp_path: Path
) -> None:
    more = {SOUND, *sounding_prompts()} if kind == "qwen2_5_omni_thinker" else set()
    assert {"one picture", OURS} | more <= compare(Served.of(make(kind, tmp_path)), RECIPES[kind].step_tokens)


CHEAP = "mistral3"
BY_LIBRARY = [
    kind if kind == CHEAP else pytest.param(kind, marks=pytest.mark.soak)
    for kind in SUITE
    if kind != "minicpmv4_6"  # its layers keep states, and pictures come between
]


@pytest.mark.parametrize("kind", BY_LIBRARY)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of transformers' processors
def test_so_they_are_where_transformers_computes_the_text(kind: str, tmp_path: Path) -> None:
    served = Served.of(make(kind, tmp_path))
    found = compare(served, RECIPES[kind].step_tokens, by_hf=True)
    assert "one picture" in found
    assert OURS not in found
