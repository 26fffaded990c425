"""A plan that was made before the step in front of it had ended."""

from __future__ import annotations

import math
import sys
from array import array

import msgspec

from llm_service.plan import Appended, Chunk, Draw, StepPlan, TokenLogprobs
from testkit.in_turn import filled


def ints(*values: int) -> bytes:
    return array("i", values).tobytes()


def plan(**fields: object) -> StepPlan:
    return StepPlan(token_ids=ints(5, 0, 7, 0), positions=bytes(48), chunks=[], rows=[], draws=[], **fields)  # type: ignore[arg-type]


def test_carried_places_get_the_tokens_that_the_draws_before_chose() -> None:
    whole = filled(plan(carried=[(1, 2), (3, 0)]), [10, 11, 12])
    assert whole.token_ids == ints(5, 12, 7, 10)
    assert whole.carried == []


def test_what_is_banned_behind_a_carried_token_is_banned_where_it_is_that_one() -> None:
    bound = Draw(at=1, banned=(3,), banned_behind=((9, 4), (8, 5), (9, 6)), carried=1)
    made = msgspec.structs.replace(plan(carried=[(1, 1)]), draws=[bound])
    assert filled(made, [8, 9]).draws == [Draw(at=1, banned=(3, 4, 6))]


def test_the_last_token_of_a_carried_output_is_put_in_and_no_other() -> None:
    known = Draw(at=2, prompt=ints(1), output=ints(2))
    open_ended = Draw(at=1, prompt=ints(1), output=ints(2, 0), carried=1)
    made = msgspec.structs.replace(plan(carried=[(1, 1)]), draws=[open_ended, known])
    assert filled(made, [8, 9]).draws == [msgspec.structs.replace(open_ended, output=ints(2, 9), carried=-1), known]


def test_a_plan_that_carries_nothing_is_itself() -> None:
    made = plan()
    assert filled(made, []) is made


def test_a_plan_survives_the_way_to_the_ranks() -> None:
    made = StepPlan(
        ints(1), bytes(12), [Chunk(0, 1, 4)], [], [Draw(at=0)], [(0, 3)], appended=[Appended(4, 0, ints(7))]
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=StepPlan) == made


def test_likeliest_tokens_that_wait_for_a_reader_are_packed() -> None:
    likeliest = [(7, -0.125), (151_000, -math.pi), *((token, -math.inf) for token in range(18))]
    packed = msgspec.msgpack.encode(TokenLogprobs.of(-1.5, likeliest))
    kept = msgspec.msgpack.decode(packed, type=TokenLogprobs)
    assert (kept.chosen, kept.top) == (-1.5, likeliest)
    assert sum(sys.getsizeof(value) for value in msgspec.structs.astuple(kept)) < 20 * 16
