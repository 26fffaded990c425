"""Reads adapters, and makes the slots that a rank has for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from common.hf.classes import config_of
from common.hf.description import HfModel
from llm_service.families.registry import check_text
from llm_service.model_config.adapter_folder import Adaptable, Adapter, read
from llm_service.models.decoder import Decoder
from llm_service.models.hf.decoder import HfDecoder
from llm_service.settings import EngineSettings
from llm_service.worker.adapters import RankAdapters, adaptable_of
from llm_service.worker.hf_adapters import HfAdapters, hf_adaptable
from llm_service.worker.loaded_adapters import LoadedAdapters


def adapter_reader(settings: EngineSettings) -> Callable[[str], Adapter] | None:
    """The function that reads an adapter's folder for this model, callable from any thread; None if no adapters are
    served."""
    if not settings.max_loras:
        return None
    hf, checkpoint = settings.hf, Checkpoint.resolve(settings.model)
    own = hf is not None and hf.adapters
    if hf is not None and own:
        adaptable = _own_adaptable(settings, hf, checkpoint)
    else:
        config = checkpoint.config if hf is None else hf.text
        adaptable = adaptable_of(config, settings.max_lora_rank, settings.base_names, settings.max_context)
    if not own:
        return partial(read, settings.lora_dir, adaptable=adaptable)

    def read_own(path: str) -> Adapter:
        """Read beside the weights, wherever their links lead: the operator has named the checkpoint."""
        return read("/", str((checkpoint.folder / path).resolve()).removeprefix("/"), adaptable)

    return read_own


def _own_adaptable(settings: EngineSettings, hf: HfModel, checkpoint: Checkpoint) -> Adaptable:
    """What a checkpoint's own adapters may change: by our names if our decoder computes its text, else by
    transformers'."""
    try:
        check_text(str(hf.text.get("model_type")))
        return adaptable_of(hf.text, settings.max_lora_rank, max_context=settings.max_context)
    except CheckpointError:
        return hf_adaptable(config_of(checkpoint.folder), settings.max_lora_rank)


def rank_adapters(settings: EngineSettings, decoder: Decoder | HfDecoder) -> LoadedAdapters | None:
    """Slots for adapters, if any are served. Raises CheckpointError if transformers computes the text, except for the
    checkpoint's own adapters."""
    if not settings.max_loras:
        return None
    if isinstance(decoder, Decoder):
        adapters = RankAdapters(decoder, settings.max_loras, settings.max_lora_rank)
        adapters.warm_up()
        return adapters
    if settings.hf is None or not settings.hf.adapters:
        raise CheckpointError("--lora-dir is not for a model that transformers computes")
    if decoder.group.size > 1:
        raise CheckpointError(f"the checkpoint's own adapter cannot be split over {decoder.group.size} ranks")
    return HfAdapters(decoder, settings.max_loras)
