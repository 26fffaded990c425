"""What an item is, before any encoder has seen it: its content key where it can be computed here, and what repeats of
it have in common where it cannot."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from common import identity, tasks
from llm_service.request import Encoded, Key, MediaItem, Opaque, Url

_SMALL = 64 << 10
"""Bytes that are hashed faster than a thread is asked to."""


@dataclass(frozen=True, slots=True)
class Identity:
    """`key` is the content key, None where only an encoder can tell; `affinity` is alike for repeats of an item."""

    key: bytes | None
    affinity: bytes


async def identify(item: MediaItem, digest: str, salt: str) -> Identity:
    """Hashes an item's content, off the event loop where that takes long; `digest` is the encoders'."""
    match item.source:
        case Key(key):
            return Identity(key, key)
        case Url(url):
            return Identity(None, hashlib.sha256(url.encode()).digest())
        case Encoded(data):
            key = await _sized(_content_key, item, data, digest, salt, size=len(data))
            return Identity(key, key)
        case Opaque(_, data):
            return Identity(None, await _sized(_plain_hash, data, size=len(data)))


def _content_key(item: MediaItem, data: bytes, digest: str, salt: str) -> bytes:
    """The same as the encoder computes; see `identity.content_key`."""
    stated = {name: value for name, value in asdict(item.options).items() if value is not None}
    return identity.content_key(digest, item.modality, stated, salt, [data])


def _plain_hash(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


async def _sized(work: Callable[..., bytes], *args: Any, size: int) -> bytes:
    return work(*args) if size <= _SMALL else await tasks.in_thread(work, *args)
