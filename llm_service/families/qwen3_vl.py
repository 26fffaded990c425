"""Qwen3-VL, dense or a mixture of experts: query and key heads are normed; a video's frame groups stand apart."""

from __future__ import annotations

from llm_service.families.family import Family

QWEN3_VL, QWEN3_VL_MOE = (
    Family(architecture, qk_norm=True, mrope_interleaved=True, frames_apart=True)
    for architecture in ("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration")
)
