"""Qwen3-VL, dense or a mixture of experts: query and key heads are normed; a video's frame groups stand apart."""

from __future__ import annotations

from common.media.item import Modality
from llm_service.families.family import Family, InPrompt

_MODALITIES = {
    Modality.IMAGE: InPrompt("image_token_id"),
    Modality.VIDEO: InPrompt("video_token_id", frames_apart=True),
}

QWEN3_VL, QWEN3_VL_MOE = (
    Family(architecture, _MODALITIES, qk_norm=True, mrope_interleaved=True)
    for architecture in ("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration")
)
