"""Clients of other makers, unchanged: `make clients` installs them apart from what the services need."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.partner import ANSWER, TOOL, WEATHER, converse
from tests.gateway.scripted import Scripted, scripted
from tests.gateway.trio import CLIP, PICTURE, Trio, data_url, image, said, text, video
from tests.launch import ROOT
from tests.waiting import until

PROGRAMS = Path(__file__).parent / "clients"
INSTALLED = ROOT / "build" / "clients"
URLS = {"picture": data_url(PICTURE, "image/png"), "video": data_url(CLIP, "video/mp4")}
QUESTIONS: dict[str, Any] = {
    "picture": [said(image(), text("What is it?"))],
    "video": [said(video(), text("What happens?"))],
    "hello": [said("Hello")],
}


@pytest.fixture(scope="module")
def scripted_door() -> Iterator[Scripted]:
    with scripted() as running:
        converse(running)
        yield running


def run(command: list[str], door: Trio, scripted_door: Scripted) -> dict[str, Any]:
    """What a client's program has seen, by case."""
    asked = {
        "packages": str(INSTALLED),
        "real": {"url": f"http://{door.gateway.address}/v1", "model": door.model},
        "scripted": {"url": f"http://{scripted_door.gateway.address}/v1", "model": "demo"},
        "tool": TOOL,
        "schema": WEATHER,
        **URLS,
    }
    done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return seen


def chat(door: Trio, question: str, **fields: Any) -> Any:
    """The same by Python's openai."""
    return door.client.chat.completions.create(
        **{"model": door.model, "messages": QUESTIONS[question], "temperature": 0, "max_tokens": 8, **fields}
    )


def by_node(package: str, name: str, door: Trio, scripted_door: Scripted) -> dict[str, Any]:
    """What a package of npm's has seen."""
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    if not (INSTALLED / "node_modules" / package).is_dir():
        pytest.skip(f"npm's {package} is not installed: make clients")
    return run(["node", str(PROGRAMS / name)], door, scripted_door)


@pytest.fixture(scope="module")
def node(door: Trio, scripted_door: Scripted) -> dict[str, Any]:
    """What npm's openai has seen."""
    return by_node("openai", "openai_node.mjs", door, scripted_door)


@pytest.fixture(scope="module")
def anthropic_node(door: Trio, scripted_door: Scripted) -> dict[str, Any]:
    """What npm's @anthropic-ai/sdk has seen."""
    return by_node("@anthropic-ai/sdk", "anthropic_node.mjs", door, scripted_door)


@pytest.fixture(scope="module")
def vercel(door: Trio, scripted_door: Scripted) -> dict[str, Any]:
    """What npm's ai has seen, by chats and by responses."""
    return by_node("ai", "vercel_node.mjs", door, scripted_door)


@pytest.mark.parametrize("case", ["picture", "video", "stream"])
def test_node_gets_the_words_and_counts_that_python_gets(door: Trio, node: dict[str, Any], case: str) -> None:
    answer = chat(door, "video" if case == "video" else "picture")
    assert node[case] == [answer.choices[0].message.content, "length", answer.usage.prompt_tokens]


def test_node_gets_every_choice_and_every_score(door: Trio, node: dict[str, Any]) -> None:
    several = chat(door, "hello", n=3, temperature=1.5, seed=11)
    assert node["n"] == [choice.message.content for choice in several.choices]
    scored = chat(door, "hello", logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert node["logprobs"] == [[each.token, 2] for each in scored]


def test_nodes_helper_for_streams_gathers_what_came(door: Trio, node: dict[str, Any]) -> None:
    content = chat(door, "picture").choices[0].message.content
    assert node["stream_helper"] == [content, content]


def test_node_gets_responses(door: Trio, node: dict[str, Any]) -> None:
    answer = chat(door, "picture")
    assert node["responses"] == [answer.choices[0].message.content, "incomplete", answer.usage.prompt_tokens]
    assert node["models"] == [door.model]


ARGUMENTS = '{"city": "Rome"}'
SEEN: dict[str, Any] = {
    "json_schema": ["city"],
    "parse": ["city"],
    "tools": ["Let me see.", "Hm.", {"name": "weather", "arguments": ARGUMENTS}, "tool_calls"],
    "tools_stream": [{"name": "weather", "arguments": ARGUMENTS}, "tool_calls"],
    "arguments_stream": [ARGUMENTS, ARGUMENTS],
    "second_turn": ANSWER,
    "run_tools": [ANSWER, ["Rome"]],
    "responses_stream": ["Let me see.", ["reasoning", "message", "function_call"], ARGUMENTS],
    "responses_parse": {"city": "Rome"},
    "abort": "assistant",
    "timeout": "APIConnectionTimeoutError",
    "retry": ANSWER,
    "no_retry": {"name": "RateLimitError", "status": 429, "code": "TOO_MANY_WAITING", "param": None},
    "refusal": {"name": "BadRequestError", "status": 400, "code": "FIELD_NOT_SERVED", "param": "audio"},
}


@pytest.mark.parametrize("case", SEEN)
def test_node_sees_what_the_model_said(node: dict[str, Any], case: str) -> None:
    assert node[case] == SEEN[case]


def test_what_node_gives_up_ends_in_the_services_as_well(scripted_door: Scripted, node: dict[str, Any]) -> None:
    left = 'requests_total{status="499",surface="chat"}'
    until(lambda: scripted_door.metric(left) == 2, "the aborted and the late request are counted")
    assert scripted_door.metric("open_requests") == 0


def test_anthropics_node_client_gets_the_words_and_counts_of_the_chat(
    door: Trio, anthropic_node: dict[str, Any]
) -> None:
    answer = chat(door, "picture")
    words, count = answer.choices[0].message.content, answer.usage.prompt_tokens
    assert anthropic_node["picture"] == anthropic_node["stream"] == [words, "max_tokens", count]
    assert anthropic_node["count"] == count


BLOCKS: list[dict[str, Any]] = [
    {"type": "thinking", "thinking": "Hm.", "signature": "unsigned"},
    {"type": "text", "text": "Let me see."},
    {"type": "tool_use", "name": "weather", "input": {"city": "Rome"}},
]


@pytest.mark.parametrize(
    ("case", "expected"),
    {
        "tools": BLOCKS,
        "tools_stream": BLOCKS,
        "second_turn": ANSWER,
        "abort": "message_start",
        "refusal": ["RateLimitError", 429, "rate_limit_error", "TOO_MANY_WAITING"],
    }.items(),
)
def test_anthropics_node_client_sees_what_the_model_said(
    scripted_door: Scripted, anthropic_node: dict[str, Any], case: str, expected: Any
) -> None:
    assert anthropic_node[case] == expected
    until(lambda: scripted_door.metric("open_requests") == 0, "nothing is under way")


@pytest.mark.parametrize("kind", ["chat", "response"])
def test_vercels_client_gets_the_words_and_counts_of_the_chat(door: Trio, vercel: dict[str, Any], kind: str) -> None:
    answer = chat(door, "picture")
    expected = [answer.choices[0].message.content, "length", answer.usage.prompt_tokens]
    assert vercel[f"{kind} picture"] == vercel[f"{kind} stream"] == expected


@pytest.mark.parametrize("kind", ["chat", "response"])
@pytest.mark.parametrize(
    ("case", "expected"),
    {
        "agent": ["Hm.", "Let me see.", ANSWER, ["Rome"]],
        "agent_stream": ["Hm.", "Let me see.", ANSWER, ["Rome"]],
        "output": {"city": "Rome"},
        "refusal": [429, "full", True],
    }.items(),
)
def test_vercels_client_sees_what_the_model_said(vercel: dict[str, Any], kind: str, case: str, expected: Any) -> None:
    assert vercel[f"{kind} {case}"] == expected


def test_vercels_client_warns_of_nothing(vercel: dict[str, Any]) -> None:
    assert vercel["warnings"] == []


def program(name: str, door: Trio, scripted_door: Scripted) -> dict[str, Any]:
    """What a Python client of another maker has seen."""
    if not (INSTALLED / ".installed").is_file():
        pytest.skip(f"{name} is not installed: make clients")
    return run([str(INSTALLED / "python" / "bin" / "python"), str(PROGRAMS / f"{name}_client.py")], door, scripted_door)


@pytest.fixture(scope="module")
def langchain(door: Trio, scripted_door: Scripted) -> dict[str, Any]:
    """What langchain-openai has seen."""
    return program("langchain", door, scripted_door)


@pytest.fixture(scope="module")
def litellm(door: Trio, scripted_door: Scripted) -> dict[str, Any]:
    """What litellm has seen."""
    return program("litellm", door, scripted_door)


def test_langchain_gets_the_words_and_counts_that_python_gets(door: Trio, langchain: dict[str, Any]) -> None:
    answer = chat(door, "picture")
    words, count = answer.choices[0].message.content, answer.usage.prompt_tokens
    assert langchain["invoke"] == langchain["stream"] == [words, "length", count]
    assert langchain["picture_block"] == langchain["responses"] == words
    brief = chat(door, "hello", messages=[said("Be brief.", role="system"), *QUESTIONS["hello"]])
    assert langchain["system"] == brief.choices[0].message.content
    assert langchain["logprobs"] == 8


CALLED = [["weather", {"city": "Rome"}]]


@pytest.mark.parametrize(
    ("case", "expected"),
    {
        "bind_tools": ["Let me see.", CALLED],
        "bind_tools_stream": CALLED,
        "required_tool": CALLED,
        "named_tool": CALLED,
        "second_turn": ANSWER,
        "structured_json_schema": "Rome",
        "structured_function_calling": "Rome",
        "structured_json_mode": "Rome",
        "responses_tools": [["weather"], ANSWER],
        "responses_stream": ["Let me see.", CALLED],
        "cut_stream": [[], ["weather"]],
        "responses_cut_stream": [[], ["weather"]],
    }.items(),
)
def test_langchain_sees_what_the_model_said(langchain: dict[str, Any], case: str, expected: Any) -> None:
    assert langchain[case] == expected


def test_litellm_gets_the_words_and_counts_that_python_gets(door: Trio, litellm: dict[str, Any]) -> None:
    answer = chat(door, "picture")
    words, count = answer.choices[0].message.content, answer.usage.prompt_tokens
    assert litellm["completion"] == [words, "length", count]
    assert litellm["stream"] == [words, count]
    assert litellm["hosted_vllm"] == words


@pytest.mark.parametrize(
    ("case", "expected"),
    {
        "tools": ["Let me see.", "Hm.", CALLED],
        "tools_stream": ["Let me see.", "Hm.", CALLED],
        "second_turn": ANSWER,
        "schema": {"city": "Rome"},
        "responses": ANSWER,
        "full": 429,
    }.items(),
)
def test_litellm_sees_what_the_model_said(litellm: dict[str, Any], case: str, expected: Any) -> None:
    assert litellm[case] == expected
