"""An item's content and its key: downloads shared by all who want the same address, hashing off the event loop."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

from common.errors import TwinlensError
from common.media import data_url
from common.media.identity import content_key, sized
from common.media.item import Encoded, Key, Modality, Url
from encoder_service.item import Item
from encoder_service.media.checks import check_item
from encoder_service.media.fetch import Fetcher
from encoder_service.media.limits import MediaLimits
from encoder_service.media.modalities import SPECS

KeyT = TypeVar("KeyT", bound=Hashable)
T = TypeVar("T")


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
                raise shared.at(field) from None
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


@dataclasses.dataclass(slots=True, eq=False)
class _Work(Generic[T]):
    task: asyncio.Task[T]
    waiters: int = 0


class SingleFlight(Generic[KeyT, T]):
    """Work that is done once for all who want it at the same time; it is cancelled when the last of them has left."""

    def __init__(self) -> None:
        self.running: dict[KeyT, _Work[T]] = {}

    async def run(self, key: KeyT, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of `work`, or of the same work that was begun for another caller."""
        one = self.running.get(key)
        if one is None:
            one = self.running[key] = _Work(asyncio.create_task(work()))
        one.waiters += 1
        try:
            return await asyncio.shield(one.task)
        finally:
            one.waiters -= 1
            if one.task.done() or not one.waiters:
                one.task.cancel()
                if self.running.get(key) is one:
                    del self.running[key]
