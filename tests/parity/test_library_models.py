"""Models that the library computes, through our prompt, scheduler and paged cache: its ids and its tokens."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from common import library_classes, library_models, library_processors, small_models
from common.checkpoint import Checkpoint, CheckpointError
from common.errors import InvalidInput
from common.library import Refusal
from common.library_classes import load
from common.library_processors import Sound
from common.media.item import Grid, Header, Key, Modality, PromptPart
from encoder_service.media.messages import PlanItem, WrongLength
from encoder_service.models.library_tower import LibraryTower, flat_rows, without_text
from encoder_service.models.processor import ItemProcessor
from encoder_service.worker import planner
from llm_service.families.family import SpanRule
from llm_service.families.registry import TEXT_FAMILIES
from llm_service.layers import index_keys
from llm_service.layers.attention import general_backend
from llm_service.layers.attention.backend import PagedChunk
from llm_service.models import library_attention, library_decoder, trial, trial_reference
from llm_service.models.config import TextConfig
from llm_service.models.library_loader import load_library_decoder
from llm_service.models.library_text import text_alone
from llm_service.models.served import ServedModel
from llm_service.models.trial import try_config, try_out
from llm_service.models.trial_prompts import TrialPrompt, drawn_prompt
from llm_service.prompt.builder import PromptBuilder
from llm_service.prompt.detokenizer import TokenTexts
from llm_service.request import ChatPrompt, MediaItem, Message, TextPrompt, TokenPrompt
from llm_service.worker.caches import Caches
from tests.parity.library_side import GREEDY, Served, compare
from tests.parity.local_engine import LocalEngine, make_prompt
from tools.models.__main__ import Row, kinds
from tools.models.__main__ import main as tools_models
from tools.models.compare import OURS, PROMPTS, SOUND, TWO_SOUNDS, Reference, picture, sounding_prompts, tones
from tools.models.recipes import RECIPES
from tools.models.recipes.recipe import TEXT, VISION, part, whole
from tools.models.recipes.spans import GEMMA4_HEARING
from tools.models.tiny import config_of_recipe, make, make_by

PAGE = Path(__file__).resolve().parents[2] / "docs/MODELS.md"

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


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with layers that see a window, and with spans whose tokens see each other."""
    return make("gemma3", tmp_path_factory.mktemp("gemma3"))


def test_a_trial_finds_spans_and_tells_other_masks(windowed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert try_out(windowed).spans is SpanRule.EVERYWHERE
    right = general_backend._Segment.mask
    monkeypatch.setattr(general_backend._Segment, "mask", lambda segment, *_: right(segment, None))
    with pytest.raises(CheckpointError, match="gemma3 gives other logits in chunks"):
        try_out(windowed)


@pytest.mark.parametrize("what", ["chunks", "tempering"])
def test_a_trial_tells_what_llama_4_wants_of_attention(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of_recipe("llama4")
    assert try_config(config, drawn_prompt).spans is SpanRule.NOWHERE
    if what == "chunks":
        monkeypatch.setattr(library_attention, "chunk_of", lambda _: None)
    else:
        monkeypatch.setattr(library_decoder, "take_tempering", lambda _: ())
    with pytest.raises(CheckpointError, match="llama4 gives other logits in chunks"):
        try_config(config_of_recipe("llama4"), drawn_prompt)


@pytest.mark.soak
@pytest.mark.parametrize("what", ["fewer", "all"])
def test_a_trial_tells_what_an_index_chooses(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert try_config(config_of_recipe("mistral_large4"), drawn_prompt).spans is SpanRule.NOWHERE
    if what == "fewer":
        right = index_keys.best
        monkeypatch.setattr(index_keys, "best", lambda scores, seen, most: right(scores, seen, most - 1))
    else:
        monkeypatch.setattr(general_backend, "choose", lambda *_: None)
    with pytest.raises(CheckpointError, match="mistral_large4 gives other logits in chunks"):
        try_config(config_of_recipe("mistral_large4"), drawn_prompt)


def test_tokens_that_a_model_does_not_let_say_hide_no_other_difference() -> None:
    least = torch.finfo(torch.float32).min
    expected = torch.tensor([[least, 2.0, -4.0]])
    assert trial._relative(torch.tensor([[least, 2.0, -4.0]]), expected) == 0.0
    assert trial._relative(torch.tensor([[least, 1.0, -4.0]]), expected) == 0.25
    assert trial._relative(torch.tensor([[0.0, 2.0, -4.0]]), expected) == math.inf
    assert math.isnan(trial._relative(torch.tensor([[least, torch.nan, -4.0]]), expected))


def test_levels_of_rows_are_tried_at_layers_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make("granite4_vision", tmp_path)
    assert library_models.describe(folder).levels == 6
    assert try_out(folder).spans is SpanRule.NOWHERE
    monkeypatch.setattr(library_decoder, "layers_of_levels", lambda _: [0, 1, 2, 3, 5, 4])
    with pytest.raises(CheckpointError, match="granite4_vision gives other logits in chunks"):
        try_out(folder)


def test_marks_around_media_are_looked_up_in_tables_of_their_own() -> None:
    """Gemma 3n's, of the marks behind media."""
    model = small_models.made_up(config_of_recipe("gemma3n"), text_alone)
    base, config = model.base_model, model.config
    ids = torch.tensor([config.eoi_token_id, 65, config.eoa_token_id])
    found = library_decoder.LibraryDecoder(model, torch.float32, torch.device("cpu")).embed_tokens(ids)
    tables = base.embed_vision, base.get_input_embeddings(), base.embed_audio
    for row, id, table in zip(found, ids, tables, strict=True):
        torch.testing.assert_close(row, table(id.unsqueeze(0))[0])


def test_pictures_that_are_padded_before_tokens_are_made_of_them_are_served_alone(tmp_path: Path) -> None:
    assert library_models.describe(make("emu3", tmp_path / "emu3")).alone == ("image",)
    assert not library_models.describe(make("chameleon", tmp_path / "chameleon")).alone


def test_a_package_that_the_library_wants_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def describe(_: Path) -> None:
        raise ImportError("\nTimmWrapperModel requires the timm library but it was not found in your environment.")

    monkeypatch.setattr(library_models, "describe", describe)
    library_models.main(tmp_path)
    answer = msgspec.json.decode(capsys.readouterr().out, type=Refusal)
    assert answer.why == "the library wants a package that is not installed here: timm"


def test_a_configuration_that_makes_no_sense_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": 5}))
    with pytest.raises(CheckpointError, match="the library cannot read the configuration of llava: "):
        library_classes.config_of(tmp_path)
    config = config_of_recipe("llava")
    config.text_config.num_attention_heads = 0
    with pytest.raises(CheckpointError, match="the library makes no model of this configuration of llava: "):
        library_models.checked(config)


def test_the_page_of_models_has_each_that_the_library_has() -> None:
    listed = re.findall(r"^\| ([\w.-]+) \| (?:native|library|refused|unknown) \|", PAGE.read_text(), re.MULTILINE)
    known = [made.model_type for made in library_classes.library().AutoModelForImageTextToText._model_mapping]
    assert listed[: len(known)] == known
    alone = listed[len(known) :]
    assert alone == sorted(alone)
    assert {"audioflamingo3", "glmasr", "phi4_multimodal", "qwen2_audio", "qwen3_asr", "voxtral"} <= {*alone}


def test_the_page_of_models_says_whose_decoder_computes_each_text() -> None:
    rows = [row for row in map(Row.read, PAGE.read_text().splitlines()) if row is not None]
    assert [row.kind for row in rows] == kinds()
    assert all((row.text in (OURS, "library")) == (row.how == "library") for row in rows)
    for row in rows:
        if row.how == "library":
            text = json.loads(config_of_recipe(row.kind).get_text_config(decoder=True).to_json_string(use_diff=False))
            assert (row.text == OURS) == _is_known(text), row


def _is_known(text: dict[str, Any]) -> bool:
    """Whether our decoder has all that a text's configuration asks for."""
    if text["model_type"] not in TEXT_FAMILIES:
        return False
    try:
        TextConfig.of(text)
    except CheckpointError:
        return False
    return True


def test_rows_of_kinds_that_are_asked_for_again_go_among_those_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    was = "| blip | refused |  | blip does"
    assert was in PAGE.read_text()
    page.write_text(PAGE.read_text().replace(was, "| blip | refused |  | long ago blip did"))
    monkeypatch.setattr("sys.argv", ["", str(page), "--only", "blip", "--kept", str(tmp_path / "kept.jsonl")])
    tools_models()
    assert page.read_text() == PAGE.read_text()
    older = page.read_text().replace(f"transformers {version('transformers')}", "transformers 5.1.0")
    page.write_text(older)
    tools_models()
    assert page.read_text() == older, "rows of another release are not this one's"


def test_an_attention_that_hands_on_what_ours_does_not_know_is_refused() -> None:
    query = torch.zeros(1, 2, 3, 4)
    with pytest.raises(CheckpointError, match="hands on a position_bias"):
        library_attention.attend_as_ours(torch.nn.Module(), query, query, query, None, position_bias=query)


_CUT: dict[str, Any] = {"step_tokens": 16, "max_running": 3}


def test_a_family_of_ours_and_the_library_make_the_same_of_one_checkpoint(checkpoints: Callable[..., Path]) -> None:
    """Rows with levels of deepstack, and positions in time, height and width; the text by our decoder, as it is served,
    and by the library. The tower holds nothing of the text."""
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
    for options in ({}, _CUT, {"by_library": True}, {"by_library": True, **_CUT}):
        said = theirs.engine(**options).run(list(prompts.values()), GREEDY)
        assert [outcome.tokens for outcome in said] == [outcome.tokens for outcome in native]


def test_a_model_that_answers_by_another_mask_than_it_reads_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps its prompt in sight and forgets its answer, which no prompt in chunks would show, if that is not known
    of it."""
    config = config_of_recipe("unlimited_ocr")
    monkeypatch.setattr(library_attention, "answer_window_of", lambda _: None)
    with pytest.raises(CheckpointError, match="sees other tokens while it answers"):
        try_config(config, drawn_prompt)


def test_rows_at_places_of_a_token_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    path = make("nemo_speechlm", tmp_path) / "config.json"
    stated = json.loads(path.read_text("utf-8"))
    stated["audio_token_id"] = stated["text_config"]["vocab_size"]
    path.write_text(json.dumps(stated), encoding="utf-8")
    with pytest.raises(CheckpointError, match="a token that its vocabulary has not"):
        library_models.describe(tmp_path)


def test_layers_with_states_are_refused() -> None:
    config = config_of_recipe("lfm2_vl")
    with pytest.raises(CheckpointError, match="layers keep states"):
        try_config(config, drawn_prompt)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("mistral4", "mistral4 is for text alone"),
        ("blip", "blip does not keep the rows of pictures apart from the rest"),
    ],
)
def test_a_configuration_says_what_cannot_be_served(kind: str, why: str) -> None:
    with pytest.raises(CheckpointError, match=why):
        library_models.checked(library_classes.library().CONFIG_MAPPING[kind]())


def test_an_index_that_is_not_known_is_refused() -> None:
    text = SimpleNamespace(model_type="new_text", layer_types=["full_attention", "indexed_attention"])
    config = SimpleNamespace(model_type="new", get_text_config=lambda decoder: text)
    with pytest.raises(CheckpointError, match="layers of new choose the tokens that they see by an index of their own"):
        library_models.checked(config)


@pytest.mark.soak
def test_tokens_of_mistral_3_with_mistral_4_s_text_are_the_library_s(tmp_path: Path) -> None:
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


def test_positions_on_four_axes_are_refused() -> None:
    class Base:
        def get_rope_index(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, None]:
            return torch.zeros(4, *input_ids.shape), None

    with pytest.raises(CheckpointError, match="Base counts places on 4 axes"):
        library_models.rope_positions(Base(), {"input_ids": torch.zeros(1, 5)})


def test_contexts_end_where_some_layers_would_turn_others_of_a_batch_otherwise() -> None:
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 64}
    text = SimpleNamespace(rope_parameters={"full_attention": rope}, max_position_embeddings=4096)
    assert (library_models.longest_context(text), library_models.turns_at(text)) == (64, 0)


def test_a_processor_that_does_not_say_what_stands_for_a_picture_is_refused(tmp_path: Path) -> None:
    """It puts a picture before the text, and none where there is a mark for one."""
    with pytest.raises(CheckpointError, match="FuyuProcessor puts a picture before a text"):
        library_models.describe(make("fuyu", tmp_path))


def test_rows_that_depend_on_the_prompt_s_text_are_refused() -> None:
    config = library_classes.library().CONFIG_MAPPING["instructblip"]()
    with pytest.raises(CheckpointError, match="instructblip makes rows of a picture by what the prompt says of it"):
        library_models.checked(config)


def test_marks_that_touch_are_one_and_a_word_behind_one_gets_a_space(tmp_path: Path) -> None:
    """As Idefics2's processor lays pictures out, which touch each other, words, spaces and special tokens."""
    folder = make("idefics2", tmp_path)
    found, processor = library_models.describe(folder), library_processors.processor_of(folder)
    assert (found.seam, found.frame) == ("<fake_token_around_image>", None)
    builder = PromptBuilder(Checkpoint(folder), ServedModel.by_library(found))
    grid, picture_of = Grid(1, 1, 6), ItemProcessor(folder).replacement(np.zeros((48, 64, 3), np.uint8))
    for text in ("<image>a", "<image><image>b", "<image> c<image>\nd<image></s>e", "f <image><g<image>"):
        count = text.count("<image>")
        made = processor(text=[text], images=[Image.new("RGB", (64, 48))] * count)["input_ids"][0]
        headers = [Header(b"", Modality.IMAGE, grid, 6, replacement=picture_of)] * count
        pieces = builder.pieces(TextPrompt(text), [Modality.IMAGE] * count)
        assert builder.layout(pieces, headers).ids == made, text


@pytest.fixture(scope="module")
def halved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in 16 bits, as models are published."""
    return make("llava", tmp_path_factory.mktemp("llava"), dtype=torch.bfloat16)


def test_weights_in_16_bits_give_the_library_s_tokens_in_float32(halved: Path) -> None:
    assert {str(each.dtype) for each in load_file(halved / "model.safetensors").values()} == {"torch.bfloat16"}
    assert "one picture" in compare(Served.of(halved))


def test_in_16_bits_logits_are_as_near_to_float32_s_as_the_library_s(halved: Path) -> None:
    ids = torch.arange(60) % 50 + 40
    whole = library_classes.class_of(library_classes.config_of(halved))
    with torch.inference_mode():
        exact, theirs = (
            whole.from_pretrained(halved, dtype=dtype)(input_ids=ids.unsqueeze(0)).logits[0].float()
            for dtype in (torch.float32, torch.bfloat16)
        )
        cpu = torch.device("cpu")
        found = library_models.describe(halved)
        decoder = load_library_decoder(Checkpoint(halved), found, torch.bfloat16, cpu)
        caches = Caches(decoder.mixers(), 8, 16, decoder.dtype, cpu, attention=decoder.backend)
        batches = caches.batches([PagedChunk(0, len(ids), [0, 1, 2, 3])], [0])
        positions = torch.arange(len(ids)).expand(3, -1)
        embedded = decoder.embed_tokens(ids)
        hidden = decoder(embedded, positions, caches.layers, batches, None, token_ids=ids)
        assert embedded.dtype == hidden.dtype == torch.bfloat16
        ours = decoder.logits(hidden)
    mine, other = ((each - exact).norm(dim=1).median() for each in (ours, theirs))
    assert 0 < mine <= 1.2 * other


def test_videos_are_left_out_where_what_they_show_decides_how_many_rows_they_have(tmp_path: Path) -> None:
    """As in VideoLLaMA 3, which drops what does not change: nobody could lay a prompt out before it is decoded."""
    assert list(library_models.describe(make("video_llama_3", tmp_path)).placeholders) == ["image"]


@pytest.mark.parametrize("asked", [{}, {"fps": 1.0}, {"fps": 5.0}], ids=["unsaid", "one", "five"])
def test_frames_of_a_video_are_the_processor_s_own_choice(asked: dict[str, float], tmp_path: Path) -> None:
    processor = ItemProcessor(make("glm4v", tmp_path))
    whole = library_processors.processor_of(tmp_path)
    about = {"total_num_frames": 90, "fps": 30.0, "duration": 3.0}
    frames = [np.zeros((90, 32, 32, 3), np.uint8)]
    made = whole.video_processor(
        videos=frames, video_metadata=[about], return_metadata=True, return_tensors="pt", **asked
    )
    taken = processor.frames(90, 30.0, *asked.values())
    assert taken == [int(number) for number in made["video_metadata"][0].frames_indices]


def test_tokens_of_pieces_have_their_bytes(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(make("mistral3", tmp_path) / "tokenizer.json"))
    texts, ids = TokenTexts(tokenizer), tokenizer.encode("a b\n é").ids
    assert b"".join(map(texts.bytes_of, ids[1:])) == " a b\n é".encode()
    assert texts.text_of(ids[0]) == "<s>"


def test_pictures_that_depend_on_each_other_are_told() -> None:
    class Counting:
        image_token = "<i>"

        def __init__(self, *, alone: bool) -> None:
            self.alone = alone

        def __call__(self, images: list[Image.Image], **_: object) -> dict[str, object]:
            count = 1 if self.alone else len(images)
            return {"text_replacement_offsets": [[{"replacement": "<i>" * count} for _ in images]]}

    assert library_processors.stand_alone(Counting(alone=True))
    assert not library_processors.stand_alone(Counting(alone=False))


def test_a_prompt_has_one_picture_where_they_depend_on_each_other(windowed: Path) -> None:
    found = msgspec.structs.replace(library_models.describe(windowed), alone=("image",))
    builder = PromptBuilder(Checkpoint(windowed), ServedModel.by_library(found))
    items = [MediaItem(Modality.IMAGE, Key(b""), index=n) for n in range(2)]
    assert builder.pieces(ChatPrompt((Message("user", (items[0], "?")),)), [Modality.IMAGE])
    with pytest.raises(InvalidInput, match="makes of a picture depends on others: one in a prompt is served"):
        builder.pieces(ChatPrompt((Message("user", tuple(items)),)), [Modality.IMAGE] * 2)


def test_a_sound_alone_depends_on_others_where_pictures_do_not(windowed: Path) -> None:
    found = msgspec.structs.replace(
        library_models.describe(windowed), alone=("audio",), placeholders={"image": 1, "audio": 2}
    )
    builder = PromptBuilder(Checkpoint(windowed), ServedModel.by_library(found))
    assert len(builder.pieces(TokenPrompt((1, 1)), [Modality.IMAGE] * 2)) == 2
    with pytest.raises(InvalidInput, match="makes of a sound depends on others: one in a prompt is served"):
        builder.pieces(TokenPrompt((1, 2)), [Modality.IMAGE, Modality.AUDIO])


def test_a_template_has_the_seconds_of_sounds_in_their_order(windowed: Path) -> None:
    """In its own text, not in a caller's."""
    checkpoint = Checkpoint(windowed)
    found = library_models.describe(windowed)
    token = found.placeholders["image"]
    found = msgspec.structs.replace(found, placeholders={"audio": token}, length_mark="{S}")
    builder = PromptBuilder(checkpoint, ServedModel.by_library(found))
    part, grid = (PromptPart("", 2, token),), Grid(1, 1, 2)
    headers = [Header(b"", Modality.AUDIO, grid, 2, seconds_per_grid=each, replacement=part) for each in (1.5, 2.25)]
    word = builder.tokenizer.id_to_token(token)
    pieces = builder.pieces(TextPrompt(f"{word} of {{S}} s, {word} of {{S}} s"), [Modality.AUDIO] * 2)
    assert builder.decode(builder.layout(pieces, headers).ids).endswith(f"of 1.50 s, {word * 2} of 2.25 s")
    texts = builder.pieces(TextPrompt("{S}?"), [])
    assert builder.decode(builder.layout(texts, []).ids).endswith("{S}?")
    with pytest.raises(InvalidInput, match="for the lengths of 2 sounds, and 1 sounds"):
        builder.pieces(TextPrompt(f"{word}{{S}}{{S}}"), [Modality.AUDIO])
    said = builder.pieces(ChatPrompt((Message("user", ("{S}",)),)), [])
    assert "{S}" in said, "a message is a text as it is"


def test_rows_of_sounds_are_the_same_each_time_where_a_tower_could_draw_noise(tmp_path: Path) -> None:
    folder = make("vibevoice_asr", tmp_path)
    found = library_models.describe(folder)
    assert (found.sound_rate, found.length_mark) == (24_000, "<|AUDIO_DURATION|>")
    tower = LibraryTower(folder, found, torch.float32, torch.device("cpu"))
    made = ItemProcessor(folder).inputs(Sound(tones(1, 0.3).heard()))
    with torch.inference_mode():
        one, other = (tower.rows(made, 2, "audio") for _ in range(2))
    assert torch.equal(one, other)


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


@pytest.mark.parametrize("kind", SUITE)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the library's processors
def test_ids_and_tokens_are_the_library_s_whatever_the_chunks_and_the_company(kind: str, tmp_path: Path) -> None:
    more = {SOUND, *sounding_prompts()} if kind == "qwen2_5_omni_thinker" else set()
    assert {"one picture"} | more <= compare(Served.of(make(kind, tmp_path)), RECIPES[kind].step_tokens)


def test_a_sound_that_the_processor_cuts_off_is_refused(tmp_path: Path) -> None:
    """Its features end after ten seconds, and it says nothing."""
    processor = ItemProcessor(make("qwen2_5_omni_thinker", tmp_path))
    whole = processor.replacement(Sound(np.zeros(160_000, np.float32)))
    assert sum(part.rows for part in whole) == 250
    with pytest.raises(ValueError, match="does not take all of so long a sound"):
        processor.replacement(Sound(np.zeros(160_001, np.float32)))
    assert planner._answer(processor, PlanItem(samples=160_001)) == WrongLength(too_long=True)
    assert planner._answer(processor, PlanItem(samples=320)) == WrongLength(too_long=False)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the library's processors
def test_of_a_model_that_speaks_the_thinker_is_served(tmp_path: Path) -> None:
    """As Qwen2.5-Omni is published: one part of its configuration, and of its tensors, writes."""
    thinker, whole = make("qwen2_5_omni_thinker", tmp_path / "thinker"), tmp_path / "whole"
    shutil.copytree(thinker, whole)
    config = json.loads((thinker / "config.json").read_text())
    del config["dtype"]
    saved = {"model_type": "qwen2_5_omni", "architectures": ["Qwen2_5OmniModel"], "thinker_config": config}
    (whole / "config.json").write_text(json.dumps(saved))
    tensors = load_file(whole / "model.safetensors")
    other = {"talker.model.norm.weight": torch.ones(8)}
    save_file({**{f"thinker.{name}": each for name, each in tensors.items()}, **other}, whole / "model.safetensors")
    alone, spoken = Served.of(thinker), Served.of(whole)
    assert spoken.found == alone.found
    parts = ["Hear ", tones(4, 0.7), " and see ", picture(4, 90, 60), "!"]
    prompts = [served.prompt(parts) for served in (alone, spoken)]
    assert prompts[0].layout == prompts[1].layout
    for one, other_rows in zip(prompts[0].rows, prompts[1].rows, strict=True):
        assert torch.equal(one, other_rows)
    answers = [
        each.engine().run([prompt], GREEDY)[0].tokens for each, prompt in zip((alone, spoken), prompts, strict=True)
    ]
    assert answers[0] == answers[1]


def test_sounds_are_left_out_where_rows_of_media_see_each_other_or_there_is_no_tower(tmp_path: Path) -> None:
    folder = make("gemma4", tmp_path)
    config, processor = library_classes.config_of(folder), library_processors.processor_of(folder)
    model = library_classes.blank_of(config)
    assert hasattr(model.base_model, "get_audio_features")
    assert config.audio_config is None
    assert config.text_config.use_bidirectional_attention == "vision"
    tower = library_classes.library().CONFIG_MAPPING["gemma4_audio"]()
    for bidirectional, audio, taken in ((None, tower, True), ("vision", tower, False), (None, None, False)):
        config.text_config.use_bidirectional_attention, config.audio_config = bidirectional, audio
        assert library_models.takes_sounds(model, processor) == taken


def test_a_trial_tells_a_sound_whose_rows_see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def prompted(model: Any) -> TrialPrompt:
        return replace(drawn_prompt(model), sounds=True)

    assert try_config(config_of_recipe("gemma3"), prompted).spans is SpanRule.EVERYWHERE
    monkeypatch.setattr(trial_reference, "_SOUND", 1)  # a picture's, whose rows do
    with pytest.raises(CheckpointError, match="gemma3 gives other logits of a sound in chunks than at once"):
        try_config(config_of_recipe("gemma3"), prompted)


@pytest.fixture(scope="module")
def filled_up(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """A model that has as many places for any sound."""
    return Served.of(make("gemma3n", tmp_path_factory.mktemp("gemma3n")))


def test_places_behind_a_sound_have_the_row_that_the_library_fills_them_up_with(filled_up: Served) -> None:
    library, parts = Reference(filled_up.folder), ["Hear ", tones(7, 1.7), "!"]
    ours, given = filled_up.prompt(parts), library.inputs(parts)
    assert ours.layout.ids == given["input_ids"][0].tolist()
    base, seen = library.model.base_model, list[torch.Tensor]()
    base.language_model.register_forward_pre_hook(
        lambda _, __, named: seen.append(named["inputs_embeds"]), with_kwargs=True
    )
    with torch.inference_mode():
        base(**given)
    rows = seen[0][0, given["input_ids"][0] == library.model.config.audio_token_id]
    torch.testing.assert_close(ours.rows[0][:, 0], rows, rtol=1e-4, atol=1e-4)
    assert torch.equal(rows[-1], rows[100]), "nothing is filled up"
    assert not torch.allclose(rows[0], rows[1]), "nothing is heard"


def test_a_sound_that_is_longer_than_its_places_is_refused(filled_up: Served) -> None:
    """Its extractor cuts it off at 30 s by default."""
    assert sum(part.rows for part in filled_up.processor.replacement(Sound(np.zeros(480_000, np.float32)))) == 188
    with pytest.raises(ValueError, match="does not take all of so long a sound"):
        filled_up.processor.replacement(Sound(np.zeros(480_001, np.float32)))


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["gemma3n", "audioflamingo3", "musicflamingo", "moss_transcribe_diarize"])
def test_tokens_of_models_that_hear_are_the_library_s(kind: str, tmp_path: Path) -> None:
    assert {SOUND, OURS} <= compare(Served.of(make(kind, tmp_path)))


@pytest.mark.soak
def test_tokens_of_gemma_4_s_smaller_sizes_are_the_library_s_of_sounds_too(tmp_path: Path) -> None:
    """They let no rows see each other."""
    assert {SOUND, OURS, "one picture"} <= compare(Served.of(make_by(GEMMA4_HEARING, tmp_path)))


def test_voxtral_hears_though_its_processor_lays_sounds_out_in_conversations_alone(tmp_path: Path) -> None:
    """Ids by its tokenizer's marks, and features of whole chunks of 30 seconds."""
    served = Served.of(make("voxtral", tmp_path))
    library = library_classes.library()
    extractor = library.WhisperFeatureExtractor.from_pretrained(tmp_path)
    model = library.VoxtralForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_str(Checkpoint(tmp_path).tokenizer())
    mark = tokenizer.token_to_id
    answers = list[list[int]]()
    for seed, seconds, chunks in ((1, 1.1, 1), (2, 30.5, 2)):
        part = tones(seed, seconds)
        sound = [mark("[BEGIN_AUDIO]"), *[mark("[AUDIO]")] * 375 * chunks]
        words = [tokenizer.encode(text, add_special_tokens=False).ids for text in ("Hear the ", " What?")]
        ids = [1, mark("[INST]"), *words[0], *sound, *words[1], mark("[/INST]")]
        prompt = served.prompt(["Hear the ", part, " What?"])
        assert prompt.layout.ids == ids
        filled = np.zeros(480_000 * chunks, np.float32)
        filled[: len(part.samples)] = part.heard()
        made = extractor(filled, sampling_rate=16_000, truncation=False, return_tensors="pt").input_features
        features = torch.cat(made.split(3_000, dim=-1))
        given = {"input_ids": torch.tensor([ids]), "input_features": features}
        out = model.generate(**given, max_new_tokens=8, do_sample=False, eos_token_id=None)
        answers.append(out[0, len(ids) :].tolist())
        assert served.engine().run([prompt], GREEDY)[0].tokens[:8] == answers[-1]
    assert answers[0] != answers[1]


@pytest.mark.soak
def test_tokens_of_voxtral_are_those_of_its_processor_and_its_maker_s_package(tmp_path: Path) -> None:
    pytest.importorskip("mistral_common.tokens.tokenizers.mistral")
    assert {SOUND, TWO_SOUNDS, OURS} <= compare(Served.of(make("voxtral", tmp_path)))
