"""What becomes of the KV blocks that prompts can find, in the order in which it happens, for whoever keeps an index of
them outside the service."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llm_service.engine.block_identity import BlockContent
from llm_service.engine.messages import BlockEvent, BlocksCleared, BlocksRemoved, BlocksStored, Medium

Describe = Callable[[int], BlockContent]
"""What is in a block, by its place in the table of the sequence that has it."""


class BlockObserver:
    """Hears which blocks can be found from now on, and which cannot, by their identities. This one makes nothing of
    it."""

    def computed(self, identity: bytes, index: int, describe: Describe | None) -> None:
        """A block of the device is found by its identity; `describe` says what is in number `index` of a table."""

    def loaded(self, identity: bytes, index: int, describe: Describe | None) -> None:
        """What the host has is in a block of the device again; likewise."""

    def evicted(self, identity: bytes) -> None:
        """The device has it no more."""

    def offloaded(self, identity: bytes) -> None:
        """The host has it as well, by now or since before."""

    def dropped(self, identity: bytes) -> None:
        """The host has it no more."""

    def cleared(self) -> None:
        """Nothing is found any more."""


@dataclass(slots=True)
class _Known:
    content: BlockContent
    media: set[Medium]


class BlockEvents(BlockObserver):
    """Keeps what it hears until it is taken. A block of which nobody has said yet what is in it, as one that has come
    to the host from elsewhere, is not told of before a sequence has it."""

    def __init__(self) -> None:
        self._known: dict[bytes, _Known] = {}
        self._events: list[BlockEvent] = []

    def take(self) -> list[BlockEvent]:
        """What has happened since the last call."""
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
        """Whether it is new."""
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
        """Blocks that follow on each other are told of together."""
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
    """As indexers want it: in 64 bits."""
    return int.from_bytes(identity[-8:], "big")
