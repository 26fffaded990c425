"""The families that are served."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from common.checkpoint import CheckpointError
from llm_service.families.family import Family
from llm_service.families.qwen2_audio import QWEN2_AUDIO
from llm_service.families.qwen2_vl import QWEN2_5_VL, QWEN2_VL
from llm_service.families.qwen3_5 import QWEN3_5
from llm_service.families.qwen3_vl import QWEN3_VL

FAMILIES: Final = {
    "qwen2_vl": QWEN2_VL,
    "qwen2_5_vl": QWEN2_5_VL,
    "qwen3_vl": QWEN3_VL,
    "qwen3_vl_moe": QWEN3_VL,
    "qwen3_5": QWEN3_5,
    "qwen3_5_moe": QWEN3_5,
    "qwen2_audio": QWEN2_AUDIO,
}
"""By `model_type` in config.json, as in the encoder service."""

TEXT_FAMILIES: Final = {
    "llama": Family({}),
    "qwen2": Family({}, attention_bias=True),
    "qwen3": Family({}, qk_norm=True),
}
"""By the `model_type` of a text: of models without media, which propose drafts for those, and of models that no family
is for, where our decoder computes the text and the library the rest."""


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a config.json; raises CheckpointError, naming the known ones, where there is none."""
    model_type = config.get("model_type", "?")
    known = {**FAMILIES, **TEXT_FAMILIES}
    if model_type not in known:
        raise CheckpointError(f"{model_type} is not supported; these are: {', '.join(FAMILIES)}")
    return known[model_type]
