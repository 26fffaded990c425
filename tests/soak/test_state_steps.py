"""Two hundred thousand random steps of the simulated engine over layers with state, in five runs."""

from __future__ import annotations

import pytest

from tests.unit.llm_service.test_state_steps import run


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3, 8))
def test_forty_thousand_steps_leak_no_slot_and_read_no_other_state(seed: int) -> None:
    _, hits, preempted = run(seed, 40_000)
    assert hits > 0
    assert preempted > 0
