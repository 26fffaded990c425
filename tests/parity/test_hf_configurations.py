"""What transformers says of a configuration, and which ones are refused, in a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch

from common.checkpoints.checkpoint import CheckpointError
from common.hf import classes as hf_classes
from common.hf import models as hf_models
from common.hf import positions as hf_positions
from common.hf import processors as hf_processors
from common.hf import rows as hf_rows
from common.hf.description import Refusal
from common.hf.small_models import redraw_corrections
from llm_service.models.hf import attention as hf_attention
from testkit import reference  # noqa: F401 - makes transformers importable beside a CPU torch
from tools.models.tiny import config_of_recipe, make

from transformers.activations import ACT2CLS  # isort: skip


def test_a_package_that_transformers_wants_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def describe(_: Path) -> None:
        raise ImportError("\nTimmWrapperModel requires the timm library but it was not found in your environment.")

    monkeypatch.setattr(hf_models, "describe", describe)
    hf_models.main(tmp_path)
    answer = msgspec.json.decode(capsys.readouterr().out, type=Refusal)
    assert answer.why == "transformers needs a package that is not installed here: timm"


def test_a_configuration_that_makes_no_sense_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": 5}))
    with pytest.raises(CheckpointError, match="transformers cannot read the configuration of llava: "):
        hf_classes.config_of(tmp_path)
    config = config_of_recipe("llava")
    config.text_config.num_attention_heads = 0
    with pytest.raises(CheckpointError, match="transformers makes no model of this configuration of llava: "):
        hf_models.checked(config)


def test_an_attention_that_hands_on_what_ours_does_not_know_is_refused() -> None:
    query = torch.zeros(1, 2, 3, 4)
    with pytest.raises(CheckpointError, match="hands on a position_bias"):
        hf_attention.attend_as_ours(torch.nn.Module(), query, query, query, None, position_bias=query)


def test_rows_at_places_of_a_token_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    path = make("nemo_speechlm", tmp_path) / "config.json"
    stated = json.loads(path.read_text("utf-8"))
    stated["audio_token_id"] = stated["text_config"]["vocab_size"]
    path.write_text(json.dumps(stated), encoding="utf-8")
    with pytest.raises(CheckpointError, match="a token that its vocabulary has not"):
        hf_models.describe(tmp_path)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("mistral4", "mistral4 is for text alone"),
        ("blip", "blip does not keep the rows of pictures apart from the rest"),
    ],
)
def test_a_configuration_says_what_cannot_be_served(kind: str, why: str) -> None:
    with pytest.raises(CheckpointError, match=why):
        hf_models.checked(hf_classes.transformers().CONFIG_MAPPING[kind]())


def test_an_index_that_is_not_known_is_refused() -> None:
    text = SimpleNamespace(model_type="new_text", layer_types=["full_attention", "indexed_attention"])
    config = SimpleNamespace(model_type="new", get_text_config=lambda decoder: text)
    with pytest.raises(CheckpointError, match="layers of new choose the tokens that they see by an index of their own"):
        hf_models.checked(config)


@pytest.mark.parametrize(
    ("stated", "why"),
    [
        ({"loop_num_passes": 3}, "new goes through some of its layers several times, each time with keys of its own"),
        ({"output_vocab_size": 9, "vocab_size": 12}, "new has logits of fewer tokens than its prompts are made of"),
    ],
)
def test_a_text_that_the_engine_has_no_way_for_is_refused(stated: dict[str, int], why: str) -> None:
    text = SimpleNamespace(model_type="new_text", **stated)
    config = SimpleNamespace(model_type="new", get_text_config=lambda decoder: text)
    with pytest.raises(CheckpointError, match=why):
        hf_models.checked(config)


def test_numbers_of_an_activation_are_not_left_as_memory_had_them() -> None:
    activation = ACT2CLS["xielu"](dtype=torch.float32)
    for number in activation.buffers():
        number.fill_(torch.nan)
    redraw_corrections(activation, torch.Generator())
    assert (float(activation.beta), float(activation.eps)) == pytest.approx((0.5, -1e-6))


def test_positions_on_four_axes_are_refused() -> None:
    class Base:
        def get_rope_index(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, None]:
            return torch.zeros(4, *input_ids.shape), None

    with pytest.raises(CheckpointError, match="Base counts places on 4 axes"):
        hf_positions.rope_positions(Base(), {"input_ids": torch.zeros(1, 5)})


def test_contexts_end_where_some_layers_would_turn_others_of_a_batch_otherwise() -> None:
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 64}
    text = SimpleNamespace(rope_parameters={"full_attention": rope}, max_position_embeddings=4096)
    assert (hf_models.longest_context(text), hf_models.long_rope_threshold(text)) == (64, 0)


def test_a_processor_that_does_not_say_what_stands_for_a_picture_is_refused(tmp_path: Path) -> None:
    """It puts a picture before the text, and none where there is a mark for one."""
    with pytest.raises(CheckpointError, match="FuyuProcessor puts a picture before a text"):
        hf_models.describe(make("fuyu", tmp_path))


def test_rows_that_depend_on_the_prompt_s_text_are_refused() -> None:
    config = hf_classes.transformers().CONFIG_MAPPING["instructblip"]()
    with pytest.raises(CheckpointError, match="instructblip makes rows of a picture by what the prompt says of it"):
        hf_models.checked(config)


def test_sounds_are_left_out_where_rows_of_media_see_each_other_or_there_is_no_tower(tmp_path: Path) -> None:
    folder = make("gemma4", tmp_path)
    config, processor = hf_classes.config_of(folder), hf_processors.processor_of(folder)
    model = hf_classes.blank_of(config)
    assert hasattr(model.base_model, "get_audio_features")
    assert config.audio_config is None
    assert config.text_config.use_bidirectional_attention == "vision"
    tower = hf_classes.transformers().CONFIG_MAPPING["gemma4_audio"]()
    for bidirectional, audio, taken in ((None, tower, True), ("vision", tower, False), (None, None, False)):
        config.text_config.use_bidirectional_attention, config.audio_config = bidirectional, audio
        assert hf_rows.takes_sounds(model, processor) == taken
