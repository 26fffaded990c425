"""The text side of Qwen3-VL: no biases, each query and key head normalised before it is turned."""

from __future__ import annotations

from llm_service.models.decoder import Decoder


class Qwen3Decoder(Decoder):
    """Qwen3, dense."""

    qk_norm = True
