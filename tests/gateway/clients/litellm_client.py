"""Asks a gateway with litellm, unchanged. Reads what to ask from standard input, and prints what came."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch a list of prices

import litellm
from pydantic import BaseModel

GIVEN: dict[str, Any] = json.load(sys.stdin)
PICTURE = [
    {"type": "image_url", "image_url": {"url": GIVEN["picture"]}},
    {"type": "text", "text": "What is it?"},
]


class City(BaseModel):
    """Where it is."""

    city: str


def ask(door: str, content: Any, **fields: Any) -> Any:
    turns = fields.pop("messages", [{"role": "user", "content": content}])
    provider = fields.pop("provider", "openai")
    return litellm.completion(
        model=f"{provider}/{GIVEN[door]['model']}",
        api_base=GIVEN[door]["url"],
        api_key="none",
        num_retries=0,
        timeout=180,
        messages=turns,
        **fields,
    )


def real(content: Any, **fields: Any) -> Any:
    return ask("real", content, **{"temperature": 0, "max_tokens": 8, **fields})


def scripted(content: Any = "Rome?", **fields: Any) -> Any:
    return ask("scripted", content, **fields)


def completion() -> Any:
    answer = real(PICTURE)
    return [answer.choices[0].message.content, answer.choices[0].finish_reason, answer.usage.prompt_tokens]


def hosted_vllm() -> Any:
    """As to a server of vLLM, with what its users add."""
    answer = real(
        PICTURE, provider="hosted_vllm", top_k=5, min_p=0.0, repetition_penalty=1.0, extra_body={"ignore_eos": False}
    )
    return answer.choices[0].message.content


def stream() -> Any:
    words, usage = "", None
    for chunk in real(PICTURE, stream=True, stream_options={"include_usage": True}):
        words += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        usage = getattr(chunk, "usage", None) or usage
    return [words, usage and usage.prompt_tokens]


def tools() -> Any:
    message = scripted(tools=[GIVEN["tool"]]).choices[0].message
    calls = [[call.function.name, json.loads(call.function.arguments)] for call in message.tool_calls]
    return [message.content, message.reasoning_content, calls]


def tools_stream() -> Any:
    chunks = list(scripted(tools=[GIVEN["tool"]], stream=True))
    whole = litellm.stream_chunk_builder(chunks)
    message = whole.choices[0].message  # type: ignore[union-attr]
    calls = [[call.function.name, json.loads(call.function.arguments)] for call in message.tool_calls]
    return [message.content, message.reasoning_content, calls]


def second_turn() -> Any:
    first = scripted(tools=[GIVEN["tool"]]).choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "Sun.", "name": "weather"}
    turns = [{"role": "user", "content": "Rome?"}, first, result]
    return scripted(messages=turns, tools=[GIVEN["tool"]]).choices[0].message.content


def schema() -> Any:
    return json.loads(scripted(response_format=City).choices[0].message.content)


def responses() -> Any:
    answer = litellm.responses(
        model=f"openai/{GIVEN['scripted']['model']}",
        api_base=GIVEN["scripted"]["url"],
        api_key="none",
        input="Rome?",
    )
    return answer.output[-1].content[0].text  # type: ignore[union-attr]


def full() -> Any:
    try:
        scripted("Full")
    except litellm.RateLimitError as error:
        return error.status_code
    return None


CASES: dict[str, Callable[[], Any]] = {
    "completion": completion,
    "hosted_vllm": hosted_vllm,
    "stream": stream,
    "tools": tools,
    "tools_stream": tools_stream,
    "second_turn": second_turn,
    "schema": schema,
    "responses": responses,
    "full": full,
}

if __name__ == "__main__":
    seen = {}
    for name, case in CASES.items():
        try:
            seen[name] = case()
        except Exception:  # noqa: BLE001 - it is what the client has seen
            seen[name] = f"failed: {traceback.format_exc()}"
    print(json.dumps(seen))
