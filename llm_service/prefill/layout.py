"""What two services must have in common to exchange KV blocks."""

from __future__ import annotations

import hashlib
from pathlib import Path

from common.checkpoints.checkpoint import Checkpoint
from common.hash_fields import canonical, framed
from common.media.encoder_digest import tensors_digest
from llm_service.settings import CacheDtype, EngineSettings

_SCHEMA = b"twinlens kv blocks/1"


def kv_layout(settings: EngineSettings, checkpoint: Checkpoint) -> bytes:
    """A hash of the model, its weights by `tensors_digest`, and everything else that determines the bytes of a
    block."""
    digest = hashlib.sha256(framed(_SCHEMA, canonical(checkpoint.config), tensors_digest(checkpoint)))
    if settings.draft_model:
        digest.update(framed(tensors_digest(Checkpoint(Path(settings.draft_model)))))
    decided = (
        settings.device.partition(":")[0],
        settings.dtype,
        settings.weight_dtype,
        settings.attention,
        "e4m3, by the checkpoint's scales" if settings.kv_cache_dtype is CacheDtype.FP8 else settings.kv_cache_dtype,
        settings.block_size,
        settings.tensor_parallel,
        settings.tensor_parallel > 1 and settings.expert_parallel,
        settings.speculative_method,
    )
    digest.update(framed(canonical(decided)))
    return digest.digest()
