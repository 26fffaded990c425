"""States of sequences as the engine sees them: who has a slot, where chunks end, and what choices share."""

from __future__ import annotations

import pytest

from llm_service.engine.state_slots import ReuseRate, SnapshotPlace, StateSlots
from tests.unit.llm_service.hashed import EOS, Order, Picture
from tests.unit.llm_service.simulated import Simulation, order, run_until_over, simulation, text


def keep(
    slots: StateSlots, identity: bytes, tokens: int, *earlier: bytes, place: SnapshotPlace = SnapshotPlace.ANSWER
) -> int:
    """The slot of a new snapshot."""
    found = slots.reserve(place, tokens)
    assert found is not None
    assert slots.keep(found[0], identity, tokens, place, earlier)
    return found[1]


def begin(slots: StateSlots, identity: bytes | None = None) -> None:
    """A sequence that begins, with a snapshot or without, and ends."""
    if identity is not None:
        slots.find(identity)
    slots.give_back(slots.take())
    slots.release()


def test_a_snapshot_gives_way_to_a_sequence() -> None:
    slots = StateSlots(3)
    first, second = keep(slots, b"first", 128), keep(slots, b"second", 64)
    assert slots.find(b"first") == first
    slots.release()
    held = [slots.take(), slots.take()]
    assert second in held
    assert b"first" in slots
    assert b"second" not in slots
    held.append(slots.take())
    assert slots.reserve(SnapshotPlace.ANSWER, 64) is None, "sequences have all slots"
    slots.check_integrity(held, [])
    slots.give_back(held.pop())
    keep(slots, b"third", 64)
    slots.forget(b"third")
    slots.forget(b"never")
    slots.check_integrity(held, [])
    assert (slots.used, slots.kept) == (2, 0)


def test_what_costs_least_to_compute_again_goes_first() -> None:
    slots = StateSlots(4)
    keep(slots, b"system", 320)
    keep(slots, b"turn", 384, b"system")
    keep(slots, b"long", 4096, b"turn", b"system")
    keep(slots, b"other", 96)
    slots.take()
    assert b"turn" not in slots, "it saves 64 tokens beyond what is before it"
    slots.take()
    assert b"other" not in slots, "96 tokens are less than 320"


def test_what_has_not_been_used_for_long_goes_before_what_has() -> None:
    slots = StateSlots(3)
    keep(slots, b"system", 320)
    keep(slots, b"long", 960)
    for _ in range(60):
        begin(slots, b"system")
    slots.take()
    slots.take()
    assert b"system" in slots
    assert b"long" not in slots


def test_a_kind_that_is_used_is_worth_more_than_one_that_is_not() -> None:
    """Others of the kind, not the one that is kept or given up."""
    slots = StateSlots(3)
    for number in range(30):
        opening, answer = b"opening %d" % number, b"answer %d" % number
        keep(slots, opening, 512, place=SnapshotPlace.OPENING)
        keep(slots, answer, 1024, opening, place=SnapshotPlace.ANSWER)
        begin(slots, opening)
        slots.forget(opening)
        slots.forget(answer)
    keep(slots, b"opening", 512, place=SnapshotPlace.OPENING)
    keep(slots, b"answer", 1024, b"opening", place=SnapshotPlace.ANSWER)
    slots.take()
    slots.take()
    assert b"opening" in slots, "both save 512 tokens"
    assert b"answer" not in slots


def test_what_is_worth_less_than_all_that_is_kept_is_not_kept() -> None:
    slots = StateSlots(2)
    keep(slots, b"one", 640)
    keep(slots, b"two", 640)
    assert slots.reserve(SnapshotPlace.ANSWER, 64) is None
    assert slots.reserve(SnapshotPlace.END, 1280) is None, "few prompts are asked again"
    assert slots.reserve(SnapshotPlace.BRANCH, 704) is not None
    assert slots.kept == 1


def test_the_rate_of_a_kind_is_learned_and_forgotten() -> None:
    rate, kind = ReuseRate(10), (SnapshotPlace.ANSWER, 0)
    assert rate.of(kind) == pytest.approx(0.1)
    rate.add(kind, 2)
    for _ in range(1000):
        rate.tick()
    assert rate.of(kind) < 0.003, "two that nobody has used"
    for _ in range(2000):
        rate.used(kind)
        rate.tick()
    assert rate.of(kind) == pytest.approx(0.5, abs=0.02), "one of two is used each time by now"
    rate.add(kind, -2)
    before = rate.of(kind)
    rate.tick()
    assert rate.of(kind) == before, "none is kept, so nothing is learned"


def test_what_a_snapshot_saves_begins_at_the_one_before_it_that_is_left() -> None:
    slots = StateSlots(3)
    keep(slots, b"head", 128)
    keep(slots, b"other", 160)
    keep(slots, b"tail", 192, b"head")
    slots.forget(b"head")
    slots.take()
    slots.take()
    assert b"tail" in slots, "192 tokens by now"


def test_what_is_in_use_is_taken_last_and_for_no_snapshot() -> None:
    slots = StateSlots(2)
    keep(slots, b"used", 64)
    keep(slots, b"valuable", 4096)
    slots.find(b"used")
    held = [slots.take()]
    assert b"used" in slots
    assert slots.reserve(SnapshotPlace.ANSWER, 8192) is None
    slots.release()
    found = slots.reserve(SnapshotPlace.ANSWER, 8192)
    assert found is not None, "its copy is planned"
    slots.check_integrity(held, [found[0]])
    held.append(slots.take())
    assert not slots.keep(found[0], b"new", 64, SnapshotPlace.ANSWER, ()), "a sequence has taken what was reserved"
    slots.cancel(found[0])
    slots.check_integrity(held, [])


def test_a_snapshot_that_is_there_is_not_kept_twice() -> None:
    slots = StateSlots(3)
    first, again = (slots.reserve(SnapshotPlace.ANSWER, 64) for _ in range(2))
    assert first is not None
    assert again is not None
    assert slots.keep(first[0], b"same", 64, SnapshotPlace.ANSWER, ())
    assert not slots.keep(again[0], b"same", 64, SnapshotPlace.ANSWER, ())
    slots.check_integrity([], [])
    slots.forget(b"same", unless_used=True)
    assert slots.kept == 0
    keep(slots, b"wanted", 64)
    slots.find(b"wanted")
    slots.forget(b"wanted", unless_used=True)
    assert slots.kept == 1, "others have begun with it"


@pytest.mark.parametrize("overlap", [False, True])
def test_choices_go_on_from_the_state_of_the_first(overlap: bool) -> None:
    engine = simulation(state_slots=8, state_chunk=8, step_tokens=64, overlap=overlap)
    engine.submit(order(text(31), n=3))
    engine.drain()
    assert engine.computed == 31 + 2 * (31 - 24) + 3 * 3, "what is before the last multiple of 8 is computed once"


def test_choices_without_room_for_a_snapshot_compute_the_prompt_themselves() -> None:
    engine = simulation(state_slots=2, max_running=2, state_chunk=8, step_tokens=64)
    other = engine.submit(order(text(9, 1), max_tokens=40))
    engine.submit(order(text(31), n=2))
    engine.step()
    engine.step()
    assert engine.scheduler.state().running == 2
    engine.drain()
    assert engine.outcomes[other].ended == ["length"]


def cached(engine: Simulation, asked: Order) -> int:
    """How many tokens of a request were in the cache; it is served to its end."""
    id = engine.submit(asked)
    engine.land_all(id)
    run_until_over(engine, id)
    return engine.outcomes[id].cached


def roomy(**more: int) -> Simulation:
    return simulation(blocks=256, **{"state_slots": 40, "state_chunk": 8, "step_tokens": 128, **more})


@pytest.mark.parametrize("overlap", [False, True])
def test_a_prompt_goes_on_at_the_last_multiple_before_its_end(overlap: bool) -> None:
    engine = roomy(overlap=overlap)
    assert [cached(engine, order(text(31))) for _ in range(2)] == [0, 24]
    assert cached(engine, order(text(31)[:25])) == 24
    assert cached(engine, order(text(31)[:24])) == 0, "blocks are cached, but no state before 24"
    assert cached(engine, order(text(31)[:24])) == 16, "where it was asked for, the state is kept"
    engine.scheduler.blocks.flush()
    assert cached(engine, order(text(31))) == 0, "a snapshot goes with its block"
    engine.drain()


@pytest.mark.parametrize("end", range(9, 33))
def test_prompts_that_share_a_turn_or_a_picture_begin_behind_it(end: int) -> None:
    turn, seen = [*text(end - 1), EOS], [Picture(1, 3, end - 3)]
    engine = roomy()
    assert cached(engine, order([*turn, *text(30, 1)])) == 0
    assert cached(engine, order([*turn, *text(30, 2)])) == end // 8 * 8
    engine = roomy()
    assert cached(engine, order(text(end) + text(30, 1), seen)) == 0
    assert cached(engine, order(text(end) + text(30, 2), seen)) == end // 8 * 8


def test_where_prompts_have_been_seen_to_branch_the_next_one_begins() -> None:
    engine = roomy()
    shared = text(29, 3)
    assert [cached(engine, order(shared + text(40, seed))) for seed in (4, 5, 6, 7)] == [0, 0, 24, 24]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("said", [1, 4, 7, 8, 9, 12, 30])
def test_the_next_turn_begins_behind_the_answer(said: int, overlap: bool) -> None:
    engine = roomy(overlap=overlap)
    first = order(text(21), max_tokens=said)
    id = engine.submit(first)
    run_until_over(engine, id)
    history = [*first.prompt, *engine.outcomes[id].tokens[0]]
    computed = len(history) - 1
    assert cached(engine, order([*history, *text(20, 1)])) == computed // 8 * 8
    kept = engine.scheduler.state().state_snapshots
    assert kept <= 2 + 2, "an answer leaves one, however long it is"
    engine.drain()


def test_a_session_s_next_turn_begins_behind_its_answer_whatever_came_meanwhile() -> None:
    """Without a session its blocks may be there, but no state."""
    found = {}
    for session in (0, 7):
        engine = simulation(blocks=1024, state_slots=6, max_running=2, state_chunk=8, step_tokens=128)
        first = order(text(21), max_tokens=13, session=session)
        id = engine.submit(first)
        run_until_over(engine, id)
        history = [*first.prompt, *engine.outcomes[id].tokens[0]]
        for seed in range(60):
            cached(engine, order([2 + seed, 1, *text(59)], max_tokens=20))  # none begins as the first
        found[session] = cached(engine, order([*history, *text(20, 1)]))
        engine.drain()
    assert found == {0: 0, 7: (len(history) - 1) // 8 * 8}


@pytest.mark.parametrize("over", [True, False], ids=["after its turn", "during its turn"])
def test_a_session_keeps_its_states_while_its_blocks_are_in_use(over: bool) -> None:
    """By others after its turn, or by the turn itself."""
    found = {}
    for session in (0, 7):
        engine = simulation(blocks=1024, state_slots=12, max_running=2, state_chunk=8, step_tokens=128)
        prompt = text(25)
        if over:
            run_until_over(engine, engine.submit(order(prompt, session=session)))
        engine.submit(order([*prompt, 3], max_tokens=1000, session=0 if over else session))
        for seed in range(40):
            cached(engine, order([2 + seed, 1, *text(59)], max_tokens=9))
        found[session] = cached(engine, order([*prompt, 3]))
        assert engine.scheduler.state().running == 1, "the blocks are in use"
        engine.drain()
    assert found == {0: 0, 7: 24}


def test_sessions_of_one_tenant_leave_slots_for_others() -> None:
    """A quarter of all, for those that were used last."""
    tenants = {b"%d" % number: b"tenant" for number in range(6)}
    slots = StateSlots(8, 0.25, tenants.get)
    for identity in (*tenants, b"other", b"young"):
        keep(slots, identity, 64)
    for _ in range(6):
        slots.take()
    assert [identity for identity in (*tenants, b"other", b"young") if identity in slots] == [b"4", b"5"]
    slots.take()
    assert b"4" not in slots, "they go as well where nothing else is left"


def test_a_preempted_sequence_goes_on_from_its_own_last_snapshot() -> None:
    engine = simulation(blocks=25, block_size=4, max_running=2, step_tokens=64, state_slots=12, state_chunk=8)
    for length, said in ((20, 30), (22, 50)):
        engine.submit(order(text(length, length), max_tokens=said))
    engine.drain()
    assert engine.scheduler.counters.preemptions == 1
    assert engine.computed == (20 + 29) + (22 + 49) + (50 - 48), "it had 50 tokens"


def test_of_many_turns_states_behind_the_first_and_the_last_are_kept_as_they_are_passed() -> None:
    engine = roomy(step_tokens=400, state_slots=400)
    prompt = [token for seed in range(20) for token in (*text(15, seed), EOS)]
    engine.submit(order(prompt))
    first = engine.step()
    assert first is not None
    assert [(number, place) for number, place, _ in first.plan.states.within] == [
        (0, place) for place in (16, 32, 272, 288, 304, 312)
    ]
    assert (first.plan.tokens, len(first.plan.states.after)) == (320, 1), "none of them ends the chunk"
    engine.drain()
    assert engine.scheduler.state().state_snapshots == 7


def test_a_chunk_that_begins_between_two_multiples_ends_where_a_state_is_kept() -> None:
    engine = roomy(step_tokens=13, max_running=2)
    engine.submit(order(text(40), max_tokens=1))
    engine.submit(order([*text(24, 1), EOS, *text(9, 2)], max_tokens=1))
    ends = []
    while (step := engine.step()) is not None:
        ends += [begin + count for sequence, begin, count in step.prefill if sequence.id == 2]
        assert all(count % 8 == 0 for _, count, _ in step.plan.states.within)
    assert {24, 34} <= set(ends)
    assert cached(engine, order([*text(24, 1), EOS, *text(9, 3)])) == 24
    engine.drain()


def test_snapshots_never_take_more_than_the_slots_that_sequences_leave() -> None:
    engine = roomy(state_slots=3, max_running=2, step_tokens=16)
    for seed in range(30):
        engine.submit(order(text(40 + seed, seed % 4), max_tokens=20))
    while engine.step() is not None:
        state = engine.scheduler.state()
        assert state.state_slots_used + state.state_snapshots <= state.state_slots == 3
        assert state.state_slots_used == state.running
    engine.drain()


def test_without_a_prefix_cache_nothing_is_cut_or_kept() -> None:
    engine = roomy(prefix_cache=False)
    engine.submit(order(text(31)))
    first = engine.step()
    assert first is not None
    assert first.plan.tokens == 31
    engine.drain()
    assert engine.scheduler.state().state_snapshots == 0


def test_chunks_end_on_multiples_but_the_last() -> None:
    engine = simulation(state_slots=4, state_chunk=8, step_tokens=21, max_running=4)
    engine.submit(order(text(43)))
    ends = []
    while (step := engine.step()) is not None:
        ends += [begin + count for _, begin, count in step.prefill]
    assert ends == [16, 32, 43]
    engine.drain()


def test_a_step_that_reaches_no_multiple_is_used_all_the_same() -> None:
    engine = simulation(state_slots=2, state_chunk=64, step_tokens=10, max_running=2)
    engine.submit(order(text(70)))
    engine.drain()
    assert engine.steps == 8 + 3
