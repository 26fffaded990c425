"""Downloads in progress, each shared by all who want the same content, and the memory they take."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from common.errors import TwinlensError, without_traces
from common.media.item import Modality, Url
from encoder_service.engine.admission import Admission, Reservation
from encoder_service.item import Item
from encoder_service.media.fetch import Fetcher


@dataclass(slots=True, eq=False)
class _Download:
    task: asyncio.Task[bytearray]
    room: Reservation


class Downloads:
    """Fetches an address once for all who want it at the same time; a download is cancelled when the last of them
    leaves.

    Its content counts as held by `admission` once its size is known, or as it arrives, once for all of them.
    """

    def __init__(self, fetcher: Fetcher, admission: Admission) -> None:
        self._fetcher = fetcher
        self._admission = admission
        self._running: dict[tuple[str, str, Modality], _Download] = {}

    @asynccontextmanager
    async def content(self, item: Item, max_bytes: int) -> AsyncIterator[tuple[bytearray, Reservation]]:
        """The content at an item's address, and its reservation, which others may hold beyond the context. Raises as
        `Fetcher.fetch`, and Exhausted if there is no room."""
        assert isinstance(item.source, Url)
        name, field = (item.source.address, item.salt, item.modality), f"{item.field}.url"
        one = self._running.get(name)
        if one is None:
            room = self._admission.for_all(field)
            fetching = self._fetcher.fetch(item.source.address, max_bytes, field, item.caller, room.resize)
            one = self._running[name] = _Download(asyncio.create_task(fetching), room)
        else:
            one.room.hold()
        try:
            try:
                content = await asyncio.shield(one.task)
            except TwinlensError as shared:
                raise without_traces(shared).at(field) from None
            yield content, one.room
        finally:
            one.room.let_go()
            if one.task.done() or not one.room.holders:
                one.task.cancel()
                if self._running.get(name) is one:
                    del self._running[name]

    def check_idle(self) -> None:
        """Raises AssertionError if a download is in progress."""
        assert not self._running, "a download has no end"
