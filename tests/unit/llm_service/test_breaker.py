"""What keeps failures from spreading, with a clock that the test sets."""

from __future__ import annotations

from dataclasses import dataclass

from llm_service.encoders.breaker import Breaker, Quarantine, RetryBudget


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def test_one_or_two_incidents_keep_nobody_away_and_a_third_does_for_a_while() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    for _ in range(2):
        breaker.failed(breaker.now())
        assert breaker.closed
        clock.now += 1
    breaker.failed(breaker.now())
    assert not breaker.closed
    clock.now += 0.5
    assert breaker.closed


def test_pauses_grow_to_four_seconds_and_no_further() -> None:
    clock, pauses = Clock(), []
    breaker = Breaker(clock)
    for _ in range(8):
        breaker.failed(breaker.now())
        begun = clock.now
        while not breaker.closed:
            clock.now += 0.25
        pauses.append(clock.now - begun)
        clock.now += 0.25
    assert pauses == [0, 0, 0.5, 1, 2, 4, 4, 4]


def test_streams_that_break_together_are_one_incident() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    opened = [breaker.now() for _ in range(16)]
    clock.now += 3
    for moment in opened:
        breaker.failed(moment)
    assert breaker.failures == 1
    assert breaker.closed


def test_a_stream_that_ends_well_begins_the_count_anew() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    for _ in range(5):
        breaker.failed(breaker.now())
        clock.now += 10
    breaker.succeeded()
    assert breaker.failures == 0
    breaker.failed(breaker.now())
    assert breaker.closed


def test_retries_are_a_fifth_of_the_items_beyond_the_reserve() -> None:
    budget = RetryBudget()
    reserve = sum(budget.spend() for _ in range(1000))
    assert reserve == 64
    for _ in range(1000):
        budget.earn()
    assert sum(budget.spend() for _ in range(1000)) == 64, "what is earned is kept up to the reserve"
    spent = 0
    for _ in range(1000):
        budget.earn()
        spent += budget.spend()
    assert 199 <= spent <= 200


def test_an_item_over_which_encoders_die_twice_is_refused_for_a_minute() -> None:
    clock = Clock()
    quarantine = Quarantine(clock)
    quarantine.blame(b"item")
    assert not quarantine.is_quarantined(b"item")
    quarantine.blame(b"item")
    assert quarantine.is_quarantined(b"item")
    assert not quarantine.is_quarantined(b"another")
    clock.now += 61
    assert not quarantine.is_quarantined(b"item")
    quarantine.blame(b"item")
    assert not quarantine.is_quarantined(b"item"), "what was long ago does not count"


def test_an_item_that_was_done_is_cleared() -> None:
    quarantine = Quarantine(Clock())
    quarantine.blame(b"item")
    quarantine.clear(b"item")
    quarantine.blame(b"item")
    assert not quarantine.is_quarantined(b"item")


def test_what_is_remembered_is_bounded() -> None:
    quarantine = Quarantine(Clock())
    for number in range(3000):
        for _ in range(2):
            quarantine.blame(b"%d" % number)
    assert not quarantine.is_quarantined(b"0")
    assert quarantine.is_quarantined(b"2999")
