"""Both clients against the same fake services: what holds for one must hold for the other."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from tests.unit.twinlens.fakes import FakeLlm
from twinlens import (
    AsyncEncoderClient,
    AsyncLlmClient,
    EncoderClient,
    Endpoint,
    LlmClient,
    NotReachableError,
    SamplingParams,
    TwinlensError,
    generate_request,
    image,
    user,
    v1,
    video,
)

TOO_LARGE = v1.Status(code=3, message="the picture is too large", reason="IMAGE_TOO_LARGE", field="chat")


@pytest.fixture
def stuck(llm: FakeLlm) -> FakeLlm:
    def play(request: v1.GenerateRequest):
        yield v1.GenerateResponse(delta=v1.GenerateDelta(text="one"))
        llm.ended.wait(180)

    llm.play = play
    return llm


@pytest.fixture
def refusing(llm: FakeLlm) -> FakeLlm:
    llm.refusal = (grpc.StatusCode.INVALID_ARGUMENT, TOO_LARGE)
    return llm


def test_both_clients_have_the_same_methods() -> None:
    for plain, awaited in ((LlmClient, AsyncLlmClient), (EncoderClient, AsyncEncoderClient)):
        names = {name for name in vars(plain) if not name.startswith("_")}
        assert names == {name for name in vars(awaited) if not name.startswith("_")}
        for name in names:
            ours, theirs = inspect.signature(getattr(plain, name)), inspect.signature(getattr(awaited, name))
            assert ours.parameters == theirs.parameters, name


STREAMS = ("ask", "generate", "embed", "transcribe", "encode")
GIVEN: dict[str, tuple[Any, ...]] = {
    "ask": ("x",),
    "generate": ("x",),
    "embed": ("x",),
    "transcribe": (v1.Media(data=b"x"),),
    "tokenize": ("x",),
    "detokenize": (1,),
    "load_adapter": ("x", "y"),
    "unload_adapter": ("x",),
    "encode": (v1.EncodeRequest(),),
    "prefetch": (v1.PrefetchRequest(),),
}


class Recorder:
    """A stub whose calls remember the time that they were given, and fail."""

    def __init__(self) -> None:
        self.timeouts: list[float] = []

    def __getattr__(self, name: str) -> Any:
        def call(*_: Any, timeout: float, **_more: Any) -> Any:
            self.timeouts.append(timeout)
            raise KeyError

        return call


async def finished(call: Callable[..., Any], *given: Any, **more: Any) -> None:
    """What either client is asked, to its end."""
    made = call(*given, **more)
    if inspect.isawaitable(made):
        await made


@pytest.mark.parametrize("kind", [LlmClient, EncoderClient, AsyncLlmClient, AsyncEncoderClient])
async def test_each_call_can_name_its_own_time(kind: Any) -> None:
    client = kind("127.0.0.1:1")
    client._stub = stub = Recorder()
    names = {name for name in vars(kind) if not name.startswith("_")}
    for name in names:
        for given in ({"timeout": 77.0}, {}, {"timeout": float("inf")}):
            with pytest.raises(KeyError):
                await finished(getattr(client, name), *GIVEN.get(name, ()), **given)
        usual = 300 if name == "load_adapter" else 600 if name in ("prefetch", *STREAMS) else 10
        assert (stub.timeouts[0], stub.timeouts[1]) == (77, usual), name
        assert stub.timeouts[2] < 1e10, name
        stub.timeouts.clear()
    await finished(client.close)


@pytest.mark.parametrize("timeout", [float("inf"), 1e12])
async def test_no_timeout_is_too_long(llm_address: str, encoder_address: str, timeout: float) -> None:
    async with AsyncLlmClient(llm_address, timeout=timeout) as llm, AsyncEncoderClient(encoder_address) as encoder:
        assert (await llm.ask("what?")).choices
        encoder.timeout = timeout
        await encoder.prefetch(v1.PrefetchRequest())


class TestThreads:
    def test_an_answer_is_put_together(self, llm: FakeLlm, llm_address: str) -> None:
        with LlmClient(llm_address) as client:
            sampling = SamplingParams(max_tokens=5)
            answer = client.ask("what?", image(b"png"), sampling=sampling, cache_salt="mine", session_id="talk")
        assert answer.text == "A red circle."
        (request,) = llm.requests
        assert (request.cache_salt, request.session_id) == ("mine", "talk")
        assert request.sampling.max_tokens == 5
        assert [part.WhichOneof("part") for part in request.chat.messages[0].parts] == ["media", "text"]

    def test_events_arrive_as_messages(self, llm_address: str) -> None:
        with LlmClient(llm_address) as client:
            kinds = [event.WhichOneof("event") for event in client.generate("hello")]
        assert kinds == ["started", None, "delta", "delta", "delta", "finished"]

    def test_a_refusal_after_some_events_is_raised_in_the_loop(self, refusing: FakeLlm, llm_address: str) -> None:
        seen = []
        with LlmClient(llm_address) as client, pytest.raises(TwinlensError) as caught:
            seen.extend(client.generate("hello"))
        assert (caught.value.reason, caught.value.field) == ("IMAGE_TOO_LARGE", "chat")
        assert caught.value.__cause__ is None

    def test_leaving_the_block_ends_the_call(self, stuck: FakeLlm, llm_address: str) -> None:
        with LlmClient(llm_address) as client:
            with client.generate("hello") as events:
                assert next(events).delta.text == "one"
                assert not stuck.ended.is_set()
            assert stuck.ended.wait(180)

    def test_a_cancelled_stream_just_stops(self, stuck: FakeLlm, llm_address: str) -> None:
        with LlmClient(llm_address) as client:
            events = client.generate("hello")
            next(events)
            events.cancel()
            assert list(events) == []

    def test_the_default_deadline_is_sent(self, llm: FakeLlm, llm_address: str) -> None:
        with LlmClient(llm_address) as client:
            client.ask("hello")
            assert 590 < llm.remaining < 610
            client.ask("hello", timeout=30)
            assert 25 < llm.remaining < 31
            client.get_info()
            assert 5 < llm.remaining < 11

    def test_a_deadline_ends_a_stuck_stream(self, stuck: FakeLlm, llm_address: str) -> None:
        with LlmClient(llm_address, timeout=0.3) as client, pytest.raises(TwinlensError) as caught:
            list(client.generate("hello"))
        assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED

    def test_a_service_that_is_not_there_is_named_as_such(self) -> None:
        with LlmClient("127.0.0.1:1") as client, pytest.raises(NotReachableError):
            client.get_info()

    def test_a_message_that_is_too_large_is_not_sent(self, llm: FakeLlm, llm_address: str) -> None:
        with LlmClient(llm_address) as client, pytest.raises(TwinlensError) as caught:
            client.ask("what?", image(bytes(72 << 20)))
        assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert llm.requests == []

    def test_a_64_mib_video_goes_through(self, llm: FakeLlm, llm_address: str) -> None:
        with LlmClient(llm_address) as client:
            client.ask("what?", video(bytes(64 << 20)))
        assert len(llm.requests[0].chat.messages[0].parts[0].media.data) == 64 << 20

    def test_the_small_calls(self, llm_address: str) -> None:
        with LlmClient(llm_address) as client:
            assert client.abort("a", "b") == 2
            assert client.tokenize("four", allow_special=True) == [4, 1]
            assert client.tokenize([user("a"), user("b")]) == [2]
            assert client.tokenize(user("a")) == [1]
            assert client.get_info().model == "demo"
            assert client.get_load().prompt_tokens == 300
            assert client.flush_cache().kv_blocks == 7

    def test_sampling_given_twice_is_refused(self, llm_address: str) -> None:
        with LlmClient(llm_address) as client, pytest.raises(ValueError, match="inside"):
            client.generate(generate_request("hello"), SamplingParams())

    def test_an_encode_streams_and_a_broken_item_fails_alone(self, encoder_address: str) -> None:
        request = v1.EncodeRequest(items=[image(b"broken"), image(b"png")])
        with EncoderClient(encoder_address) as client:
            kinds = [event.WhichOneof("event") for event in client.encode(request)]
            assert kinds == ["error", "header", "rows", "done"]
            assert [event.WhichOneof("event") for event in client.encode(image(b"png"))] == kinds[1:]

    def test_the_encoders_small_calls(self, encoder_address: str) -> None:
        with EncoderClient(encoder_address) as client:
            assert client.probe(bytes(32), b"x" * 32) == [True, False]
            assert len(client.prefetch(v1.PrefetchRequest(items=[image(b"png")])).headers) == 1
            assert client.release("l1") == 1
            assert client.get_info().model == "demo"
            assert client.get_load().vit_calls == 3
            assert client.flush_cache().entries == 2


class TestEventLoop:
    async def test_an_answer_is_put_together(self, llm: FakeLlm, llm_address: str) -> None:
        async with AsyncLlmClient(llm_address) as client:
            answer = await client.ask("what?", image(b"png"), cache_salt="mine", session_id="talk")
        assert answer.text == "A red circle."
        (request,) = llm.requests
        assert (request.cache_salt, request.session_id) == ("mine", "talk")

    async def test_many_answers_at_once_are_kept_apart(self, llm: FakeLlm, llm_address: str) -> None:
        def echo(request: v1.GenerateRequest):
            text = request.chat.messages[0].parts[0].text
            yield from (v1.GenerateResponse(delta=v1.GenerateDelta(text=text)) for _ in range(2))

        llm.play = echo
        async with AsyncLlmClient(llm_address) as client:
            answers = await asyncio.gather(*(client.ask(f"<{number}>") for number in range(20)))
        assert [answer.text for answer in answers] == [f"<{number}>" * 2 for number in range(20)]

    async def test_a_refusal_after_some_events_is_raised_in_the_loop(self, refusing: FakeLlm, llm_address: str) -> None:
        async with AsyncLlmClient(llm_address) as client:
            events = client.generate("hello")
            with pytest.raises(TwinlensError, match="too large"):
                [event async for event in events]

    async def test_leaving_the_block_ends_the_call(self, stuck: FakeLlm, llm_address: str) -> None:
        async with AsyncLlmClient(llm_address) as client:
            async with client.generate("hello") as events:
                assert (await anext(events)).delta.text == "one"
            assert await asyncio.to_thread(stuck.ended.wait, 180)

    async def test_a_stream_cancelled_by_another_task_just_stops(self, stuck: FakeLlm, llm_address: str) -> None:
        async with AsyncLlmClient(llm_address) as client:
            events = client.generate("hello")
            await anext(events)
            rest = asyncio.ensure_future(anext(events, None))
            await asyncio.sleep(0)
            events.cancel()
            assert await rest is None

    async def test_a_cancelled_task_is_cancelled_and_ends_its_call(self, stuck: FakeLlm, llm_address: str) -> None:
        async with AsyncLlmClient(llm_address) as client:
            begun = asyncio.Event()

            async def read() -> None:
                async with client.generate("hello") as events:
                    async for _ in events:
                        begun.set()

            reader = asyncio.ensure_future(read())
            await begun.wait()
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader
            assert await asyncio.to_thread(stuck.ended.wait, 180)

    async def test_deadlines_and_tokens_are_sent(self, llm: FakeLlm, llm_address: str) -> None:
        async with AsyncLlmClient(Endpoint(llm_address, token="secret")) as client:
            await client.ask("hello", timeout=30)
        assert 25 < llm.remaining < 31
        assert llm.metadata["authorization"] == "Bearer secret"

    async def test_a_service_that_is_not_there_is_named_as_such(self) -> None:
        async with AsyncLlmClient("127.0.0.1:1") as client:
            with pytest.raises(NotReachableError):
                await client.get_load()

    async def test_the_small_calls(self, llm_address: str, encoder_address: str) -> None:
        async with AsyncLlmClient(llm_address) as client:
            assert await client.abort("a") == 1
            assert await client.tokenize("four") == [4, 0]
            assert (await client.get_info()).model == "demo"
            assert (await client.flush_cache()).kv_blocks == 7
        async with AsyncEncoderClient(encoder_address) as encoder:
            assert await encoder.probe(bytes(32)) == [True]
            assert await encoder.release("l") == 1
            assert len((await encoder.prefetch(v1.PrefetchRequest(items=[image(b"png")]))).headers) == 1
            assert (await encoder.get_info()).model == "demo"
            assert (await encoder.get_load()).store_hits == 3
            assert (await encoder.flush_cache()).bytes == 64
            kinds = [event.WhichOneof("event") async for event in encoder.encode(image(b"png"))]
            assert kinds == ["header", "rows", "done"]
