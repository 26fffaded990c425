"""What the scripted LLM service says to real clients: it depends on the question alone, so that each of them, in
whichever language, can be asked the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc

from tests.gateway.scripted import Scripted
from tests.waiting import until
from twinlens import v1

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather", "parameters": WEATHER},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TEXT = f"<think>\nHm.\n</think>\n\nLet me see.\n{CALL}"
"""What it says where it may call: reasoning, words, a call."""
CUT = TEXT[: TEXT.index("me", TEXT.index("Rome"))]
"""The same, as long as it may be."""
ANSWER = "It is sunny."
"""What it says once it has the call's result, and where it may not call."""
_FULL = v1.Status(code=8, message="full", reason="TOO_MANY_WAITING", retry_after_ms=10)


def converse(door: Scripted) -> None:
    """Has the LLM service answer by the question: `Full` is refused, `Busy` every other time, `Slow` takes as long as
    its caller waits, the answer to `Cut` has no room for all of it, and to anything else it says what is above, three
    signs at a time."""
    busy = 0

    def play(request: v1.GenerateRequest) -> Iterator[v1.GenerateResponse]:
        nonlocal busy
        question = next((part.text for part in request.chat.messages[-1].parts), "")
        door.llm.refusal = None
        busy += question == "Busy"
        if question == "Full" or (question == "Busy" and busy % 2):
            door.llm.refusal = (grpc.StatusCode.RESOURCE_EXHAUSTED, _FULL)
            return
        yield v1.GenerateResponse(started=v1.GenerateStarted(prompt_tokens=9))
        if question == "Slow":
            until(lambda: id(request) not in door.llm.under_way, "its caller leaves")
            return
        is_cut = question == "Cut"
        said = CUT if is_cut else _said(request)
        for at in range(0, len(said), 3):
            yield v1.GenerateResponse(delta=v1.GenerateDelta(text=said[at : at + 3], token_ids=[at]))
        usage = v1.Usage(prompt_tokens=9, cached_tokens=4, completion_tokens=len(said))
        reason = v1.FINISH_REASON_LENGTH if is_cut else v1.FINISH_REASON_STOP
        yield v1.GenerateResponse(finished=v1.GenerateFinished(reason=reason, usage=usage))

    door.llm.play = play


def _said(request: v1.GenerateRequest) -> str:
    match request.sampling.json_schema:
        case "":
            calls = request.chat.tools and request.chat.messages[-1].role != "tool"
            return TEXT if calls else ANSWER
        case schema if '"minItems"' in schema:
            return '[{"name": "weather", "parameters": {"city": "Rome"}}]'
        case _:
            return '{"city": "Rome"}'
