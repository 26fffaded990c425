"""What recipes are made of: the parts of a configuration and of a processor. Names of special tokens stand for their
ids in a configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from common.hf.classes import transformers

SIDE = 56
TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": 14,
}
PATCHES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "depth": 2, "num_heads": 2, "patch_size": 14}
"""Of towers that take packed patches."""

PINPOINTS = [[SIDE, 112], [112, SIDE], [112, 112]]
SQUARE = {"height": SIDE, "width": SIDE}
PIXELS = {"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 24}
"""Least and most of a picture, of processors that count them so."""

Words = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a checkpoint of one architecture is made: its configuration, of the ids of special tokens and the size of the
    vocabulary; its processor, of the tokenizer and the template; and its other special tokens, of which the tokenizer
    has a name for those in `named`. `image`, `video` and `audio` stand for
    one in a chat. `pieces`: its tokenizer is one of pieces,
    which sets a mark before the first word of a text; else one of bytes. `begins`: it sets <s> before a text. Steps of
    `step_tokens` hold what no chunk may end within. `tekken`: the
    tokenizer's file is in Mistral's own form, with these special tokens, and there is no template.
    `adapters`: settings of LoRA adapters that the checkpoint has of its own, by the folder within its own."""

    config: Callable[[Words, int], Any]
    processor: Callable[[Any, str], Any]
    words: tuple[str, ...] = ()
    pieces: bool = False
    begins: bool = True
    named: Mapping[str, str] = field(default_factory=dict)
    image: str = "<image>"
    video: str = "<video>"
    audio: str = "<audio>"
    step_tokens: int = 16
    tekken: tuple[str, ...] = ()
    adapters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def part(kind: str, sizes: Mapping[str, Any], **more: Any) -> Callable[[Words, int], Any]:
    """A configuration by its `model_type`, of those sizes that it has; `more` are its own."""

    def make(words: Words, vocabulary: int) -> Any:
        cls = transformers().CONFIG_MAPPING[kind]
        known = cls.__dataclass_fields__.keys()
        common = {**sizes, "vocab_size": vocabulary, "pad_token_id": words["<pad>"], "bos_token_id": words["<s>"]}
        given = {name: value for name, value in common.items() if name in known}
        return cls(**{**given, **_filled(more, words, vocabulary)})

    return make


def whole(kind: str, **more: Any) -> Callable[[Words, int], Any]:
    """The same of a model, whose parts are among what is its own."""
    return part(kind, {}, **more)


def _filled(given: Mapping[str, Any], words: Words, vocabulary: int) -> dict[str, Any]:
    return {name: _value(value, words, vocabulary) for name, value in given.items()}


def _value(value: Any, words: Words, vocabulary: int) -> Any:
    if callable(value):
        return value(words, vocabulary)
    if isinstance(value, str):
        return words.get(value, value)
    return [_value(each, words, vocabulary) for each in value] if isinstance(value, list) else value


def processor(
    kind: str,
    pictures: str = "",
    *,
    settings: Mapping[str, Any] | None = None,
    videos: str = "",
    stills: Mapping[str, Any] | None = None,
    frames: Mapping[str, Any] | None = None,
    sounds: str = "",
    bands: Mapping[str, Any] | None = None,
    **more: Any,
) -> Callable[[Any, str], Any]:
    """A processor by its class, with that of pictures and of videos where it needs them, both of these settings and of
    their own, `stills` and `frames`, and what extracts features of sounds, with the settings `bands`."""

    def make(tokenizer: Any, template: str) -> Any:
        lib, given = transformers(), dict(settings or {})
        parts: dict[str, Any] = {"tokenizer": tokenizer}
        if pictures:
            parts["image_processor"] = getattr(lib, pictures)(**given, **(stills or {}))
        if videos:
            parts["video_processor"] = getattr(lib, videos)(**given, **(frames or {}))
        if sounds:
            parts["feature_extractor"] = getattr(lib, sounds)(**(bands or {}))
        made = getattr(lib, kind)(**parts, **more)
        made.chat_template = template
        return made

    return make


LLAMA = part("llama", TEXT)
GRANITE = part(
    "granite", TEXT, embedding_multiplier=1.5, logits_scaling=2.0, residual_multiplier=0.8, attention_multiplier=0.25
)
QWEN2 = part("qwen2", TEXT)
QWEN3 = part("qwen3", TEXT)
CLIP = part("clip_vision_model", VISION, projection_dim=32)
SIGLIP = part("siglip_vision_model", VISION, vision_use_head=False)
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
WINDOWED = ["sliding_attention", "sliding_attention", "full_attention"]
MEDIA = {"image_token": "<image>", "video_token": "<video>"}
QWEN_PICTURES = {"size": PIXELS, "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
IDS = {"image_token_id": "<image>", "video_token_id": "<video>"}
