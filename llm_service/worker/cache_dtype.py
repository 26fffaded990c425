"""The element type of a rank's KV cache, once its model is loaded."""

from __future__ import annotations

import msgspec

from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from common.telemetry import log
from llm_service.layers.attention.int8_blocks import SCALE_BYTES
from llm_service.layers.cache_spec import IndexedKV, PagedKV
from llm_service.model_config.stated_quantization import cache_type_of, suggests_fp8_cache
from llm_service.models.model import Model
from llm_service.settings import CacheDtype, EngineSettings

_log = log.get("load")


def with_cache_dtype(settings: EngineSettings, checkpoint: Checkpoint, decoder: Model) -> EngineSettings:
    """Settings with the type of keys and values as configured, or, if the checkpoint suggests one that is not possible,
    as computed. Raises CheckpointError if the configured one is not possible."""
    try:
        if settings.kv_cache_dtype is not CacheDtype.AUTO:
            check_small_cache(decoder, settings.kv_cache_dtype)
    except CheckpointError:
        if not settings.kv_cache_suggested:
            raise
        settings = msgspec.structs.replace(settings, kv_cache_dtype=CacheDtype.AUTO)
    told = cache_type_of(checkpoint.config)
    if told and (settings.kv_cache_dtype is not CacheDtype.FP8 or not suggests_fp8_cache(checkpoint.config)):
        _log.info("the KV cache is not what the checkpoint suggests", suggested=told, kept=settings.kv_cache_dtype)
    return settings


def check_small_cache(decoder: Model, kept: CacheDtype) -> None:
    """Raises CheckpointError if this model's keys and values cannot be kept in 8 bits."""
    if not decoder.keeps_small_cache:
        raise CheckpointError(f"--kv-cache-dtype {kept} is not for a text that transformers computes")
    for spec in (mixer.cache_spec() for mixer in decoder.mixers()):
        if isinstance(spec, IndexedKV):
            raise CheckpointError(f"--kv-cache-dtype {kept} is not for layers that choose tokens by an index")
        if isinstance(spec, PagedKV) and spec.values_in_keys:
            raise CheckpointError(f"--kv-cache-dtype {kept} is not for latent attention, whose cache is small")
        if kept is CacheDtype.INT8 and isinstance(spec, PagedKV) and spec.head_dim % SCALE_BYTES:
            raise CheckpointError(f"--kv-cache-dtype int8 is for heads of a multiple of {SCALE_BYTES} numbers")
