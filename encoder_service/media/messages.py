"""What the service and its decode processes say to each other. Bytes and pixels travel in the staging arena."""

from __future__ import annotations

import msgspec


class Begin(msgspec.Struct, tag=True):
    """First message to a decode process.

    The arena's size, the most memory it may map beyond it, in bytes, the threads that may decode one video, and the
    pixels of the largest picture that may be decoded.
    """

    staging_bytes: int
    memory_bytes: int
    threads: int
    max_image_area: int


class Inspect(msgspec.Struct, tag=True):
    """Parse the header of the encoded bytes at [offset, offset + size).

    `key` names the content: a video that was opened to look at it is kept open under its key, in the place of the last
    one, so that it need not be opened again to decode it.
    """

    key: bytes
    video: bool
    offset: int
    size: int


class Decode(msgspec.Struct, tag=True):
    """Decode frames of the encoded bytes into `pixels`, an offset: [frames, height, width, 3] uint8.

    `key` as in `Inspect`.
    """

    key: bytes
    video: bool
    offset: int
    size: int
    pixels: int
    frames: list[int]
    height: int
    width: int


class Ready(msgspec.Struct, tag=True):
    """The decode process can work."""


class Inspected(msgspec.Struct, tag=True):
    """A header's contents, dimensions after orientation; `frames` is 1 and `fps` 0 for a picture."""

    width: int
    height: int
    frames: int
    fps: float


class Decoding(msgspec.Struct, tag=True):
    """The pixels of the first `frames` frames are written; more are to come."""

    frames: int


class Decoded(msgspec.Struct, tag=True):
    """The pixels are written."""


class Refused(msgspec.Struct, tag=True):
    """The bytes cannot be read. `why` is for the log alone."""

    why: str


ToDecoder = Begin | Inspect | Decode
FromDecoder = Ready | Inspected | Decoding | Decoded | Refused
