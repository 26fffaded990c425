"""Bounds on what is under way and on what waits."""

from __future__ import annotations

import random

import pytest

from common.errors import Exhausted
from llm_service.generation.admission import Admission, AdmissionTicket


def admission(requests: int = 10, waiting: int = 3, tokens: int = 100) -> Admission:
    return Admission(max_requests=requests, max_waiting=waiting, max_waiting_tokens=tokens)


def refusal(bounds: Admission) -> str:
    with pytest.raises(Exhausted) as error:
        bounds.enter()
    assert error.value.retry_after
    return error.value.reason


def test_too_many_that_wait_are_refused_until_one_starts() -> None:
    bounds = admission()
    places = [bounds.enter() for _ in range(3)]
    assert refusal(bounds) == "TOO_MANY_WAITING"
    places[1].start()
    assert (bounds.enter().waiting, bounds.running, bounds.waiting) == (True, 1, 3)


def test_too_many_at_once_are_refused_though_none_waits() -> None:
    bounds = admission(requests=2)
    for place in [bounds.enter(), bounds.enter()]:
        place.start()
    assert refusal(bounds) == "TOO_MANY_REQUESTS"
    assert bounds.refused == 1


def test_tokens_that_wait_are_bounded_and_a_large_prompt_is_taken_alone() -> None:
    bounds = admission(tokens=100)
    large, small = bounds.enter(), bounds.enter()
    large.measure(5000)
    with pytest.raises(Exhausted) as error:
        small.measure(1)
    assert (error.value.reason, bool(error.value.retry_after)) == ("TOO_MANY_WAITING_TOKENS", True)
    large.start()
    small.measure(100)
    assert bounds.waiting_tokens == 100


def test_whatever_happens_to_requests_the_counts_are_theirs() -> None:
    rng, bounds = random.Random(5), admission(8, 5, 300)
    places: list[AdmissionTicket] = []
    for _ in range(3000):
        move = rng.randrange(4)
        try:
            if move == 0:
                places.append(bounds.enter())
            elif places and move == 1:
                place = rng.choice(places)
                if place.waiting and not place.tokens:
                    place.measure(rng.randrange(1, 200))
            elif places and move == 2:
                rng.choice(places).start()
            elif places:
                places.pop(rng.randrange(len(places))).leave()
        except Exhausted:
            pass
        assert bounds.open == len(places) <= 8
        assert bounds.waiting == sum(place.waiting for place in places) <= 5
        assert bounds.waiting_tokens == sum(place.tokens for place in places if place.waiting)
    assert bounds.refused > 0
