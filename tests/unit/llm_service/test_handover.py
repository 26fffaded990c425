"""Which requests the next engine gets, in which state, and which of them ends with the one that has died."""

from __future__ import annotations

import asyncio
import contextlib
import time
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from common.errors import DeadlineExceeded, TwinlensError, Unavailable
from llm_service.engine.messages import (
    NOWHERE,
    Abort,
    Add,
    Beat,
    Failed,
    ItemRows,
    Landed,
    PromptLogprobs,
    PromptLogprobsTaken,
    Released,
    Resumed,
    RowsNeeded,
    RowsPlaced,
    Started,
    State,
    Token,
    Tokens,
)
from llm_service.engine_client.client import EngineClient
from llm_service.engine_client.engine_request import EngineRequest
from llm_service.plan import TokenLogprobs
from llm_service.request import MediaRun, SamplingParams
from tests.unit.llm_service.scripted import eventually
from tests.unit.llm_service.scripted_engine import Holder, ScriptedEngine, front_of

FOREVER = 1e6


@dataclass
class Line:
    """A front over engines that live one after the other; `now` is the one that serves."""

    front: EngineClient
    engines: list[ScriptedEngine]
    released: list[int] = field(default_factory=list)
    needed: list[int] = field(default_factory=list)
    """Requests that are to find places for their items."""

    @property
    def now(self) -> ScriptedEngine:
        return self.engines[0]

    def submit(self, max_handovers: int = 2, *, n: int = 1, **fields: Any) -> EngineRequest:
        add = {
            "token_ids": array("i", [1, 2, 3]).tobytes(),
            "positions": b"",
            "mrope_delta": 0,
            "items": [],
            "sampling": SamplingParams(max_tokens=9, n=n),
            "salt": "",
            "priority": 0,
            "deadline": None,
            **fields,
        }
        id = self.front.next_id()
        holder = Holder(id, self.needed, self.released)
        return self.front.submit(Add(id=id, **add), holder, max_handovers)

    async def hear(self, *messages: Any) -> None:
        """The engine that serves says this, and the front has heard it."""
        last = Beat(State())
        for message in (*messages, last):
            self.now.says(message)
        await eventually(lambda: self.front.latest is last.state)

    async def begin(self, *requests: EngineRequest) -> None:
        await self.hear(*(Started(request.id, 0) for request in requests))

    async def die(self) -> None:
        """The engine dies; the next one does not serve yet."""
        self.engines.pop(0).dies()
        await eventually(lambda: self.front.ready is None)

    async def serve(self) -> None:
        self.now.serves()
        await eventually(lambda: self.front.ready is not None)

    async def replace(self) -> None:
        await self.die()
        await self.serve()

    def adds(self) -> list[int]:
        """The requests that the engine that serves was given."""
        return [add.id for add in self.now.told(Add)]


@asynccontextmanager
async def line(
    monkeypatch: pytest.MonkeyPatch, engines: int = 2, *, handover_seconds: float = FOREVER, drafts: int = 0
) -> AsyncIterator[Line]:
    script = [ScriptedEngine() for _ in range(engines)]
    front = front_of(monkeypatch, *script, handover_seconds=handover_seconds, drafts=drafts)
    starting = asyncio.create_task(front.start())
    script[0].serves()
    await starting
    made = Line(front, script)
    yield made
    await front.stop()
    assert len(made.released) == len(set(made.released)), "a request was let go twice"


def token(request: EngineRequest, number: int, choice: int = 0, ended: str = "") -> Tokens:
    return Tokens([Token(request.id, choice, number, ended)], 0.0)


async def error_of(request: EngineRequest) -> TwinlensError:
    with contextlib.suppress(TwinlensError):
        while await asyncio.wait_for(request.next(), 180):
            pass  # what came before it
    with pytest.raises(TwinlensError) as error:
        await request.next()
    return error.value


async def test_the_next_engine_gets_a_request_as_far_as_it_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = [TokenLogprobs(0.0)] * 2
    async with line(monkeypatch) as made:
        request = made.submit(n=3, resume=[Resumed(2, array("i", [4]).tobytes())])
        await made.begin(request)
        await made.hear(
            PromptLogprobs(request.id, 1, scores), token(request, 7), token(request, 8), token(request, 9, 1, "stop")
        )
        await made.replace()
        (add,) = made.now.told(Add)
        said = {each.choice: (array("i", each.token_ids).tolist(), each.finished) for each in add.resume}
        assert said == {0: ([7, 8], False), 1: ([9], True), 2: ([4], False)}
        assert add.with_logprobs == 3
        await made.begin(request)
        await made.hear(token(request, 10))
        events = await request.next()
        assert [type(event) for event in events] == [Started, PromptLogprobs, Token, Token, Token, Token], (
            "it starts once"
        )
        assert made.front.handed_over == 1
        await made.hear(Released([request.id]))
        assert made.released == [request.id]


async def test_an_engine_hears_of_scores_when_their_caller_comes_back_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = [TokenLogprobs(0.0)] * 2
    async with line(monkeypatch) as made:
        request = made.submit()
        await made.hear(Started(request.id, 0), PromptLogprobs(request.id, 1, scores))
        await request.next()
        await made.hear(PromptLogprobs(request.id, 3, scores))
        assert made.now.told(PromptLogprobsTaken) == []
        await request.next()
        assert made.now.told(PromptLogprobsTaken) == [PromptLogprobsTaken(request.id, 3)]
        await made.replace()
        await made.hear(PromptLogprobs(request.id, 5, scores))
        await request.next()
        await made.hear(token(request, 7))
        await request.next()
        assert made.now.told(PromptLogprobsTaken) == [
            PromptLogprobsTaken(request.id, 5),
            PromptLogprobsTaken(request.id, 7),
        ]


async def test_choices_that_its_caller_has_ended_are_not_gone_on_with(monkeypatch: pytest.MonkeyPatch) -> None:
    async with line(monkeypatch, 3) as made:
        one, all_ended = made.submit(n=2), made.submit(n=2)
        await made.begin(one, all_ended)
        made.front.abort(one.id, 1)
        await made.hear(token(all_ended, 5, 0, "stop"))
        made.front.abort(all_ended.id, 1)
        await made.die()
        assert made.released == [all_ended.id], "nothing is left to compute for it"
        made.front.abort(one.id, 0)
        assert made.released == [all_ended.id, one.id], "no engine has it, so none has to let go of it"
        await made.serve()
        assert made.adds() == []


@pytest.mark.parametrize("end", ["abort", "failure", "item"])
async def test_what_is_over_is_let_go_with_its_engine(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    async with line(monkeypatch) as made:
        request = made.submit()
        await made.begin(request)
        if end == "abort":
            made.front.abort(request.id)
            assert made.now.told(Abort) == [Abort(request.id)]
        elif end == "failure":
            await made.hear(Failed(request.id, 3, "BAD_STOP", "no"))
        else:
            request.fail(Unavailable("the encoder is gone"))
        assert made.released == []
        await made.replace()
        assert (made.released, made.adds()) == ([request.id], [])


async def test_who_is_not_to_be_handed_over_fails_with_the_engine_though_it_only_waited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with line(monkeypatch) as made:
        request, other = made.submit(0), made.submit(1)
        await made.begin(other)
        await made.die()
        assert (await error_of(request)).reason == "ENGINE_UNAVAILABLE"
        assert made.released == [request.id]
        with pytest.raises(Unavailable):
            made.submit(0)
        late = made.submit(1)
        await made.serve()
        assert made.adds() == [other.id, late.id]
        assert made.front.handed_over == 1


async def test_nobody_waits_before_the_first_engine_has_served(monkeypatch: pytest.MonkeyPatch) -> None:
    front = front_of(monkeypatch, ScriptedEngine(), handover_seconds=FOREVER)
    starting = asyncio.create_task(front.start())
    await asyncio.sleep(0)
    with pytest.raises(Unavailable):
        Line(front, []).submit()
    await front.stop()
    starting.cancel()


async def test_a_request_that_kills_every_engine_ends_and_takes_nobody_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """It dies over the step to its next token, wherever that is; the others get theirs."""
    async with line(monkeypatch, 12) as made:
        requests = [made.submit() for _ in range(5)]
        deadly = requests[2]
        deaths = 0
        while deadly.id in made.adds() or not made.released:
            here = [request for request in requests if request.id in made.adds()]
            await made.begin(*here)
            if deadly in here:
                await made.replace()
                deaths += 1
            else:  # whoever is tried gets on, so that the next one is
                await made.hear(*(token(request, 1) for request in here))
            assert deaths < 10
        assert deaths == 3
        assert made.released == [deadly.id]
        assert (await error_of(deadly)).reason == "ENGINE_UNAVAILABLE"
        for _ in range(2 * len(requests)):
            here = [request for request in requests if request.id in made.adds()]
            await made.begin(*here)
            await made.hear(*(token(request, 1) for request in here))
        assert sorted(made.adds()) == sorted(request.id for request in requests if request is not deadly)
        newcomer = made.submit()
        assert made.adds()[-1] == newcomer.id


async def test_suspects_go_in_one_by_one_and_the_rest_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    async with line(monkeypatch, 4) as made:
        first, second = made.submit(), made.submit()
        for _ in range(2):
            await made.begin(first, second)
            await made.replace()
        bystander = made.submit()
        assert made.adds() == [first.id, bystander.id]
        assert second.timer is None, "it waits for its turn, and for an engine no more"
        await made.begin(first, bystander)
        await made.hear(token(bystander, 1))
        assert second.id not in made.adds()
        await made.hear(token(first, 1))
        assert second.id not in made.adds(), "that token may have been there before, and never been told"
        await made.hear(token(first, 2))
        assert made.adds() == [first.id, bystander.id, second.id]
        await made.begin(second)
        await made.replace()
        assert made.released == [second.id], "the engine ended over the one that was tried"
        assert made.adds() == [first.id, bystander.id]
        assert made.front.requests == 2


@pytest.mark.parametrize(("drafts", "n"), [(0, 1), (0, 3), (4, 1), (2, 2)])
async def test_a_suspect_is_tried_past_what_one_step_may_have_given_untold(
    monkeypatch: pytest.MonkeyPatch, drafts: int, n: int
) -> None:
    """A step is launched before the last one's tokens are told. An engine that dies over it takes them along, and the
    next one computes them again on its way there."""
    async with line(monkeypatch, 4, drafts=drafts) as made:
        deadly, second = made.submit(n=n), made.submit(n=n)
        for _ in range(2):
            await made.begin(deadly, second)
            await made.replace()
        await made.begin(deadly)
        again = [token(deadly, 7, choice) for _ in range(1 + drafts) for choice in range(n)]
        await made.hear(*again)
        assert second.id not in made.adds()
        await made.replace()
        assert made.released == [deadly.id], "the end is charged to it alone"
        await made.begin(second)
        await made.hear(*(token(second, 7, choice) for choice in range(n)))
        assert made.front.requests == 1


async def test_a_suspect_is_not_tried_before_it_has_places_for_its_items(monkeypatch: pytest.MonkeyPatch) -> None:
    """The room that it waits for may be held by another one, which would wait for its trial to end."""
    async with line(monkeypatch, 4) as made:
        covered, other = made.submit(items=[item(64), item(NOWHERE)]), made.submit(items=[item(0)])
        await made.begin(covered, other)
        await made.replace()
        assert (made.adds(), made.needed) == ([covered.id, other.id], []), "none of them is suspected yet"
        await made.begin(covered, other)
        await made.replace()
        assert (made.adds(), made.needed) == ([other.id], [covered.id])
        await made.begin(other)
        made.front.placed(covered.id, [(64, 0), (128, 0)])
        assert made.adds() == [other.id], "it is not its turn"
        await made.hear(token(other, 1), token(other, 2))
        assert made.adds() == [other.id, covered.id]
        assert [each.offset for each in made.now.told(Add)[1].items] == [64, 128]


async def test_an_end_is_charged_to_those_that_the_engine_had_begun_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async with line(monkeypatch, 5) as made:
        running, waits = made.submit(1), made.submit(1)
        for _ in range(2):
            await made.begin(running)
            await made.replace()
        assert made.released == [running.id]
        assert made.adds() == [waits.id]
        await made.replace()  # it had begun on nobody
        assert made.adds() == [waits.id]
        await made.replace()
        assert made.released == [running.id, waits.id]


async def test_nobody_waits_for_an_engine_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    async with line(monkeypatch, handover_seconds=0.05) as made:
        request = made.submit()
        await made.begin(request)
        await made.die()
        assert (await error_of(request)).reason == "ENGINE_UNAVAILABLE"
        assert made.released == [request.id]
        with pytest.raises(Unavailable):
            made.submit()
        await made.serve()
        assert made.adds() == []


async def test_who_waited_while_an_engine_served_waits_no_longer_than_others_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A suspect whose turn it is not, and one that has no places: the engine that ends has neither of them."""
    async with line(monkeypatch, 4) as made:
        tried, suspect = made.submit(9), made.submit(9)
        for _ in range(2):
            await made.begin(tried, suspect)
            await made.replace()
        placeless = made.submit(9, items=[item(NOWHERE)])
        await made.begin(tried, placeless)
        await made.hear(RowsNeeded(placeless.id))
        await made.replace()
        waiting = [each for each in (tried, suspect, placeless) if each.id not in made.adds()]
        assert placeless in waiting
        assert len(waiting) == 2
        assert [each.timer for each in waiting] == [None, None], "no engine is waited for"
        await made.die()
        assert None not in [each.timer for each in waiting], "each is given up if there is no other one"


async def test_a_deadline_counts_while_no_engine_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    async with line(monkeypatch) as made:
        request, patient = (
            made.submit(deadline=time.monotonic() + 0.05),
            made.submit(deadline=time.monotonic() + FOREVER),
        )
        await made.die()
        assert isinstance(await error_of(request), DeadlineExceeded)
        await made.serve()
        assert made.adds() == [patient.id]


async def test_who_still_waits_when_the_service_stops_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async with line(monkeypatch) as made:
        request = made.submit()
        await made.die()
        await made.front.stop()
        assert (await error_of(request)).reason == "ENGINE_UNAVAILABLE"
        assert made.released == [request.id]


def item(offset: int) -> ItemRows:
    return ItemRows(b"key", offset, (MediaRun(0, 0, 4),), 0)


async def test_rows_that_landed_meanwhile_are_told_to_the_next_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async with line(monkeypatch) as made:
        request = made.submit(items=[item(64), item(NOWHERE)])
        made.front.landed(request.id, 0, 1)
        await made.die()
        made.front.landed(request.id, 0, 3)
        made.front.landed(request.id, 1, 4)
        await made.serve()
        (add,) = made.now.told(Add)
        assert [(each.offset, each.landed) for each in add.items] == [(64, 3), (NOWHERE, 0)]
        made.front.landed(request.id, 0, 4)
        assert made.now.told(Landed) == [Landed(request.id, 0, 4)]


async def test_for_a_request_that_has_failed_no_rows_are_fetched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows are lost with the engine's mirrors, and its caller has not read the error yet."""
    async with line(monkeypatch) as made:
        request = made.submit(max_handovers=0, items=[item(64)])
        await made.die()
        request.rows_needed()
        assert (made.needed, made.released) == ([], [request.id])
        assert (await error_of(request)).reason == "ENGINE_UNAVAILABLE"


@pytest.mark.parametrize("placed", ["before the next one serves", "after that"])
async def test_a_request_that_waits_for_places_goes_to_the_next_engine_when_it_has_them(
    monkeypatch: pytest.MonkeyPatch, placed: str
) -> None:
    async with line(monkeypatch) as made:
        request = made.submit(items=[item(NOWHERE)])
        await made.hear(RowsNeeded(request.id))
        await made.die()
        if placed == "before the next one serves":
            made.front.placed(request.id, [(128, 2)])
            await made.serve()
        else:
            await made.serve()
            assert made.adds() == []
            made.front.placed(request.id, [(128, 2)])
        (add,) = made.now.told(Add)
        assert [(each.offset, each.landed) for each in add.items] == [(128, 2)]
        assert made.now.told(RowsPlaced) == []
        assert made.needed == [request.id]


async def test_the_next_engine_hears_of_no_session_that_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    async with line(monkeypatch) as made:
        made.submit(session=3)
        made.submit(session=4)
        made.front.end_sessions([3])
        await made.replace()
        assert [add.session for add in made.now.told(Add)] == [0, 4]


@pytest.mark.parametrize("leave", [lambda front, id: front.abort(id), lambda front, id: front.abort(id, 0)])
async def test_who_leaves_while_no_engine_serves_is_let_go_at_once(
    monkeypatch: pytest.MonkeyPatch, leave: Callable[[EngineClient, int], None]
) -> None:
    async with line(monkeypatch) as made:
        request = made.submit()
        await made.begin(request)
        await made.die()
        leave(made.front, request.id)
        assert made.released == [request.id]
        await made.serve()
        assert made.adds() == []
