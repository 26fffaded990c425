"""Between the nouns and the encoder's messages."""

from __future__ import annotations

import copy
from typing import assert_never

from common.errors import DataLoss
from common.wire import DType, crc32c
from llm_service.request import Encoded, Key, MediaHeader, MediaItem, Modality, Pixels, Rows, Url
from twinlens.v1 import encoder_pb2, media_pb2

_MODALITIES: dict[Modality, media_pb2.Modality] = {
    "image": media_pb2.MODALITY_IMAGE,
    "video": media_pb2.MODALITY_VIDEO,
    "audio": media_pb2.MODALITY_AUDIO,
}
_NAMES: dict[int, Modality] = {number: name for name, number in _MODALITIES.items()}
DTYPES = {
    media_pb2.DATA_TYPE_FLOAT32: DType.FLOAT32,
    media_pb2.DATA_TYPE_BFLOAT16: DType.BFLOAT16,
    media_pb2.DATA_TYPE_FLOAT16: DType.FLOAT16,
}
_NUMBERS = {dtype.value: number for number, dtype in DTYPES.items()}


def media_message(item: MediaItem) -> media_pb2.Media:
    """An item as the encoder takes it."""
    media = media_pb2.Media(modality=_MODALITIES[item.modality], mime_type=item.mime_type)
    match item.source:
        case Encoded(data):
            media.data = data
        case Url(url, known_key):
            media.url, media.known_key = url, known_key
        case Key(key):
            media.key = key
        case Pixels():
            media.pixels.CopyFrom(_pixels(item.source))
        case Rows():
            media.embedding.CopyFrom(_rows(item.source))
        case _ as unreachable:
            assert_never(unreachable)
    for name in ("min_pixels", "max_pixels", "fps", "max_frames", "video_pruning_rate"):
        if (value := getattr(item.options, name)) is not None:
            setattr(media.options, name, value)
    return media


def _pixels(given: Pixels) -> media_pb2.PixelBlock:
    return media_pb2.PixelBlock(
        data=given.data, frames=given.frames, height=given.height, width=given.width, timestamps=given.seconds
    )


def _rows(given: Rows) -> media_pb2.EmbeddingBlock:
    count, levels, width = given.shape
    t, h, w = given.grid
    return media_pb2.EmbeddingBlock(
        data=given.data,
        dtype=_NUMBERS.get(given.dtype, media_pb2.DATA_TYPE_UNSPECIFIED),
        count=count,
        levels=levels,
        width=width,
        grid=media_pb2.Grid(t=t, h=h, w=w),
        timestamps=given.seconds,
        seconds_per_grid=given.apart,
    )


def media_header(message: encoder_pb2.EncodeHeader) -> MediaHeader:
    """An encoder's header; raises DataLoss for one that makes no sense."""
    _check_sum(message)
    grid = (message.grid.t, message.grid.h, message.grid.w)
    if len(message.key) != 32 or min(*grid, message.tokens, message.width, message.levels) < 1:
        raise DataLoss("an encoder sent a header that makes no sense")
    if message.dtype not in DTYPES or message.modality not in _NAMES:
        raise DataLoss("an encoder sent a header that makes no sense")
    return MediaHeader(
        key=message.key,
        modality=_NAMES[message.modality],
        grid=grid,
        tokens=message.tokens,
        width=message.width,
        levels=message.levels,
        dtype=DTYPES[message.dtype].value,
        timestamps=tuple(message.timestamps),
        seconds_per_grid=message.seconds_per_grid,
        cached=message.cached,
    )


def rows_handle(message: encoder_pb2.EncodeRows) -> encoder_pb2.RowsHandle:
    """Where rows lie that an encoder hands over; raises DataLoss for a message that was damaged: it may point at the
    rows of another item."""
    _check_sum(message)
    return message.handle


def _check_sum(message: encoder_pb2.EncodeHeader | encoder_pb2.EncodeRows) -> None:
    """Raises DataLoss where a message is not as it was sent; one without a sum is believed."""
    if not message.crc32c:
        return
    plain = copy.deepcopy(message)
    plain.ClearField("crc32c")
    if crc32c(plain.SerializeToString(deterministic=True)) != message.crc32c:
        raise DataLoss("a message was damaged on the way")
