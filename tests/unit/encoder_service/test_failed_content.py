"""Content of an item that has failed, or whose caller has left, goes with the call: no circle of an error, its frames
and its tasks keeps it for the garbage collector, which looks at what is old once in a long while."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from common.aio.merged import merged
from common.errors import InvalidInput, TwinlensError
from common.media.item import Modality, Url
from encoder_service import convert
from encoder_service.delivery import Delivery, Event
from encoder_service.engine.encode import EncoderEngine
from encoder_service.item import Item
from encoder_service.servicer import EncoderServicer
from encoder_service.worker.messages import BatchFailed
from tests.unit.encoder_service.engines import PICTURES, SEEN, encoder, item
from tests.unit.encoder_service.fakes import DONE, FakeDecoders, turns
from twinlens.v1 import encoder_pb2, media_pb2

SOURCE = Url("http://a.test/")


class Watched(bytearray):
    """Content to which there may be weak references."""


class NoMeters:
    def served(self, timings: object) -> None: ...
    def failed(self, reason: str) -> None: ...


@dataclass
class Served:
    encoder: EncoderEngine
    meters: NoMeters = field(default_factory=NoMeters)


class WatchedFetcher:
    """Every address gives the same, which is watched; or breaks off, at its end."""

    def __init__(self, given: bytes = PICTURES[0], *, breaks_off: bool = False) -> None:
        self.brought: list[weakref.ref[Watched]] = []
        self._given = given
        self._breaks_off = breaks_off

    def check(self, *_: object) -> None: ...

    async def fetch(self, *_: object) -> Watched:
        await turns(1)
        content = Watched(self._given)
        self.brought.append(weakref.ref(content))
        if self._breaks_off:
            raise InvalidInput("the media is too large", reason="MEDIA_TOO_LARGE", field="items[0].url")
        return content


class LateDecoders(FakeDecoders):
    """Fails once it is known what the item is."""

    async def inspect(self, *_: object, **__: object) -> object:
        return self.seen


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@asynccontextmanager
async def failing(monkeypatch: pytest.MonkeyPatch, at: str, **options) -> AsyncIterator[EncoderEngine]:
    """An encoder where every item fails there."""
    failure = InvalidInput("the media cannot be decoded", reason="MEDIA_UNREADABLE", field="items[0]")
    decoders = {"inspect": FakeDecoders(SEEN, failure=failure), "decode": LateDecoders(SEEN, failure=failure)}.get(at)
    answer = BatchFailed(why="broken") if at == "worker" else DONE
    async with encoder(monkeypatch, decoders=decoders, answers=lambda _: answer, **options) as (made, _):
        if at == "plan":
            made.pipeline.media._plans._max_patches = 1
        yield made


def watched() -> tuple[Item, weakref.ref[Watched]]:
    content = Watched(PICTURES[0])
    return item(source=content), weakref.ref(content)


async def asked(made: EncoderEngine, *items: Item | TwinlensError) -> list[Event]:
    """The events of a call with these items."""
    request = encoder_pb2.EncodeRequest()
    deliveries = [
        Delivery(made, None, NoMeters(), request, index, each)  # type: ignore[arg-type]
        for index, each in enumerate(items)
    ]
    return [event async for event in merged([each.run for each in deliveries])]


def errors(events: list[Event]) -> int:
    return sum(not isinstance(event, bytes) and event.HasField("error") for event in events)


@pytest.mark.parametrize("at", ["inspect", "plan", "decode", "worker"])
@pytest.mark.parametrize("callers", [1, 3])
async def test_content_is_gone_once_the_calls_that_it_failed_in_have_ended(monkeypatch, at, callers):
    async with failing(monkeypatch, at) as made:
        wanted, content = watched()
        found = await asyncio.gather(*(asked(made, wanted) for _ in range(callers)))
        assert [errors(each) for each in found] == [1] * callers
        del wanted
        await turns()
        assert content() is None


@pytest.mark.parametrize(
    "fetcher",
    [
        WatchedFetcher,
        lambda: WatchedFetcher(breaks_off=True),
        lambda: WatchedFetcher(b"no picture"),
    ],
    ids=["unreadable", "breaks off", "no picture"],
)
@pytest.mark.parametrize("callers", [1, 3])
async def test_downloaded_content_is_gone_as_well(monkeypatch, callers, fetcher):
    fetcher = fetcher()
    async with failing(monkeypatch, "inspect", fetcher=fetcher) as made:
        found = await asyncio.gather(*(asked(made, item(source=SOURCE)) for _ in range(callers)))
        assert [errors(each) for each in found] == [1] * callers
        await turns()
        assert [content() for content in fetcher.brought] == [None]


@pytest.mark.parametrize("at", ["inspect", "decode"])
async def test_a_prefetch_that_fails_keeps_nothing(monkeypatch, at):
    async with failing(monkeypatch, at) as made:
        wanted, content = watched()
        answer = await EncoderServicer()._prefetch(Served(made), 0, wanted)  # type: ignore[arg-type]
        assert isinstance(answer, encoder_pb2.EncodeError) == (at == "inspect")
        del wanted
        await turns(50)
        assert content() is None


@pytest.mark.parametrize("after", [3, 10, 20, 130])
async def test_a_caller_who_leaves_takes_the_content_along(monkeypatch, after):
    async with encoder(monkeypatch, decoders=FakeDecoders(SEEN, turns=100)) as (made, _):
        wanted, content = watched()
        asking = asyncio.create_task(asked(made, wanted))
        await turns(after)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        del wanted, asking
        await turns(200)
        assert content() is None


async def test_what_is_refused_before_it_is_begun_keeps_no_other_item_of_its_request(monkeypatch):
    class Request(list[media_pb2.Media]):
        pass

    async with encoder(monkeypatch) as (made, _):
        given = Request([media_pb2.Media(modality=media_pb2.MODALITY_IMAGE, key=b"short")])
        request = weakref.ref(given)
        items = convert.read_items(given, "", 0, tuple(Modality))
        del given
        assert errors(await asked(made, *items)) == 1
        del items
        assert request() is None
