"""The publisher of KV events against real sockets: order, numbers, replays, and who is too slow."""

from __future__ import annotations

import threading
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

zmq = pytest.importorskip("zmq")

from llm_service.engine.messages import BlocksCleared, BlocksRemoved, BlocksStored, Medium  # noqa: E402
from llm_service.kv_events import Batch, KvEventPublisher, binds, encode  # noqa: E402
from tests.kv_index import Index, Subscriber, replay  # noqa: E402
from tests.waiting import until  # noqa: E402


def stored(number: int, tokens: int = 4) -> BlocksStored:
    return BlocksStored(None, Medium.DEVICE, 0, [number], [array("i", [number] * tokens).tobytes()], [[]])


@asynccontextmanager
async def published(folder: Path, **more: Any) -> AsyncIterator[tuple[KvEventPublisher, str]]:
    endpoint = f"ipc://{folder}/events"
    publisher = KvEventPublisher(endpoint, **{"block_size": 4, **more})
    publisher.start()
    try:
        yield publisher, endpoint
    finally:
        await publisher.stop()


def met(publisher: KvEventPublisher, subscriber: Subscriber) -> None:
    """Events reach the subscriber from now on: it is connected when one has."""
    until(lambda: publisher.publish([BlocksCleared()]) or subscriber.read(10) > 0, "it hears something")


def test_events_look_as_vllm_has_them() -> None:
    chain = BlocksStored(
        7, Medium.HOST, 3, [1 << 63, 2], [array("i", [1, 2]).tobytes(), array("i", [3, 4]).tobytes()], [["ab"], []]
    )
    batch = Batch(0, 12.5, [chain, BlocksRemoved(Medium.DEVICE, [5]), BlocksCleared()], {3: "french"})
    assert msgspec.msgpack.decode(encode(batch, 2)) == [
        12.5,
        [
            ["BlockStored", [1 << 63, 2], 7, [1, 2, 3, 4], 2, 3, "CPU", "french", [["ab"], None]],
            ["BlockRemoved", [5], "GPU"],
            ["AllBlocksCleared"],
        ],
        0,
    ]
    (_, ((*_, number, _, name, keys),), _) = msgspec.msgpack.decode(encode(Batch(0, 1.0, [stored(1)], {}), 4))
    assert (number, name, keys) == (None, None, None)


def test_an_adapter_without_a_name_is_not_taken_for_the_model_itself() -> None:
    event = stored(1)
    event.adapter = 9
    (_, ((*_, number, _, name, _),), _) = msgspec.msgpack.decode(encode(Batch(0, 1.0, [event], {}), 4))
    assert number == 9
    assert name


@pytest.mark.parametrize("bind", [False, True])
async def test_a_subscriber_hears_all_in_order_whoever_binds(tmp_path: Path, bind: bool) -> None:
    endpoint = f"ipc://{tmp_path}/events"
    if bind:
        context = zmq.Context()
        with context, context.socket(zmq.SUB) as socket:
            port = socket.bind_to_random_port("tcp://127.0.0.1")
        endpoint = f"tcp://127.0.0.1:{port}"
        assert not binds(endpoint)
    publisher = KvEventPublisher(endpoint, block_size=4, topic="kv@pod@model")
    publisher.start()
    with Subscriber(endpoint, topic="kv@pod@model", bind=bind) as subscriber:
        met(publisher, subscriber)
        for number in range(500):
            publisher.publish([stored(number)])
        until(lambda: subscriber.read(10) and len(subscriber.index.media) == 500, "all are here")
        first = subscriber.numbers[0]
        assert subscriber.numbers == list(range(first, first + len(subscriber.numbers)))
        await publisher.stop()
    assert publisher.dropped == 0


async def test_what_was_missed_is_sent_again_as_far_as_it_is_kept(tmp_path: Path) -> None:
    """More at once than a socket holds, to a subscriber that asks twice, and to one that asks for what is to come."""
    question = f"ipc://{tmp_path}/replay"
    more: dict[str, Any] = {"replay_endpoint": question, "replay_bytes": 1 << 20, "most_waiting": 9000}
    async with published(tmp_path, **more) as (publisher, _):
        for number in range(6000):
            publisher.publish([stored(number)])
        until(lambda: publisher.published == 6000, "all are sent")
        found = replay(question, 1000)
        assert [number for number, _ in found] == list(range(1000, 6000))
        index = Index()
        for _, payload in found:
            index.take(payload)
        assert set(index.media) == set(range(1000, 6000))
        assert [number for number, _ in replay(question, 5999)] == [5999]
        assert replay(question, 6000) == replay(question, (1 << 64) - 1) == []


async def test_a_replay_has_all_that_was_said_before_it_was_asked_for(tmp_path: Path) -> None:
    """However late the thread hears of either: here of both at once."""
    question, asked = f"ipc://{tmp_path}/replay", threading.Event()
    async with published(tmp_path, replay_endpoint=question, replay_bytes=4000) as (publisher, _):
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.connect(question)
            take = publisher._take_questions

            def taken(replayer: zmq.Socket[bytes]) -> None:
                if not asked.is_set():
                    publisher.publish([stored(1)])
                    socket.send_multipart((b"", bytes(8)))
                    assert replayer.poll(180_000)
                    asked.set()
                take(replayer)

            publisher._take_questions = taken  # type: ignore[method-assign]
            publisher.publish([stored(0)])
            assert asked.wait(180)
            numbers = list[int]()
            while -1 not in numbers:
                _, number, _ = socket.recv_multipart()
                numbers.append(int.from_bytes(number, "big", signed=True))
        assert numbers == [0, 1, -1]


async def test_only_the_last_ones_are_kept(tmp_path: Path) -> None:
    question = f"ipc://{tmp_path}/replay"
    async with published(tmp_path, replay_endpoint=question, replay_bytes=4000) as (publisher, _):
        for number in range(300):
            publisher.publish([stored(number)])
        until(lambda: publisher.published == 300, "all are sent")
        found = replay(question, 0)
        assert 0 < sum(len(payload) for _, payload in found) <= 4000
        assert [number for number, _ in found] == list(range(300 - len(found), 300))
    async with published(tmp_path, replay_endpoint=question, replay_bytes=0) as (publisher, _):
        publisher.publish([stored(1)])
        until(lambda: publisher.published == 1, "it is sent")
        assert replay(question, 0) == []


async def test_what_is_no_question_is_not_answered_and_harms_nobody(tmp_path: Path) -> None:
    question = f"ipc://{tmp_path}/replay"
    async with published(tmp_path, replay_endpoint=question, replay_bytes=4000) as (publisher, _):
        publisher.publish([stored(1)])
        with zmq.Context() as context:
            for frames in ([b"", b"short"], [b"no delimiter" * 2], [b"", b"1" * 8, b"more"], [b"", b"x" * 4096]):
                with context.socket(zmq.DEALER) as socket:
                    socket.connect(question)
                    socket.send_multipart(frames)
        assert len(replay(question, 0)) == 1


async def test_who_asks_and_never_reads_holds_up_nobody(tmp_path: Path) -> None:
    question = f"ipc://{tmp_path}/replay"
    more: dict[str, Any] = {
        "replay_endpoint": question,
        "replay_bytes": 64 << 20,
        "most_waiting": 9000,
        "block_size": 512,
    }
    async with published(tmp_path, **more) as (publisher, endpoint):
        for number in range(3000):
            publisher.publish([stored(number, 512)])
        until(lambda: publisher.published == 3000, "all are sent")
        with zmq.Context() as context, context.socket(zmq.DEALER) as idle, Subscriber(endpoint) as subscriber:
            idle.linger, idle.rcvhwm = 0, 1
            idle.connect(question)
            idle.send_multipart((b"", bytes(8)))
            assert idle.poll(30_000), "its replay has begun"
            assert len(replay(question, 0)) == 3000
            met(publisher, subscriber)


async def test_what_the_thread_is_too_far_behind_for_is_dropped_counted_and_seen_by_its_number(tmp_path: Path) -> None:
    publisher = KvEventPublisher(f"ipc://{tmp_path}/events", block_size=4, most_waiting=10)
    for number in range(25):  # the thread has not begun
        publisher.publish([stored(number)])
    assert publisher.dropped == 15
    publisher.start()
    until(lambda: publisher.published == 10, "what waited is sent")
    with Subscriber(f"ipc://{tmp_path}/events") as subscriber:
        met(publisher, subscriber)
        assert subscriber.numbers[0] >= 25
        await publisher.stop()
    assert publisher.dropped == 15


async def test_a_subscriber_that_does_not_read_loses_what_it_has_no_room_for_and_others_do_not(tmp_path: Path) -> None:
    async with published(tmp_path, block_size=16_384, most_unsent=50) as (publisher, endpoint):
        with Subscriber(endpoint, room=1) as slow, Subscriber(endpoint) as quick:
            met(publisher, slow)
            met(publisher, quick)
            first = quick.numbers[-1]
            for number in range(400):
                publisher.publish([stored(number, 16_384)])
                until(lambda n=number: n in quick.index.media or quick.read(10) > 0, "the quick one has it")
            assert len(quick.index.media) == 400

            def goes_on() -> bool:
                publisher.publish([BlocksCleared()])
                return slow.read(10) > 0 and slow.numbers[-1] > first + 400

            until(goes_on, "the slow one hears of what is new")
            gaps = [after - before for before, after in zip(slow.numbers, slow.numbers[1:], strict=False)]
            assert max(gaps) > 1, "what it has lost it sees"
            assert min(gaps) == 1
        assert publisher.dropped == 0


def test_an_endpoint_that_cannot_be_had_is_named(tmp_path: Path) -> None:
    publisher = KvEventPublisher(f"ipc://{tmp_path}/no/such/folder", block_size=4)
    with pytest.raises(OSError, match=r"cannot open ipc://.*/no/such/folder \(--kv-events\): No such file"):
        publisher.start()
