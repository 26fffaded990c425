"""What the service must know of a model before it is loaded, for both back ends."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from common.checkpoints.checkpoint import Checkpoint
from common.hf.description import HfModel, describe
from llm_service.families.family import Family
from llm_service.families.hf import hf_family
from llm_service.families.registry import find_family
from llm_service.model_config.text import TextConfig


class Weights(msgspec.Struct, frozen=True):
    """Weights as a rank holds them: the quantisation, if any; the type of most numbers; the bits of one; where they are
    widened (registers or memory); bytes of all, scales included; and the type of activations, if these are rounded to
    as few bits."""

    quantization: str = ""
    number: str = ""
    bits: int = 0
    widened_in: str = ""
    bytes: int = 0
    inputs: str = ""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A row has `levels` times `hidden_size` numbers; `hf` describes a model that transformers computes."""

    family: Family
    hidden_size: int
    vocab_size: int
    max_position: int
    levels: int
    hf: HfModel | None = None

    def max_context(self, allowed: int) -> int:
        """Tokens of the longest context, if the operator allows `allowed`; 0: the model's own bound."""
        return min(allowed or self.max_position, self.max_position)

    @classmethod
    def of(cls, checkpoint: Checkpoint, hf: HfModel | None = None) -> ServedModel:
        """How a checkpoint is served: by a family of ours, else by transformers, which takes seconds to ask; `hf` is
        its answer, if known. Raises CheckpointError if neither serves it."""
        if find_family(checkpoint.config) is not None:
            text = TextConfig.of(checkpoint.config)
            encoder = checkpoint.config.get(text.family.encoder.section, {})
            levels = 1 + len(encoder.get("deepstack_visual_indexes") or ())
            return cls(text.family, text.hidden_size, text.vocab_size, text.max_position, levels)
        return cls.by_hf(hf or describe(checkpoint))

    @classmethod
    def by_hf(cls, found: HfModel) -> ServedModel:
        """A model that transformers computes."""
        return cls(hf_family(found), found.hidden_size, found.vocab_size, found.max_position, found.levels, found)
