"""Publishes which KV blocks prompts can find here, in vLLM's protocol: msgpack over ZeroMQ, with sequence numbers by
which subscribers notice gaps, and a socket that replays what they missed."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from common.aio import tasks
from common.telemetry import log
from llm_service.engine.messages import BlockEvent, BlocksCleared, BlocksRemoved, BlocksStored

_log = log.get("kv-events")
_END = (-1).to_bytes(8, "big", signed=True)
"""The sequence number that ends a replay."""
_LINGER_MS, _RETRY_MS = 500, 20
_LONGEST_QUESTION = 1024
"""Most bytes of an incoming message: a subscription, or a number."""
_MOST_REPLAYS = 64
"""Most subscribers that get a replay at once; others are not answered."""
_REPLAY_TURN = 256
"""Batches of one replay between two looks for new events."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Changes of blocks at one time. `names` are the adapters' names by their numbers."""

    number: int
    time: float
    events: list[BlockEvent]
    names: Mapping[int, str]


def encode(batch: Batch, block_size: int) -> bytes:
    """As vLLM has it: [time, [event, …], rank]; an event is its kind and then its fields, known by their places."""
    events = [_fields(event, block_size, batch.names) for event in batch.events]
    return msgspec.msgpack.encode([batch.time, events, 0])


def _fields(event: BlockEvent, block_size: int, names: Mapping[int, str]) -> list[Any]:
    match event:
        case BlocksCleared():
            return ["AllBlocksCleared"]
        case BlocksRemoved(medium, hashes):
            return ["BlockRemoved", hashes, medium]
        case BlocksStored(parent, medium, adapter, hashes, token_ids, keys):
            tokens = array("i", b"".join(token_ids)).tolist()
            # One without a name is not the model itself either.
            number, name = (adapter, names.get(adapter, f"#{adapter}")) if adapter else (None, None)
            more = [each or None for each in keys] if any(keys) else None
            return ["BlockStored", hashes, parent, tokens, block_size, number, medium, name, more]


class KvEventPublisher:
    """Publishes batches under a topic at `endpoint`, which it binds if its host is a wildcard, else connects to.
    Batches of the last `replay_bytes` are sent again on request at `replay_endpoint`, if there is one.

    The event loop calls `publish`, which never waits: a thread encodes and sends. If more than `most_waiting` batches
    wait, some are dropped. `adapter_name` names adapters by their numbers.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        block_size: int,
        topic: str = "",
        replay_endpoint: str = "",
        replay_bytes: int = 0,
        adapter_name: Callable[[int], str | None] = lambda _: None,
        most_waiting: int = 1000,
        most_unsent: int = 1000,
    ) -> None:
        self._endpoint, self._replay_endpoint = endpoint, replay_endpoint
        self._block_size = block_size
        self._topic = topic.encode()
        self._adapter_name = adapter_name
        self._most_waiting, self._most_unsent = most_waiting, most_unsent
        self._next = 0
        self._waiting: deque[Batch] = deque()
        self._sent = _Sent(replay_bytes)
        self._replays: dict[bytes, int] = {}
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = False
        self._thread: threading.Thread | None = None
        self.published = 0
        """Batches that were handed to ZeroMQ."""
        self.dropped = 0
        """Batches dropped because the thread was too far behind."""

    def publish(self, events: list[BlockEvent]) -> None:
        """Hands a batch to the thread, or drops it; either way it has a number."""
        number, self._next = self._next, self._next + 1
        if len(self._waiting) >= self._most_waiting:
            self.dropped += 1
            return
        adapters = {event.adapter for event in events if isinstance(event, BlocksStored) and event.adapter}
        names = {adapter: name for adapter in adapters if (name := self._adapter_name(adapter))}
        self._waiting.append(Batch(number, time.time(), events, names))
        os.eventfd_write(self._woken, 1)

    def start(self) -> None:
        """Opens the sockets. Raises OSError if that fails."""
        context = zmq.Context()
        try:
            publisher = self._open(context, zmq.PUB, self._endpoint, "--kv-events")
            replayer = None
            if self._replay_endpoint:
                replayer = self._open(context, zmq.ROUTER, self._replay_endpoint, "--kv-events-replay")
        except OSError:
            context.destroy(linger=0)
            raise
        self._thread = threading.Thread(
            target=self._serve, args=(context, publisher, replayer), name="kv-events", daemon=True
        )
        self._thread.start()
        _log.info("KV events are published", endpoint=self._endpoint, replay=self._replay_endpoint)

    async def stop(self) -> None:
        """Sends waiting batches and closes the sockets."""
        self._stopping = True
        os.eventfd_write(self._woken, 1)
        if self._thread is not None:
            await tasks.to_thread(self._thread.join)
        os.close(self._woken)

    def _open(
        self, context: zmq.Context[zmq.Socket[bytes]], kind: int, endpoint: str, option: str
    ) -> zmq.Socket[bytes]:
        socket = context.socket(kind)
        socket.linger, socket.maxmsgsize, socket.ipv6 = _LINGER_MS, _LONGEST_QUESTION, True
        socket.sndhwm = self._most_unsent
        try:
            if kind == zmq.ROUTER:
                socket.router_mandatory = 1  # raises instead of silently dropping what a peer has no room for
                socket.bind(endpoint)
            elif binds(endpoint):
                socket.bind(endpoint)
            else:
                socket.connect(endpoint)
        except zmq.ZMQError as error:
            raise OSError(f"cannot open {endpoint} ({option}): {error.strerror}") from error
        return socket

    def _serve(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        publisher: zmq.Socket[bytes],
        replayer: zmq.Socket[bytes] | None,
    ) -> None:
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        if replayer is not None:
            poller.register(replayer, zmq.POLLIN)
        with context:
            went_on = False
            while self._waiting or not self._stopping:
                poller.poll(0 if went_on else _RETRY_MS if self._replays else None)
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._woken)
                if replayer is not None:  # before new batches: a replay covers all that were published by then
                    self._take_questions(replayer)
                self._send_waiting(publisher)
                if replayer is not None:
                    went_on = self._replay(replayer)
            for socket in (publisher, replayer):
                if socket is not None:
                    socket.close()

    def _send_waiting(self, publisher: zmq.Socket[bytes]) -> None:
        while self._waiting:
            batch = self._waiting.popleft()
            payload = encode(batch, self._block_size)
            publisher.send_multipart((self._topic, batch.number.to_bytes(8, "big"), payload))
            self._sent.add(batch.number, payload)
            self.published += 1

    def _take_questions(self, replayer: zmq.Socket[bytes]) -> None:
        """Each is the first number that is wanted; the last one of a subscriber counts."""
        while replayer.poll(0):
            match replayer.recv_multipart():
                case [subscriber, b"", number] if len(number) == 8 and (
                    subscriber in self._replays or len(self._replays) < _MOST_REPLAYS
                ):
                    self._replays[subscriber] = int.from_bytes(number, "big")

    def _replay(self, replayer: zmq.Socket[bytes]) -> bool:
        """Sends subscribers what they missed, as far as they have room. Returns whether more is left."""
        more = False
        for subscriber, first in list(self._replays.items()):
            missed = self._sent.since(first, _REPLAY_TURN)
            for number, payload in missed:
                if not self._answer(replayer, subscriber, number.to_bytes(8, "big"), payload):
                    break
                self._replays[subscriber] = number + 1
            else:
                if len(missed) == _REPLAY_TURN:
                    more = True
                elif self._answer(replayer, subscriber, _END, b""):
                    del self._replays[subscriber]
        return more

    def _answer(self, replayer: zmq.Socket[bytes], subscriber: bytes, number: bytes, payload: bytes) -> bool:
        """Sends one message; False if the subscriber has no room or is gone, after which it gets nothing more."""
        try:
            replayer.send_multipart((subscriber, b"", number, payload), zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._replays.pop(subscriber, None)
            return False
        return True


class _Sent:
    """The last batches that were sent, of `most` bytes together."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held = 0
        self._last = -1
        self._payloads: OrderedDict[int, bytes] = OrderedDict()

    def add(self, number: int, payload: bytes) -> None:
        """Takes one in; the oldest give way."""
        self._last = number
        self._payloads[number] = payload
        self._held += len(payload)
        while self._held > self._most:
            _, gone = self._payloads.popitem(last=False)
            self._held -= len(gone)

    def since(self, first: int, count: int) -> list[tuple[int, bytes]]:
        """Up to `count` batches from number `first` on, in order; dropped ones are missing."""
        if not self._payloads:
            return []
        found: list[tuple[int, bytes]] = []
        for number in range(max(first, next(iter(self._payloads))), self._last + 1):
            if (payload := self._payloads.get(number)) is not None:
                found.append((number, payload))
                if len(found) == count:
                    break
        return found


def binds(endpoint: str) -> bool:
    """Whether an endpoint is one's own: any address of the host, or a file.

    >>> binds("tcp://*:5557"), binds("tcp://[::]:5557"), binds("ipc:///run/events"), binds("tcp://indexer:5557")
    (True, True, True, False)
    """
    scheme, _, place = endpoint.partition("://")
    return scheme == "ipc" or place.rpartition(":")[0] in ("*", "0.0.0.0", "[::]")  # noqa: S104
