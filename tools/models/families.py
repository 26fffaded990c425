"""Kinds with a family of ours: their tiny checkpoints, which the tests make, and the media that they take."""

from __future__ import annotations

from pathlib import Path
from pkgutil import resolve_name

from common.checkpoints.checkpoint import Checkpoint
from common.hf.classes import class_of, config_of
from common.hf.description import HfModel
from encoder_service.families import config as families
from encoder_service.families.registry import find_family

_MAKERS = {
    "internvl": "testkit.internvl_checkpoint:make_internvl",
    "qwen2_audio": "testkit.audio_checkpoint:make_audio_checkpoint",
}
_USUAL = "testkit.checkpoints:make_checkpoint"


def make_native(kind: str, folder: Path) -> Path:
    """Writes a checkpoint of a kind into a folder, and returns that."""
    if kind in _MAKERS:
        resolve_name(_MAKERS[kind])(folder)
    else:
        resolve_name(_USUAL)(kind, folder)
    return folder


def taken_by_family(folder: Path) -> HfModel | None:
    """What a family of ours takes, and its text's configuration, as one would know it of a model of transformers; None
    where none is for a checkpoint."""
    checkpoint = Checkpoint(folder)
    if find_family(checkpoint.config) is None:
        return None
    config = config_of(folder)
    text = config.get_text_config()
    return HfModel(
        architecture=class_of(config).__name__,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        max_position=text.max_position_embeddings,
        placeholders={modality.name.lower(): 0 for modality in families.read(checkpoint).processors},
        text=text.to_dict(),
    )
