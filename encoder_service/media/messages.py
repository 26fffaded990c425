"""Messages between the service, its decode processes, and the process that plans items. Bytes and pixels travel in the
staging arena."""

from __future__ import annotations

import msgspec

from common.media.item import PromptPart
from encoder_service.item import SAMPLE_RATE, Inspection


class Bounds(msgspec.Struct, frozen=True):
    """The limits of a decode process; see the options of `MediaLimits`. Areas are in pixels. Sounds are resampled to
    `sample_rate`."""

    image_area: int
    image_chunks: int
    image_scans: int
    packed_bmp_bytes: int
    video_chunks: int
    audio_seconds: float
    audio_rate: int
    audio_channels: int
    sample_rate: int = SAMPLE_RATE


class DecoderSettings(msgspec.Struct, tag=True):
    """The first message to a decode process.

    The arena's size, the most memory it may map in addition, in bytes, the number of threads for decoding one video,
    the limits of files, and the classes ("module:Class") that read files.
    """

    staging_bytes: int
    memory_bytes: int
    threads: int
    bounds: Bounds
    decoders: list[str]


class Inspect(msgspec.Struct, tag=True):
    """Parse the header of the encoded bytes at [offset, offset + size), by the class `decoder` of the settings.

    With a `key`, which identifies the content, the file stays open under it instead of the last one, so that it need
    not be opened again to be decoded.
    """

    key: bytes
    decoder: str
    offset: int
    size: int


class Decode(msgspec.Struct, tag=True):
    """Decode frames of the encoded bytes to offset `pixels`: [frames, height, width, depth] uint8, preceded by
    `samples` of a video's sound, float32.

    `key` and `decoder` as in `Inspect`; `whole` as in `Plan`.
    """

    key: bytes
    decoder: str
    offset: int
    size: int
    pixels: int
    frames: list[int]
    height: int
    width: int
    depth: int = 3
    samples: int = 0
    whole: tuple[int, int] | None = None


class Ready(msgspec.Struct, tag=True):
    """The decode process is ready. `unconfined` says why the kernel could not restrict its system calls, if so."""

    unconfined: str = ""


class Inspected(msgspec.Struct, tag=True):
    """What a file's header says."""

    seen: Inspection


class Decoding(msgspec.Struct, tag=True):
    """The pixels of the first `frames` frames are written; more will follow."""

    frames: int


class Decoded(msgspec.Struct, tag=True):
    """The pixels are written."""


class Refused(msgspec.Struct, tag=True):
    """The bytes cannot be read, or, if `too_complex`, are made of too many parts, or, if `unsupported`, are of a kind
    that nothing here shows. `why` is for the log alone."""

    why: str
    too_complex: bool = False
    unsupported: bool = False


class PlannerSettings(msgspec.Struct, tag=True):
    """First message to the process that plans items: the checkpoint's folder."""

    folder: str


class PlannerStartFailed(msgspec.Struct, tag=True):
    """It cannot work; it ends. `why` is for the operator."""

    why: str


class ChooseFrames(msgspec.Struct, tag=True):
    """Which frames are taken of a video with so many? `wanted` per second were asked for; 0: not stated."""

    total: int
    fps: float
    wanted: float = 0.0


class Chosen(msgspec.Struct, tag=True):
    """These are."""

    frames: list[int]


class PlanItem(msgspec.Struct, frozen=True, tag=True):
    """What does the prompt have for an item of this size? For a video: with frames of these numbers, of `total` at
    `fps` per second, of which `wanted` per second were asked for, and so many samples of its sound. For sound: with so
    many samples."""

    height: int = 0
    width: int = 0
    frames: tuple[int, ...] = ()
    total: int = 0
    fps: float = 0.0
    samples: int = 0
    wanted: float = 0.0


class Planned(msgspec.Struct, tag=True):
    """That does. `turns` as in `Plan`."""

    parts: tuple[PromptPart, ...]
    turns: tuple[int, ...] = ()


class WrongLength(msgspec.Struct, tag=True):
    """The sound is longer than the model hears at a time, or, unless `too_long`, shorter than a row."""

    too_long: bool


ToPlanner = PlannerSettings | ChooseFrames | PlanItem
FromPlanner = Ready | PlannerStartFailed | Chosen | Planned | WrongLength | Refused
ToDecoder = DecoderSettings | Inspect | Decode
FromDecoder = Ready | Inspected | Decoding | Decoded | Refused
