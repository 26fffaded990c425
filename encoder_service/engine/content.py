"""An item's content and its key: downloads shared by all who want the same address, and hashing off the event loop."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from common.media import data_url
from common.media.content_key import content_key, sized
from common.media.item import Key, Url
from encoder_service.engine.admission import Admission, Reservation
from encoder_service.engine.downloads import Downloads
from encoder_service.item import Item
from encoder_service.media.checks import check_item
from encoder_service.media.fetch import Fetcher
from encoder_service.media.limits import MediaLimits
from encoder_service.media.modalities import SPECS


class Contents:
    """Fetches the content of items, if `admission` has room, and computes keys. `digest` is the tower's."""

    def __init__(self, fetcher: Fetcher, media_limits: MediaLimits, digest: str, admission: Admission) -> None:
        self._fetcher = fetcher
        self._limits = media_limits
        self._digest = digest
        self._admission = admission
        self._downloads = Downloads(fetcher, admission)

    def check(self, item: Item) -> None:
        """Checks what needs no content. Raises InvalidInput, or Forbidden for an address that is not allowed."""
        check_item(item, self._limits)
        if isinstance(item.source, Url) and not data_url.is_data(item.source.address):
            self._fetcher.check(item.source.address, f"{item.field}.url")

    @asynccontextmanager
    async def fetched(self, item: Item, own: Reservation | None) -> AsyncIterator[tuple[Item, Reservation]]:
        """The item with its content instead of its address, and the content's reservation, which others may hold beyond
        the context. `own` is the reservation of a caller who is still there and holds the address. Raises as
        `Downloads.content` and `check_item`."""
        assert isinstance(item.source, Url)
        if data_url.is_data(item.source.address):
            room = own.hold() if own is not None else self._admission.for_all(item.field)
            try:
                yield await self._decoded(item), room
            finally:
                room.let_go()
            return
        if own is not None:
            own.resize(0)  # from now on the content counts instead
        max_bytes = SPECS[item.modality].max_bytes(self._limits)
        async with self._downloads.content(item, max_bytes) as (content, room):
            yield self._checked(dataclasses.replace(item, source=content)), room

    async def _decoded(self, item: Item) -> Item:
        """The content of an address that holds it."""
        assert isinstance(item.source, Url)
        address, field = item.source.address, f"{item.field}.url"
        content, stated = await sized(data_url.decode, address, field, size=len(address))
        return self._checked(dataclasses.replace(item, source=content, mime_type=item.mime_type or stated))

    def _checked(self, item: Item) -> Item:
        check_item(item, self._limits)
        return item

    async def key(self, item: Item) -> bytes:
        """The content key of an item that holds its content."""
        assert not isinstance(item.source, Url | Key)
        return await sized(
            content_key, self._digest, item.modality, item.source, item.options, item.salt, size=item.size
        )

    def check_idle(self) -> None:
        """Raises AssertionError if a download is in progress."""
        self._downloads.check_idle()
