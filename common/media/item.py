"""The nouns of media that both services share. They know neither protobuf nor torch."""

from __future__ import annotations

import enum
import hashlib
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from common.rows.wire import DType


class Modality(enum.StrEnum):
    """The kind of an item. Which of them a service takes, it says itself."""

    IMAGE = "image"
    VIDEO = "video"
    AUDIO = "audio"


@dataclass(frozen=True, slots=True)
class HeaderShape:
    """What the headers of one modality's items have: a plane of patches, which are merged, or positions in a row,
    [1, 1, w] in the grid; and a time for each step along the grid's time. `unserved` is the reason where a model does
    not take such items."""

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
    """What a caller may change about preprocessing; None is the model's own setting. Pixels are counted after
    resizing. `kept_rows` are bits as in `common.media.kept_rows`."""

    min_pixels: int | None = None
    max_pixels: int | None = None
    fps: float | None = None
    max_frames: int | None = None
    video_pruning_rate: float | None = None
    kept_rows: bytes | None = None
    with_sound: bool | None = None
    lesser_max_pixels: bool | None = None
    """The lesser of `max_pixels` and the model's setting holds."""

    def stated(self) -> dict[str, Any]:
        """The options that were given and change something, for the content key: a rate of 0 prunes nothing, and
        what is switched off is as it is anyway."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        for name in ("video_pruning_rate", "with_sound", "lesser_max_pixels"):
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
"""An encoded file; a bytearray is a download, which nobody changes any more."""


@dataclass(frozen=True, slots=True)
class Url:
    """Where the content is. `known_key` is the content key that it had before, empty where the caller knows none."""

    address: str
    known_key: bytes = b""


@dataclass(frozen=True, slots=True)
class Key:
    """A content key (32 bytes) that stands for content which an encoder has."""

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
    """Rows that were computed elsewhere: row-major [count, levels, width] in `dtype`, None where none was stated. The
    times and the rows kept of a pruned video are as in `Header`."""

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
"""Where an item's content comes from. Whether all of it fits together is for an encoder to check."""


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
"""How far at most rows are from where a text in their place would be."""


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A stretch of what stands in a prompt for an item: a text, with special tokens by their names, and behind it the
    item's next `rows` rows, each at a place of the token with this id.

    `positions`, int32 [3, n] as bytes, says where they are in time, height and width, and before them the last n - rows
    tokens of the text, from where the first of these would be if text counted on; `advance` how far from there the
    prompt goes on. Empty: each is one further than the one before. `from_origin`: they are counted from 0, and width by
    one more for each item before this one.
    """

    text: str = ""
    rows: int = 0
    token: int = 0
    positions: bytes = b""
    advance: int = 0
    from_origin: bool = False

    @property
    def has_run(self) -> bool:
        """Whether it has rows, or says without them where its text is, or where the prompt goes on."""
        return bool(self.rows or self.advance or self.positions)


@dataclass(frozen=True, slots=True)
class Header:
    """What is known of an item before its rows exist.

    `timestamps` are the seconds of a video's frame groups, `seconds_per_grid` the time from one to the next; both are
    empty for a picture. A sound, where the encoder says what stands for it, has its length in the place of the latter.
    `replacement` is what stands in a prompt for the item, where the encoder says that; it is empty where it follows
    from the grid. `cached` says that the encoder which sent it had the rows.

    Of a video that is pruned, `tokens` of the `grid_rows` that its grid has are kept (0: none is dropped), and
    `kept_rows` says which (`common.media.kept_rows`); empty until all rows are computed, which decides it.
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
        """Which rows are kept is not known yet."""
        return bool(self.grid_rows) and not self.kept_rows

    @property
    def rows_key(self) -> bytes:
        """Names its rows: the key and, of a pruned video, which they are. Two encoders may choose differently, where
        what they compute differs by rounding."""
        return hashlib.sha256(self.key + self.kept_rows).digest() if self.kept_rows else self.key

    def agrees(self, other: Header) -> bool:
        """Whether both speak of the same item and, as far as both know, of the same rows of it."""
        one = replace(self, cached=False, kept_rows=self.kept_rows or other.kept_rows)
        return one == replace(other, cached=False, kept_rows=other.kept_rows or self.kept_rows)
