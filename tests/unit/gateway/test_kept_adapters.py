"""What a gateway keeps of adapters, beside a service that fails, refuses and comes back as a test says."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc

from common.errors import TwinlensError, Unavailable
from common.rpc.channel import ChannelSecurity
from gateway.kept_adapters import Kept, KeptAdapters, load, unload
from gateway.services import LlmService, LlmServices
from tests.unit.gateway.test_services import service_of
from tests.unit.twinlens.conftest import serving
from tests.unit.twinlens.fakes import FakeLlm, refuse
from twinlens import v1
from twinlens.v1 import llm_pb2

SECONDS = 180.0
"""Only ends a test that has failed."""


class Llm(FakeLlm):
    """It is another process with another `instance`. While `down` it cannot be reached; with a `refused` reason, or so
    many `failing` tries, it loads nothing. `folders` are those that it has loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.down = False
        self.instance = 1
        self.failing = 0
        self.refused = ""
        self.tries: Counter[str] = Counter()
        self.folders: dict[str, str] = {}

    def GetInfo(self, request, context):
        self._reached(context)
        info = super().GetInfo(request, context)
        info.instance = self.instance
        return info

    def LoadAdapter(self, request, context):
        self._reached(context)
        self.tries[f"load {request.name}"] += 1
        code = grpc.StatusCode.INVALID_ARGUMENT
        if self.refused:
            refuse(context, code, v1.Status(code=code.value[0], message="no", reason=self.refused, field="path"))
        if self.failing:
            self.failing -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "its engine has ended")
        answer = super().LoadAdapter(request, context)
        self.folders[request.name] = request.path
        return answer

    def UnloadAdapter(self, request, context):
        self._reached(context)
        self.tries[f"unload {request.name}"] += 1
        return super().UnloadAdapter(request, context)

    def _reached(self, context) -> None:
        if self.down:
            context.abort(grpc.StatusCode.UNAVAILABLE, "nobody listens")


@dataclass
class Gateway:
    """What of one is tried, over two services, of which the first has whatever is loaded."""

    services: LlmServices
    kept: KeptAdapters
    first: LlmService
    second: LlmService
    told: Counter[tuple[str, str]] = field(default_factory=Counter)

    async def load(self, name: str, folder: str = "folder") -> dict[LlmService, TwinlensError | None]:
        both = self.first, self.second
        change = load(name, folder, self.services.metadata)
        outcomes = {service: await self.kept.change(service, change, loads=name) for service in both}
        self.kept.keep(Kept("demo", name, folder), outcomes)
        return outcomes

    async def unload(self, name: str) -> None:
        self.kept.forget("", name)
        change = unload(name, self.services.metadata)
        self.kept.owe(name, {each: await self.kept.change(each, change) for each in (self.first, self.second)})

    def lacks(self, name: str) -> str:
        """What is said to those who ask for it while no service has it."""
        return self.services.lack(name).reason


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(SECONDS):
        while not holds():  # noqa: ASYNC110 - it is another thread's service that is asked
            await asyncio.sleep(0.01)


@asynccontextmanager
async def gateway(*addresses: str, first_pause: float = 0.0) -> AsyncIterator[Gateway]:
    services = LlmServices(addresses, ChannelSecurity(), request_seconds=SECONDS, watch_seconds=0.05)
    told: Counter[tuple[str, str]] = Counter()

    def tell(change: str, outcome: str) -> None:
        told[change, outcome] += 1

    kept = KeptAdapters(services, tell, look_seconds=0.01, first_pause=first_pause)
    async with services.watched(), kept.brought():
        await until(lambda: len(services.usable) == len(addresses))
        by_address = {service.address: service for service in services.services}
        yield Gateway(services, kept, *(by_address[address] for address in addresses), told=told)


def test_a_service_that_comes_back_without_them_is_brought_adapters_and_with_them_nothing() -> None:
    one, other = Llm(), Llm()

    async def run(*addresses: str) -> None:
        async with gateway(*addresses) as door:
            assert set((await door.load("a")).values()) == {None}
            for lost in (True, False):
                other.down = True
                await until(lambda: door.second.info is None)
                if lost:
                    other.adapters.clear()
                other.down = False
                await until(lambda: door.second.info is not None and "a" in door.second.adapters)
            assert (door.kept.count, door.kept.missing) == (1, 0)
            assert door.told == {("load", "done"): 1}

    with serving(llm=one) as first, serving(llm=other) as second:
        asyncio.run(run(first, second))
    assert other.tries == {"load a": 2}
    assert one.tries == {"load a": 1}


def test_a_service_that_was_away_for_less_than_a_look_is_brought_them_too() -> None:
    one, other = Llm(), Llm()

    async def run(*addresses: str) -> None:
        async with gateway(*addresses) as door:
            await door.load("a")
            other.adapters.clear()
            other.instance += 1
            await until(lambda: other.adapters and "a" in door.second.adapters)
            assert door.told == {("load", "done"): 1}

    with serving(llm=one) as first, serving(llm=other) as second:
        asyncio.run(run(first, second))


def test_what_is_unloaded_behind_the_gateway_stays_unloaded_until_the_service_comes_again() -> None:
    one, other = Llm(), Llm()

    async def run(*addresses: str) -> None:
        async with gateway(*addresses) as door:
            await door.load("a")
            other.adapters.clear()
            await until(lambda: not door.second.adapters)
            await door.load("b")
            other.down = True
            await until(lambda: door.second.info is None)
            assert other.tries == {"load a": 1, "load b": 1}
            other.down = False
            await until(lambda: door.second.adapters == {"a", "b"})

    with serving(llm=one) as first, serving(llm=other) as second:
        asyncio.run(run(first, second))


def test_a_service_that_could_not_be_reached_is_brought_to_what_was_asked_for_meanwhile() -> None:
    one, other = Llm(), Llm()

    async def run(*addresses: str) -> None:
        async with gateway(*addresses) as door:
            await door.load("old")
            await door.load("again")
            other.down = True
            await until(lambda: door.second.info is None)
            for name in ("old", "again"):
                await door.unload(name)
            for name in ("new", "again"):
                outcomes = await door.load(name, "other")
                assert isinstance(outcomes[door.second], Unavailable)
            other.down = False
            await until(lambda: door.told == {("unload", "done"): 2, ("load", "done"): 2})
            assert door.second.adapters == {"again", "new"}

    with serving(llm=one) as first, serving(llm=other) as second:
        asyncio.run(run(first, second))
    assert other.tries["unload old"] == 1
    assert other.folders["again"] == one.folders["again"] == "other"


def test_a_folder_that_is_refused_is_tried_once_each_time_the_service_comes() -> None:
    one, other = Llm(), Llm()

    async def run(*addresses: str) -> None:
        async with gateway(*addresses) as door:
            other.refused = "BAD_ADAPTER"
            await door.load("a")
            for refused in (1, 2):
                other.down = True
                await until(lambda: door.second.info is None)
                other.down = False
                await until(lambda refused=refused: door.told["load", "refused"] == refused)
            other.refused = ""
            await door.load("b")
            await until(lambda: "b" in door.second.adapters)
            assert (door.kept.count, door.kept.missing) == (2, 1)
            assert door.told == {("load", "refused"): 2}

    with serving(llm=one) as first, serving(llm=other) as second:
        asyncio.run(run(first, second))
    assert other.tries["load a"] == 3


def test_tries_that_fail_are_bounded_and_the_next_adapter_has_its_own() -> None:
    one, other = Llm(), Llm()

    async def run(*addresses: str) -> None:
        async with gateway(*addresses) as door:
            other.down = True
            await until(lambda: door.second.info is None)
            await door.load("a")
            await door.load("b")
            other.down, other.failing = False, 8
            await until(lambda: door.second.adapters == {"b"})
            assert door.told == {("load", "failed"): 7, ("load", "given_up"): 1, ("load", "done"): 1}

    with serving(llm=one) as first, serving(llm=other) as second:
        asyncio.run(run(first, second))
    assert other.tries == {"load a": 6, "load b": 3}


def test_an_adapter_that_is_about_to_come_is_no_unknown_model() -> None:
    one, other = Llm(), Llm()

    async def run(*addresses: str) -> None:
        async with gateway(*addresses, first_pause=1e6) as door:
            await door.load("a")
            for llm in (one, other):
                llm.down = True
                llm.adapters.clear()
            await until(lambda: not door.services.usable)
            for llm in (one, other):
                llm.down, llm.failing = False, 1
            await until(lambda: len(door.services.usable) == 2 and door.told["load", "failed"] == 2)
            assert (door.lacks("a"), door.lacks("b")) == ("NO_LLM_SERVICE", "UNKNOWN_MODEL")
            door.kept.forget("", "a")
            assert door.lacks("a") == "UNKNOWN_MODEL"

    with serving(llm=one) as first, serving(llm=other) as second:
        asyncio.run(run(first, second))


def test_what_is_still_to_be_unloaded_goes_before_another_of_its_name_is_loaded() -> None:
    one, other = Llm(), Llm()

    async def run(*addresses: str) -> None:
        async with gateway(*addresses, first_pause=1e6) as door:
            await door.load("a", "before")
            other.down = True
            await door.unload("a")
            other.down = False
            assert set((await door.load("a", "behind")).values()) == {None}
            assert door.kept.missing == 0

    with serving(llm=one) as first, serving(llm=other) as second:
        asyncio.run(run(first, second))
    assert one.folders == other.folders == {"a": "behind"}


def test_a_service_that_is_another_process_before_all_have_loaded_is_brought_the_adapter() -> None:
    one, other = Llm(), Llm()

    async def run(*addresses: str) -> None:
        async with gateway(*addresses) as door:
            change, came = load("a", "folder", door.services.metadata), door.first.came
            outcomes = {door.first: await door.kept.change(door.first, change, loads="a")}
            one.adapters.clear()
            one.instance += 1
            await until(lambda: door.first.came > came)
            outcomes[door.second] = await door.kept.change(door.second, change, loads="a")
            door.kept.keep(Kept("demo", "a", "folder"), outcomes)
            await until(lambda: "a" in one.adapters and door.kept.missing == 0)

    with serving(llm=one) as first, serving(llm=other) as second:
        asyncio.run(run(first, second))
    assert (one.tries, other.tries) == ({"load a": 2}, {"load a": 1})


def test_a_look_that_takes_long_does_not_overrule_one_that_began_later() -> None:
    class Stub:
        def __init__(self) -> None:
            self.answers = [asyncio.get_running_loop().create_future() for _ in range(2)]
            self.given = iter(self.answers)

        def GetInfo(self, *_given, **_more):
            return next(self.given)

        async def GetLoad(self, *_given, **_more):
            return llm_pb2.LlmServiceGetLoadResponse()

    async def run() -> None:
        stub = Stub()
        service = service_of(stub)
        first, second = (asyncio.ensure_future(service.look(())) for _ in range(2))
        await asyncio.sleep(0)
        for look, answer, name in ((second, stub.answers[1], "new"), (first, stub.answers[0], "old")):
            adapters = [llm_pb2.Adapter(name=name)]
            answer.set_result(llm_pb2.LlmServiceGetInfoResponse(context_tokens=1, adapters=adapters))
            await look
        assert service.adapters == {"new"}

    asyncio.run(run())
