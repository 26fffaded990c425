"""The text of a model without a family, if our decoder computes it: its configuration is of a known kind, and for a
small model of that configuration our decoder's logits equal transformers'."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from common.hf.classes import blank_of, config_of, layers_of_levels
from common.hf.description import HfModel
from common.telemetry import log
from llm_service.families.registry import check_text
from llm_service.layers.tensor_parallel import ALONE, TensorGroup
from llm_service.model_config.text import TextConfig
from llm_service.models.hf.names import own_names
from llm_service.models.loader import HEAD, TABLE, TextSide, equal_tensors
from llm_service.models.trial import try_ours, with_media

_log = log.get("known_text")


def known_text(
    checkpoint: Checkpoint, hf: HfModel, group: TensorGroup = ALONE, max_context: int = 0
) -> TextSide | None:
    """The `text` of a checkpoint for `load_decoder`; None if transformers must compute it on any rank of the group, in
    which case the log says why. Contexts are bounded as in `TextConfig.of`. Takes seconds, since a small model is
    tried."""
    why, found = "", None
    try:
        found = _found(checkpoint, hf, max_context)
    except CheckpointError as error:
        why = str(error)
    if not group.all_reduce_min(int(found is not None)):
        found, why = None, why or "another rank cannot"
    if group.rank == 0:
        kind = hf.text.get("model_type", "?")
        if found is None:
            _log.info("transformers computes the text", kind=kind, cause=why)
        else:
            _log.info("our decoder computes the text", kind=kind)
    return found


def _found(checkpoint: Checkpoint, hf: HfModel, max_context: int) -> TextSide:
    check_text(str(hf.text.get("model_type")))
    config, whole = TextConfig.of(hf.text, max_context), config_of(checkpoint.folder)
    model = blank_of(whole)
    names, parted = own_names(model, checkpoint.tensors)
    levels, found = tuple(layers_of_levels(whole)), try_ours(checkpoint.folder)
    by_trial: dict[str, Any] = {"spans": found.spans, "adds_rows": found.adds_rows, "together": hf.together}
    config = with_media(replace(config, level_layers=levels, **by_trial), model)
    if config.family.mlp.fused_gate_up and not any(own.endswith(".gate_up_proj.weight") for own in names.values()):
        config = replace(
            config, family=replace(config.family, mlp=replace(config.family.mlp, fused_gate_up=False))
        )  # transformers fuses them, ours too
    if config.tied:
        config, names = _as_stored(checkpoint, config, names)
    return TextSide(config, names.get, parted)


def _as_stored(checkpoint: Checkpoint, config: TextConfig, names: dict[str, str]) -> tuple[TextConfig, dict[str, str]]:
    """A configuration that ties the head to the token table, and names, corrected by what a checkpoint stores: some
    have a head nevertheless, which then counts as in transformers, and some have the head alone."""
    stored = {own: name for name, own in names.items() if own in (HEAD, TABLE)}
    if HEAD not in stored:
        return config, names
    if TABLE not in stored:
        return config, {name: TABLE if own == HEAD else own for name, own in names.items()}
    if not equal_tensors(checkpoint, stored[HEAD], stored[TABLE]):
        return replace(config, tied=False), names
    return config, {name: own for name, own in names.items() if own != HEAD}
