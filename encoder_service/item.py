"""The nouns of the encoder service. This module imports none of its others."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from common.wire import DType


class Modality(enum.StrEnum):
    """The kind of an item."""

    IMAGE = "image"
    VIDEO = "video"


@dataclass(frozen=True, slots=True)
class Options:
    """What a caller may change about preprocessing; None is the model's own setting."""

    min_pixels: int | None = None
    max_pixels: int | None = None
    fps: float | None = None
    max_frames: int | None = None

    def stated(self) -> dict[str, Any]:
        """The options that were given, for the content key."""
        names = ("min_pixels", "max_pixels", "fps", "max_frames")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


@dataclass(frozen=True, slots=True)
class Pixels:
    """Decoded pixels as a caller gave them: row-major [frames, height, width, 3] uint8."""

    data: bytes
    frames: int
    height: int
    width: int
    timestamps: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Embedding:
    """Rows that were computed elsewhere: row-major [count, levels, width] in `dtype`. The times are as in `Header`."""

    data: bytes
    dtype: DType
    count: int
    levels: int
    width: int
    grid: Grid
    timestamps: tuple[float, ...] = ()
    seconds_per_grid: float = 0.0


@dataclass(frozen=True, slots=True)
class Item:
    """One picture or video to encode: encoded bytes, where they are, decoded pixels, rows, or a key alone. `field` is
    its place in the request, `peer` the host that asks."""

    modality: Modality
    source: Source
    options: Options = Options()
    salt: str = ""
    priority: int = 0
    field: str = ""
    peer: str = ""

    @property
    def caller(self) -> tuple[str, str]:
        """Whose it is: a tenant's, by its salt, or, where there is none, its peer's."""
        return self.salt, "" if self.salt else self.peer

    @property
    def size(self) -> int:
        """Bytes of content that came with it."""
        match self.source:
            case Key():
                return 0
            case Url(address):
                return len(address)
            case Pixels(data) | Embedding(data):
                return len(data)
            case encoded:
                return len(encoded)


@dataclass(frozen=True, slots=True)
class Key:
    """A content key (32 bytes) that stands for content which is already in the store."""

    value: bytes


@dataclass(frozen=True, slots=True)
class Url:
    """Where the content is. `key` is the content key that it had before, empty where the caller knows none."""

    address: str
    key: bytes = b""


Source = bytes | bytearray | Url | Pixels | Embedding | Key
"""Where an item's content comes from; a bytearray is a download, which nobody changes any more."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """What a file's header says: pixels across and down once its orientation is applied, and a video's length.

    `frames` is 1 and `fps` 0 for a picture.
    """

    width: int
    height: int
    frames: int = 1
    fps: float = 0.0


@dataclass(frozen=True, slots=True)
class Grid:
    """Patches along time, height and width, before merging."""

    t: int
    h: int
    w: int

    @property
    def patches(self) -> int:
        return self.t * self.h * self.w


@dataclass(frozen=True, slots=True)
class Header:
    """What is known of an item before its rows exist.

    `timestamps` are the seconds of a video's frame groups, `seconds_per_grid` the time from one to the next; both are
    empty for a picture.
    """

    key: bytes
    modality: Modality
    grid: Grid
    tokens: int
    timestamps: tuple[float, ...] = ()
    seconds_per_grid: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How an item is going to be computed.

    `frames` are the frame numbers to decode, padded to whole frame groups (one for a picture); `height` and `width` are
    what the decoder gives; `resized` is the (height, width) that patches are cut from.
    """

    grid: Grid
    tokens: int
    frames: tuple[int, ...]
    height: int
    width: int
    resized: tuple[int, int]
    timestamps: tuple[float, ...] = ()
    seconds_per_grid: float = 0.0

    @property
    def pixel_bytes(self) -> int:
        """Bytes of the decoded frames, [frames, height, width, 3] uint8."""
        return len(self.frames) * self.height * self.width * 3
