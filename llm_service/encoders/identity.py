"""What is known of an item before any encoder is asked: its content key, what repeats of it have in common, and the
header of one that was seen."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import asdict, dataclass

from common.identity import canonical, framed
from common.media import data_url
from common.media.identity import content_key, sized
from common.media.item import Content, Encoded, Header, Key, Modality, Options, Url
from llm_service.request import MediaItem


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
    """The name of what an address gave under these options, with this type stated. Encoders alone know which addresses
    are allowed, so it is given only where one has answered for exactly this."""
    assert isinstance(item.source, Url)
    options = canonical(asdict(item.options))
    return hashlib.sha256(framed(item.source.address.encode(), key, options, item.mime_type.encode())).digest()


async def _of_content(item: MediaItem, content: Content, digest: str, salt: str, mime_type: str) -> Identity:
    size = len(content) if isinstance(content, Encoded) else len(content.data)
    key = await sized(content_key, digest, item.modality, content, item.options, salt, size=size)
    named = hashlib.sha256(framed(key, mime_type.encode())).digest() if mime_type else key
    return Identity(key, key, named)


_REMEMBERED = 16_384
_REMEMBERED_BYTES = 64 << 20
_ENTRY_BYTES = 1024
"""Of an entry without what a header holds of any length: objects, names, the place in the dictionary."""


@dataclass(frozen=True, slots=True)
class KnownHeader:
    """A header, and the affinity by which the encoder that sent it was chosen: it, if any, has the rows."""

    header: Header
    affinity: bytes


class HeaderCache:
    """Headers by content key, the longest unused forgotten first, bounded in number and in bytes: a header may carry
    what stands in a prompt for its item, and a row mask.

    A key stands for content, options and tenant; but a caller may state any key, so the tenant is compared as well.
    """

    def __init__(self, max_entries: int = _REMEMBERED, max_bytes: int = _REMEMBERED_BYTES) -> None:
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._known: OrderedDict[tuple[bytes, str, Modality], KnownHeader] = OrderedDict()
        self.bytes = 0
        """Bytes of all that is remembered, an estimate from above."""

    def find(self, name: bytes | None, salt: str, modality: Modality) -> KnownHeader | None:
        """What is known of an item that was seen under this salt."""
        place = (name or b"", salt, modality)
        if (known := self._known.get(place)) is not None:
            self._known.move_to_end(place)
        return known

    def remember(self, names: Collection[bytes], header: Header, salt: str, affinity: bytes) -> None:
        """Keeps a header that an encoder has sent, under its key and other names."""
        known = KnownHeader(dataclasses.replace(header, cached=False), affinity)
        for name in names:
            place = name, salt, header.modality
            self._drop(place)
            self._known[place] = known
            self.bytes += _size(known.header)
        while len(self._known) > self._max_entries or self.bytes > self._max_bytes:
            self._drop(next(iter(self._known)))

    def forget(self, names: Collection[bytes], header: Header, salt: str) -> None:
        """Drops a header that an encoder contradicts."""
        for name in names:
            self._drop((name, salt, header.modality))

    def _drop(self, place: tuple[bytes, str, Modality]) -> None:
        if (known := self._known.pop(place, None)) is not None:
            self.bytes -= _size(known.header)


def _size(header: Header) -> int:
    """Bytes of one; what several names share is counted for each."""
    parts = sum(_PART_BYTES + 4 * len(part.text) + len(part.positions) for part in header.replacement)
    return _ENTRY_BYTES + 32 * len(header.timestamps) + len(header.kept_rows) + parts


_PART_BYTES = 256
