"""What a family of models is described by."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from common.identity import VISION, EncoderParts
from common.media.item import Header, Modality


class Mixer(Enum):
    """What mixes the tokens of a sequence in a layer."""

    ATTENTION = "attention"
    GATED_DELTA_NET = "gated delta net"


class FeedForwardKind(Enum):
    """What follows in a layer, for each token alone."""

    DENSE = "dense"
    EXPERTS = "experts"


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What one decoder layer is made of."""

    mixer: Mixer
    feed_forward: FeedForwardKind


@dataclass(frozen=True, slots=True)
class Rows:
    """A run of an item's rows, its next `count`: as many placeholders, or tokens of that id where one is given, or of
    that name among the family's `marks`, less those of rows that are pruned."""

    count: int
    token: int | str | None = None


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A special token, by what config.json calls its id, or tokenizer_config.json the token."""

    name: str


def in_one_run(header: Header) -> Iterable[str | SpecialToken | Rows]:
    """All rows one after the other, and nothing besides."""
    return (Rows(header.all_rows),)


@dataclass(frozen=True, slots=True)
class InPrompt:
    """How a family lays items of one modality out in a prompt.

    `token` is what the checkpoint calls the placeholder, as a `SpecialToken`, or the id. `expand` says what stands in
    its stead: texts, special tokens, which `marks` names, and the item's rows, all of them in order. `timed_frames`:
    positions in time count seconds · tokens_per_second, else frame groups. `counted`: rows have no height and width,
    and count on as text does.
    """

    token: str | int
    expand: Callable[[Header], Iterable[str | SpecialToken | Rows]] = in_one_run
    marks: tuple[str, ...] = ()
    timed_frames: bool = False
    counted: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models. What its checkpoints state themselves is read from them. `encoder` is where they have what
    computes rows.

    `replaced`: the encoder says what stands in a prompt for an item, in its header; nothing follows from a grid.
    `one_item`: a prompt may have one item, as what stands for one depends on the others. `texts`: the kinds of text
    that it goes with, each of which decides what layers have (`registry.TEXT_FAMILIES`); empty: it has its own.

    Layers: `attention_bias`, queries, keys and values have biases; `qk_norm`, each query and key head is normed before
    it is rotated; `output_gate`, each head of queries has a gate for what is attended to; `zero_centred_norms`, the
    norms of layers and heads scale by 1 + weight; `mrope_interleaved`, rotary pairs are dealt out to time, height and
    width in turns, and `rotary_share`, so much of a head is rotated, unless the checkpoint says otherwise. `mixers`:
    what config.json's `layer_types` stand for. `text_defaults`: what holds of the decoder where config.json leaves it
    out.
    """

    modalities: Mapping[Modality, InPrompt]
    encoder: EncoderParts = VISION
    replaced: bool = False
    one_item: bool = False
    texts: Collection[str] = ()
    attention_bias: bool = False
    qk_norm: bool = False
    output_gate: bool = False
    zero_centred_norms: bool = False
    mrope_interleaved: bool = False
    rotary_share: float = 1.0
    text_defaults: Mapping[str, Any] = field(default_factory=dict)
    mixers: Mapping[str, Mixer] = field(default_factory=lambda: {"full_attention": Mixer.ATTENTION})
