"""Bounds on what is under way and on what waits."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from common.errors import Exhausted
from llm_service.generation.admission import Admission, AdmissionTicket


def admission(requests: int = 10, waiting: int = 3, media: int = 2, tokens: int = 100) -> Admission:
    return Admission(max_requests=requests, max_waiting=waiting, max_waiting_media=media, max_waiting_tokens=tokens)


def refusal(asks: Callable[[], object]) -> str:
    with pytest.raises(Exhausted) as error:
        asks()
    assert error.value.retry_after
    return error.value.reason


def test_too_many_that_wait_are_refused_until_one_starts() -> None:
    bounds = admission()
    places = [bounds.enter() for _ in range(3)]
    assert refusal(bounds.enter) == "TOO_MANY_WAITING"
    places[1].start()
    assert (bounds.enter().waiting, bounds.running, bounds.waiting) == (True, 1, 3)


def test_too_many_at_once_are_refused_though_none_waits() -> None:
    bounds = admission(requests=2)
    for place in [bounds.enter(), bounds.enter()]:
        place.start()
    assert refusal(bounds.enter) == "TOO_MANY_REQUESTS"
    assert bounds.refused == 1


def test_tokens_that_wait_are_bounded_and_a_large_prompt_is_taken_alone() -> None:
    bounds = admission(tokens=100)
    large, small = bounds.enter(), bounds.enter()
    large.measure(5000)
    assert refusal(lambda: small.measure(1)) == "TOO_MANY_WAITING_TOKENS"
    large.start()
    small.measure(100)
    assert bounds.waiting_tokens == 100


def test_who_waits_for_media_keeps_nobody_out_but_those_who_would_wait_for_theirs() -> None:
    bounds = admission(waiting=3, media=2)
    media = [bounds.enter() for _ in range(2)]
    for place in media:
        place.wait_for_media()
        place.wait_for_media()  # once more: it is one that waits
    places = [bounds.enter() for _ in range(3)]
    assert refusal(bounds.enter) == "TOO_MANY_WAITING"
    assert refusal(places[0].wait_for_media) == "TOO_MANY_WAITING_MEDIA"
    places.pop().leave()
    assert (bounds.waiting, bounds.for_media.requests, bounds.running, bounds.refused) == (4, 2, 0, 2)
    media[0].media_came()
    assert refusal(bounds.enter) == "TOO_MANY_WAITING", "who has its rows waits for the engine, as others do"
    places[0].wait_for_media()


def test_who_has_its_rows_goes_on_however_many_wait() -> None:
    bounds = admission(waiting=2, media=2, tokens=100)
    media = bounds.enter()
    media.wait_for_media()
    media.measure(90)
    texts = [bounds.enter() for _ in range(2)]
    texts[0].measure(90)
    media.media_came()
    assert (bounds.for_engine.requests, bounds.for_engine.tokens, bounds.for_media.tokens) == (3, 180, 0)
    assert refusal(lambda: texts[1].measure(1)) == "TOO_MANY_WAITING_TOKENS"


def test_tokens_of_who_waits_for_media_are_bounded_and_keep_no_text_out() -> None:
    bounds = admission(waiting=4, media=3, tokens=100)
    first, second, text, late = (bounds.enter() for _ in range(4))
    first.wait_for_media()
    first.measure(90)
    second.wait_for_media()
    assert refusal(lambda: second.measure(20)) == "TOO_MANY_WAITING_TOKENS"
    text.measure(60)
    late.measure(30)
    assert refusal(late.wait_for_media) == "TOO_MANY_WAITING_TOKENS"
    assert refusal(lambda: second.measure(20)) == "TOO_MANY_WAITING_TOKENS", "it would wait for the engine as well"


def test_who_is_computed_waits_for_no_media() -> None:
    bounds = admission()
    place = bounds.enter()
    place.start()
    place.wait_for_media()
    place.media_came()
    assert (place.waiting, bounds.waiting, bounds.running) == (False, 0, 1)


def test_whatever_happens_to_requests_the_counts_are_theirs() -> None:
    rng, bounds = random.Random(5), admission(9, 4, 3, 300)
    places: list[AdmissionTicket] = []
    for _ in range(3000):
        move = rng.randrange(6)
        try:
            if move == 0:
                places.append(bounds.enter())
            elif places and move == 1:
                place = rng.choice(places)
                if place.waiting and not place.tokens:
                    place.measure(rng.randrange(1, 200))
            elif places and move == 2:
                rng.choice(places).start()
            elif places and move == 3:
                rng.choice(places).wait_for_media()
            elif places and move == 4:
                rng.choice(places).media_came()
            elif places:
                places.pop(rng.randrange(len(places))).leave()
        except Exhausted:
            pass
        assert bounds.open == len(places) <= 9
        assert bounds.waiting == sum(place.waiting for place in places) <= 4 + 3
        assert bounds.for_media.requests <= 3
        assert bounds.waiting_tokens == sum(place.tokens for place in places if place.waiting)
    assert bounds.refused > 0
