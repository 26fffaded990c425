"""Models of transformers that hear, and see or write as well: places of sounds, their rows and tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from common.checkpoints.checkpoint import Checkpoint
from common.hf import classes as hf_classes
from common.hf import models as hf_models
from common.hf.processors import Sound
from encoder_service.media.messages import PlanItem, WrongLength
from encoder_service.models.hf.tower import HfTower
from encoder_service.models.processor import ItemProcessor
from encoder_service.worker import planner
from testkit.hf_side import GREEDY, Served, compare
from tools.models.compare import OURS
from tools.models.prompts import SOUND, TWO_SOUNDS, picture, tones
from tools.models.recipes.spans import GEMMA4_HEARING
from tools.models.reference import Reference
from tools.models.tiny import make, make_by


def test_rows_of_sounds_are_the_same_each_time_where_a_tower_could_draw_noise(tmp_path: Path) -> None:
    folder = make("vibevoice_asr", tmp_path)
    found = hf_models.describe(folder)
    assert (found.sound_rate, found.duration_mark) == (24_000, "<|AUDIO_DURATION|>")
    tower = HfTower(folder, found, torch.float32, torch.device("cpu"))
    made = ItemProcessor(folder).inputs(Sound(tones(1, 0.3).heard()))
    with torch.inference_mode():
        one, other = (tower.rows(made, 2, "audio") for _ in range(2))
    assert torch.equal(one, other)


def test_a_sound_that_the_processor_cuts_off_is_refused(tmp_path: Path) -> None:
    """Its features end after ten seconds, and it says nothing."""
    processor = ItemProcessor(make("qwen2_5_omni_thinker", tmp_path))
    whole = processor.replacement(Sound(np.zeros(160_000, np.float32)))
    assert sum(part.rows for part in whole) == 250
    with pytest.raises(ValueError, match="does not take all of so long a sound"):
        processor.replacement(Sound(np.zeros(160_001, np.float32)))
    assert planner._answer(processor, PlanItem(samples=160_001)) == WrongLength(too_long=True)
    assert planner._answer(processor, PlanItem(samples=320)) == WrongLength(too_long=False)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of transformers' processors
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
    assert spoken.found.tower_tensors == tuple(f"thinker.{each}" for each in alone.found.tower_tensors)
    assert structs.replace(spoken.found, tower_tensors=alone.found.tower_tensors) == alone.found
    parts = ["Hear ", tones(4, 0.7), " and see ", picture(4, 90, 60), "!"]
    prompts = [served.prompt(parts) for served in (alone, spoken)]
    assert prompts[0].layout == prompts[1].layout
    for one, other_rows in zip(prompts[0].rows, prompts[1].rows, strict=True):
        assert torch.equal(one, other_rows)
    answers = [
        each.engine().run([prompt], GREEDY)[0].tokens for each, prompt in zip((alone, spoken), prompts, strict=True)
    ]
    assert answers[0] == answers[1]


@pytest.fixture(scope="module")
def filled_up(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """A model that has as many places for any sound."""
    return Served.of(make("gemma3n", tmp_path_factory.mktemp("gemma3n")))


def test_places_behind_a_sound_have_the_row_that_transformers_fills_them_up_with(filled_up: Served) -> None:
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
def test_tokens_of_models_that_hear_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    assert {SOUND, OURS} <= compare(Served.of(make(kind, tmp_path)))


@pytest.mark.soak
def test_tokens_of_gemma_4_s_smaller_sizes_are_those_of_transformers_of_sounds_too(tmp_path: Path) -> None:
    """They let no rows see each other."""
    assert {SOUND, OURS, "one picture"} <= compare(Served.of(make_by(GEMMA4_HEARING, tmp_path)))


def test_voxtral_hears_though_its_processor_lays_sounds_out_in_conversations_alone(tmp_path: Path) -> None:
    """Ids by its tokenizer's marks, and features of whole chunks of 30 seconds."""
    served = Served.of(make("voxtral", tmp_path))
    library = hf_classes.transformers()
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
