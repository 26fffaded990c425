"""Conversations that are kept, within bounds."""

from __future__ import annotations

import random

from llm_service.generation.sessions import Session, SessionLimits, Sessions


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def made(*, most: int = 4, max_per_tenant: int = 3, seconds: float = 10.0, rows: int = 100) -> tuple[Sessions, Clock]:
    clock = Clock()
    return Sessions(SessionLimits(most, max_per_tenant, seconds, rows), clock), clock


def test_a_session_is_the_same_from_turn_to_turn_and_another_under_another_salt() -> None:
    sessions, _ = made()
    first = sessions.use("a", "talk")
    assert sessions.use("a", "talk") is first
    assert sessions.use("b", "talk").number != first.number


def test_what_a_session_uses_is_kept_until_its_time_is_over() -> None:
    sessions, clock = made()
    session = sessions.use("a", "talk")
    sessions.retain(session, b"picture", 40)
    clock.now += 9
    assert sessions.is_retained(b"picture")
    sessions.use("a", "talk")
    clock.now += 9
    assert sessions.is_retained(b"picture"), "its last turn counts"
    clock.now += 1
    assert not sessions.is_retained(b"picture")
    assert sessions.take_ended() == [session.number]
    assert sessions.take_ended() == []


def test_the_longest_unused_session_gives_way_to_a_new_one() -> None:
    sessions, _ = made(most=3)
    first, second = sessions.use("a", "1"), sessions.use("b", "2")
    sessions.use("c", "3")
    sessions.use("a", "1")
    sessions.use("d", "4")
    assert sessions.take_ended() == [second.number]
    assert sessions.use("a", "1") is first


def test_a_tenant_with_many_sessions_pushes_out_its_own_and_nobody_elses() -> None:
    sessions, _ = made(most=10, max_per_tenant=2)
    other = sessions.use("b", "quiet")
    own = [sessions.use("a", str(n)) for n in range(5)]
    assert sessions.take_ended() == [each.number for each in own[:3]]
    assert sessions.use("b", "quiet") is other


def test_a_tenants_rows_are_bounded_and_its_longest_unused_go_first() -> None:
    sessions, _ = made(rows=100)
    old, new = sessions.use("a", "old"), sessions.use("a", "new")
    other = sessions.use("b", "other")
    sessions.retain(other, b"theirs", 90)
    sessions.retain(old, b"first", 40)
    sessions.retain(old, b"second", 40)
    sessions.retain(new, b"third", 50)
    assert [sessions.is_retained(key) for key in (b"first", b"second", b"third", b"theirs")] == [
        False,
        True,
        True,
        True,
    ]
    sessions.retain(new, b"too large", 101)
    assert not sessions.is_retained(b"too large")
    sessions.check_integrity()


def test_rows_that_two_sessions_use_are_kept_until_both_are_over_and_count_once() -> None:
    sessions, clock = made(rows=100)
    first = sessions.use("a", "1")
    sessions.retain(first, b"picture", 80)
    clock.now += 5
    second = sessions.use("a", "2")
    sessions.retain(second, b"picture", 80)
    sessions.check_integrity()
    clock.now += 5
    assert sessions.is_retained(b"picture")
    clock.now += 5
    assert not sessions.is_retained(b"picture")


def test_whatever_comes_the_bounds_hold_and_the_counts_are_right() -> None:
    rng = random.Random(3)
    sessions, clock = made(most=6, max_per_tenant=3, seconds=20.0, rows=100)
    held: list[Session] = []
    for _ in range(4000):
        tenant = rng.choice("abc")
        session = sessions.use(tenant, str(rng.randrange(5)))
        held = [*held[-5:], session]
        turn, item = rng.choice(held), rng.randrange(8)  # a key is its tenant's alone, and has one size
        sessions.retain(turn, f"{turn.tenant}{item}".encode(), 10 * item + 10)
        clock.now += rng.choice([0.0, 1.0, 7.0])
        sessions.take_ended()
        sessions.check_integrity()
