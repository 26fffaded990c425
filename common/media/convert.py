"""Between the nouns of media and their messages, for both services."""

from __future__ import annotations

import copy
import math
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from common.errors import DataLoss, InvalidInput, Unsupported
from common.media import kept_rows
from common.media.item import (
    HEADER_SHAPES,
    MAX_POSITION,
    Embedding,
    Grid,
    Header,
    Key,
    Media,
    Modality,
    Options,
    Pixels,
    PromptPart,
    Source,
    Url,
)
from common.rows.frames import varint
from common.rows.wire import DType, RowLayout, crc32c
from common.telemetry.stages import Stage
from twinlens.v1 import encoder_pb2, media_pb2

KEY_BYTES: Final = 32
MAX_TIMES: Final = 16_384
"""Most times of one item. They are part of its key, and a message could hold millions, which would take seconds."""

MAX_PARTS: Final = 16_384
"""Most parts of an item's layout in a prompt."""
MAX_REPLACEMENT: Final = 1 << 20
"""Characters of all of them at most."""

MODALITIES: Final = {
    Modality.IMAGE: media_pb2.MODALITY_IMAGE,
    Modality.VIDEO: media_pb2.MODALITY_VIDEO,
    Modality.AUDIO: media_pb2.MODALITY_AUDIO,
}
DTYPES: Final = {
    DType.FLOAT32: media_pb2.DATA_TYPE_FLOAT32,
    DType.BFLOAT16: media_pb2.DATA_TYPE_BFLOAT16,
    DType.FLOAT16: media_pb2.DATA_TYPE_FLOAT16,
}
_OPTIONS: Final = (
    *("min_pixels", "max_pixels", "fps", "max_frames"),
    *("video_pruning_rate", "kept_rows", "with_sound", "clamp_max_pixels"),
)
_MAX_KEPT_BYTES: Final = 1 << 17
"""Of a million rows. They are part of a key as well."""
_MODALITY_OF: Final[dict[int, Modality]] = {number: modality for modality, number in MODALITIES.items()}
_DTYPE_OF: Final[dict[int, DType]] = {number: dtype for dtype, number in DTYPES.items()}


def read_media(message: media_pb2.Media, field: str, served: Container[Modality]) -> Media:
    """An item of a request; raises Unsupported or InvalidInput for a modality that is not `served`, no source, a known
    key that goes with none, or too many times."""
    modality = _MODALITY_OF.get(message.modality)
    if modality is None:
        raise InvalidInput("the modality is not set", reason="BAD_MODALITY", field=f"{field}.modality")
    if modality not in served:
        shape = HEADER_SHAPES[modality]
        why = f"{modality} is not served by this model"
        raise Unsupported(why, reason=shape.unserved, field=f"{field}.modality")
    source = _read_source(message, field)
    if message.known_key and not isinstance(source, Url):
        raise InvalidInput("a known key goes only with a url", reason="BAD_OPTION", field=f"{field}.known_key")
    given = message.options
    if len(given.kept_rows) > _MAX_KEPT_BYTES:
        raise InvalidInput("kept_rows is too long", reason="BAD_OPTION", field=f"{field}.options.kept_rows")
    options = Options(**{name: getattr(given, name) for name in _OPTIONS if given.HasField(name)})
    return Media(modality, source, options, message.mime_type, field)


def _read_source(message: media_pb2.Media, field: str) -> Source:
    match message.WhichOneof("source"):
        case "data":
            return message.data
        case "url":
            return Url(message.url, message.known_key)
        case "key":
            return Key(message.key)
        case "pixels":
            block = message.pixels
            times = _read_times(block.timestamps, f"{field}.pixels")
            return Pixels(block.data, block.frames, block.height, block.width, times)
        case "embedding":
            rows = message.embedding
            if len(rows.kept_rows) > _MAX_KEPT_BYTES:
                raise InvalidInput("kept_rows is too long", reason="BAD_EMBEDDING", field=f"{field}.embedding")
            return Embedding(
                data=rows.data,
                dtype=_DTYPE_OF.get(rows.dtype),
                count=rows.count,
                levels=rows.levels,
                width=rows.width,
                grid=_read_grid(rows.grid),
                timestamps=_read_times(rows.timestamps, f"{field}.embedding"),
                seconds_per_grid=rows.seconds_per_grid,
                kept_rows=rows.kept_rows,
            )
        case _:
            raise InvalidInput("the media has no source", reason="NO_SOURCE", field=field)


def _read_grid(message: media_pb2.Grid) -> Grid:
    return Grid(message.t, message.h, message.w)


def _read_times(given: Sequence[float], field: str) -> tuple[float, ...]:
    if len(given) > MAX_TIMES:
        raise InvalidInput(f"there are more than {MAX_TIMES} timestamps", reason="TOO_MANY_TIMES", field=field)
    return tuple(given)


def write_media(item: Media) -> list[bytes]:
    """An item as the encoder takes it: an `items` field of an EncodeRequest, in pieces to be joined. Content is one of
    them, and no copy: protobuf makes four, and lets no other thread run meanwhile; joining makes one, and does."""
    media = media_pb2.Media(modality=MODALITIES[item.modality], mime_type=item.mime_type)
    for name, value in item.options.stated().items():
        setattr(media.options, name, value)
    content: list[bytes] = []
    match item.source:
        case Url(address, known_key):
            media.url, media.known_key = address, known_key
        case Key(key):
            media.key = key
        case Pixels(data, frames, height, width, times):
            block = media_pb2.PixelBlock(frames=frames, height=height, width=width, timestamps=times)
            data_field = _framed(media_pb2.PixelBlock.DATA_FIELD_NUMBER, data)
            content = _framed(media_pb2.Media.PIXELS_FIELD_NUMBER, block.SerializeToString(), *data_field)
        case Embedding() as rows:
            block_bytes = _write_embedding(rows).SerializeToString()
            data_field = _framed(media_pb2.EmbeddingBlock.DATA_FIELD_NUMBER, rows.data)
            content = _framed(media_pb2.Media.EMBEDDING_FIELD_NUMBER, block_bytes, *data_field)
        case encoded:
            content = _framed(media_pb2.Media.DATA_FIELD_NUMBER, bytes(encoded))
    return _framed(encoder_pb2.EncodeRequest.ITEMS_FIELD_NUMBER, media.SerializeToString(), *content)


def _framed(field: int, *pieces: bytes) -> list[bytes]:
    """A field of these bytes, with a number below 16."""
    return [bytes((field << 3 | 2,)), varint(sum(map(len, pieces))), *pieces]


def _write_embedding(rows: Embedding) -> media_pb2.EmbeddingBlock:
    """But for its data."""
    return media_pb2.EmbeddingBlock(
        dtype=media_pb2.DATA_TYPE_UNSPECIFIED if rows.dtype is None else DTYPES[rows.dtype],
        count=rows.count,
        levels=rows.levels,
        width=rows.width,
        grid=_write_grid(rows.grid),
        timestamps=rows.timestamps,
        seconds_per_grid=rows.seconds_per_grid,
        kept_rows=rows.kept_rows,
    )


def _write_grid(grid: Grid) -> media_pb2.Grid:
    return media_pb2.Grid(t=grid.t, h=grid.h, w=grid.w)


def write_header(index: int, found: Header, layout: RowLayout, *, cached: bool) -> encoder_pb2.EncodeHeader:
    """An item's header as it travels."""
    message = encoder_pb2.EncodeHeader(
        item=index,
        key=found.key,
        modality=MODALITIES[found.modality],
        grid=_write_grid(found.grid),
        tokens=found.tokens,
        width=layout.width,
        levels=layout.levels,
        dtype=DTYPES[layout.dtype],
        timestamps=found.timestamps,
        cached=cached,
        seconds_per_grid=found.seconds_per_grid,
        grid_rows=found.grid_rows,
        kept_rows=found.kept_rows,
        replacement=[
            encoder_pb2.PromptPart(
                text=part.text,
                rows=part.rows,
                token=part.token,
                positions=part.positions,
                advance=part.advance,
                from_origin=part.from_origin,
            )
            for part in found.replacement
        ],
    )
    add_checksum(message)
    return message


def read_header(message: encoder_pb2.EncodeHeader) -> tuple[Header, RowLayout]:
    """An encoder's header, and the layout of its rows; raises DataLoss for one that makes no sense, or was damaged."""
    verify_checksum(message)
    modality, dtype, grid = _MODALITY_OF.get(message.modality), _DTYPE_OF.get(message.dtype), _read_grid(message.grid)
    numbers = (grid.t, grid.h, grid.w, message.tokens, message.width, message.levels)
    if modality is None or dtype is None or len(message.key) != KEY_BYTES or min(numbers) < 1:
        raise DataLoss("an encoder sent an invalid header")
    kept = message.kept_rows
    if message.grid_rows and not message.tokens < message.grid_rows:
        raise DataLoss("an encoder's header keeps more rows than there are")
    if kept and not (kept_rows.fits(kept, message.grid_rows) and kept_rows.count(kept) == message.tokens):
        raise DataLoss("an encoder's header has kept_rows that do not match its row count")
    found = Header(
        message.key,
        modality,
        grid,
        message.tokens,
        timestamps=tuple(message.timestamps),
        seconds_per_grid=message.seconds_per_grid,
        cached=message.cached,
        grid_rows=message.grid_rows,
        kept_rows=kept,
        replacement=_read_replacement(message.replacement),
    )
    return found, RowLayout(message.levels, message.width, dtype)


def _read_replacement(given: Sequence[encoder_pb2.PromptPart]) -> tuple[PromptPart, ...]:
    if len(given) > MAX_PARTS or sum(len(part.text) for part in given) > MAX_REPLACEMENT:
        raise DataLoss("an encoder sent too much to stand for an item in a prompt")
    if any(part.positions and not _has_positions(part) for part in given):
        raise DataLoss("an encoder sent different numbers of positions and rows")
    if any(abs(at) > MAX_POSITION for part in given for at in (part.advance, *_numbers(part.positions))):
        raise DataLoss("an encoder places rows beyond the longest prompt")
    return tuple(
        PromptPart(part.text, part.rows, part.token, part.positions, part.advance, part.from_origin) for part in given
    )


def _has_positions(part: encoder_pb2.PromptPart) -> bool:
    """Whether a part's positions cover its rows, and no more tokens of its text than it has."""
    of_text = len(part.positions) // _POSITION_BYTES - part.rows
    return len(part.positions) % _POSITION_BYTES == 0 and 0 <= of_text <= len(part.text.encode())


def _numbers(positions: bytes) -> tuple[int, ...]:
    """The least and the greatest of them."""
    each = np.frombuffer(positions, "<i4")
    return (int(each.min()), int(each.max())) if len(each) else ()


_POSITION_BYTES = 12
"""Of a token: three integers."""


Checked = encoder_pb2.EncodeHeader | encoder_pb2.EncodeRows
"""Messages with a checksum of their own."""


def write_stages(stages: Mapping[str, Stage]) -> list[media_pb2.StageTiming]:
    """Stages with times counted from the call's arrival."""
    return [
        media_pb2.StageTiming(stage=name, seconds=stage.seconds, start_seconds=stage.began, end_seconds=stage.ended)
        for name, stage in stages.items()
    ]


def read_stages(given: Iterable[media_pb2.StageTiming], called: float) -> dict[str, Stage]:
    """An encoder's stages on our clock, which was at `called` at the time of the call; times that are not numbers are
    dropped."""

    def moment(stage: media_pb2.StageTiming, field: str) -> float | None:
        value: float = getattr(stage, field)
        return called + value if stage.HasField(field) and math.isfinite(value) else None

    return {
        each.stage: Stage(each.seconds, moment(each, "start_seconds"), moment(each, "end_seconds"))
        for each in given
        if math.isfinite(each.seconds)
    }


def add_checksum(message: Checked) -> None:
    """Adds a checksum, which reveals damage on the way."""
    message.crc32c = crc32c(message.SerializeToString(deterministic=True))


def verify_checksum(message: Checked) -> None:
    """Raises DataLoss if a message differs from what was sent; one without a checksum is accepted."""
    if not message.crc32c:
        return
    plain = copy.deepcopy(message)
    plain.ClearField("crc32c")
    if crc32c(plain.SerializeToString(deterministic=True)) != message.crc32c:
        raise DataLoss("a message was damaged on the way")


def by_transport(counts: Mapping[Any, int]) -> dict[tuple[str, ...], float]:
    """Counts by transport number under their names, such as `shared_memory`; 0 for missing ones."""
    return {
        (name.removeprefix("TRANSPORT_").lower(),): counts.get(number, 0)
        for name, number in encoder_pb2.Transport.items()
        if number
    }
