"""What the servicer knows of the engine's bounds before the engine has said them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import InvalidInput
from llm_service.config import LlmConfig
from llm_service.convert import Requests
from llm_service.servicer import LlmServicer
from twinlens import v1

CONTEXT: Any = SimpleNamespace(time_remaining=lambda: None)


@pytest.mark.parametrize("ready", [None, SimpleNamespace(context=32)])
async def test_a_prompt_is_bounded_whether_the_engine_is_ready_or_not(ready: Any) -> None:
    parts: Any = SimpleNamespace(
        engine=SimpleNamespace(ready=ready), longest=64, requests=Requests(LlmConfig(model="m"), "m", 600, {})
    )
    ids = [1] * (64 if ready is None else 32)
    request = v1.GenerateRequest(tokens=v1.TokensInput(ids=ids), sampling=v1.SamplingParams(max_tokens=1))
    with pytest.raises(InvalidInput) as error:
        _ = [event async for event in LlmServicer(parts).Generate(request, CONTEXT)]
    assert (error.value.reason, error.value.field) == ("PROMPT_TOO_LONG", "tokens.ids")
