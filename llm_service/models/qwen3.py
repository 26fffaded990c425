"""The text side of Qwen3-VL and Qwen3-VL-MoE: no biases, each query and key head normalised before it is rotated."""

from __future__ import annotations

from llm_service.models.decoder import Decoder


class Qwen3Decoder(Decoder):
    """Qwen3, dense or a mixture of experts: the configuration says which layers are which."""

    qk_norm = True
