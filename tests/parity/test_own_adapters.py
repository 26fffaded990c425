"""Adapters that a checkpoint has beside its weights, with which prompts with sounds alone are computed."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from common.hf import models as hf_models
from common.hf.processors import are_filled_up
from llm_service.config import LlmConfig
from llm_service.engine_settings import _adapter_settings
from llm_service.model_config.served import ServedModel
from llm_service.models.decoder import Decoder
from llm_service.settings import EngineSettings
from llm_service.worker.load_adapters import adapter_reader
from testkit.hf_side import GREEDY, Served, compare
from tools.models.compare import OURS
from tools.models.prompts import SOUND, Part, tones
from tools.models.recipes.sounds import HEARING_BY_ADAPTER
from tools.models.reference import Reference
from tools.models.tiny import config_of_recipe, make, make_by

ASKED: dict[str, list[Part]] = {
    "a text": ["Tell me about two red circles."],
    "a sound": [tones(1, 0.9), "What is said?"],
    "another text": ["Who was the first?"],
    "another sound": ["Hear ", tones(2, 1.7), "!"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_by(HEARING_BY_ADAPTER, tmp_path_factory.mktemp("adapted"))


@pytest.fixture(scope="module")
def served(folder: Path) -> Served:
    return Served.of(folder)


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[int]]:
    """transformers' own tokens: it loads the adapter, which is switched off where there is no sound."""
    reference = Reference(folder)
    return {name: reference.tokens(reference.inputs(parts)) for name, parts in ASKED.items()}


@pytest.mark.parametrize("by_hf", [False, True], ids=["our decoder", "transformers"])
def test_prompts_with_sounds_alone_have_the_adapter(
    served: Served, expected: dict[str, list[int]], *, by_hf: bool
) -> None:
    """Beside each other, in short steps, and from the prefix cache."""
    assert served.found.adapters == {"audio": "."}
    prompts = [served.prompt(parts) for parts in ASKED.values()]
    numbers = [served.adapter(prompt) for prompt in prompts]
    assert numbers == [0, 1, 0, 1]
    engine = served.engine(by_hf=by_hf, step_tokens=40, prefix_cache=True)
    assert isinstance(engine.decoder, Decoder) != by_hf
    for cached in (False, True):
        outcomes = engine.run(prompts, GREEDY, numbers)
        assert dict(zip(ASKED, (outcome.tokens for outcome in outcomes), strict=True)) == expected
        assert all(bool(outcome.cached) == cached for outcome in outcomes)
    sound = prompts[1]
    (plain,) = engine.run([sound], GREEDY, [0])
    assert plain.tokens != expected["a sound"], "the adapter changes nothing"
    assert not plain.cached, "keys and values of another model are taken for this one's"


def test_an_adapter_that_is_not_there_is_missed(folder: Path, tmp_path: Path) -> None:
    for name in (
        "config.json",
        "model.safetensors",
        "processor_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ):
        (tmp_path / name).symlink_to(folder / name)
    with pytest.raises(CheckpointError, match="computes prompts with sounds by an adapter, and there is no"):
        hf_models.describe(tmp_path)


def test_a_kind_has_adapters_in_folders_of_their_own_by_the_modality(tmp_path: Path) -> None:
    config = config_of_recipe("phi4_multimodal")
    for path in ("vision-lora", "speech-lora"):
        kind = "pictures" if path == "vision-lora" else "sounds"
        with pytest.raises(CheckpointError, match=f"prompts with {kind} by an adapter, and there is no .* in {path}"):
            hf_models.own_adapters(config, tmp_path)
        (tmp_path / path).mkdir()
        (tmp_path / path / hf_models.ADAPTER_CONFIG).touch()
    assert list(hf_models.own_adapters(config, tmp_path)) == ["image", "audio"], "a picture's is the first"


def test_slots_are_as_wide_as_the_checkpoint_s_own_adapter(served: Served, tmp_path: Path) -> None:
    checkpoint, model = Checkpoint(served.folder), ServedModel.by_hf(served.found)
    made = _adapter_settings(LlmConfig(model=str(served.folder), max_lora_rank=2), checkpoint, model)
    assert made == {"lora_dir": "", "max_loras": 1, "max_lora_rank": 4}
    with pytest.raises(CheckpointError, match="--lora-dir is not for a checkpoint that has adapters of its own"):
        _adapter_settings(LlmConfig(model=str(served.folder), lora_dir=str(tmp_path)), checkpoint, model)


def test_it_is_read_by_transformers_names_where_our_decoder_does_not_know_the_text(served: Served) -> None:
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 2048}
    given = {"model": str(served.folder), "max_loras": 1, "max_lora_rank": 8}
    blank = EngineSettings(**{**dict.fromkeys(EngineSettings.__struct_fields__, 0), **given})  # type: ignore[arg-type]
    read = {}
    for name, text in {"known": {}, "unknown": {"rope_parameters": rope}}.items():
        found = msgspec.structs.replace(served.found, text={**served.found.text, **text})
        reader = adapter_reader(msgspec.structs.replace(blank, hf=found))
        assert reader is not None
        read[name] = reader(".")
    assert read["known"] == read["unknown"]
    assert read["known"].scales


class Padding:
    """A processor that fills features of sounds up to one length, and says which are of a sound, or does not."""

    audio_token = "<audio>"

    def __init__(self, *, says: bool) -> None:
        self._says = says

    def __call__(self, text: list[str], audio: list[np.ndarray], return_tensors: str) -> dict[str, torch.Tensor]:
        assert (len(text), text[0].count("<audio>"), return_tensors) == (1, len(audio), "pt")
        longest = max(map(len, audio)) // 100
        made = {"input_features": torch.zeros(len(audio), longest, 8), "attention_mask": torch.ones(1, longest)}
        return made | ({"input_features_mask": torch.ones(len(audio), longest)} if self._says else {})


def test_sounds_that_are_filled_up_by_what_a_tower_hears_are_told() -> None:
    """As Granite Speech's, of which one in a prompt is served."""
    assert are_filled_up(Padding(says=False))
    assert not are_filled_up(Padding(says=True))


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["granite_speech", "granite_speech_plus", "fun_asr_nano"])
def test_tokens_of_models_whose_features_torchaudio_makes_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("torchaudio")
    assert {SOUND, OURS} <= compare(Served.of(make(kind, tmp_path)))
