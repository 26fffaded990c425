"""Headers of items that were seen before: a repeat is laid out without asking any encoder."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict

from llm_service.request import MediaHeader, Modality

_REMEMBERED = 16_384


class KnownHeaders:
    """Headers by content key, the longest unused forgotten first.

    A key stands for content, options and tenant; but a caller may state any key, so the tenant is compared as well.
    """

    def __init__(self, most: int = _REMEMBERED) -> None:
        self._most = most
        self._headers: OrderedDict[tuple[bytes, str, Modality], MediaHeader] = OrderedDict()

    def find(self, key: bytes | None, salt: str, modality: Modality) -> MediaHeader | None:
        """The header of an item that was seen under this salt."""
        name = (key or b"", salt, modality)
        if (header := self._headers.get(name)) is not None:
            self._headers.move_to_end(name)
        return header

    def remember(self, header: MediaHeader, salt: str) -> None:
        """Keeps a header that an encoder has sent."""
        self._headers[header.key, salt, header.modality] = dataclasses.replace(header, cached=False)
        while len(self._headers) > self._most:
            self._headers.popitem(last=False)

    def forget(self, header: MediaHeader, salt: str) -> None:
        """Drops a header that an encoder contradicts."""
        self._headers.pop((header.key, salt, header.modality), None)
