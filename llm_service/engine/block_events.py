"""Which KV blocks can be found by prompts and which no longer, in the order of the changes, for indexes outside the
service."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llm_service.engine.block_identity import BlockContent
from llm_service.engine.messages import BlockEvent, BlocksCleared, BlocksRemoved, BlocksStored, Medium

Describe = Callable[[int], BlockContent]
"""Returns the content of a block, given its index in the table of the sequence that has it."""


class BlockObserver:
    """Is notified of blocks that become findable, or are lost, by identity. This base class ignores it."""

    def computed(self, identity: bytes, index: int, describe: Describe | None) -> None:
        """A block on the device can be found by its identity; `describe` tells the content of block `index` of a
        table."""

    def loaded(self, identity: bytes, index: int, describe: Describe | None) -> None:
        """A block was loaded from the host to the device; `describe` as above."""

    def evicted(self, identity: bytes) -> None:
        """The block was evicted from the device."""

    def offloaded(self, identity: bytes) -> None:
        """The block is also on the host."""

    def dropped(self, identity: bytes) -> None:
        """The block was evicted from the host."""

    def cleared(self) -> None:
        """All blocks were dropped."""


@dataclass(slots=True)
class _Known:
    content: BlockContent
    media: set[Medium]


class BlockEvents(BlockObserver):
    """Collects events until they are taken. A block whose content nobody has described yet, such as one that arrived in
    host memory from elsewhere, is announced when a sequence first uses it."""

    def __init__(self) -> None:
        self._known: dict[bytes, _Known] = {}
        self._events: list[BlockEvent] = []

    def take(self) -> list[BlockEvent]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events

    def computed(self, identity: bytes, index: int, describe: Describe | None) -> None:
        self._learn(identity, index, describe)
        self._store(identity, Medium.DEVICE)

    def loaded(self, identity: bytes, index: int, describe: Describe | None) -> None:
        if self._learn(identity, index, describe):
            self._store(identity, Medium.HOST)
        self._store(identity, Medium.DEVICE)

    def _learn(self, identity: bytes, index: int, describe: Describe | None) -> bool:
        """Records a block; returns whether it is new."""
        if identity in self._known:
            return False
        assert describe is not None, "nobody could tell what is in the block"
        self._known[identity] = _Known(describe(index), set())
        return True

    def evicted(self, identity: bytes) -> None:
        self._remove(identity, Medium.DEVICE)

    def offloaded(self, identity: bytes) -> None:
        self._store(identity, Medium.HOST)

    def dropped(self, identity: bytes) -> None:
        self._remove(identity, Medium.HOST)

    def cleared(self) -> None:
        self._known.clear()
        self._events = [BlocksCleared()]

    def _store(self, identity: bytes, medium: Medium) -> None:
        """Reports consecutive blocks in one event."""
        known = self._known[identity]
        if medium in known.media:
            return
        known.media.add(medium)
        content = known.content
        last = self._events[-1] if self._events else None
        parent = _hash(content.parent) if content.parent else None
        behind = parent, medium, content.adapter
        if not isinstance(last, BlocksStored) or (last.hashes[-1], last.medium, last.adapter) != behind:
            self._events.append(last := BlocksStored(*behind))
        last.hashes.append(_hash(identity))
        last.token_ids.append(content.token_ids)
        last.keys.append(list(content.keys))

    def _remove(self, identity: bytes, medium: Medium) -> None:
        known = self._known.get(identity)
        if known is None or medium not in known.media:
            return
        known.media.remove(medium)
        if not known.media:
            del self._known[identity]
        last = self._events[-1] if self._events else None
        if not isinstance(last, BlocksRemoved) or last.medium != medium:
            self._events.append(last := BlocksRemoved(medium))
        last.hashes.append(_hash(identity))


def _hash(identity: bytes) -> int:
    """The identity's last 64 bits, as indexers expect."""
    return int.from_bytes(identity[-8:], "big")
