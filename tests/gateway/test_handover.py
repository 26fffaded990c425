"""An LLM service that ends under an answer is followed by another: the caller sees a pause, and the same answer."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from tests.gateway.replicas import End, Player, Script, ending, lose, replicas, stop_in_order
from tests.gateway.trio import Door, Reply, said
from tests.waiting import until

CHAT = "/v1/chat/completions"
UNAVAILABLE, EXHAUSTED = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED
ENGINE_LOST = ending(UNAVAILABLE, "ENGINE_UNAVAILABLE")
TAKEN_OVER = 'handovers_total{outcome="taken_over"}'
WORDS = ["A", " red", " circle", "."]
MADE_UP = re.compile(rb'"(id|item_id|call_id|created|created_at|completed_at)":("[^"]*"|[0-9.]+)')
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]

SURFACES: dict[str, tuple[str, dict[str, Any], list[list[str]], bool]] = {
    "chat": (CHAT, {"messages": [said("x")], "stream_options": {"include_usage": True}}, [WORDS], False),
    "logprobs": (
        CHAT,
        {"messages": [said("x")], "n": 2, "logprobs": True, "seed": 5},
        [WORDS, ["Two", " blue", " ones", ",", " no", "?"]],
        False,
    ),
    "tools": (
        CHAT,
        {"messages": [said("x")], "tools": TOOLS},
        [["See:", "<tool", '_call>{"name": "lo', 'ok", "arguments": {"at": ', "5}}</tool_", "call>", " yes"]],
        False,
    ),
    "reasoning": (CHAT, {"messages": [said("x")]}, [["hm", "m", "</th", "ink>", "\n\nyes", "."]], True),
    "completions": ("/v1/completions", {"prompt": "x", "logprobs": 0}, [WORDS], False),
    "messages": (
        "/v1/messages",
        {"max_tokens": 99, "messages": [said("x")], "tools": [{"name": "look", "input_schema": {"type": "object"}}]},
        [["hm", "</think>", "See", ":", '<tool_call>{"name": "look", "arguments": {"at"', ": 5}}</tool_call>"]],
        True,
    ),
    "responses": ("/v1/responses", {"input": "x"}, [["hm", "</think>", *WORDS]], True),
}


Two = tuple[Door, list[Player]]


def plain(reply: Reply) -> bytes:
    """An answer without what is made up for it."""
    assert reply.status == 200, reply.body
    return MADE_UP.sub(b"", reply.body)


def ask(door: Door, stream: bool = True, **fields: Any) -> Reply:
    return door.post(CHAT, {"messages": [said("x")], "stream": stream, **fields})


def error(reply: Reply) -> str:
    """The reason of a stream's last event."""
    assert reply.status == 200, reply.body
    assert b"[DONE]" not in reply.body
    return str(json.loads(reply.body.split(b"data: ")[-1])["error"]["code"])


@pytest.fixture(scope="module")
def two() -> Iterator[Two]:
    """A gateway over two services, for tests that bring a script."""
    players = [Player(Script([])), Player(Script([]))]
    with replicas(players) as door:
        yield door, players


@pytest.mark.parametrize("how", [lose, ENGINE_LOST, stop_in_order], ids=["lost", "engine", "in order"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", SURFACES)
def test_wherever_a_service_ends_the_answer_is_the_same(two: Two, name: str, stream: bool, how: End) -> None:
    path, body, words, thinking = SURFACES[name]
    if not stream:
        body = {key: value for key, value in body.items() if key != "stream_options"}
    door, players = two
    script = Script(words, thinking=thinking)
    for each in players:
        each.script = script
    before = door.metric(TAKEN_OVER)
    undisturbed = plain(door.post(path, {**body, "stream": stream}))
    events = 1 + sum(len(each) + 1 for each in words)
    for cut in range(events + 1):
        script.cuts.append((cut, how))
        assert plain(door.post(path, {**body, "stream": stream})) == undisturbed, f"after {cut} events"
    assert not script.cuts
    # Neither before the first event nor after the last one is there anything to go on with.
    assert door.metric(TAKEN_OVER) - before == events - 1
    assert door.metric("handover_seconds_count") == door.metric(TAKEN_OVER)
    assert (door.metric("kept_request_bytes"), door.metric("open_requests")) == (0, 0)


def test_another_service_is_told_what_is_there() -> None:
    script = Script([["a", "b"], ["c", "d", "e", "f"]])
    script.cuts = [(8, lose)]  # started, four words by turns, the first's end, two more words
    services = [Player(script), Player(script)]
    with replicas(services) as door:
        ask(door, n=2, seed=7)
        first, second = script.asked
        assert [len(each.requests) for each in services] == [1, 1]
        assert not first.resume
        assert not first.HasField("max_handovers")
        assert [(each.index, list(each.token_ids), each.finished) for each in second.resume] == [
            (0, [], True),
            (1, [0, 1, 2, 3], False),
        ]
        assert (second.model, second.sampling) == ("demo", first.sampling)
        assert (second.chat, second.request_id) == (first.chat, first.request_id)
        logged = door.gateway.log.read_text()
        assert "an answer continues elsewhere" in logged
        assert "STREAM_INTERRUPTED" in logged


def test_a_handover_for_each_word_is_as_good_as_none() -> None:
    script = Script([WORDS])
    with replicas([Player(script), Player(script)], max_handovers=len(WORDS)) as door:
        undisturbed = plain(ask(door))
        script.cuts = [(2, lose)] * len(WORDS)
        assert plain(ask(door)) == undisturbed
        assert not script.cuts


def test_what_the_prompt_cost_is_said_once() -> None:
    script = Script([WORDS])
    services = [Player(script, cached=4), Player(script, cached=4)]
    with replicas(services) as door:
        body = {"messages": [said("x")]}
        door.post(CHAT, body)
        home = next(each for each in services if each.requests)
        other = next(each for each in services if each is not home)
        other.cached = 9
        script.cuts = [(3, lose)]
        usage = json.loads(door.post(CHAT, body).body)["usage"]
        assert usage == {
            "prompt_tokens": 9,
            "completion_tokens": 4,
            "total_tokens": 13,
            "prompt_tokens_details": {"cached_tokens": 4},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }


def test_a_request_that_ends_its_services_does_not_meet_them_all() -> None:
    script = Script([WORDS], [(1, lose)] * 100)
    services = [Player(script) for _ in range(6)]
    with replicas(services) as door:
        assert error(ask(door)) == "STREAM_INTERRUPTED"
        assert sorted(len(each.requests) for each in services) == [0, 0, 0, 1, 1, 1]
        told = [each.max_handovers if each.HasField("max_handovers") else None for each in script.asked]
        assert told == [None, None, 0]  # the last one is not to try it on several engines
        assert door.metric('handovers_total{outcome="too_many"}') == 1
        script.cuts = [(0, lose)] * 100
        reply = ask(door)  # before its first event
        assert (reply.status, reply.error["code"], len(script.cuts)) == (503, "NO_LLM_SERVICE", 97)
        script.cuts = [(1, lose), *[(0, lose)] * 100]
        assert error(ask(door)) == "STREAM_INTERRUPTED"
        assert len(script.cuts) == 98


def test_services_that_stop_in_order_count_only_where_nothing_came_of_them() -> None:
    script = Script([WORDS], [(2, stop_in_order)] * len(WORDS))
    with replicas([Player(script), Player(script)], max_handovers=1) as door:
        assert ask(door).body.endswith(b"[DONE]\n\n")
        assert not script.cuts
        script.cuts = [(1, stop_in_order)] * 3
        assert error(ask(door)) == "CALL_ENDED"
        assert len(script.cuts) == 1


@pytest.mark.parametrize(("asked", "flags"), [({"max_handovers": 0}, {}), ({}, {"max_handovers": 0})])
def test_who_wants_no_handover_has_none(asked: dict[str, Any], flags: dict[str, Any]) -> None:
    script = Script([WORDS], [(2, lose)])
    with replicas([Player(script), Player(script)], **flags) as door:
        assert error(ask(door, **asked)) == "STREAM_INTERRUPTED"
        assert len(script.asked) == 1
        assert script.asked[0].HasField("max_handovers") == bool(asked)
        assert door.metric(TAKEN_OVER) == 0


def test_a_caller_may_ask_for_fewer_handovers_but_not_for_more() -> None:
    script = Script([WORDS], [(2, lose)] * 100)
    with replicas([Player(script), Player(script)]) as door:
        ask(door, max_handovers=1)
        assert len(script.cuts) == 98
        assert [each.max_handovers for each in script.asked] == [1, 0]
        ask(door, max_handovers=50)
        assert len(script.cuts) == 95
        reply = door.post("/v1/responses", {"input": "x", "max_handovers": 0, "stream": True})
        assert (b"STREAM_INTERRUPTED" in reply.body, len(script.cuts)) == (True, 94)
        assert ask(door, max_handovers=-1).error["param"] == "max_handovers"


@pytest.mark.parametrize(
    "how",
    [
        ending(grpc.StatusCode.INVALID_ARGUMENT, "OUT_OF_RANGE"),
        ending(grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"),
        ending(grpc.StatusCode.CANCELLED, "ABORTED"),
        ending(grpc.StatusCode.INTERNAL, "INTERNAL"),
        ending(UNAVAILABLE, "MEDIA_CHANGED"),
    ],
)
def test_what_is_no_services_end_ends_the_answer(how: End) -> None:
    script = Script([WORDS], [(2, how)])
    with replicas([Player(script), Player(script)]) as door:
        assert b"[DONE]" not in ask(door).body
        assert len(script.asked) == 1


def test_an_only_service_goes_on_when_it_is_back() -> None:
    script = Script([WORDS])
    player = Player(script)

    def vanish(context: grpc.ServicerContext) -> Any:
        player.usable = False
        lose(context)

    with replicas([player]) as door:
        undisturbed = plain(ask(door))
        script.cuts = [(2, vanish)]
        replies: list[Reply] = []
        caller = threading.Thread(target=lambda: replies.append(ask(door)))
        caller.start()
        until(lambda: door.metric("llm_services_usable") == 0, "it is gone")
        assert (door.metric("open_requests"), len(script.asked)) == (1, 2)
        assert door.metric("kept_request_bytes") == script.asked[0].ByteSize()
        player.usable = True
        caller.join()
        assert plain(replies[0]) == undisturbed
        assert len(script.asked) == 3


def test_one_that_does_not_come_back_is_waited_for_as_long_as_was_said() -> None:
    script = Script([WORDS])
    player = Player(script)

    def vanish(context: grpc.ServicerContext) -> Any:
        player.usable = False
        lose(context)

    with replicas([player], handover_seconds=0.5) as door:
        script.cuts = [(2, vanish)]
        assert error(ask(door)) == "STREAM_INTERRUPTED"
        assert door.metric('handovers_total{outcome="no_service"}') == 1
        assert "an answer cannot be continued" in door.gateway.log.read_text()


@pytest.mark.parametrize("way", ["the caller leaves", "the request's time is over", "the gateway stops"])
def test_an_answer_that_waits_ends_like_any_other(way: str) -> None:
    script = Script([WORDS])
    player = Player(script)

    def vanish(context: grpc.ServicerContext) -> Any:
        player.usable = False
        lose(context)

    seconds = 5 if way == "the request's time is over" else 60
    with replicas([player], request_seconds=seconds, grace_seconds=0.2) as door, door.connect() as connection:
        script.cuts = [(2, vanish)]
        body = json.dumps({"messages": [said("x")], "stream": True}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        came = b""
        while b'"A"' not in came:
            came += (part := connection.recv(65536))
            assert part, came
        if way == "the caller leaves":
            connection.close()
            until(lambda: door.metric('requests_total{status="499",surface="chat"}') == 1, "it is over")
            assert (door.metric("open_requests"), door.metric("kept_request_bytes")) == (0, 0)
            return
        if way == "the gateway stops":
            door.gateway.process.terminate()
        while part := connection.recv(65536):
            came += part
            if b"error" in came:
                break
        assert (b"DEADLINE_EXCEEDED" if seconds < 60 else b"CALL_ENDED") in came


def test_a_service_that_is_full_is_asked_again() -> None:
    full = ending(EXHAUSTED, "TOO_MANY_WAITING")
    script = Script([WORDS])
    with replicas([Player(script), Player(script)], max_handovers=1) as door:
        undisturbed = plain(ask(door))
        script.cuts = [(2, lose), (0, full), (0, full), (0, full), (0, full)]
        assert plain(ask(door)) == undisturbed
        assert not script.cuts


def test_media_that_are_gone_when_another_goes_on_end_the_answer() -> None:
    script = Script([WORDS], [(2, lose), (0, ending(UNAVAILABLE, "MEDIA_HOST_UNAVAILABLE"))])
    with replicas([Player(script), Player(script)]) as door:
        assert error(ask(door)) == "MEDIA_HOST_UNAVAILABLE"
        assert len(script.asked) == 2


def test_a_service_that_lays_out_another_prompt_does_not_go_on() -> None:
    script = Script([WORDS])
    services = [Player(script), Player(script)]
    with replicas(services) as door:
        undisturbed = plain(ask(door))
        home = next(each for each in services if each.requests)
        other = next(each for each in services if each is not home)
        script.cuts, other.prompt_tokens = [(2, lose)], 10
        assert plain(ask(door)) == undisturbed  # where it was broken off
        assert [len(each.requests) for each in (home, other)] == [3, 1]
        script.cuts = [(2, lose)]
        assert error(ask(door, max_handovers=1)) == "STREAM_INTERRUPTED"
        assert [len(each.requests) for each in (home, other)] == [4, 2]


def test_a_service_that_begins_the_answer_anew_does_not_go_on() -> None:
    """One of an older release, which does not know of `resume`: its words would be there twice."""
    script = Script([["a", "b"], ["c", "d", "e", "f"]])
    services = [Player(script), Player(script)]
    with replicas(services) as door:
        undisturbed = plain(ask(door, n=2))
        home = next(each for each in services if each.requests)
        other = next(each for each in services if each is not home)
        other.old = True
        for cut in (3, 8):  # two words; of one choice the end, and words of the other
            script.cuts = [(cut, lose)]
            assert plain(ask(door, n=2)) == undisturbed
            assert len(script.asked[-2].resume) == len(script.asked[-1].resume) == 2
        assert [len(each.requests) for each in (home, other)] == [5, 2]
        assert "BEGINS_ANEW" in door.gateway.log.read_text()
        script.cuts = [(1, lose)]  # of which nothing is there
        assert plain(ask(door, n=2)) == undisturbed
        assert [len(each.requests) for each in (home, other)] == [6, 3]


def test_a_request_for_which_there_was_no_room_ends_with_its_service() -> None:
    script = Script([WORDS], [(2, lose)])
    with replicas([Player(script), Player(script)], max_kept_bytes=10) as door:
        assert error(ask(door)) == "STREAM_INTERRUPTED"
        assert len(script.asked) == 1
        assert door.metric('handovers_total{outcome="not_kept"}') == 1
        script.cuts = [(0, lose)]
        assert ask(door).body.endswith(b"[DONE]\n\n")  # before its first event it is still there
