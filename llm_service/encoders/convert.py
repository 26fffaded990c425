"""Between the nouns and the encoder's messages."""

from __future__ import annotations

from typing import assert_never

from common.errors import DataLoss
from common.wire import DType, crc32c
from llm_service.request import Encoded, Key, MediaHeader, MediaItem, Modality, Opaque, Url
from twinlens.v1 import encoder_pb2, media_pb2

_MODALITIES: dict[Modality, media_pb2.Modality] = {
    "image": media_pb2.MODALITY_IMAGE,
    "video": media_pb2.MODALITY_VIDEO,
    "audio": media_pb2.MODALITY_AUDIO,
}
_NAMES: dict[int, Modality] = {number: name for name, number in _MODALITIES.items()}
_DTYPES = {
    media_pb2.DATA_TYPE_FLOAT32: DType.FLOAT32,
    media_pb2.DATA_TYPE_BFLOAT16: DType.BFLOAT16,
    media_pb2.DATA_TYPE_FLOAT16: DType.FLOAT16,
}


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
        case Opaque("pixels", packed):
            media.pixels.ParseFromString(packed)
        case Opaque(_, packed):
            media.embedding.ParseFromString(packed)
        case _ as unreachable:
            assert_never(unreachable)
    for name in ("min_pixels", "max_pixels", "fps", "max_frames", "video_pruning_rate"):
        if (value := getattr(item.options, name)) is not None:
            setattr(media.options, name, value)
    return media


def media_header(message: encoder_pb2.EncodeHeader) -> MediaHeader:
    """An encoder's header; raises DataLoss for one that makes no sense."""
    if message.crc32c:
        plain = encoder_pb2.EncodeHeader()
        plain.CopyFrom(message)
        plain.ClearField("crc32c")
        if crc32c(plain.SerializeToString(deterministic=True)) != message.crc32c:
            raise DataLoss("a header was damaged on the way")
    grid = (message.grid.t, message.grid.h, message.grid.w)
    if len(message.key) != 32 or min(*grid, message.tokens, message.width, message.levels) < 1:
        raise DataLoss("an encoder sent a header that makes no sense")
    if message.dtype not in _DTYPES or message.modality not in _NAMES:
        raise DataLoss("an encoder sent a header that makes no sense")
    return MediaHeader(
        key=message.key,
        modality=_NAMES[message.modality],
        grid=grid,
        tokens=message.tokens,
        width=message.width,
        levels=message.levels,
        dtype=_DTYPES[message.dtype].value,
        timestamps=tuple(message.timestamps),
        seconds_per_grid=message.seconds_per_grid,
        cached=message.cached,
    )
