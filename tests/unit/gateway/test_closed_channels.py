"""Requests under way at a service whose channel is closed: its address has left, or certificates were replaced."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager
from typing import Any, NoReturn

import grpc
import pytest

from common.rpc.channel import ChannelSecurity
from gateway.dialect import dialect_of
from gateway.embedding_calls import EmbeddingCalls
from gateway.generation import Generations, HandoverLimits
from gateway.request_context import BodyBudget, BodyLease, RequestContext
from gateway.services import LlmServices
from tests.gateway.replicas import Player, Script
from tests.unit.twinlens.conftest import serving
from tests.waiting import eventually
from twinlens import v1
from twinlens.v1 import llm_pb2

WORDS = ["A", " red", " circle", "."]


def hold(context: grpc.ServicerContext) -> NoReturn:
    """As a service that computes for as long as its caller is there."""
    left = threading.Event()
    if context.add_callback(left.set):
        left.wait(180)
    context.abort(grpc.StatusCode.CANCELLED, "its caller has left")
    raise AssertionError


class Holding(Player):
    """Embeds nothing at first."""

    def __init__(self) -> None:
        super().__init__(Script([WORDS], [(3, hold)]))
        self.embeds = [hold]

    def Embed(self, request, context):
        answer = super().Embed(request, context)
        if self.embeds:
            self.embeds.pop()(context)
        return answer


@asynccontextmanager
async def held(
    services: Sequence[Holding], seconds: float = 60.0, options: tuple[tuple[str, int], ...] = ()
) -> AsyncIterator[LlmServices]:
    """What a gateway knows of these services, which can be used."""
    with ExitStack() as running:
        addresses = [running.enter_context(serving(llm=each, options=options)) for each in services]
        known = LlmServices(addresses, ChannelSecurity(), request_seconds=seconds)
        async with known.watched():
            await eventually(lambda: len(known.usable) == len(addresses), "all can be used")
            yield known


def context() -> RequestContext:
    return RequestContext("a", (), BodyLease(BodyBudget(1 << 30)), dialect_of("/v1/chat/completions"))


async def generate(services: LlmServices, words: list[Any]) -> None:
    """Takes in an answer's words as they come."""
    limits = HandoverLimits(most=3, seconds=60.0, kept_bytes=1 << 20, longest_seconds=180.0)
    generations = Generations(services, limits, lambda *_: None, lambda *_: None)
    request = llm_pb2.GenerateRequest(chat=v1.ChatInput(messages=[v1.ChatMessage(role="user")]))
    async with aclosing(generations.events(request, context())) as events:
        async for event in events:
            words += [event.delta.text] if event.WhichOneof("event") == "delta" else []


async def embed(services: LlmServices, vectors: list[Any]) -> None:
    request = llm_pb2.EmbedRequest(text=v1.TextInput(prompt="x"))
    answer = await EmbeddingCalls(services, 180.0, lambda *_: None).embed(request, context())
    vectors.append(list(answer.values))


async def close_channel(services: LlmServices) -> None:
    """Of the one that is busy: certificates were replaced, and the time is over that calls had to end in."""
    (busy,) = [each for each in services.services if each.in_flight]
    await services._renew(busy, 0.0)


async def test_they_have_as_long_as_a_request_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    graces: list[float | None] = []
    close = grpc.aio.Channel.close

    async def closing(channel: grpc.aio.Channel, grace: float | None = None) -> None:
        graces.append(grace)
        await close(channel, None)

    monkeypatch.setattr(grpc.aio._channel.Channel, "close", closing)
    for seconds, least in ((1200.0, 1200.0), (1.0, 60.0)):
        async with held([Holding()], seconds) as known:
            (service,) = known.services
            known._set.forget(service.address)
            await eventually(lambda: graces, "its channel is closed")
            assert (graces[0] or 0.0) >= least
        graces.clear()


@pytest.mark.parametrize("count", [1, 2])
async def test_an_answer_goes_on(count: int) -> None:
    """By a channel of its own at the same service, or at another one."""
    services, answer = [Holding() for _ in range(count)], list[Any]()
    for each in services:
        each.script = services[0].script
    async with held(services) as known:
        asking = asyncio.create_task(generate(known, answer))
        await eventually(lambda: answer == WORDS[:2], "it has begun")
        await close_channel(known)
        await asking
    assert answer == WORDS


async def test_a_prompt_is_embedded_by_another_service() -> None:
    services, answer = [Holding(), Holding()], list[Any]()
    for each in services:
        each.embeds = services[0].embeds
    async with held(services) as known:
        asking = asyncio.create_task(embed(known, answer))
        await eventually(lambda: not services[0].embeds, "it is asked")
        await close_channel(known)
        await asking
    assert answer == [[pytest.approx(0.6), pytest.approx(-0.8)]]


@pytest.mark.parametrize("ask", [generate, embed])
async def test_a_caller_who_leaves_ends_it(ask: Callable[[LlmServices, list[Any]], Coroutine[Any, Any, None]]) -> None:
    service = Holding()
    answer: list[Any] = []
    async with held([service]) as known:
        asking = asyncio.create_task(ask(known, answer))
        await eventually(lambda: len(answer) == 2 or not service.embeds, "it has begun")
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
    assert len(service.requests) + len(service.to_embed) == 1
