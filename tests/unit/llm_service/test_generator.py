"""A request's way from its media to its end, over real gRPC to scripted encoders and the real front of a scripted
engine: what it is measured by, and that nothing stays held on any way out."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import grpc
import pytest
from tokenizers import Tokenizer, models

from common.errors import Cancelled, Exhausted, InvalidInput, TwinlensError, Unavailable
from common.media.item import Header, Modality
from common.rpc.bearer_tokens import AcceptedTokens
from common.rpc.calls import CallInterceptor
from common.shm.arena import SharedBuffer
from common.telemetry.metrics import Metrics
from llm_service.engine.messages import (
    Abort,
    Add,
    Beat,
    Complete,
    GetState,
    PromptLogprobs,
    Released,
    RowsNeeded,
    RowsPlaced,
    Started,
    State,
    Token,
    Tokens,
)
from llm_service.engine.prompt_identities import block_identities
from llm_service.engine_client.block_places import BlockPlaces
from llm_service.engine_client.client import EngineClient
from llm_service.generation import input_processor
from llm_service.generation.adapters import Adapters
from llm_service.generation.admission import Admission
from llm_service.generation.choices import merge_tokens
from llm_service.generation.events import Begun, Delta
from llm_service.generation.generator import Generator
from llm_service.generation.sessions import SessionLimits, Sessions
from llm_service.grammar.compiler import Compiler
from llm_service.meters import Meters
from llm_service.plan import TokenLogprobs
from llm_service.prompt.builder import PromptBuilder
from llm_service.prompt.output_marks import THINK
from llm_service.request import (
    ChatPrompt,
    MediaItem,
    MediaRun,
    Message,
    PromptLayout,
    Request,
    ResumedChoice,
    SamplingParams,
    Span,
    TextPrompt,
    TokenPrompt,
    ToolCall,
)
from tests.unit.llm_service.scripted import (
    ROWS,
    Bench,
    Call,
    ScriptedEncoder,
    bench,
    eventually,
    hangs_after_the_header,
    settled,
    well,
)
from tests.unit.llm_service.scripted import request as asked
from tests.unit.llm_service.scripted_engine import ScriptedEngine, front_of
from tests.unit.llm_service.simulated import front_identities
from twinlens import v1

WORDLESS = Tokenizer(models.BPE({}, []))


class Prompts:
    """Lays every prompt out as so many tokens, the first of which stand for its items."""

    def __init__(self, tokens: int, tokenizer: Tokenizer) -> None:
        self._tokens = tokens
        self.tokenizer = tokenizer
        self.at_once: list[bool] = []
        self.texts = SimpleNamespace(bytes_of=lambda _: b"x")
        self.template = SimpleNamespace(reasoning_marks=THINK, tool_format=None, reads_reasoning=True)

    def ends_in_thinking(self, _: Sequence[int]) -> bool:
        return False

    def pieces(self, *_: Any, **__: Any) -> list[Any]:
        self.at_once.append(threading.current_thread() is threading.main_thread())
        return []

    def strict_calls(self, _: Any) -> None:
        """No function is strict."""

    def layout(self, _: Any, headers: Sequence[Header]) -> PromptLayout:
        self.at_once.append(threading.current_thread() is threading.main_thread())
        spans = [Span(n, header, (MediaRun(n, 0, 1),)) for n, header in enumerate(headers)]
        return PromptLayout([1] * self._tokens, spans, array("i", [0] * 3 * self._tokens).tobytes())


def generator(
    b: Bench,
    engine: EngineClient,
    tokenizer: Tokenizer = WORDLESS,
    *,
    tokens: int = 10,
    meters: Meters | None = None,
    session_seconds: float = 60.0,
) -> Generator:
    return Generator(
        cast(PromptBuilder, Prompts(tokens, tokenizer)),
        cast(Compiler, None),
        b.receiver,
        engine,
        Admission(max_requests=8, max_waiting=8, max_waiting_media=8, max_waiting_tokens=1000),
        Sessions(SessionLimits(8, 8, session_seconds, 1 << 20)),
        meters or Meters(Metrics("test")),
        Adapters(engine, (), 1, enabled=False),
    )


@asynccontextmanager
async def serving(front: EngineClient) -> AsyncIterator[asyncio.Task[Any]]:
    """The front, started in the background, and stopped at the end."""
    starting = asyncio.create_task(front.start())
    await asyncio.sleep(0)
    try:
        yield starting
    finally:
        await front.stop()
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)


class Served(NamedTuple):
    """An engine, and its front."""

    child: ScriptedEngine
    front: EngineClient


@asynccontextmanager
async def served(monkeypatch: pytest.MonkeyPatch, *encoders: ScriptedEncoder) -> AsyncIterator[tuple[Bench, Served]]:
    """Encoders, one that answers where none is given, and an engine that serves."""
    child = ScriptedEngine()
    front = front_of(monkeypatch, child)
    async with bench(*encoders or (ScriptedEncoder(),)) as b, serving(front) as starting:
        child.serves()
        await starting
        yield b, Served(child, front)


async def everything(generator: Generator, request: Request) -> list[Any]:
    return [event async for event in generator.generate(request)]


async def test_a_prompt_is_measured_by_the_engine_that_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine has ended when the prompt is laid out; while the request waits for room, one comes that is smaller."""
    large, child = ScriptedEngine(), ScriptedEngine()
    front = front_of(monkeypatch, large, child, handover_seconds=60)
    async with bench(ScriptedEncoder(), rows=ROWS) as b, serving(front) as starting:
        await b.usable(1)
        large.serves(max_context=1000)
        await starting
        large.dies()
        await eventually(lambda: front.ready is None)
        (held,) = await b.land(b"another")
        patient = replace(asked(b"picture"), max_handovers=1)
        ends = asyncio.create_task(everything(generator(b, front, tokens=50), patient))
        await eventually(b.cache._turn.locked)
        child.serves(max_context=20)
        await eventually(lambda: front.ready is not None)
        b.cache.release(held)
        with pytest.raises(InvalidInput) as error:
            await asyncio.wait_for(ends, 180)
        assert error.value.reason == "PROMPT_TOO_LONG"
        assert child.told(Add) == []


async def test_who_is_handed_over_while_the_engine_is_asked_how_it_stands_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go_on = asyncio.Event()

    async def waits(call: Call) -> None:
        await go_on.wait()
        await call.header()

    async with served(monkeypatch, ScriptedEncoder([waits])) as (b, (child, front)):
        await b.usable(1)
        made = generator(b, front)
        ends = asyncio.create_task(everything(made, asked(b"picture")))
        await eventually(lambda: made.open_requests)
        state = asyncio.create_task(made.state())
        await eventually(lambda: child.told(GetState))
        go_on.set()
        await eventually(lambda: child.told(Add))
        child.says(State(running=1))  # before it has read of the newcomer
        assert ((await state).running, (await state).waiting) == (1, 1)
        ends.cancel()
        await asyncio.gather(ends, return_exceptions=True)


async def test_an_engine_keeps_nothing_for_a_session_that_is_over_with_its_first_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It hears of the end before the request: nothing would end what it kept."""
    async with served(monkeypatch) as (b, (child, front)):
        await b.usable(1)
        made = [generator(b, front, session_seconds=seconds) for seconds in (60.0, 0.0)]
        turns = [asyncio.create_task(everything(each, replace(asked(b"picture"), session="talk"))) for each in made]
        await eventually(lambda: len(child.told(Add)) == 2)
        assert sorted(add.session for add in child.told(Add)) == [0, 1]
        for turn in turns:
            turn.cancel()
        await asyncio.gather(*turns, return_exceptions=True)


async def test_nothing_is_encoded_for_who_finds_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = ScriptedEncoder()
    front = front_of(monkeypatch, ScriptedEngine(), handover_seconds=60)
    async with bench(encoder, rows=ROWS) as b, serving(front):
        await b.usable(1)
        with pytest.raises(Unavailable) as error:
            await everything(generator(b, front), replace(asked(b"picture"), max_handovers=1))
        assert (error.value.reason, encoder.calls) == ("ENGINE_UNAVAILABLE", [])


async def test_who_lends_nothing_says_so_and_who_has_no_engine_yet_says_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is left alone for a while, the second is asked again when there is an engine."""
    child = ScriptedEngine()
    front = front_of(monkeypatch, child, handover_seconds=60)
    memory = SharedBuffer.create("blocks", 64)
    request = Request("", TokenPrompt((1,)), (), SamplingParams(max_tokens=1))

    async def refused() -> TwinlensError:
        with pytest.raises(TwinlensError) as error:
            _ = [part async for part in generator(b, front).prefill(request, 0)]
        return error.value

    async with bench(ScriptedEncoder()) as b, serving(front) as starting:
        assert (await refused()).reason == "NOT_LENT", "it exchanges no blocks"
        front.blocks = BlockPlaces(memory, 1, 64, lambda _: None)
        assert isinstance(error := await refused(), Unavailable)
        assert error.reason == "ENGINE_UNAVAILABLE"
        child.serves(prefix_caching=False)
        await starting
        assert (await refused()).reason == "NOT_LENT", "its blocks are of no use to others"
        child.dies()
        await eventually(lambda: front.ready is None)
        assert (await refused()).reason == "ENGINE_UNAVAILABLE"
    memory.close()


LONG = "x" * 5000
USER, CALLS = Message("user", ("x",)), (ToolCall("1", "f", {}),)


@pytest.mark.parametrize(
    ("prompt", "at_once"),
    [
        (TextPrompt("x"), True),
        (TextPrompt(LONG), False),
        (TokenPrompt((1,) * 5000), False),
        (ChatPrompt((USER,)), True),
        (ChatPrompt((USER, Message("assistant", ("x",), reasoning=LONG))), False),
        (ChatPrompt((USER, Message("assistant", (), CALLS))), False),
        (ChatPrompt((USER,) * 100), False),
    ],
)
async def test_what_may_take_long_to_lay_out_holds_up_no_other_request(
    monkeypatch: pytest.MonkeyPatch, prompt: Any, at_once: bool
) -> None:
    async with served(monkeypatch) as (b, (child, front)):
        made = generator(b, front)
        ends = asyncio.create_task(everything(made, replace(asked(), prompt=prompt)))
        await eventually(lambda: child.told(Add))
        ends.cancel()
        assert cast(Prompts, made._prompts).at_once == [at_once, at_once]


@pytest.mark.parametrize(("tokens", "at_once"), [(90, True), (5000, False)])
async def test_identities_of_a_prompts_blocks_come_with_it(
    monkeypatch: pytest.MonkeyPatch, tokens: int, at_once: bool
) -> None:
    """A long prompt's hold up no other request."""
    computed: list[bool] = []

    def watched(*given: Any) -> list[bytes]:
        computed.append(threading.current_thread() is threading.main_thread())
        return block_identities(*given)

    monkeypatch.setattr(input_processor, "block_identities", watched)
    child = ScriptedEngine()
    front = front_of(monkeypatch, child)
    async with bench(ScriptedEncoder()) as b, serving(front) as starting:
        child.serves(max_context=10_000, prefix_caching=True)
        await starting
        ends = asyncio.create_task(everything(generator(b, front, tokens=tokens), asked()))
        await eventually(lambda: child.told(Add))
        ends.cancel()
        (add,) = child.told(Add)
        assert add.identities == b"".join(front_identities(add, 16))
        assert len(add.identities) == tokens // 16 * 32
        assert computed == [at_once]


async def test_what_an_answer_goes_on_behind_is_read_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(monkeypatch) as (b, (child, front)):
        made = generator(b, front)
        readers = set[threading.Thread]()
        prompts = cast(Any, made._prompts)
        prompts.texts = SimpleNamespace(bytes_of=lambda _: readers.add(threading.current_thread()) or b" ")
        said = (ResumedChoice(0, (1, 2, 3)),)
        ends = asyncio.create_task(everything(made, replace(asked(), resume=said)))
        await eventually(lambda: child.told(Add))
        assert readers
        assert threading.main_thread() not in readers
        child.says(Complete(child.told(Add)[0].id, 0, "stop"))
        assert (await ends)[-1].completion_tokens == 3


async def test_an_abort_frees_the_engine_though_the_caller_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(monkeypatch) as (b, (child, front)):
        made = generator(b, front)
        events = made.generate(asked())
        reading = asyncio.ensure_future(anext(events))
        await eventually(lambda: child.told(Add))
        (add,) = child.told(Add)
        child.says(Started(add.id, 0))
        assert isinstance(await reading, Begun)
        assert [made.abort("name", salt) for salt in ("", "another's")] == [0, 0]
        assert child.told(Abort) == []
        assert made.abort("name", asked().salt) == 1
        assert child.told(Abort) == [Abort(add.id)]
        with pytest.raises(Cancelled):
            await anext(events)


async def test_what_the_engine_asks_for_after_the_caller_has_left_is_not_fetched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with served(monkeypatch) as (b, (child, front)):
        await b.usable(1)
        events = generator(b, front).generate(asked(b"picture"))
        reading = asyncio.ensure_future(anext(events))
        await eventually(lambda: child.told(Add))
        (add,) = child.told(Add)
        child.says(Started(add.id, 0))
        await reading
        await events.aclose()
        last = Beat(State())
        for message in (RowsNeeded(add.id), last):
            child.says(message)
        await eventually(lambda: front.latest is last.state)
        assert child.told(RowsPlaced) == []
        child.says(Released([add.id]))
        await eventually(lambda: front.requests == 0)


async def test_streams_are_closed_at_once_where_the_engine_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    front = front_of(monkeypatch)
    async with bench(ScriptedEncoder([hangs_after_the_header])) as b:
        await b.usable(1)
        with pytest.raises(Unavailable) as error:  # which keeps what the request held from being collected
            await everything(generator(b, front), asked(b"picture"))
        assert error.value.reason == "ENGINE_UNAVAILABLE"
        await eventually(lambda: not b.encoders[0].open)
        await eventually(lambda: [replica.in_flight for replica in b.pool.replicas] == [0])


async def test_a_stop_text_ends_nothing_before_the_least_tokens(
    monkeypatch: pytest.MonkeyPatch, builder: PromptBuilder
) -> None:
    async with served(monkeypatch) as (b, (child, front)):
        sampling = SamplingParams(max_tokens=9, min_tokens=3)
        ends = asyncio.create_task(
            everything(generator(b, front, builder.tokenizer), replace(asked(), sampling=sampling, stop=("a",)))
        )
        await eventually(lambda: child.told(Add))
        (add,) = child.told(Add)
        letter = builder.encode("a")[0]
        child.says(Started(add.id, 0))
        child.says(Tokens([Token(add.id, 0, letter, "") for _ in range(5)], 1.0))
        *deltas, ended = (await ends)[1:]
        assert "".join(delta.text for delta in deltas) == "aa"
        assert sum(len(delta.tokens) for delta in deltas) == 3
        assert (ended.reason, ended.stop_text, ended.completion_tokens) == ("stop", "a", 3)
        assert child.told(Abort)[0] == Abort(add.id, 0)


async def test_a_caller_who_is_behind_gets_what_has_come_since_as_one_delta_of_each_choice(
    monkeypatch: pytest.MonkeyPatch, builder: PromptBuilder
) -> None:
    async with served(monkeypatch) as (b, (child, front)):
        metrics = Metrics("test")
        made = generator(b, front, builder.tokenizer, meters=Meters(metrics))
        events = made.generate(replace(asked(), sampling=SamplingParams(max_tokens=9, n=2, logprobs=0), stop=("!",)))
        reading = asyncio.ensure_future(anext(events))
        await eventually(lambda: child.told(Add))
        (add,) = child.told(Add)
        child.says(Started(add.id, 0))
        assert isinstance(await reading, Begun)
        first, second = ([builder.encode(letter)[0] for letter in text] for text in ("ab!cd", "xyz"))
        for number, token in enumerate(first):
            likely = TokenLogprobs(-float(number))
            child.says(Tokens([Token(add.id, 0, token, "length" if number == 4 else "", likely)], 1.0 + number))
        ends = ("", "", "length")
        child.says(Tokens([Token(add.id, 1, second[0], "")], 1.0))
        child.says(Tokens([Token(add.id, 1, token, end) for token, end in zip(second[1:], ends[1:], strict=True)], 2.0))
        child.says(last := Beat(State()))
        await eventually(lambda: front.latest is last.state)
        scores = [TokenLogprobs(-float(number)) for number in range(3)]
        said = [event async for event in events]
        assert said[0] == Delta(0, "ab", first[:3], scores)
        assert (said[1].choice, said[1].reason, said[1].stop_text, said[1].completion_tokens) == (0, "stop", "!", 3)
        assert said[2] == Delta(1, "xyz", second)
        assert (said[3].choice, said[3].reason, said[3].completion_tokens) == (1, "length", 3)
        assert child.told(Abort)[:-1] == [], "both have ended by themselves; what is left is said at the end"
        told = await metrics.exposition()
        assert b"test_inter_token_latency_seconds_count 4.0\n" in told
        assert b"test_inter_token_latency_seconds_sum 3.0\n" in told, "2 of 1 s, and 2 of a step that took 1 s"
        assert b'test_inter_token_latency_seconds_bucket{le="0.3"} 0.0\n' in told, "no token came at no time"


@pytest.mark.parametrize(
    ("output", "text", "reason"), [("ab!", "ab!", "length"), ("ab!?", "ab", "stop")], ids=["its beginning", "all of it"]
)
async def test_an_answer_that_the_next_engine_has_no_room_for_is_told_to_its_end(
    monkeypatch: pytest.MonkeyPatch, builder: PromptBuilder, output: str, text: str, reason: str
) -> None:
    """Its caller is behind, and has read nothing of what the first engine said, which ends with a stop text."""
    large, small = ScriptedEngine(), ScriptedEngine()
    front = front_of(monkeypatch, large, small, handover_seconds=60)
    async with bench(ScriptedEncoder()) as b, serving(front) as starting:
        large.serves(max_context=1000)
        await starting
        patient = replace(asked(), sampling=SamplingParams(max_tokens=9), stop=("!?",), max_handovers=1)
        events = generator(b, front, builder.tokenizer).generate(patient)
        reading = asyncio.ensure_future(anext(events))
        await eventually(lambda: large.told(Add))
        (add,) = large.told(Add)
        large.says(Started(add.id, 0))
        assert isinstance(await reading, Begun)
        said = [builder.encode(letter)[0] for letter in output]
        large.says(Tokens([Token(add.id, 0, token, "") for token in said], 1.0))
        large.dies()
        small.serves(max_context=13)
        await eventually(lambda: small.told(Add))
        small.says(Complete(add.id, 0, "length"))
        small.says(last := Beat(State()))
        await eventually(lambda: front.latest is last.state)
        deltas, ended = [], []
        async for event in events:
            (deltas if isinstance(event, Delta) else ended).append(event)
        assert [token for delta in deltas for token in delta.tokens] == said
        assert "".join(delta.text for delta in deltas) == text
        assert [(each.reason, each.completion_tokens) for each in ended] == [(reason, len(output))]


def test_a_delta_never_holds_more_tokens_than_a_message_has_room_for() -> None:
    events = [Started(1, 0), *(Token(1, number % 2, number, "") for number in range(10)), Complete(1, 2, "stop")]
    started, *runs, complete, first, second = merge_tokens(events, most=3)
    assert (started, complete) == (events[0], events[-1])
    assert [[token.token for token in run] for run in (*runs, first, second)] == [[0, 2, 4], [1, 3, 5], [6, 8], [7, 9]]


def test_logprobs_of_a_prompt_come_in_messages_that_have_room_for_them() -> None:
    """A step tells those of thousands of tokens; with twenty likely ones beside each, that is megabytes."""
    logprobs = [TokenLogprobs(-float(number)) for number in range(8)]
    found = list(merge_tokens([PromptLogprobs(1, 5, logprobs[:7]), PromptLogprobs(1, 12, logprobs[7:])], most=3))
    assert found == [
        PromptLogprobs(1, 5, logprobs[:3]),
        PromptLogprobs(1, 8, logprobs[3:6]),
        PromptLogprobs(1, 11, logprobs[6:7]),
        PromptLogprobs(1, 12, logprobs[7:]),
    ]


async def test_whoever_shares_an_item_hears_of_its_failure_by_a_place_in_its_own_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_fail = asyncio.Event()

    async def fails_late(call: Call) -> None:
        await call.header()
        await may_fail.wait()
        status = v1.Status(code=3, message="the picture is broken", reason="MEDIA_UNREADABLE", field="items[0].data")
        await call.context.write(v1.EncodeResponse(error=v1.EncodeError(status=status)))

    async with served(monkeypatch, ScriptedEncoder([fails_late])) as (b, (child, front)):
        await b.usable(1)
        made = generator(b, front)
        first = asyncio.create_task(everything(made, asked(b"picture")))
        await eventually(lambda: len(child.told(Add)) == 1)
        elsewhere = (MediaItem(Modality.IMAGE, b"picture", field="there"),)
        second = asyncio.create_task(everything(made, replace(asked(), media=elsewhere)))
        await eventually(lambda: len(child.told(Add)) == 2)
        may_fail.set()
        for request, field in ((first, "here[0].data"), (second, "there.data")):
            with pytest.raises(InvalidInput) as error:
                await request
            assert (error.value.reason, error.value.field) == ("MEDIA_UNREADABLE", field)
        child.says(Released([add.id for add in child.told(Add)]))
        await eventually(lambda: not b.cache.used_bytes)


async def test_a_prompt_that_comes_to_no_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(monkeypatch) as (b, (child, front)):
        with pytest.raises(InvalidInput) as error:
            await asyncio.wait_for(everything(generator(b, front, tokens=0), asked()), 180)
        assert (error.value.reason, error.value.field) == ("EMPTY_PROMPT", "input")
        assert child.told(Add) == []


async def test_a_request_that_is_refused_has_failed_once_wherever_it_was_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with served(monkeypatch) as (b, (child, front)):
        made = generator(b, front)
        made.admission.max_requests, made.admission.max_waiting_tokens = 2, 15
        waiting = asyncio.create_task(everything(made, asked()))
        await eventually(lambda: child.told(Add))
        with pytest.raises(Exhausted) as error:
            await everything(made, asked())
        assert error.value.reason == "TOO_MANY_WAITING_TOKENS"
        made.admission.max_requests = 1
        with pytest.raises(Exhausted) as error:
            await everything(made, asked())
        assert error.value.reason == "TOO_MANY_REQUESTS"
        assert (made.outcomes["failed"], made.admission.refused) == (2, 2)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


@pytest.mark.parametrize(("seconds", "outcome"), [(0.0, "failed"), (3600.0, "cancelled"), (None, "cancelled")], ids=str)
@pytest.mark.parametrize("begun", [False, True], ids=["waits", "begun"])
async def test_who_leaves_because_his_time_is_up_was_failed(
    seconds: float | None, outcome: str, begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(monkeypatch) as (b, (child, front)):
        made = generator(b, front)
        deadline = None if seconds is None else time.monotonic() + seconds
        events = made.generate(replace(asked(), deadline=deadline))
        reading = asyncio.ensure_future(anext(events))
        await eventually(lambda: child.told(Add))
        (add,) = child.told(Add)
        if begun:
            child.says(Started(add.id, 0))
            await reading
            await events.aclose()  # between two events
        else:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        assert made.outcomes == {outcome: 1}
        child.says(Released([add.id]))
        await eventually(lambda: front.requests == 0)


async def refusal(made: Generator, request: Request) -> str:
    with pytest.raises(Exhausted) as error:
        await everything(made, request)
    return error.value.reason


async def test_texts_and_pictures_that_are_here_are_taken_in_while_others_wait_for_encoders(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go_on = asyncio.Event()

    async def is_slow(call: Call) -> None:
        await go_on.wait()
        await well(call)

    async def says_headers_alone(call: Call) -> None:
        await call.header()
        await is_slow(call)

    script = [well, says_headers_alone, is_slow]
    async with served(monkeypatch, ScriptedEncoder(script)) as (b, (child, front)):
        await b.usable(1)
        (here,) = await b.land(b"here")
        await settled(here)
        b.cache.release(here)
        made = generator(b, front)
        made.admission.max_waiting, made.admission.max_waiting_media = 3, 2
        slow = []
        for count, picture in enumerate((b"one", b"other"), start=1):
            slow.append(asyncio.create_task(everything(made, asked(picture))))
            await eventually(lambda count=count: made.admission.for_media.requests == count)
        await eventually(lambda: len(child.told(Add)) == 1)  # its header is known
        assert await refusal(made, asked(b"third")) == "TOO_MANY_WAITING_MEDIA"
        others = [asyncio.create_task(everything(made, asked(*files))) for files in ((), (b"here",), ())]
        await eventually(lambda: len(child.told(Add)) == 4)
        assert (made.admission.waiting, made.admission.for_media.requests) == (5, 2)
        assert await refusal(made, asked()) == "TOO_MANY_WAITING"
        go_on.set()
        await eventually(lambda: len(child.told(Add)) == 5)
        await eventually(lambda: not made.admission.for_media.requests)
        assert (made.admission.waiting, made.admission.refused, made.outcomes["failed"]) == (5, 2, 2)
        for task in (*slow, *others):
            task.cancel()
        await asyncio.gather(*slow, *others, return_exceptions=True)
        child.says(Released([add.id for add in child.told(Add)]))


async def test_who_waits_for_room_for_rows_waits_for_media(monkeypatch: pytest.MonkeyPatch) -> None:
    child = ScriptedEngine()
    front = front_of(monkeypatch, child)
    async with bench(ScriptedEncoder(), rows=ROWS) as b, serving(front) as starting:
        child.serves()
        await starting
        await b.usable(1)
        (held,) = await b.land(b"held")
        await settled(held)
        made = generator(b, front)
        made.admission.max_waiting = made.admission.max_waiting_media = 1
        waits = asyncio.create_task(everything(made, asked(b"waits")))
        await eventually(b.cache._turn.locked)
        text = asyncio.create_task(everything(made, asked()))
        await eventually(lambda: len(child.told(Add)) == 1)
        assert (made.admission.for_media.requests, made.admission.for_engine.requests) == (1, 1)
        text.cancel()
        await asyncio.gather(text, return_exceptions=True)
        b.cache.release(held)
        await eventually(lambda: len(child.told(Add)) == 2)
        await eventually(lambda: not made.admission.for_media.requests)
        waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)
        child.says(Released([add.id for add in child.told(Add)]))


EndOfCall = type(grpc.aio.EOF) | BaseException
"""What reading the messages of a call ends with."""


class Content(bytearray):
    """A file of which can be told whether it is still held: of bytes that cannot."""


class Asked(v1.LlmServiceServicer):
    """Generates about a picture that nobody else has."""

    def __init__(self, made: Generator) -> None:
        self._made = made
        self.content: weakref.ref[Content] | None = None

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[v1.GenerateResponse]:
        content = Content(b"picture")
        self.content = weakref.ref(content)
        given = asked(content)
        del content
        async with aclosing(self._made.generate(given)) as events:
            del given
            async for _ in events:
                yield v1.GenerateResponse()


async def _refuses(call: Call) -> None:
    status = v1.Status(code=3, message="the picture is broken", reason="MEDIA_UNREADABLE")
    await call.context.write(v1.EncodeResponse(error=v1.EncodeError(status=status)))


async def _breaks_late(call: Call) -> None:
    await call.header()
    await _refuses(call)


async def _hangs(call: Call) -> None:
    await call.header()
    await asyncio.Event().wait()


@pytest.mark.parametrize("way", ["finished", "refused", "failed", "aborted", "cancelled", "cancelled before its rows"])
@pytest.mark.usefixtures("no_garbage_collection")
async def test_content_is_freed_without_a_look_for_garbage(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    say = {"refused": _refuses, "failed": _breaks_late, "cancelled before its rows": _hangs}.get(way, well)
    async with served(monkeypatch, ScriptedEncoder([say])) as (b, (child, front)), AsyncExitStack() as stack:
        await b.usable(1)
        server = grpc.aio.server(interceptors=[interceptor := CallInterceptor(AcceptedTokens())])
        v1.add_LlmServiceServicer_to_server(service := Asked(made := generator(b, front)), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        stack.push_async_callback(server.stop, None)
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{port}"))
        call = v1.LlmServiceStub(channel).Generate(v1.GenerateRequest())
        if way != "refused":
            await eventually(lambda: child.told(Add))
            (add,) = child.told(Add)
            child.says(Started(add.id, 0))
            if way == "failed":
                await eventually(lambda: child.told(Abort))  # an engine lets go of what has ended alone
            else:
                await call.read()
            if way == "finished":
                child.says(Complete(add.id, 0, "length"))
            elif way == "aborted":
                made.abort("name", "salt")
            elif way == "cancelled":
                call.cancel()
            child.says(Released([add.id]))
        while not isinstance((await asyncio.gather(call.read(), return_exceptions=True))[0], EndOfCall):
            pass
        await eventually(lambda: not (interceptor.open_calls or front.requests))
        await eventually(lambda: service.content is not None and service.content() is None)
