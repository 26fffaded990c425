"""A hundred thousand random steps of the simulated engine over layers with state, in five runs: three of these notice
a slot that is lost at one cancelled snapshot of five hundred."""

from __future__ import annotations

import pytest

from tests.unit.llm_service.test_state_steps import run


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3, 8))
def test_twenty_thousand_steps_leak_no_slot_and_read_no_other_state(seed: int) -> None:
    _, hits, preempted = run(seed, 20_000)
    assert hits > 0
    assert preempted > 0
