"""Asks a gateway with langchain-openai, unchanged. Reads what to ask from standard input, and prints what came."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

GIVEN: dict[str, Any] = json.load(sys.stdin)
PICTURE = [
    {"type": "image_url", "image_url": {"url": GIVEN["picture"]}},
    {"type": "text", "text": "What is it?"},
]


class City(BaseModel):
    """Where it is."""

    city: str


@tool
def weather(city: str) -> str:
    """The weather"""
    return f"Sun in {city}."


def model(door: str, **fields: Any) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=GIVEN[door]["url"], model=GIVEN[door]["model"], api_key="none", max_retries=0, timeout=180, **fields
    )


REAL = model("real", temperature=0, max_tokens=8)
SCRIPTED = model("scripted")


def invoke() -> Any:
    answer = REAL.invoke([HumanMessage(PICTURE)])
    usage = answer.usage_metadata
    return [answer.content, answer.response_metadata["finish_reason"], usage and usage["input_tokens"]]


def picture_block() -> Any:
    """A picture as LangChain writes it for all makers."""
    data = GIVEN["picture"].partition("base64,")[2]
    block = {"type": "image", "base64": data, "mime_type": "image/png"}
    return REAL.invoke([HumanMessage([block, PICTURE[1]])]).content


def stream() -> Any:
    whole = None
    for chunk in REAL.stream([HumanMessage(PICTURE)], stream_usage=True):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    usage = whole.usage_metadata  # type: ignore[attr-defined]
    return [whole.content, whole.response_metadata["finish_reason"], usage and usage["input_tokens"]]


def system() -> Any:
    return REAL.invoke([("system", "Be brief."), ("human", "Hello")]).content


def bind_tools() -> Any:
    answer = SCRIPTED.bind_tools([weather]).invoke("Rome?")
    assert isinstance(answer, AIMessage)
    return [answer.content, [[call["name"], call["args"]] for call in answer.tool_calls]]


def bind_tools_stream() -> Any:
    whole = None
    for chunk in SCRIPTED.bind_tools([weather], strict=True).stream("Rome?"):
        whole = chunk if whole is None else whole + chunk
    return [[call["name"], call["args"]] for call in whole.tool_calls]  # type: ignore[union-attr]


def required_tool() -> Any:
    answer = SCRIPTED.bind_tools([weather], tool_choice="any", parallel_tool_calls=False).invoke("Rome?")
    return [[call["name"], call["args"]] for call in answer.tool_calls]


def named_tool() -> Any:
    answer = SCRIPTED.bind_tools([weather], tool_choice="weather").invoke("Rome?")
    return [[call["name"], call["args"]] for call in answer.tool_calls]


def second_turn() -> Any:
    bound = SCRIPTED.bind_tools([weather])
    turns: list[Any] = [HumanMessage("Rome?")]
    turns.append(bound.invoke(turns))
    turns += [ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"]) for call in turns[-1].tool_calls]
    return bound.invoke(turns).content


def structured(method: str) -> Callable[[], Any]:
    def ask() -> Any:
        answer = SCRIPTED.with_structured_output(City, method=method).invoke("Rome?")  # type: ignore[arg-type]
        assert isinstance(answer, City)
        return answer.city

    return ask


def responses() -> Any:
    answer = model("real", temperature=0, max_tokens=8, use_responses_api=True).invoke([HumanMessage(PICTURE)])
    return answer.text


def responses_tools() -> Any:
    bound = model("scripted", use_responses_api=True).bind_tools([weather])
    turns: list[Any] = [HumanMessage("Rome?")]
    turns.append(bound.invoke(turns))
    turns += [ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"]) for call in turns[-1].tool_calls]
    return [[call["name"] for call in turns[1].tool_calls], bound.invoke(turns).text]


def responses_stream() -> Any:
    whole = None
    for chunk in model("scripted", use_responses_api=True).bind_tools([weather]).stream("Rome?"):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    return [whole.text, [[call["name"], call["args"]] for call in whole.tool_calls]]  # type: ignore[attr-defined]


def cut_stream(**fields: Any) -> Callable[[], Any]:
    """A call that is cut off: what it may run, and what not."""

    def ask() -> Any:
        whole = None
        for chunk in model("scripted", **fields).bind_tools([weather]).stream("Cut"):
            whole = chunk if whole is None else whole + chunk
        assert whole is not None
        return [whole.tool_calls, [call["name"] for call in whole.invalid_tool_calls]]  # type: ignore[attr-defined]

    return ask


def logprobs() -> Any:
    answer = REAL.bind(logprobs=True, top_logprobs=2).invoke("Hello")
    return len(answer.response_metadata["logprobs"]["content"])


CASES: dict[str, Callable[[], Any]] = {
    "invoke": invoke,
    "picture_block": picture_block,
    "stream": stream,
    "system": system,
    "bind_tools": bind_tools,
    "bind_tools_stream": bind_tools_stream,
    "required_tool": required_tool,
    "named_tool": named_tool,
    "second_turn": second_turn,
    "structured_json_schema": structured("json_schema"),
    "structured_function_calling": structured("function_calling"),
    "structured_json_mode": structured("json_mode"),
    "responses": responses,
    "responses_tools": responses_tools,
    "responses_stream": responses_stream,
    "cut_stream": cut_stream(),
    "responses_cut_stream": cut_stream(use_responses_api=True),
    "logprobs": logprobs,
}

if __name__ == "__main__":
    seen = {}
    for name, case in CASES.items():
        try:
            seen[name] = case()
        except Exception:  # noqa: BLE001 - it is what the client has seen
            seen[name] = f"failed: {traceback.format_exc()}"
    print(json.dumps(seen))
