"""What is known of an item before any encoder is asked: its content key, and what its repeats have in common."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass

from common.hash_fields import canonical, framed
from common.media import data_url
from common.media.content_key import content_key, sized
from common.media.item import Content, Encoded, Key, Options, Url
from llm_service.request import MediaItem


@dataclass(frozen=True, slots=True)
class Identity:
    """`key` is the content key, None for the content of an address; `affinity` is equal for repeats of an item.

    `recalled` is the name under which a known header may apply to the item: the key; with a stated type, which is not
    part of the key and may be wrong, a name for both; for an address with a stated key, a name that an encoder's answer
    about both makes known; None if an encoder must inspect the item in any case.
    """

    key: bytes | None
    affinity: bytes
    recalled: bytes | None


async def identify(item: MediaItem, digest: str, salt: str) -> Identity:
    """Hashes an item's content, in a thread if that takes long; `digest` is the encoders'.

    Raises InvalidInput for a data address that is not base64.
    """
    match item.source:
        case Url(url) if data_url.is_data(url):
            data, stated = await sized(data_url.decode, url, f"{item.field}.url", size=len(url))
            return await _of_content(item, data, digest, salt, item.mime_type or stated)
        case Url(url, known_key):
            return Identity(
                None, hashlib.sha256(url.encode()).digest(), given_by(item, known_key) if known_key else None
            )
        case Key(key):  # it stands for its options, and an encoder refuses others, and a type
            return Identity(key, key, key if item.options == Options() and not item.mime_type else None)
        case content:
            return await _of_content(item, content, digest, salt, item.mime_type)


def given_by(item: MediaItem, key: bytes) -> bytes:
    """The name of what an address gave under these options and this stated type. Only encoders know which addresses are
    allowed, so it is used only after one has answered for exactly these."""
    assert isinstance(item.source, Url)
    options = canonical(asdict(item.options))
    return hashlib.sha256(framed(item.source.address.encode(), key, options, item.mime_type.encode())).digest()


async def _of_content(item: MediaItem, content: Content, digest: str, salt: str, mime_type: str) -> Identity:
    size = len(content) if isinstance(content, Encoded) else len(content.data)
    key = await sized(content_key, digest, item.modality, content, item.options, salt, size=size)
    named = hashlib.sha256(framed(key, mime_type.encode())).digest() if mime_type else key
    return Identity(key, key, named)
