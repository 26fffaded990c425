"""The families that are served."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from common.checkpoints.checkpoint import CheckpointError
from encoder_service.families.family import Family
from encoder_service.families.internvl import INTERNVL
from encoder_service.families.qwen2_audio import QWEN2_AUDIO
from encoder_service.families.qwen2_vl import QWEN2_5_VL, QWEN2_VL
from encoder_service.families.qwen3_5 import QWEN3_5
from encoder_service.families.qwen3_vl import QWEN3_VL

FAMILIES: Final = {
    "qwen2_vl": QWEN2_VL,
    "qwen2_5_vl": QWEN2_5_VL,
    "qwen3_vl": QWEN3_VL,
    "qwen3_vl_moe": QWEN3_VL,
    "qwen3_5": QWEN3_5,
    "qwen3_5_moe": QWEN3_5,
    "qwen4_exp": QWEN3_5,
    "qwen2_audio": QWEN2_AUDIO,
    "internvl": INTERNVL,
}
"""By `model_type` in config.json, as in the LLM service."""


def find_family(config: Mapping[str, Any]) -> Family | None:
    """The family of a config.json; None if there is none for it or its text."""
    family = FAMILIES.get(config.get("model_type", "?"))
    if family is None or not family.texts:
        return family
    return family if (config.get("text_config") or {}).get("model_type") in family.texts else None


def family_of(config: Mapping[str, Any]) -> Family:
    """As `find_family`; raises CheckpointError, which lists the known ones, if there is none."""
    family = find_family(config)
    if family is None:
        model_type = config.get("model_type", "?")
        raise CheckpointError(f"the tower of {model_type} is not supported; these are: {', '.join(FAMILIES)}")
    return family
