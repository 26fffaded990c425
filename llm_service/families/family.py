"""What a family of models is described by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from common.media.item import Modality


class Mixer(Enum):
    """What mixes the tokens of a sequence in a layer."""

    ATTENTION = "attention"


class FeedForward(Enum):
    """What follows in a layer, for each token alone."""

    DENSE = "dense"
    EXPERTS = "experts"


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What one decoder layer is made of."""

    mixer: Mixer
    feed_forward: FeedForward


@dataclass(frozen=True, slots=True)
class InPrompt:
    """How a family lays items of one modality out in a prompt.

    `token` is what config.json calls the placeholder's id. `frames_apart`: each frame group is a run of its own behind
    a timestamp. `timed_frames`: positions in time count seconds · tokens_per_second, else frame groups.
    """

    token: str
    frames_apart: bool = False
    timed_frames: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """A family by the name of its architecture in config.json. What its checkpoints state themselves is read from them.

    Layers: `attention_bias`, queries, keys and values have biases; `qk_norm`, each query and key head is normed before
    it is rotated; `mrope_interleaved`, rotary pairs are dealt out to time, height and width in turns, unless the
    checkpoint says otherwise.
    """

    architecture: str
    modalities: Mapping[Modality, InPrompt]
    attention_bias: bool = False
    qk_norm: bool = False
    mrope_interleaved: bool = False
