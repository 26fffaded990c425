"""The nouns of the encoder service. This module imports none of its others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from common.media.item import Grid, Media, Pixels, PromptPart


@dataclass(frozen=True, slots=True)
class Item(Media):
    """One picture, video or clip to encode; `host` is the one that asks."""

    salt: str = ""
    priority: int = 0
    host: str = ""

    @property
    def caller(self) -> tuple[str, str]:
        """The caller, for fairness: a tenant's salt or, without one, the client's host."""
        return self.salt, "" if self.salt else self.host


SAMPLE_RATE: Final = 16_000
"""Samples per second of decoded sound: what families and most transformers models take."""


LISTED_FPS: Final = 2.0
"""Frames per second of frames listed without times: the usual rate for models."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """What a file's header says: pixels across and down after its orientation is applied, and a video's length.

    For a picture, `frames` is 1 and `fps` 0. For sound, `frames` is the number of its samples at `rate` per second,
    `fps` the rate in its file, and `channels` the number of channels. `track` is a video's own sound, if it is wanted
    and exists. A video that is `listed` is a list of frames that somebody has chosen: all of them are kept.
    """

    width: int
    height: int
    frames: int = 1
    fps: float = 0.0
    channels: int = 0
    rate: int = SAMPLE_RATE
    track: Inspection | None = None
    listed: bool = False

    @property
    def as_given(self) -> Pixels:
        """The same as a caller would describe decoded frames."""
        return Pixels(b"", self.frames, self.height, self.width)


@dataclass(frozen=True, slots=True)
class Footage:
    """Frames taken of a video: their numbers among `total` frames, at `fps` per second. If a caller has decoded them,
    `given` is their number, and the numbers are their times."""

    numbers: tuple[int, ...]
    total: int
    fps: float
    given: int = 0

    @classmethod
    def of(cls, pixels: Pixels) -> Footage:
        """All frames of decoded pixels; those without times are half a second apart."""
        times = pixels.timestamps or tuple(frame / LISTED_FPS for frame in range(pixels.frames))
        numbers = tuple(round(_TICKS * time) for time in times)
        return cls(numbers, numbers[-1] + 1, _TICKS, pixels.frames)

    @property
    def decoded(self) -> tuple[int, ...]:
        """The numbers of frames as the decoder, or the caller, has them."""
        return tuple(range(self.given)) if self.given else self.numbers


_TICKS: Final = 1000.0
"""Per second, if a frame's number is its time."""


@dataclass(frozen=True, slots=True)
class Pruning:
    """How many of a video's rows are kept, and which, as bits (`common.media.kept_rows`); empty: those that change most
    from one frame group to the next."""

    count: int
    kept_rows: bytes = b""


@dataclass(frozen=True, slots=True)
class Plan:
    """How an item will be computed.

    `tokens` is the number of its rows. `frames` are the frame numbers to decode, padded to whole frame groups (one for
    a picture); `height` and `width` are what a decode process produces; `resized` is the (height, width) that patches
    are cut from. `whole` is the (height, width) of a picture, or of a video's frames, if that process resizes them one
    by one; None: it does not. `pruning` says which rows stay; None: all. `replacement` is as in `Header`. A pixel has
    `depth` bytes: 3 colours, or one float32 sample of sound; all samples are one line of one frame.

    For a video with its sound, `samples` of that are decoded as well, and rows are in `turns`: so many of frames, then
    so many of sound, and so on.
    """

    grid: Grid
    tokens: int
    frames: tuple[int, ...]
    height: int
    width: int
    resized: tuple[int, int]
    timestamps: tuple[float, ...] = ()
    seconds_per_grid: float = 0.0
    pruning: Pruning | None = None
    replacement: tuple[PromptPart, ...] = ()
    depth: int = 3
    samples: int = 0
    turns: tuple[int, ...] = ()
    whole: tuple[int, int] | None = None

    @property
    def pixels(self) -> int:
        """Pixels of all frames that are decoded."""
        return len(self.frames) * self.height * self.width

    @property
    def kept(self) -> int:
        """How many rows stay."""
        return self.tokens if self.pruning is None else self.pruning.count

    @property
    def frame_bytes(self) -> int:
        """Bytes of one decoded frame, [height, width, depth] uint8."""
        return self.height * self.width * self.depth

    @property
    def sound_bytes(self) -> int:
        """Bytes of a video's sound, float32."""
        return 4 * self.samples

    @property
    def pixel_bytes(self) -> int:
        """Bytes of everything decoded: sound, followed by all frames."""
        return self.sound_bytes + len(self.frames) * self.frame_bytes
