"""The content key of an item. Both services compute it, so that a repeat is known without asking an encoder.

Everything that can change a row is part of the key; every field is framed by its length, so that no two different
lists of fields run together into the same bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, TypeVar

from common.aio.tasks import in_thread
from common.hash_fields import canonical, framed
from common.media.encoder_digest import SCHEMA
from common.media.item import Content, Embedding, Modality, Options, Pixels

_SMALL = 256 << 10
"""Bytes that are hashed, or decoded from base64, faster than a thread is asked to."""

T = TypeVar("T")


def content_key(digest: str, modality: Modality, content: Content, options: Options, salt: str) -> bytes:
    """The key of an item: SHA-256, 32 bytes. `digest` is the tower's.

    Hashing megabytes takes milliseconds: see `sized`.
    """
    about = canonical(_about(content) | options.stated())
    key = hashlib.sha256(framed(SCHEMA, digest.encode(), modality.encode(), about, salt.encode()))
    key.update(content if isinstance(content, bytes | bytearray) else content.data)
    return key.digest()


def _about(content: Content) -> dict[str, Any]:
    """What the key covers besides the bytes: for decoded pixels the shape and the times of frames; for rows everything
    stated about them, so that a contradictory block never has the key of a good one."""
    match content:
        case Pixels(_, frames, height, width, seconds):
            return {"pixels": [frames, height, width], "seconds": list(seconds)}
        case Embedding(_, dtype, count, levels, width, grid, seconds, apart, kept):
            shape = [count, levels, width, str(dtype or "")]
            about = {"rows": [grid.t, grid.h, grid.w], "shape": shape, "seconds": list(seconds), "apart": apart}
            return about | ({"kept": kept} if kept else {})
        case _:
            return {}


async def sized(work: Callable[..., T], *args: Any, size: int) -> T:
    """The result of work over `size` bytes, in a thread if that takes long."""
    return work(*args) if size <= _SMALL else await in_thread(work, *args)
