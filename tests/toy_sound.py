"""A third modality in this module: `python -m tests.toy_sound` is an encoder whose family serves sounds as well.

A file is `TOY!` and samples of 8 bits, four in a second. Four samples are a patch, and four patches a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from common.checkpoints.checkpoint import Checkpoint
from common.errors import InvalidInput
from common.media.item import HEADER_SHAPES, Grid, HeaderShape, Modality, Options, Pixels
from encoder_service.__main__ import main
from encoder_service.families.family import Processor
from encoder_service.families.qwen3_vl import QWEN3_VL
from encoder_service.families.registry import FAMILIES
from encoder_service.item import Inspection, Plan
from encoder_service.media.limits import MediaLimits
from encoder_service.media.messages import DecoderSettings
from encoder_service.media.modalities import SPECS, ModalitySpec
from encoder_service.media.sniff import Format

if TYPE_CHECKING:
    from torch import Tensor

_HEAD = b"TOY!"


def encoded(samples: bytes) -> bytes:
    """A file."""
    return _HEAD + samples


class SoundFile:
    """Reads a file in the decode process."""

    def __init__(self, data: bytes, settings: DecoderSettings) -> None:
        self._samples = np.frombuffer(data[len(_HEAD) :], np.uint8)

    @staticmethod
    def prepare() -> None: ...

    def inspect(self) -> Inspection:
        return Inspection(width=1, height=1, frames=len(self._samples), fps=4.0)

    def decode(self, frames: Sequence[int], out: np.ndarray) -> Iterator[int]:
        out[:] = self._samples[list(frames), None, None, None]
        yield len(frames)


def _check(seen: Inspection, field: str, limits: MediaLimits) -> None:
    if seen.frames > limits.max_scanned_frames:
        raise InvalidInput("the sound is too long", reason="VIDEO_TOO_LONG", field=field)


@dataclass(frozen=True, slots=True)
class SoundProcessor:
    """Sixteen samples a row; a patch has `numbers`."""

    numbers: int
    merge: int = 2
    preprocess: str = "tests.toy_sound:sound_patches"

    def rows(self, grid: Grid) -> int:
        return grid.t

    def plan(self, seen: Inspection, options: Options) -> Plan:
        rows = seen.frames // 16
        return Plan(Grid(rows, 2, 2), rows, tuple(range(16 * rows)), 1, 1, (1, 1), tuple(map(float, range(rows))), 4.0)

    def plan_pixels(self, given: Pixels, options: Options) -> Plan:
        raise InvalidInput("a sound has no pixels", reason="BAD_PIXELS")


def sound_patches(samples: Tensor, size: tuple[int, int], processor: SoundProcessor) -> Tensor:
    """Patches [samples / 4, dim] float32 of samples [T, 1, 1, 3] uint8: the mean of each four, all over the patch."""
    means = samples[:, 0, 0, 0].float().view(-1, 4).mean(1) / 255
    return means[:, None].repeat(1, processor.numbers)


def _processors(checkpoint: Checkpoint, tower: Mapping[str, Any]) -> Mapping[Modality, Processor]:
    sounds = SoundProcessor(3 * tower["temporal_patch_size"] * tower["patch_size"] ** 2)
    return {**QWEN3_VL.processors(checkpoint, tower), Modality.AUDIO: sounds}


FAMILY = replace(QWEN3_VL, processors=_processors)


SPEC = ModalitySpec(
    formats={"TOY": Format(lambda head: head.startswith(_HEAD), frozenset({"audio/x-toy"}))},
    options=frozenset(),
    has_pixels=False,
    slow_bytes=math.inf,
    max_items=lambda _: 1,
    max_bytes=lambda _: 1 << 20,
    max_area=lambda _: 1 << 20,
    max_frames=lambda limits: limits.max_frames,
    too_large="VIDEO_TOO_LARGE",
    check=_check,
    decoder="tests.toy_sound:SoundFile",
)


SHAPE = HeaderShape(has_plane=True, has_times=True, unserved="NO_AUDIO")


def register() -> None:
    """Serves sounds in this process."""
    HEADER_SHAPES[Modality.AUDIO] = SHAPE
    SPECS[Modality.AUDIO] = SPEC
    FAMILIES["qwen3_vl"] = FAMILY


if __name__ == "__main__":
    register()
    main(worker="tests.toy_sound_worker")
