"""From a checkpoint's architecture to the decoder that runs it. Knows names only, so it imports no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

from common.checkpoint import CheckpointError

if TYPE_CHECKING:
    from llm_service.models.decoder import Decoder

DECODERS: Final = {
    "Qwen2VLForConditionalGeneration": "llm_service.models.qwen2:Qwen2Decoder",
    "Qwen2_5_VLForConditionalGeneration": "llm_service.models.qwen2:Qwen2Decoder",
    "Qwen3VLForConditionalGeneration": "llm_service.models.qwen3:Qwen3Decoder",
    "Qwen3VLMoeForConditionalGeneration": "llm_service.models.qwen3:Qwen3Decoder",
}
"""Architecture name in config.json → `module:Class`."""


def decoder_class(architecture: str) -> type[Decoder]:
    """The decoder of an architecture; raises CheckpointError, naming the known ones, where there is none."""
    place = DECODERS.get(architecture)
    if place is None:
        raise CheckpointError(f"{architecture} is not supported; these are: {', '.join(DECODERS)}")
    module, _, name = place.partition(":")
    found: type[Decoder] = getattr(importlib.import_module(module), name)
    return found
