"""What is known of an item of a request while encoders are asked for it, and how they are asked."""

from __future__ import annotations

import dataclasses

from common.errors import MEDIA_CHANGED, DataLoss, Unavailable
from common.media.item import Header, Key, Url
from llm_service.encoders.header_cache import HeaderCache, KnownHeader
from llm_service.encoders.item_identity import Identity, given_by
from llm_service.request import MediaItem


class KnownItem:
    """An item under its tenant's `salt`, with its `header` once it is `known`; encoders must not contradict that."""

    def __init__(
        self, item: MediaItem, identity: Identity, known: KnownHeader | None, headers: HeaderCache, salt: str
    ) -> None:
        self.item = item
        self.header = None if known is None else known.header
        self.affinity = identity.affinity if known is None else known.affinity
        self._identity = identity
        self._headers = headers
        self._salt = salt
        self._states_rows = False

    def renewed(self) -> KnownItem:
        """The same item, independent of this one."""
        known = None if self.header is None else KnownHeader(self.header, self.affinity)
        return KnownItem(self.item, self._identity, known, self._headers, self._salt)

    @property
    def has_content(self) -> bool:
        """Whether the item came with its content, and not by a key or an address, which somebody else must have."""
        return self._identity.key is not None and not isinstance(self.item.source, Key)

    @property
    def asked(self) -> MediaItem:
        """The item as encoders are asked for it: once it is known what an address gives, it need not be fetched
        again."""
        if self.header is None:
            return self.item
        if self._states_rows:
            options = dataclasses.replace(self.item.options, video_pruning_rate=None, kept_rows=self.header.kept_rows)
            source = Url(self.item.source.address) if isinstance(self.item.source, Url) else self.item.source
            return dataclasses.replace(self.item, source=source, options=options)
        if not isinstance(self.item.source, Url):
            return self.item
        return dataclasses.replace(self.item, source=Url(self.item.source.address, self.header.key))

    def keeps_others(self, header: Header) -> bool:
        """Whether an encoder that was not told has kept other rows of a pruned video than those known here: if results
        differ by rounding, so may the choice. It can be told, unless the item is only a key."""
        known = self.header
        return (
            known is not None
            and bool(known.kept_rows)
            and not self._states_rows
            and not isinstance(self.item.source, Key)
            and known.key == header.key
            and known.kept_rows != header.kept_rows
        )

    def state_rows(self) -> None:
        """From now on encoders are told which rows to keep."""
        self._states_rows = True

    def checked(self, header: Header) -> Header:
        """An encoder's header, under the item's key. Two encoders, or an encoder and our own bytes, must agree about an
        item: raises DataLoss if they do not, and Unavailable if its address returns other media than before."""
        if self._states_rows and self.header is not None:
            header = dataclasses.replace(header, key=self.header.key)  # encoders give it another key there
        if self._identity.key not in (None, header.key) or header.modality != self.item.modality:
            raise DataLoss("an encoder sent another item's header")
        if self.header is not None and dataclasses.replace(header, cached=self.header.cached) != self.header:
            self._headers.forget(self._names(self.header), self.header, self._salt)
            if self._identity.key is None:
                why = "the address returns other media than before"
                raise Unavailable(why, reason=MEDIA_CHANGED, field=self.item.field)
            raise DataLoss("two encoders contradict each other on an item")
        return header

    def learn(self, header: Header) -> None:
        """Takes a header that was `checked`, for this request and for repeats of the item."""
        self.header = header
        self._headers.remember(self._names(header), header, self._salt, self.affinity)

    def _names(self, header: Header) -> set[bytes]:
        """The names of the header: its key, and the name by which the item is recalled, if the header agrees with it.
        For an address, it is the name that the next caller will use, who states the key that this one is told."""
        if self._identity.key is None:
            return {header.key, given_by(self.item, header.key)}
        same = self._identity.key == header.key and self._identity.recalled is not None
        return {header.key, self._identity.recalled or b""} if same else {header.key}
