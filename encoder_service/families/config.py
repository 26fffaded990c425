"""Reads a checkpoint's JSON files about its tower and its processors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from common.hf.description import describe
from common.telemetry import log
from encoder_service.families.family import HfConfig, ModelConfig, ServedConfig
from encoder_service.families.registry import family_of, find_family

_log = log.get("families")


def resolve(model: str, revision: str = "") -> tuple[Checkpoint, ServedConfig]:
    """As `Checkpoint.resolve`: a checkpoint, of which only shards with tensors of its tower are needed, and how it is
    served. Raises CheckpointError if it is not."""
    told: ServedConfig | None = None

    def needs(settings: Checkpoint) -> Sequence[str]:
        nonlocal told
        if (family := find_family(settings.config)) is not None:
            return family.parts.tensors
        if settings.shards() is None:  # the names of its tensors are known once it is here
            return ("",)
        told = served(settings)
        if told.parts.tensors == ("",):
            _log.info("all shards are needed: nothing says which have the tower alone")
        return told.parts.tensors

    checkpoint = Checkpoint.resolve(model, revision, needs)
    return checkpoint, told or served(checkpoint)


def served(checkpoint: Checkpoint) -> ServedConfig:
    """How a checkpoint is served: by a family of ours, else by transformers, which takes seconds to ask. Raises
    CheckpointError if neither serves it."""
    if find_family(checkpoint.config) is not None:
        return read(checkpoint)
    return HfConfig(describe(checkpoint))


def read(checkpoint: Checkpoint) -> ModelConfig:
    """Reads a checkpoint's settings, of a family of ours; raises CheckpointError if one is missing, not supported, or
    contradicts another."""
    config = checkpoint.config
    family = family_of(config)
    tower: Mapping[str, Any] | None = config.get(family.parts.section)
    if not isinstance(tower, dict):
        raise CheckpointError(f"config.json has no tower: there is no {family.parts.section}")
    if family.complete is not None:
        tower = family.complete(config)
    try:
        levels, width = family.row_shape(tower)
        processors = family.processors(checkpoint, tower)
    except KeyError as error:
        what = f"config.json of {config['model_type']} does not state {error.args[0]} of its tower"
        raise CheckpointError(what) from None
    decoder = (config.get("text_config") or config).get("hidden_size", width)
    if width != decoder:
        raise CheckpointError(f"the tower's rows have {width} numbers, and the decoder takes {decoder}")
    return ModelConfig(checkpoint.architecture, family, tower, processors, levels, width)
