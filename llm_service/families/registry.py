"""The families that are served."""

from __future__ import annotations

from typing import Any, Final

from common.checkpoint import CheckpointError
from llm_service.families.family import Family
from llm_service.families.qwen2_vl import QWEN2_5_VL, QWEN2_VL
from llm_service.families.qwen3_vl import QWEN3_VL, QWEN3_VL_MOE

FAMILIES: Final = {family.architecture: family for family in (QWEN2_VL, QWEN2_5_VL, QWEN3_VL, QWEN3_VL_MOE)}
"""By the architecture in config.json."""


def family_of(config: dict[str, Any]) -> Family:
    """The family of a config.json; raises CheckpointError, naming the known ones, where there is none."""
    architecture = (config.get("architectures") or ["?"])[0]
    if architecture not in FAMILIES:
        raise CheckpointError(f"{architecture} is not supported; these are: {', '.join(FAMILIES)}")
    return FAMILIES[architecture]
