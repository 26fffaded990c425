"""The nouns of media that both services share, without protobuf or torch."""

from __future__ import annotations

import enum
import hashlib
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from common.rows.wire import DType


class Modality(enum.StrEnum):
    """The kind of an item. Each service states which ones it takes."""

    IMAGE = "image"
    VIDEO = "video"
    AUDIO = "audio"


@dataclass(frozen=True, slots=True)
class HeaderShape:
    """The grid of one modality's items: a plane of patches, which are merged, or a line of positions, [1, 1, w]; and
    whether there is a time for each step along the time axis. `unserved` is the reason if a model does not take such
    items."""

    has_plane: bool
    has_times: bool
    unserved: str


HEADER_SHAPES: Final = {
    Modality.IMAGE: HeaderShape(has_plane=True, has_times=False, unserved="NO_VISION"),
    Modality.VIDEO: HeaderShape(has_plane=True, has_times=True, unserved="NO_VISION"),
    Modality.AUDIO: HeaderShape(has_plane=False, has_times=False, unserved="NO_AUDIO"),
}
"""A row for each modality."""


@dataclass(frozen=True, slots=True)
class Options:
    """Preprocessing options of a caller; None is the model's setting. Pixels are counted after resizing. `kept_rows`
    are bits as in `common.media.kept_rows`."""

    min_pixels: int | None = None
    max_pixels: int | None = None
    fps: float | None = None
    max_frames: int | None = None
    video_pruning_rate: float | None = None
    kept_rows: bytes | None = None
    with_sound: bool | None = None
    clamp_max_pixels: bool | None = None
    """The lesser of `max_pixels` and the model's setting holds."""

    def stated(self) -> dict[str, Any]:
        """The options that were given and have an effect, for the content key: a rate of 0 prunes nothing, and
        switched-off options change nothing."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        for name in ("video_pruning_rate", "with_sound", "clamp_max_pixels"):
            if name in given and not given[name]:
                del given[name]
        return given


@dataclass(frozen=True, slots=True)
class Grid:
    """Patches along time, height and width, before merging."""

    t: int
    h: int
    w: int

    @property
    def patches(self) -> int:
        return self.t * self.h * self.w


Encoded = bytes | bytearray
"""An encoded file; a bytearray is a download that nobody changes any more."""


@dataclass(frozen=True, slots=True)
class Url:
    """The address of the content. `known_key` is its earlier content key, empty if the caller knows none."""

    address: str
    known_key: bytes = b""


@dataclass(frozen=True, slots=True)
class Key:
    """A content key (32 bytes) of content that an encoder has."""

    value: bytes


@dataclass(frozen=True, slots=True)
class Pixels:
    """Decoded pixels as a caller gave them: row-major [frames, height, width, 3] uint8, and the time of each frame."""

    data: bytes
    frames: int
    height: int
    width: int
    timestamps: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Embedding:
    """Precomputed rows: row-major [count, levels, width] in `dtype`, None if not stated. Times, and the kept rows of a
    pruned video, as in `Header`."""

    data: bytes
    dtype: DType | None
    count: int
    levels: int
    width: int
    grid: Grid
    timestamps: tuple[float, ...] = ()
    seconds_per_grid: float = 0.0
    kept_rows: bytes = b""


Content = Encoded | Pixels | Embedding
"""A source that holds the content itself."""

Source = Content | Url | Key
"""Where an item's content comes from. Encoders check its consistency."""


@dataclass(frozen=True, slots=True)
class Media:
    """One picture, video or clip, as a caller gave it. `field` is its place in the request."""

    modality: Modality
    source: Source
    options: Options = Options()
    mime_type: str = ""
    field: str = ""

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


MAX_POSITION = 1 << 24
"""The largest distance of rows from where text in their place would be."""


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A part of an item's layout in a prompt: a text, with special tokens by name, followed by the item's next `rows`
    rows, each at a token with this id.

    `positions`, int32 [3, n] as bytes, has their time, height and width, preceded by those of the last n - rows tokens
    of the text, relative to where the first of these would be if text counted on; `advance` is how far from there the
    prompt continues. Empty: each is one further than the one before. `from_origin`: positions are counted from 0, and
    the width grows by one for each item before this one.
    """

    text: str = ""
    rows: int = 0
    token: int = 0
    positions: bytes = b""
    advance: int = 0
    from_origin: bool = False

    @property
    def has_run(self) -> bool:
        """Whether it has rows, or positions for its text or for what follows."""
        return bool(self.rows or self.advance or self.positions)


@dataclass(frozen=True, slots=True)
class Header:
    """What is known of an item before its rows exist.

    `timestamps` are the seconds of a video's frame groups, `seconds_per_grid` the time between them; both are empty for
    a picture. For a sound whose layout comes from the encoder, the latter is its length. `replacement` is the item's
    layout in a prompt, if the encoder states it; otherwise it is empty and follows from the grid. `cached`: the encoder
    that sent it had the rows.

    Of a pruned video, `tokens` of the grid's `grid_rows` are kept (0: nothing is pruned), and `kept_rows` says which
    (`common.media.kept_rows`); it is empty until all rows are computed.
    """

    key: bytes
    modality: Modality
    grid: Grid
    tokens: int
    timestamps: tuple[float, ...] = ()
    seconds_per_grid: float = 0.0
    cached: bool = False
    grid_rows: int = 0
    kept_rows: bytes = b""
    replacement: tuple[PromptPart, ...] = ()

    @property
    def all_rows(self) -> int:
        """Rows of the whole grid."""
        return self.grid_rows or self.tokens

    @property
    def awaits_kept_rows(self) -> bool:
        """Whether it is not known yet which rows are kept."""
        return bool(self.grid_rows) and not self.kept_rows

    @property
    def rows_key(self) -> bytes:
        """Identifies its rows: the key and, for a pruned video, which rows are kept. Two encoders may choose
        differently if their results differ by rounding."""
        return hashlib.sha256(self.key + self.kept_rows).digest() if self.kept_rows else self.key

    def agrees(self, other: Header) -> bool:
        """Whether both describe the same item and, as far as both know, the same rows of it."""
        one = replace(self, cached=False, kept_rows=self.kept_rows or other.kept_rows)
        return one == replace(other, cached=False, kept_rows=other.kept_rows or self.kept_rows)
