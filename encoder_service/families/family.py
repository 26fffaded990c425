"""Families, and checkpoints of a family: what is known before the tower is loaded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from common.checkpoints.checkpoint import Checkpoint
from common.hf.description import HfModel
from common.media.encoder_digest import VISION, EncoderParts
from common.media.item import Grid, Modality, Options, Pixels
from encoder_service.item import Inspection, Plan


class Processor(Protocol):
    """How a checkpoint's items of one modality are prepared for its tower: the number of rows, which follows from the
    header, what is decoded, and what the tower gets."""

    @property
    def merge(self) -> int:
        """Patches on a side of one row."""
        ...

    @property
    def preprocess(self) -> str:
        """The function ("module:function", a `worker.patches.Preprocess`) that makes patches in the device workers."""
        ...

    def rows(self, grid: Grid) -> int:
        """Rows of a grid; 0 if no item has such a grid."""
        ...

    def plan(self, seen: Inspection, options: Options) -> Plan:
        """The plan of a file. Raises InvalidInput, without a field, for what the model does not take."""
        ...

    def plan_pixels(self, given: Pixels, options: Options) -> Plan:
        """The plan of pixels that the caller has decoded. Raises as `plan`."""
        ...


@dataclass(frozen=True, slots=True)
class Family:
    """Towers of one kind, and the processors before them.

    `tower` is the class ("module:Class"), built from the tower's part of config.json and imported by device workers
    only. `row_shape` reads the shape of a row there: (levels, width). `processors` reads how items of each served
    modality are processed, there and in the checkpoint's other files. Both raise CheckpointError for unsupported
    settings, and KeyError for missing ones. `parts` says where a checkpoint has all of this; `complete` makes the
    tower's settings of config.json, if the tower's section is not all of it. `texts` are the kinds of text that the LLM
    service's family goes with; empty: its own.
    """

    tower: str
    row_shape: Callable[[Mapping[str, Any]], tuple[int, int]]
    processors: Callable[[Checkpoint, Mapping[str, Any]], Mapping[Modality, Processor]]
    parts: EncoderParts = VISION
    complete: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    texts: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A checkpoint's tower, by its own numbers (`tower`, as in config.json), its processors, and its rows."""

    architecture: str
    family: Family
    tower: Mapping[str, Any]
    processors: Mapping[Modality, Processor]
    levels: int
    width: int

    @property
    def modalities(self) -> Collection[Modality]:
        """The modalities that it takes."""
        return self.processors.keys()

    @property
    def parts(self) -> EncoderParts:
        """The parts of the checkpoint that compute rows."""
        return self.family.parts


@dataclass(frozen=True, slots=True)
class HfConfig:
    """A checkpoint that no family is for: transformers has its processor and its tower."""

    hf: HfModel

    @property
    def architecture(self) -> str:
        """transformers' class."""
        return self.hf.architecture

    @property
    def levels(self) -> int:
        """As `ModelConfig.levels`."""
        return self.hf.levels

    @property
    def width(self) -> int:
        """As `ModelConfig.width`."""
        return self.hf.hidden_size

    @property
    def modalities(self) -> Collection[Modality]:
        """The modalities that it takes."""
        return [Modality(name) for name in self.hf.placeholders]

    @property
    def parts(self) -> EncoderParts:
        """The parts of the checkpoint that compute rows."""
        return self.hf.encoder


ServedConfig = ModelConfig | HfConfig
