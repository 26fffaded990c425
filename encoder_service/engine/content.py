"""An item's content and its key: downloads shared by all who want the same address, hashing off the event loop."""

from __future__ import annotations

import dataclasses

from common.errors import TwinlensError, without_traces
from common.media import data_url
from common.media.identity import content_key, sized
from common.media.item import Encoded, Key, Modality, Url
from encoder_service.engine.single_flight import SingleFlight
from encoder_service.item import Item
from encoder_service.media.checks import check_item
from encoder_service.media.fetch import Fetcher
from encoder_service.media.limits import MediaLimits
from encoder_service.media.modalities import SPECS


class Contents:
    """Brings what items name, and names what they bring. `digest` is the tower's."""

    def __init__(self, fetcher: Fetcher, media_limits: MediaLimits, digest: str) -> None:
        self._fetcher = fetcher
        self._limits = media_limits
        self._digest = digest
        self._downloads: SingleFlight[tuple[str, str, Modality], bytearray] = SingleFlight()

    def check(self, item: Item) -> None:
        """Checks what can be checked at once. Raises InvalidInput, or Forbidden for an address that is not allowed."""
        check_item(item, self._limits)
        if isinstance(item.source, Url) and not data_url.is_data(item.source.address):
            self._fetcher.check(item.source.address, f"{item.field}.url")

    async def fetched(self, item: Item) -> Item:
        """The item with its content in the place of its address. Raises as `Fetcher.fetch` and `check_item`."""
        assert isinstance(item.source, Url)
        address, field = item.source.address, f"{item.field}.url"
        content: Encoded
        if data_url.is_data(address):
            content, stated = await sized(data_url.decode, address, field, size=len(address))
            item = dataclasses.replace(item, mime_type=item.mime_type or stated)
        else:
            limit = SPECS[item.modality].max_bytes(self._limits)
            try:
                content = await self._downloads.run(
                    (address, item.salt, item.modality),
                    lambda: self._fetcher.fetch(address, limit, field, item.caller),
                )
            except TwinlensError as shared:
                raise without_traces(shared).at(field) from None
        brought = dataclasses.replace(item, source=content)
        check_item(brought, self._limits)
        return brought

    async def key(self, item: Item) -> bytes:
        """The content key of an item that holds its content."""
        assert not isinstance(item.source, Url | Key)
        return await sized(
            content_key, self._digest, item.modality, item.source, item.options, item.salt, size=item.size
        )

    def check_integrity(self) -> None:
        """Raises AssertionError where, at idle, a download goes on."""
        assert not self._downloads.running, "a download has no end"
