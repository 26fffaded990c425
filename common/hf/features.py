"""How a transformers model computes rows of one item: by a method of its own, or by a function of ours if its class has
none, because it puts rows among embeddings itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from common.hf.classes import transformers


@dataclass(frozen=True, slots=True)
class Lacking:
    """What a kind of models lacks that others have. `features` replace `get_…_features`, by modality: each takes the
    model below its head, and, by name, the processor's output for one item. `alone`: modalities whose items depend on
    what else is in the prompt. `adapters`: as in `HfModel`."""

    features: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    alone: tuple[str, ...] = ()
    adapters: Mapping[str, str] = field(default_factory=dict)


def features_of(base: Any, modality: str) -> Callable[..., Any] | None:
    """The function that computes rows of an item, given the processor's output by name; None if there is none. `base`
    is the model below its head."""
    own = lacking(base.config).features.get(modality)
    found: Callable[..., Any] | None = getattr(base, f"get_{modality}_features", None)
    return partial(own, base) if own else found


def lacking(config: Any) -> Lacking:
    """Of a model's configuration."""
    return _LACKING.get(config.model_type, _NOTHING)


def _phi4_pictures(
    base: Any, input_ids: Any, image_pixel_values: Any, image_sizes: Any, image_attention_mask: Any, **_: Any
) -> Any:
    here = input_ids == base.config.image_token_id
    among = image_pixel_values.new_zeros(*here.shape, base.config.hidden_size)
    given = image_pixel_values, image_sizes, image_attention_mask
    return _rows(here, base.embed_tokens_extend.image_embed(input_ids, among, *given))


def _phi4_sounds(base: Any, input_ids: Any, audio_input_features: Any, audio_embed_sizes: Any, **_: Any) -> Any:
    here = input_ids == base.config.audio_token_id
    among = audio_input_features.new_zeros(*here.shape, base.config.hidden_size)
    return _rows(here, base.embed_tokens_extend.audio_embed(input_ids, among, audio_input_features, audio_embed_sizes))


def _rows(here: torch.Tensor, embedded: torch.Tensor) -> Any:
    """As transformers' methods return them."""
    return transformers().modeling_outputs.BaseModelOutputWithPooling(pooler_output=embedded[here])


_NOTHING = Lacking()
_LACKING = {
    "phi4_multimodal": Lacking(
        features={"image": _phi4_pictures, "audio": _phi4_sounds},
        # Beside a picture it is projected differently, and features of two are padded to one length.
        alone=("audio",),
        adapters={"image": "vision-lora", "audio": "speech-lora"},
    )
}
