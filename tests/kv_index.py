"""What an indexer outside makes of KV events: which blocks a service has, by nothing but what it was sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec
import zmq

BlockKey = tuple[Any, ...]
"""What a block and all before it hold, as far as events say so."""


@dataclass
class Index:
    """Blocks by hash, with the media that have them, and all that was said of what is in them."""

    media: dict[int, set[str]] = field(default_factory=dict)
    chains: dict[int, BlockKey] = field(default_factory=dict)
    cleared: int = 0

    def take(self, payload: bytes) -> None:
        """A batch, as it came."""
        when, events, rank = msgspec.msgpack.decode(payload)
        assert when > 1e9
        assert rank == 0
        for event in events:
            self._take(*event)

    def _take(self, kind: str, *fields: Any) -> None:
        match kind, fields:
            case "AllBlocksCleared", ():
                self.media.clear()
                self.chains.clear()
                self.cleared += 1
            case "BlockRemoved", (hashes, medium):
                for each in hashes:
                    self.media[each].remove(medium)
                    if not self.media[each]:
                        del self.media[each], self.chains[each]
            case "BlockStored", (hashes, parent, tokens, size, lora, medium, name, keys):
                assert len(tokens) == size * len(hashes)
                assert (lora is None) == (name is None)
                assert keys is None or len(keys) == len(hashes)
                before: BlockKey = () if parent is None else self.chains.get(parent, ("gone", parent))
                for number, each in enumerate(hashes):
                    own = tuple(tokens[number * size : (number + 1) * size])
                    before = (*before, (name, own, tuple(keys[number] or ()) if keys else ()))
                    self.media.setdefault(each, set()).add(medium)
                    self.chains.setdefault(each, before)
            case _:
                raise AssertionError(f"an event of no known kind: {kind}")

    def on(self, medium: str) -> set[int]:
        """Hashes of the blocks that are there."""
        return {each for each, media in self.media.items() if medium in media}

    def match(
        self, tokens: Sequence[int], size: int, keys: Sequence[tuple[str, ...]] = (), name: str | None = None
    ) -> int:
        """How many leading tokens of a prompt it would find, whose blocks have these extra keys."""
        known, chain = set(self.chains.values()), ()
        count = len(tokens) // size
        for number in range(count):
            own = tuple(tokens[number * size : (number + 1) * size])
            chain = (*chain, (name, own, keys[number] if number < len(keys) else ()))
            if chain not in known:
                return number * size
        return count * size


class Subscriber:
    """Reads what a publisher sends, and keeps an index of it; `endpoint` is bound where the publisher connects. It has
    `room` for so many batches that are not read."""

    def __init__(self, endpoint: str, *, topic: str = "", bind: bool = False, room: int = 100_000) -> None:
        self.index = Index()
        self.numbers: list[int] = []
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.subscribe(topic)
        self._socket.rcvhwm = room
        self._topic = topic.encode()
        (self._socket.bind if bind else self._socket.connect)(endpoint)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def read(self, wait_ms: int = 0) -> int:
        """Takes in what has come; how many batches."""
        count = 0
        while self._socket.poll(wait_ms if not count else 0):
            topic, number, payload = self._socket.recv_multipart()
            assert topic == self._topic
            self.numbers.append(int.from_bytes(number, "big"))
            self.index.take(payload)
            count += 1
        return count


def replay(endpoint: str, first: int, wait_ms: int = 30_000) -> list[tuple[int, bytes]]:
    """What a publisher sends again to who asks for everything from number `first` on."""
    found: list[tuple[int, bytes]] = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(endpoint)
        socket.send_multipart((b"", first.to_bytes(8, "big")))
        while socket.poll(wait_ms):
            empty, number, payload = socket.recv_multipart()
            assert empty == b""
            if int.from_bytes(number, "big", signed=True) == -1:
                assert payload == b""
                return found
            found.append((int.from_bytes(number, "big"), payload))
    raise AssertionError("the replay did not end")
