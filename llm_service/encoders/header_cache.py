"""Headers of items that were seen before: a repeat is laid out without asking any encoder."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

from common.media.item import Header, Modality

_REMEMBERED = 16_384


@dataclass(frozen=True, slots=True)
class KnownHeader:
    """A header, and the affinity by which the encoder that sent it was chosen: it, if any, has the rows."""

    header: Header
    affinity: bytes


class HeaderCache:
    """Headers by content key, the longest unused forgotten first.

    A key stands for content, options and tenant; but a caller may state any key, so the tenant is compared as well.
    """

    def __init__(self, max_entries: int = _REMEMBERED) -> None:
        self._max_entries = max_entries
        self._known: OrderedDict[tuple[bytes, str, Modality], KnownHeader] = OrderedDict()

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
            self._known[name, salt, header.modality] = known
            self._known.move_to_end((name, salt, header.modality))
        while len(self._known) > self._max_entries:
            self._known.popitem(last=False)

    def forget(self, names: Collection[bytes], header: Header, salt: str) -> None:
        """Drops a header that an encoder contradicts."""
        for name in names:
            self._known.pop((name, salt, header.modality), None)
