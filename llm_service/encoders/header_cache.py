"""The headers of items that were seen, so that a repeat's prompt is laid out before any encoder is asked."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

from common.media.item import Header, Modality

_REMEMBERED = 16_384
_REMEMBERED_BYTES = 64 << 20
_ENTRY_BYTES = 1024
"""Bytes of an entry without the header's parts of variable size."""
_PART_BYTES = 256
"""Bytes of a part of an item's layout, without its tokens and positions."""


@dataclass(frozen=True, slots=True)
class KnownHeader:
    """A header, and the affinity by which its encoder was chosen, which is the likeliest to have the rows."""

    header: Header
    affinity: bytes


class HeaderCache:
    """Headers by content key, the least recently used forgotten first, bounded in number and bytes: a header may have
    an item's layout and a row mask.

    A key covers content, options and tenant; but callers may state any key, so the tenant is compared as well.
    """

    def __init__(self, max_entries: int = _REMEMBERED, max_bytes: int = _REMEMBERED_BYTES) -> None:
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._known: OrderedDict[tuple[bytes, str, Modality], KnownHeader] = OrderedDict()
        self.bytes = 0
        """Bytes of all that is remembered, an estimate from above."""

    def find(self, name: bytes | None, salt: str, modality: Modality) -> KnownHeader | None:
        """What is known of an item seen under this salt."""
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
    """The bytes of one; shared parts count for each name."""
    parts = sum(_PART_BYTES + 4 * len(part.text) + len(part.positions) for part in header.replacement)
    return _ENTRY_BYTES + 32 * len(header.timestamps) + len(header.kept_rows) + parts
