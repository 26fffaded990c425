"""Half a million random steps of the simulated engine over layers with state."""

from __future__ import annotations

import pytest

from tests.unit.llm_service.test_state_steps import run


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_half_a_million_steps_leak_no_slot_and_read_no_other_state() -> None:
    _, hits, preempted = run(3, 500_000)
    assert hits > 0
    assert preempted > 0
