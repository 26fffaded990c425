"""Between messages and nouns. Every field of a request is read here, used, or refused by name."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from common.errors import InvalidInput, TwinlensError, Unsupported
from common.grpc_calls import plain_status
from common.identity import MOST_TIMES
from common.wire import DType, RowLayout, crc32c
from encoder_service.item import Embedding, Grid, Header, Item, Key, Modality, Options, Pixels, Source, Url
from encoder_service.media.limits import MediaLimits
from twinlens.v1 import encoder_pb2, media_pb2

KEY_BYTES = 32
_MOST_KEYS = _MOST_LEASES = 1024
_MOST_WAYS = 64
"""Transports that a caller accepts, and GPUs that it has."""

Order = tuple[Item, str] | TwinlensError
"""An item that is asked for, with the MIME type that was stated; or why it cannot be."""

_MODALITIES = {media_pb2.MODALITY_IMAGE: Modality.IMAGE, media_pb2.MODALITY_VIDEO: Modality.VIDEO}
MODALITIES = {kind: number for number, kind in _MODALITIES.items()}
DTYPES = {
    DType.FLOAT32: media_pb2.DATA_TYPE_FLOAT32,
    DType.BFLOAT16: media_pb2.DATA_TYPE_BFLOAT16,
    DType.FLOAT16: media_pb2.DATA_TYPE_FLOAT16,
}


def check_items(items: Sequence[media_pb2.Media], limits: MediaLimits) -> None:
    """Raises InvalidInput for no items, or too many of a kind. A flood of them is only counted."""
    if not items:
        raise InvalidInput("there are no items", reason="NO_ITEMS", field="items")
    if len(items) > limits.max_images + limits.max_videos:
        raise InvalidInput("there are too many items", reason="TOO_MANY_ITEMS", field="items")
    counts = Counter(media.modality for media in items)
    for kind, most in (
        (media_pb2.MODALITY_IMAGE, limits.max_images),
        (media_pb2.MODALITY_VIDEO, limits.max_videos),
    ):
        if counts[kind] > most:
            what = media_pb2.Modality.Name(kind).removeprefix("MODALITY_").lower()
            raise InvalidInput(f"more than {most} items are a {what}", reason="TOO_MANY_ITEMS", field="items")


def check_lists(request: encoder_pb2.EncodeRequest) -> None:
    """Raises InvalidInput unless there are first and end rows for each item or for none, and few of everything else."""
    for given, field in ((request.accepts, "accepts"), (request.host.gpu_uuids, "host.gpu_uuids")):
        if len(given) > _MOST_WAYS:
            raise InvalidInput(f"{field} may hold {_MOST_WAYS}", reason="TOO_MANY_TRANSPORTS", field=field)
    if len(request.first_rows) not in (0, len(request.items)):
        raise InvalidInput("there must be one first row for each item", reason="BAD_FIRST_ROW", field="first_rows")
    if len(request.end_rows) not in (0, len(request.items)):
        raise InvalidInput("there must be one end row for each item", reason="BAD_END_ROW", field="end_rows")


def without_items(request: encoder_pb2.EncodeRequest) -> encoder_pb2.EncodeRequest:
    """Everything else that a request says. A message keeps all of its bytes for as long as there is any of it."""
    return encoder_pb2.EncodeRequest(
        **{field.name: value for field, value in request.ListFields() if field.name != "items"}
    )


def stretch(request: encoder_pb2.EncodeRequest, index: int, tokens: int) -> tuple[int, int]:
    """The first row of an item that the caller wants, and the one before which to stop; raises InvalidInput where the
    item has no such stretch."""
    first = request.first_rows[index] if request.first_rows else 0
    if not 0 <= first <= tokens:
        raise InvalidInput("the item has no such row", reason="BAD_FIRST_ROW", field=f"first_rows[{index}]")
    end = (request.end_rows[index] if request.end_rows else 0) or tokens
    if not first <= end <= tokens:
        raise InvalidInput("the item's rows cannot end there", reason="BAD_END_ROW", field=f"end_rows[{index}]")
    return first, end


def item(media: media_pb2.Media, index: int, salt: str, priority: int) -> Item:
    """One item of a request; raises InvalidInput, Forbidden or Unsupported, naming the field."""
    field = f"items[{index}]"
    if media.modality == media_pb2.MODALITY_AUDIO:
        raise Unsupported("audio is not served by this model", reason="NO_AUDIO", field=f"{field}.modality")
    if media.modality not in _MODALITIES:
        raise InvalidInput("the modality is not set", reason="BAD_MODALITY", field=f"{field}.modality")
    source = media.WhichOneof("source")
    if media.mime_type and source not in ("data", "url"):
        raise InvalidInput("a MIME type goes with encoded bytes alone", reason="BAD_OPTION", field=f"{field}.mime_type")
    if media.known_key and source != "url":
        raise InvalidInput("a known key goes with a url alone", reason="BAD_OPTION", field=f"{field}.known_key")
    options = _options(media, field)
    return Item(
        modality=_MODALITIES[media.modality],
        source=_source(media, source, options, field),
        options=options,
        salt=salt,
        priority=priority,
        field=field,
    )


def items(given: Sequence[media_pb2.Media], salt: str, priority: int, connection: str = "") -> list[Order]:
    """Every item of a request that came over a connection, with its MIME type, or with what is wrong with it."""
    peer = connection.rpartition(":")[0]  # without its port
    orders: list[Order] = []
    for index, media in enumerate(given):
        try:
            orders.append((replace(item(media, index, salt, priority), peer=peer), media.mime_type))
        except TwinlensError as error:
            orders.append(error)
    return orders


def key(value: bytes, field: str) -> bytes:
    """A content key; raises InvalidInput for one of another length."""
    if len(value) != KEY_BYTES:
        raise InvalidInput(f"a content key has {KEY_BYTES} bytes", reason="BAD_KEY", field=field)
    return value


def keys(request: encoder_pb2.ProbeRequest) -> list[bytes]:
    """The keys that are asked about; raises InvalidInput for too many, or one of another length."""
    if len(request.keys) > _MOST_KEYS:
        raise InvalidInput(f"more than {_MOST_KEYS} keys", reason="TOO_MANY_KEYS", field="keys")
    return [key(value, f"keys[{index}]") for index, value in enumerate(request.keys)]


def leases(request: encoder_pb2.ReleaseRequest) -> Sequence[str]:
    """The leases that are given back; raises InvalidInput for too many."""
    if len(request.leases) > _MOST_LEASES:
        raise InvalidInput(f"more than {_MOST_LEASES} leases", reason="TOO_MANY_LEASES", field="leases")
    return request.leases


def shared_load(counts: Mapping[str, int] | None) -> encoder_pb2.SharedStoreLoad | None:
    """What the shared store did, as it travels; None where there is none."""
    if counts is None:
        return None
    names = ("hits", "errors", "garbage", "written", "dropped", "waits_in_vain")
    return encoder_pb2.SharedStoreLoad(**{name: counts[name] for name in names})


def header(index: int, found: Header, layout: RowLayout, *, cached: bool) -> encoder_pb2.EncodeHeader:
    """An item's header as it travels."""
    message = encoder_pb2.EncodeHeader(
        item=index,
        key=found.key,
        modality=MODALITIES[found.modality],
        grid=media_pb2.Grid(t=found.grid.t, h=found.grid.h, w=found.grid.w),
        tokens=found.tokens,
        width=layout.width,
        levels=layout.levels,
        dtype=DTYPES[layout.dtype],
        timestamps=found.timestamps,
        cached=cached,
        seconds_per_grid=found.seconds_per_grid,
    )
    message.crc32c = crc32c(message.SerializeToString(deterministic=True))
    return message


def summed(rows: encoder_pb2.EncodeRows) -> encoder_pb2.EncodeRows:
    """Rows that are handed over, with what tells whether the message was damaged on the way."""
    rows.crc32c = crc32c(rows.SerializeToString(deterministic=True))
    return rows


def timings(seconds: Mapping[str, float]) -> list[media_pb2.StageTiming]:
    """Seconds by stage as they travel."""
    return [media_pb2.StageTiming(stage=stage, seconds=value) for stage, value in seconds.items()]


def by_transport(counts: Mapping[encoder_pb2.Transport, int]) -> dict[tuple[str, ...], float]:
    """Counts by the transport's name, such as `shared_memory`."""
    return {
        (encoder_pb2.Transport.Name(number).removeprefix("TRANSPORT_").lower(),): count
        for number, count in counts.items()
    }


def milliseconds(seconds: float | None) -> int | None:
    """Whole milliseconds, upwards; None stays unset."""
    return None if seconds is None else math.ceil(seconds * 1e3)


def error(index: int, failure: TwinlensError) -> encoder_pb2.EncodeError:
    """One item's failure as it travels."""
    return encoder_pb2.EncodeError(item=index, status=plain_status(failure))


def _options(media: media_pb2.Media, field: str) -> Options:
    given = media.options
    if given.HasField("video_pruning_rate"):
        raise Unsupported(
            "pruning of video tokens is not in this release",
            reason="NO_PRUNING",
            field=f"{field}.options.video_pruning_rate",
        )
    if given.HasField("fps") and not math.isfinite(given.fps):
        raise InvalidInput("fps must be a number", reason="BAD_OPTION", field=f"{field}.options.fps")
    return Options(
        min_pixels=given.min_pixels if given.HasField("min_pixels") else None,
        max_pixels=given.max_pixels if given.HasField("max_pixels") else None,
        fps=given.fps if given.HasField("fps") else None,
        max_frames=given.max_frames if given.HasField("max_frames") else None,
    )


def _source(media: media_pb2.Media, source: str | None, options: Options, field: str) -> Source:
    match source:
        case "data":
            return media.data
        case "key":
            if options.stated():
                raise InvalidInput(
                    "a key already stands for its options", reason="BAD_OPTION", field=f"{field}.options"
                )
            return Key(key(media.key, f"{field}.key"))
        case "pixels":
            given = media.pixels
            times = _times(given.timestamps, f"{field}.pixels")
            return Pixels(given.data, given.frames, given.height, given.width, times)
        case "url":
            return Url(media.url, key(media.known_key, f"{field}.known_key") if media.known_key else b"")
        case "embedding":
            if options.stated():
                raise InvalidInput("rows have no options", reason="BAD_OPTION", field=f"{field}.options")
            return _embedding(media.embedding, f"{field}.embedding")
        case _:
            raise InvalidInput("the media has no source", reason="NO_SOURCE", field=field)


def _embedding(given: media_pb2.EmbeddingBlock, field: str) -> Embedding:
    dtype = next((kind for kind, number in DTYPES.items() if number == given.dtype), None)
    if dtype is None:
        raise InvalidInput("the element type is not set", reason="BAD_EMBEDDING", field=f"{field}.dtype")
    grid = Grid(given.grid.t, given.grid.h, given.grid.w)
    times = _times(given.timestamps, field)
    return Embedding(given.data, dtype, given.count, given.levels, given.width, grid, times, given.seconds_per_grid)


def _times(given: Sequence[float], field: str) -> tuple[float, ...]:
    if len(given) > MOST_TIMES:
        raise InvalidInput(f"there are more than {MOST_TIMES} timestamps", reason="TOO_MANY_TIMES", field=field)
    return tuple(given)
