"""What a family of models is described by."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


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
class Family:
    """A family by the name of its architecture in config.json. What its checkpoints state themselves is read from them.

    Layers: `attention_bias`, queries, keys and values have biases; `qk_norm`, each query and key head is normed before
    it is rotated; `mrope_interleaved`, rotary pairs are dealt out to time, height and width in turns, unless the
    checkpoint says otherwise.

    Prompt: `frames_apart`, each frame group of a video is a span of its own behind a timestamp; `timed_frames`, a
    video's positions in time count seconds · tokens_per_second, else frame groups.
    """

    architecture: str
    attention_bias: bool = False
    qk_norm: bool = False
    mrope_interleaved: bool = False
    frames_apart: bool = False
    timed_frames: bool = False
