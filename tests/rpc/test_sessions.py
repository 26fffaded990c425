"""A conversation's pictures are still here at its next turn, though others have come and gone meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import pictures
from tests.rpc.pairs import Pair, about, answer, asked, greedy, pair
from tests.waiting import until
from twinlens import Answer, image, user, v1


@pytest.fixture(scope="module")
def both(checkpoints: Callable[..., Path]) -> Iterator[Pair]:
    """Services with room for few pictures and few KV blocks."""
    flags = {"row_cache_bytes": "64KiB", "kv_cache_bytes": "96KiB", "block_size": 4, "session_share": 0.5}
    with pair(checkpoints("qwen3_vl"), **flags) as running:
        yield running


def picture(number: int) -> bytes:
    return pictures.encoded(pictures.noise(64, 64, 9_100 + number))


def turn(both: Pair, number: int, question: str, session: str, salt: str = "") -> Answer:
    return answer(both.text, asked(about(picture(number), question), session_id=session, cache_salt=salt))


def traffic(both: Pair, first: int) -> None:
    """So many other pictures that the caches hold none of those before."""
    for number in range(first, first + 24):
        answer(both.text, asked(about(picture(number)), greedy(2)))


def test_the_next_turn_of_a_session_finds_its_picture_and_one_without_does_not(both: Pair) -> None:
    kept, lost = turn(both, 1, "What is it?", "talk"), turn(both, 2, "What is it?", "")
    traffic(both, 100)
    before = both.text.get_load()
    again = turn(both, 1, "And what else?", "talk")
    after = both.text.get_load()
    assert after.rows_received == before.rows_received, "its rows, or their KV, were here"
    assert again.usage.cached_tokens > again.started.spans[0].start
    assert after.sessions == 1
    turn(both, 2, "And what else?", "")
    assert both.text.get_load().rows_received > after.rows_received
    assert kept.started.spans[0].key == again.started.spans[0].key != lost.started.spans[0].key


def test_the_same_name_under_another_salt_finds_nothing(both: Pair) -> None:
    turn(both, 3, "What is it?", "name", "one tenant")
    before = both.text.get_load().rows_received
    said = turn(both, 3, "What is it?", "name", "another")
    assert said.usage.cached_tokens == 0
    assert both.text.get_load().rows_received > before


def test_a_tenant_with_many_sessions_leaves_room_for_others(both: Pair) -> None:
    for number in range(200, 230):
        turn(both, number, "What is it?", f"talk {number}", "busy")
    alone = user(image(picture(300)), image(picture(301)), "Which?")
    assert len(answer(both.text, v1.GenerateRequest(chat=asked(alone).chat, sampling=greedy(8))).choices) == 1
    until(both.idle, "everything was given back")
