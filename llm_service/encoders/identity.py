"""What an item is, before any encoder has seen it: its content key, and what repeats of it have in common."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from common import data_url, identity, tasks
from llm_service.request import Encoded, Key, MediaItem, MediaOptions, Pixels, Rows, Url

_SMALL = 256 << 10
"""Bytes that are hashed faster than a thread is asked to."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Identity:
    """`key` is the content key, None for what an address gives; `affinity` is alike for repeats of an item.

    `recalled` is the name under which a header that was seen before may stand for the item: the key; where a type was
    stated, which is no part of the key and might not be true of the content, a name for both; of an address with the
    key that it is said to have given, a name that an encoder's answer about them makes known; None where an encoder has
    to look at the item in any case.
    """

    key: bytes | None
    affinity: bytes
    recalled: bytes | None


async def identify(item: MediaItem, digest: str, salt: str) -> Identity:
    """Hashes an item's content, off the event loop where that takes long; `digest` is the encoders'.

    Raises InvalidInput for a data address that is not base64.
    """
    match item.source:
        case Url(url) if data_url.is_data(url):
            data, stated = await _sized(data_url.decode, url, f"{item.field}.url", size=len(url))
            return await _of_content(item, Encoded(data), digest, salt, item.mime_type or stated)
        case Url(url, known_key):
            return Identity(
                None, hashlib.sha256(url.encode()).digest(), given_by(item, known_key) if known_key else None
            )
        case Key(key):  # it stands for its options, and an encoder refuses others, and a type
            return Identity(key, key, key if item.options == MediaOptions() and not item.mime_type else None)
        case Encoded() | Pixels() | Rows() as content:
            return await _of_content(item, content, digest, salt, item.mime_type)


def given_by(item: MediaItem, key: bytes) -> bytes:
    """The name of what an address gave under these options, with this type stated. Encoders alone know which addresses
    are allowed, so it is given only where one has answered for exactly this."""
    assert isinstance(item.source, Url)
    options = identity.canonical(asdict(item.options))
    return hashlib.sha256(identity.framed(item.source.url.encode(), key, options, item.mime_type.encode())).digest()


async def _of_content(
    item: MediaItem, content: Encoded | Pixels | Rows, digest: str, salt: str, mime_type: str
) -> Identity:
    about = _about(content) | {name: value for name, value in asdict(item.options).items() if value is not None}
    data = content.data
    key = await _sized(identity.content_key, digest, item.modality, about, salt, [data], size=len(data))
    named = hashlib.sha256(identity.framed(key, mime_type.encode())).digest() if mime_type else key
    return Identity(key, key, named)


def _about(content: Encoded | Pixels | Rows) -> dict[str, Any]:
    """What a content's key covers besides its bytes and options."""
    match content:
        case Encoded():
            return {}
        case Pixels(_, frames, height, width, seconds):
            return identity.about_pixels(frames, height, width, seconds)
        case Rows(_, dtype, shape, grid, seconds, apart):
            return identity.about_rows(grid, shape, dtype, seconds, apart)


async def _sized(work: Callable[..., T], *args: Any, size: int) -> T:
    return work(*args) if size <= _SMALL else await tasks.in_thread(work, *args)
