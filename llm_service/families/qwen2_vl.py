"""Qwen2-VL and Qwen2.5-VL: biases on queries, keys and values; a video is one span."""

from __future__ import annotations

from common.media.item import Modality
from llm_service.families.family import AttentionRules, Family, InPrompt

_IMAGE = InPrompt("image_token_id")

QWEN2_VL = Family(
    {Modality.IMAGE: _IMAGE, Modality.VIDEO: InPrompt("video_token_id")}, attention=AttentionRules(bias=True)
)
QWEN2_5_VL = Family(
    {Modality.IMAGE: _IMAGE, Modality.VIDEO: InPrompt("video_token_id", timed_frames=True)},
    attention=AttentionRules(bias=True),
)
