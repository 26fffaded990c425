"""The text side of Qwen2-VL and Qwen2.5-VL: biases on queries, keys and values."""

from __future__ import annotations

from llm_service.models.decoder import Decoder


class Qwen2Decoder(Decoder):
    """Qwen2 and Qwen2.5, dense."""

    bias = True
