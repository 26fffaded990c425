"""Fixtures of what is compared with transformers."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from llm_service.models.trial import Reference
from llm_service.models.trial_prompts import Prompted
from tools.models.drawn_prompts import drawn_prompt


@pytest.fixture(scope="session")
def _computed() -> dict[Any, Reference]:
    return {}


@pytest.fixture
def references_once(_computed: dict[Any, Reference], monkeypatch: pytest.MonkeyPatch) -> None:
    """What transformers computes for a trial of a configuration is computed for the first test that wants it, and the
    same for all others: tests that change our decoder, of which none changes transformers."""
    make = Reference.of

    def of(config: Any, prompted: Prompted, ranks: int = 1, seed: int = 0) -> Reference:
        assert prompted is drawn_prompt
        key = type(config), config.to_json_string(), ranks, seed
        if key not in _computed:
            _computed[key] = make(deepcopy(config), prompted, ranks, seed)
        return deepcopy(_computed[key])

    monkeypatch.setattr(Reference, "of", of)
