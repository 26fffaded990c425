"""Between messages and nouns. Every field of a request is read here, used, or refused by name."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from common.errors import InvalidInput, TwinlensError, without_traces
from common.media.convert import KEY_BYTES, MODALITIES, read_media
from common.media.item import Embedding, Encoded, Key, Media, Modality, Url
from common.nixl.messages import AgentMemory
from common.rpc.status import plain_status
from encoder_service.item import Item
from encoder_service.media.limits import MediaLimits
from encoder_service.media.modalities import SPECS
from twinlens.v1 import encoder_pb2, media_pb2

_MAX_KEYS = _MAX_LEASES = 1024
_MAX_TRANSPORTS = 64
"""Transports that a caller accepts, and GPUs that it has."""

ItemOrError = Item | TwinlensError
"""An item that is asked for, or why it cannot be."""


def check_items(items: Sequence[media_pb2.Media], limits: MediaLimits) -> None:
    """Raises InvalidInput for no items, or too many of a kind. A flood of them is only counted."""
    if not items:
        raise InvalidInput("there are no items", reason="NO_ITEMS", field="items")
    if len(items) > sum(spec.max_items(limits) for spec in SPECS.values()):
        raise InvalidInput("there are too many items", reason="TOO_MANY_ITEMS", field="items")
    counts = Counter(media.modality for media in items)
    for modality, spec in SPECS.items():
        if counts[MODALITIES[modality]] > (max_items := spec.max_items(limits)):
            raise InvalidInput(f"more than {max_items} items are a {modality}", reason="TOO_MANY_ITEMS", field="items")


def check_lists(request: encoder_pb2.EncodeRequest) -> None:
    """Raises InvalidInput unless there are first and end rows for each item or for none, and few elements in all other
    lists."""
    for given, field in ((request.accepts, "accepts"), (request.host.gpu_uuids, "host.gpu_uuids")):
        if len(given) > _MAX_TRANSPORTS:
            raise InvalidInput(f"{field} may hold {_MAX_TRANSPORTS}", reason="TOO_MANY_TRANSPORTS", field=field)
    if len(request.first_rows) not in (0, len(request.items)):
        raise InvalidInput("there must be one first row for each item", reason="BAD_FIRST_ROW", field="first_rows")
    if len(request.end_rows) not in (0, len(request.items)):
        raise InvalidInput("there must be one end row for each item", reason="BAD_END_ROW", field="end_rows")


def without_items(request: encoder_pb2.EncodeRequest) -> encoder_pb2.EncodeRequest:
    """A request without its items. A message keeps all of its bytes as long as any part of it is referenced."""
    return encoder_pb2.EncodeRequest(
        **{field.name: value for field, value in request.ListFields() if field.name != "items"}
    )


def read_stretch(request: encoder_pb2.EncodeRequest, index: int, tokens: int) -> tuple[int, int]:
    """The first row of an item that the caller wants, and the one before which to stop; raises InvalidInput if the item
    has no such rows."""
    first = request.first_rows[index] if request.first_rows else 0
    if not 0 <= first <= tokens:
        raise InvalidInput("the item has no such row", reason="BAD_FIRST_ROW", field=f"first_rows[{index}]")
    end = (request.end_rows[index] if request.end_rows else 0) or tokens
    if not first <= end <= tokens:
        raise InvalidInput("the item's rows cannot end there", reason="BAD_END_ROW", field=f"end_rows[{index}]")
    return first, end


def read_item(
    message: media_pb2.Media, index: int, salt: str, priority: int, served: Collection[Modality], host: str = ""
) -> Item:
    """One item of a request from `host`, of a modality that is `served`; raises InvalidInput, Forbidden or Unsupported,
    naming the field."""
    field = f"items[{index}]"
    media = read_media(message, field, served)
    _check(media, field)
    return Item(
        modality=media.modality,
        source=media.source,
        options=media.options,
        mime_type=media.mime_type,
        field=field,
        salt=salt,
        priority=priority,
        host=host,
    )


def read_items(
    given: Sequence[media_pb2.Media], salt: str, priority: int, served: Collection[Modality], connection: str = ""
) -> list[ItemOrError]:
    """Each item of a request that came over a connection, or the error in it."""
    host = connection.rpartition(":")[0]  # without its port
    found: list[ItemOrError] = []
    for index, media in enumerate(given):
        try:
            found.append(read_item(media, index, salt, priority, served, host))
        except TwinlensError as error:
            found.append(without_traces(error))
    return found


def read_key(value: bytes, field: str) -> bytes:
    """A content key; raises InvalidInput for one of another length."""
    if len(value) != KEY_BYTES:
        raise InvalidInput(f"a content key has {KEY_BYTES} bytes", reason="BAD_KEY", field=field)
    return value


def read_keys(request: encoder_pb2.ProbeRequest) -> list[bytes]:
    """The keys that are asked about; raises InvalidInput for too many, or one of another length."""
    if len(request.keys) > _MAX_KEYS:
        raise InvalidInput(f"more than {_MAX_KEYS} keys", reason="TOO_MANY_KEYS", field="keys")
    return [read_key(value, f"keys[{index}]") for index, value in enumerate(request.keys)]


def read_leases(request: encoder_pb2.ReleaseRequest) -> Sequence[str]:
    """The leases that are given back; raises InvalidInput for too many."""
    if len(request.leases) > _MAX_LEASES:
        raise InvalidInput(f"more than {_MAX_LEASES} leases", reason="TOO_MANY_LEASES", field="leases")
    return request.leases


def write_shared_load(counts: Mapping[str, int] | None) -> encoder_pb2.SharedStoreLoad | None:
    """The shared store's counters as a message; None without a shared store."""
    if counts is None:
        return None
    names = ("hits", "errors", "garbage", "written", "dropped", "waits_in_vain")
    return encoder_pb2.SharedStoreLoad(**{name: counts[name] for name in names})


def write_timings(seconds: Mapping[str, float]) -> list[media_pb2.StageTiming]:
    """Seconds by stage as they travel."""
    return [media_pb2.StageTiming(stage=stage, seconds=value) for stage, value in seconds.items()]


def write_nixl_agent(memory: AgentMemory | None) -> encoder_pb2.NixlAgent | None:
    """The store's memory as callers' agents find it; None stays unset."""
    if memory is None:
        return None
    return encoder_pb2.NixlAgent(
        name=memory.agent, backend=memory.backend, metadata=memory.metadata, base=memory.base, bytes=memory.size
    )


def milliseconds(seconds: float | None) -> int | None:
    """Whole milliseconds, upwards; None stays unset."""
    return None if seconds is None else math.ceil(seconds * 1e3)


def write_error(index: int, failure: TwinlensError) -> encoder_pb2.EncodeError:
    """One item's failure as it travels."""
    return encoder_pb2.EncodeError(item=index, status=plain_status(failure))


def _check(media: Media, field: str) -> None:
    """Checks a message for contradictions; sizes are checked by `media.limits`."""
    source, options = media.source, media.options
    if media.mime_type and not isinstance(source, Encoded | Url):
        raise InvalidInput("a MIME type goes only with encoded bytes", reason="BAD_OPTION", field=f"{field}.mime_type")
    if options.fps is not None and not math.isfinite(options.fps):
        raise InvalidInput("fps must be a number", reason="BAD_OPTION", field=f"{field}.options.fps")
    match source:
        case Key(value):
            if options.stated():
                raise InvalidInput(
                    "a key already stands for its options", reason="BAD_OPTION", field=f"{field}.options"
                )
            read_key(value, f"{field}.key")
        case Url(_, known_key) if known_key:
            read_key(known_key, f"{field}.known_key")
        case Embedding(_, dtype):
            if options.stated():
                raise InvalidInput("rows have no options", reason="BAD_OPTION", field=f"{field}.options")
            if dtype is None:
                raise InvalidInput(
                    "the element type is not set", reason="BAD_EMBEDDING", field=f"{field}.embedding.dtype"
                )
