"""The shape of an EAGLE-3 head, as its config.json has it: the form that EAGLE, SGLang and vLLM read, or that of
speculators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from common.checkpoints.checkpoint import CheckpointError
from llm_service.model_config.text import TextConfig

_ARCHITECTURE = "Eagle3"


def is_eagle3(config: Mapping[str, Any]) -> bool:
    """Whether config.json is that of an EAGLE-3 head. EAGLE's own is a plain Llama's but for the words of the head."""
    names = config.get("architectures")
    named = isinstance(names, list) and any(_ARCHITECTURE in str(name) for name in names)
    return named or config.get("speculators_model_type") == "eagle3" or config.get("draft_vocab_size") is not None


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """`text` is the shape of the head's layers, whose `vocab_size` counts the tokens it is given; it predicts
    `vocab_size` words itself. It `reads` the inputs of these layers of the model, counted from 0. With `norms_before`
    they are normed together before the projection, with `norms_each` each by itself. `adds_to_normed` is as in
    `JoiningLayer`; with `gives_normed`, its own hidden states are normed where it continues from them. It `ties` logits
    to its own embeddings, if it has no other matrix."""

    text: TextConfig
    vocab_size: int
    reads: tuple[int, ...]
    norms_before: bool = False
    norms_each: bool = False
    adds_to_normed: bool = False
    gives_normed: bool = False
    ties: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any], layers: int) -> EagleConfig:
        """The head for a model with so many layers. Raises CheckpointError if the configuration is not that of a head,
        or needs something unsupported."""
        if not is_eagle3(config):
            raise CheckpointError("its config.json is not that of an EAGLE-3 head")
        try:
            return cls._read(config, layers)
        except CheckpointError:
            raise
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            what = f"its config.json has a setting that is of another kind than it has to be: {error}"
            raise CheckpointError(what[:200]) from error

    @classmethod
    def _read(cls, config: Mapping[str, Any], layers: int) -> EagleConfig:
        inner = config.get("transformer_layer_config")
        own = {**config, **inner} if isinstance(inner, dict) else dict(config)
        extra = {**config, **(config.get("eagle_config") or {})}
        if not extra.get("use_aux_hidden_state", True):
            raise CheckpointError("a head that does not read hidden states of several layers is not supported")
        if extra.get("parallel_drafting") or extra.get("ptd_token_id") is not None:
            raise CheckpointError("a head that drafts several tokens in one pass is not supported")
        text = TextConfig.of(own)
        if text.experts or text.stream_count > 1 or text.shared_layers:
            raise CheckpointError("its layers are of a kind that is not supported in a head")
        words = int(config.get("draft_vocab_size") or text.vocab_size)
        if text.layers < 1 or words < 1:
            raise CheckpointError(f"it has {text.layers} layers and {words} words")
        if own.get("attention_bias") and not text.family.attention.bias:
            text = replace(text, family=replace(text.family, attention=replace(text.family.attention, bias=True)))
        return cls(
            replace(text, tied=False),
            words,
            _boundaries(extra.get("eagle_aux_hidden_state_layer_ids"), layers),
            norms_before=bool(extra.get("norm_before_fc")),
            norms_each=bool(extra.get("fc_norm")),
            adds_to_normed=bool(extra.get("norm_before_residual", "speculators_model_type" in config)),
            gives_normed=bool(extra.get("norm_output")),
            ties=text.tied,
        )


def _boundaries(stated: Any, layers: int) -> tuple[int, ...]:
    """Before which layers the states are that a head reads. Two conventions are about: numbers of the layers whose
    outputs they are, the first of which is then 1, since nobody reads the embeddings, and of those whose inputs.

    >>> _boundaries(None, 36), _boundaries([1, 17, 32], 36), _boundaries([2, 18, 33], 36)
    ((2, 18, 33), (2, 18, 33), (2, 18, 33))
    """
    if not stated:
        stated = (2, layers // 2, layers - 3)
    elif not isinstance(stated, list) or not all(type(number) is int for number in stated):
        raise CheckpointError(f"it reads layers {stated}, which are no numbers")
    elif stated[0] == 1:
        stated = [number + 1 for number in stated]
    if not all(0 <= number <= layers for number in stated):
        raise CheckpointError(f"it reads layers {list(stated)} of a model with {layers}")
    return tuple(stated)
