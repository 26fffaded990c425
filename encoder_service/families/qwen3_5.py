"""Qwen3.5 and Qwen3.6, dense or a mixture of experts, and Qwen4: Qwen3-VL's processors, and its tower without
deepstack."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from common.checkpoints.checkpoint import CheckpointError
from encoder_service.families.qwen3_vl import QWEN3_VL


def _row_shape(vision: Mapping[str, Any]) -> tuple[int, int]:
    if vision.get("deepstack_visual_indexes"):
        raise CheckpointError("config.json asks for deepstack, which the towers of Qwen3.5 do not have")
    return 1, int(vision["out_hidden_size"])


QWEN3_5 = replace(QWEN3_VL, row_shape=_row_shape)
