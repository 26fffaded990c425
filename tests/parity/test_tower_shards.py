"""Of sharded checkpoints of models that transformers computes, an encoder needs the shards that have a tensor of its
tower: their rows are those of the whole one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.checkpoints.checkpoint import INDEX, SINGLE, Checkpoint, CheckpointError
from common.hf import models as hf_models
from common.hf.classes import blank_of, config_of
from common.hf.towers import ALL, tower_tensors
from common.media.encoder_digest import encoder_digest
from common.rows.wire import DType
from encoder_service.families import config
from encoder_service.families.family import HfConfig
from encoder_service.models.hf.tower import HfTower
from encoder_service.models.processor import ItemProcessor
from encoder_service.worker.hf.runner import noisy_sound, picture
from llm_service.families.hf import hf_family
from tools.models.tiny import make, make_without_weights

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of transformers' processors

CPU = torch.device("cpu")
KINDS = (
    "llava",  # names of older releases
    "mistral3",
    "gemma3",
    "kimi_k25",  # tensors of the tower that are cut when they are loaded
    "chameleon",  # rows from the table of tokens
    "muse_spark",  # rows that go through that table's norm
    "phi4_multimodal",  # a tower within the decoder
    "qwen2_5_omni_thinker",  # two towers
)


def _sharded(source: Path, folder: Path) -> Path:
    """The same with four tensors in a file."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    places = {name: f"model-{at // 4}.safetensors" for at, name in enumerate(sorted(tensors))}
    for file in set(places.values()):
        held = {name: tensor for name, tensor in tensors.items() if places[name] == file}
        save_file(held, folder / file, {"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def _rows(folder: Path, found: hf_models.HfModel) -> list[Tensor]:
    """Of a picture and of a sound, as far as they are taken; and all that the tower has."""
    processor, tower = ItemProcessor(folder), HfTower(folder, found, torch.float32, CPU)
    rows = list(tower._model.state_dict().values())
    for kind, shown in (("image", picture((84, 84), 1)), ("audio", noisy_sound(1, found.sound_rate, 1))):
        if kind in found.placeholders:
            tokens = sum(part.rows for part in processor.replacement(shown))
            with torch.inference_mode():
                rows.append(tower.rows(processor.inputs(shown), tokens, kind))
    return rows


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_the_same_without_the_shards_of_the_text(kind: str, tmp_path: Path) -> None:
    whole = make(kind, tmp_path / "whole")
    found = hf_models.describe(whole)
    folder = _sharded(whole, tmp_path / "sharded")
    told = hf_models.describe(folder)
    assert told.tower_tensors == found.tower_tensors
    part = Checkpoint(folder, prefixes=told.tower_tensors)
    needed, every = part.weight_files(), Checkpoint(folder).weight_files()
    assert set(needed) < set(every), "the shards prove nothing"
    for name in set(every) - set(needed):
        (folder / name).unlink()
    assert hf_models.describe(folder) == told
    digests = [encoder_digest(each, DType.FLOAT32, found.encoder) for each in (Checkpoint(whole), part)]
    assert digests[0] == digests[1]
    assert hf_family(found).encoder == HfConfig(told).parts
    for ours, theirs in zip(_rows(folder, told), _rows(whole, found), strict=True):
        assert torch.equal(ours, theirs)
    (folder / needed[0]).unlink()
    with pytest.raises(CheckpointError, match="transformers cannot load the model"):
        HfTower(folder, told, torch.float32, CPU)


def _needed(folder: Path, *stored: str) -> tuple[str, ...]:
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(stored, "model-1.safetensors")}))
    return tuple(tower_tensors(Checkpoint(folder), blank_of(config_of(folder))))


def test_what_is_not_surely_the_text_s_is_needed(tmp_path: Path) -> None:
    """Names with a prefix that transformers takes away, a quantised text's, and those that nothing is known of."""
    folder = make_without_weights("qwen2_5_omni_thinker", tmp_path)
    assert _needed(folder) == ALL
    model = blank_of(config_of(folder))
    own = [f"thinker.{name.removeprefix('model.').replace('language_model', 'model')}" for name in model.state_dict()]
    quantised = "thinker.model.layers.0.mlp.up_proj.weight_packed", "thinker.model.layers.0.mlp.up_proj.weight_scale"
    towers = "thinker.audio_tower.", "thinker.visual."
    assert _needed(folder, *own, *quantised) == towers
    assert _needed(folder, *own, "talker.model.norm.weight", "mtp.weight") == ("mtp.", "talker.", *towers)
    assert _needed(folder, *(name for name in own if "visual.patch_embed" not in name)) == ALL
    assert _needed(folder, *(f"elsewhere.{name}" for name in own)) == ALL


def test_an_encoder_fetches_the_shards_of_its_tower_and_asks_transformers_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, snapshot = _sharded(make("llava", tmp_path / "whole"), tmp_path / "source"), tmp_path / "0123abc"
    snapshot.mkdir()
    asked = list[Path]()

    def download(_: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        assert revision in (None, snapshot.name)
        for pattern in allow_patterns:
            for file in source.glob(pattern):
                shutil.copy(file, snapshot)
        return str(snapshot)

    def describe(checkpoint: Checkpoint) -> hf_models.HfModel:
        asked.append(checkpoint.folder)
        return hf_models.describe(checkpoint.folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr(config, "describe", describe)
    checkpoint, told = config.resolve("a/model")
    fetched = {path.name for path in snapshot.glob("*.safetensors")}
    assert fetched == {*checkpoint.weight_files()} < {path.name for path in source.glob("*.safetensors")}
    assert isinstance(told, HfConfig)
    assert all(map(torch.equal, _rows(snapshot, told.hf), _rows(tmp_path / "whole", told.hf)))
    assert asked == [snapshot]
    source = tmp_path / "whole"
    for path in snapshot.iterdir():
        path.unlink()
    single, alike = config.resolve("a/model")
    assert (single.weight_files(), alike) == ([SINGLE], told), "whose names are known once it is here"
