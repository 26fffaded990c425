"""What an item is, before any encoder has seen it: its content key, and what repeats of it have in common."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from common import identity, tasks
from llm_service.request import Encoded, Key, MediaItem, MediaOptions, Pixels, Rows, Url

_SMALL = 64 << 10
"""Bytes that are hashed faster than a thread is asked to."""


@dataclass(frozen=True, slots=True)
class Identity:
    """`key` is the content key, None for what an address gives; `affinity` is alike for repeats of an item.

    `recalled` is the key under which a header that was seen before may stand for the item, None where an encoder has to
    look at the item first: what it states besides its content might not be true of it.
    """

    key: bytes | None
    affinity: bytes
    recalled: bytes | None


async def identify(item: MediaItem, digest: str, salt: str) -> Identity:
    """Hashes an item's content, off the event loop where that takes long; `digest` is the encoders'."""
    match item.source:
        case Url(url, known_key):
            affinity = await _sized(_plain_hash, url, size=len(url))  # a data address may be megabytes
            return Identity(None, affinity, known_key or None)
        case Key(key):  # it stands for its options, and an encoder refuses others
            return Identity(key, key, key if item.options == MediaOptions() and not item.mime_type else None)
        case Encoded() | Pixels() | Rows() as content:
            about = _about(content) | {name: value for name, value in asdict(item.options).items() if value is not None}
            data = content.data
            key = await _sized(identity.content_key, digest, item.modality, about, salt, [data], size=len(data))
            return Identity(key, key, None if item.mime_type else key)  # a stated type is no part of a key


def _about(content: Encoded | Pixels | Rows) -> dict[str, Any]:
    """What a content's key covers besides its bytes and options."""
    match content:
        case Encoded():
            return {}
        case Pixels(_, frames, height, width, seconds):
            return identity.about_pixels(frames, height, width, seconds)
        case Rows(_, dtype, shape, grid, seconds, apart):
            return identity.about_rows(grid, shape, dtype, seconds, apart)


def _plain_hash(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


async def _sized(work: Callable[..., bytes], *args: Any, size: int) -> bytes:
    return work(*args) if size <= _SMALL else await tasks.in_thread(work, *args)
