"""Qwen2-VL and Qwen2.5-VL: biases on queries, keys and values; a video is one span."""

from __future__ import annotations

from llm_service.families.family import Family

QWEN2_VL = Family("Qwen2VLForConditionalGeneration", attention_bias=True)
QWEN2_5_VL = Family("Qwen2_5_VLForConditionalGeneration", attention_bias=True, timed_frames=True)
