"""Tools and reasoning by the real client: calls whole and streamed, a second turn, and what is no call."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest

from llm_service.request import ChatPrompt, Message, ToolCall, ToolDefinition
from tests.gateway.scripted import Scripted, scripted
from tests.gateway.trio import fronted, said, trio
from tests.rpc.pairs import pair
from tests.unit.llm_service.test_tools_in_prompts import TEMPLATE, plain
from tests.unit.twinlens.fakes import FakeLlm
from twinlens import v1

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        "strict": True,
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TEXT = f"<think>\nHm.\n</think>\n\nLet me see.\n{CALL}\n{CALL}"
ASK: Any = {"model": "demo", "messages": [{"role": "user", "content": "What is the weather in Rome?"}], "tools": [TOOL]}


@pytest.fixture(scope="module")
def door() -> Iterator[Scripted]:
    with scripted() as running:
        yield running


@pytest.fixture
def client(door: Scripted) -> Iterator[openai.OpenAI]:
    door.llm.requests.clear()
    with openai.OpenAI(base_url=f"http://{door.gateway.address}/v1", api_key="x", max_retries=0) as client:
        yield client


def says(
    door: Scripted,
    text: str,
    reason: v1.FinishReason = v1.FINISH_REASON_STOP,
    *,
    thinking: bool = False,
    thought: int = 0,
    unread: bool = False,
) -> None:
    """Has the LLM service say this, three signs at a time."""

    def play(request: v1.GenerateRequest) -> Iterator[v1.GenerateResponse]:
        yield v1.GenerateResponse(
            started=v1.GenerateStarted(prompt_tokens=9, thinking=thinking, reasoning_unread=unread)
        )
        for at in range(0, len(text), 3):
            yield v1.GenerateResponse(delta=v1.GenerateDelta(text=text[at : at + 3], token_ids=[at]))
        usage = v1.Usage(prompt_tokens=9, completion_tokens=-(-len(text) // 3), reasoning_tokens=thought)
        yield v1.GenerateResponse(finished=v1.GenerateFinished(reason=reason, usage=usage))

    door.llm.play = play


def streamed(client: openai.OpenAI, **fields: Any) -> tuple[str, str, list[dict[str, str]], str | None]:
    """What a stream says: reasoning, words, calls, and how it ends."""
    thought, words, ending = "", "", None
    calls: list[dict[str, str]] = []
    for chunk in client.chat.completions.create(**{**ASK, **fields}, stream=True):
        delta = chunk.choices[0].delta
        thought += getattr(delta, "reasoning_content", None) or ""
        assert getattr(delta, "reasoning", None) == getattr(delta, "reasoning_content", None)
        words += delta.content or ""
        for each in delta.tool_calls or []:
            if each.id:
                assert each.index == len(calls)
                calls.append({"id": each.id, "name": each.function.name, "arguments": ""})
            calls[each.index]["arguments"] += each.function.arguments or ""
        ending = chunk.choices[0].finish_reason
    return thought, words, calls, ending


def test_a_models_calls_are_the_answers(door: Scripted, client: openai.OpenAI) -> None:
    says(door, TEXT)
    choice = client.chat.completions.create(**ASK).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("Let me see.", "tool_calls")
    assert choice.message.reasoning_content == "Hm."  # type: ignore[attr-defined]
    assert choice.message.reasoning == "Hm."  # type: ignore[attr-defined]
    calls = choice.message.tool_calls or []
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
        ("weather", {"city": "Rome"})
    ] * 2
    assert len({call.id for call in calls}) == 2
    (tool,) = door.llm.requests[0].chat.tools
    assert (tool.name, tool.description) == ("weather", "The weather")
    assert json.loads(tool.parameters) == TOOL["function"]["parameters"]
    assert tool.strict


def test_a_stream_has_the_same_calls(door: Scripted, client: openai.OpenAI) -> None:
    says(door, TEXT)
    thought, words, calls, ending = streamed(client)
    assert (thought, words, ending) == ("Hm.", "Let me see.", "tool_calls")
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [("weather", {"city": "Rome"})] * 2


def test_reasoning_is_left_out_where_that_is_asked_for(door: Scripted, client: openai.OpenAI) -> None:
    says(door, TEXT, thought=4)
    shown = client.chat.completions.create(**ASK)
    hidden = client.chat.completions.create(**ASK, extra_body={"include_reasoning": False})
    assert not {"reasoning", "reasoning_content"} & hidden.choices[0].message.model_dump().keys()
    assert (hidden.choices[0].message.content, hidden.usage) == (shown.choices[0].message.content, shown.usage)
    thought, words, calls, ending = streamed(client, extra_body={"include_reasoning": False})
    assert (thought, words, len(calls), ending) == ("", "Let me see.", 2, "tool_calls")


def test_a_second_turn_brings_calls_results_and_reasoning_back(door: Scripted, client: openai.OpenAI) -> None:
    says(door, TEXT)
    message = client.chat.completions.create(**ASK).choices[0].message
    assert message.tool_calls
    results = [{"role": "tool", "tool_call_id": call.id, "content": "Sun."} for call in message.tool_calls]
    says(door, "It is sunny.")
    door.llm.requests.clear()
    turns: Any = [*ASK["messages"], message, *results]
    answer = client.chat.completions.create(**{**ASK, "messages": turns}).choices[0]
    assert (answer.message.content, answer.message.tool_calls, answer.finish_reason) == ("It is sunny.", None, "stop")
    _, said_before, *given = door.llm.requests[0].chat.messages
    assert (said_before.role, said_before.reasoning) == ("assistant", "Hm.")
    assert [(call.id, call.name, json.loads(call.arguments)) for call in said_before.tool_calls] == [
        (call.id, "weather", {"city": "Rome"}) for call in message.tool_calls
    ]
    assert [(each.role, each.tool_call_id, each.parts[0].text) for each in given] == [
        ("tool", call.id, "Sun.") for call in message.tool_calls
    ]


@pytest.mark.parametrize("text", ["<tool_call>{oops}</tool_call>", "Hm. <tool_call>{", "<tool_call></tool_call>"])
def test_what_is_no_call_comes_back_as_it_was_written(door: Scripted, client: openai.OpenAI, text: str) -> None:
    says(door, text, v1.FINISH_REASON_LENGTH)
    choice = client.chat.completions.create(**ASK).choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "length")
    assert streamed(client)[1:] == (text, [], "length")


@pytest.mark.parametrize(
    ("reason", "ending"), [(v1.FINISH_REASON_LENGTH, "length"), (v1.FINISH_REASON_STOP, "stop")], ids=["cut", "broken"]
)
def test_a_call_that_a_stream_has_begun_and_that_never_ends_is_no_json(
    door: Scripted, client: openai.OpenAI, reason: v1.FinishReason, ending: str
) -> None:
    text = 'Hm.\n<tool_call>\n{"name": "weather", "arguments": {"city":"Ro'
    says(door, text, reason)
    choice = client.chat.completions.create(**ASK).choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, ending)
    _, words, (call,), ended = streamed(client)
    assert (words, call["name"], call["arguments"], ended) == (text, "weather", '{"city": "Ro"]', ending)


def test_without_tools_nothing_is_a_call(door: Scripted, client: openai.OpenAI) -> None:
    says(door, CALL)
    for fields in ({"tools": []}, {"tool_choice": "none"}):
        door.llm.requests.clear()
        choice = client.chat.completions.create(**{**ASK, **fields}).choices[0]
        assert (choice.message.content, choice.message.tool_calls) == (CALL, None)
        assert not door.llm.requests[0].chat.tools


def test_one_call_where_more_are_not_wanted(door: Scripted, client: openai.OpenAI) -> None:
    says(door, TEXT)
    assert (
        len(client.chat.completions.create(**ASK, parallel_tool_calls=False).choices[0].message.tool_calls or []) == 1
    )
    assert len(streamed(client, parallel_tool_calls=False)[2]) == 1


def test_a_call_that_is_required_is_compiled(door: Scripted, client: openai.OpenAI) -> None:
    says(door, '[{"name": "weather", "parameters": {"city": "Rome"}}]', v1.FINISH_REASON_STRUCTURE)
    choice = client.chat.completions.create(**ASK, tool_choice="required").choices[0]
    assert choice.message.tool_calls
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Rome"}
    assert choice.finish_reason == "tool_calls"
    schema = json.loads(door.llm.requests[0].sampling.json_schema)
    (call,) = schema["items"]["anyOf"]
    assert call["properties"]["parameters"] == {"$ref": "#/$defs/f0"}
    assert schema["$defs"] == {"f0": TOOL["function"]["parameters"]}


def test_the_arguments_of_a_named_function_are_streamed(door: Scripted, client: openai.OpenAI) -> None:
    says(door, '{"city": "Rome"}', v1.FINISH_REASON_STRUCTURE)
    named = {"type": "function", "function": {"name": "weather"}}
    chunks = list(client.chat.completions.create(**ASK, tool_choice=named, stream=True))
    pieces = [each.function.arguments for chunk in chunks for each in chunk.choices[0].delta.tool_calls or []]
    assert "".join(pieces) == '{"city": "Rome"}'
    assert len(pieces) > 4
    assert json.loads(door.llm.requests[0].sampling.json_schema) == TOOL["function"]["parameters"]
    assert streamed(client, tool_choice=named)[2][0]["name"] == "weather"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_that_must_be_made_and_a_stop_text_ends_is_none(
    door: Scripted, client: openai.OpenAI, choice: Any
) -> None:
    text = '{"city": "' if isinstance(choice, dict) else '[{"name": "weather", "parameters": {"city": "'
    says(door, text)
    answer = client.chat.completions.create(**ASK, tool_choice=choice, stop=["Rome"]).choices[0]
    assert (answer.message.content, answer.message.tool_calls, answer.finish_reason) == (text, None, "stop")
    _, words, _, ended = streamed(client, tool_choice=choice, stop=["Rome"])
    assert (words, ended) == (text, "stop")
    flat: Any = {"type": "function", **TOOL["function"]}
    wanted: Any = choice if choice == "required" else {"type": "function", "name": "weather"}
    response = client.responses.create(model="demo", input="x", tools=[flat], tool_choice=wanted)
    assert [each.type for each in response.output] == ["message"]
    says(door, text, v1.FINISH_REASON_LENGTH)
    answer = client.chat.completions.create(**ASK, tool_choice=choice).choices[0]
    assert answer.finish_reason == "length"


def test_a_prompt_that_ends_in_reasoning_begins_with_it(door: Scripted, client: openai.OpenAI) -> None:
    says(door, "Hm.\n</think>\n\nYes.", thinking=True)
    assert streamed(client, tools=[])[:2] == ("Hm.", "Yes.")
    fields: Any = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
    client.chat.completions.create(**ASK, **fields)
    assert door.llm.requests[-1].chat.thinking is False


def test_tokens_of_reasoning_are_as_many_as_the_service_says(door: Scripted, client: openai.OpenAI) -> None:
    says(door, TEXT, thought=7)
    counted = client.chat.completions.create(**ASK).usage
    assert counted is not None
    assert counted.completion_tokens_details is not None
    assert counted.completion_tokens_details.reasoning_tokens == 7
    *_, last = client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True})
    assert last.usage == counted
    response = client.responses.create(model="demo", input="Rome?")
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == 7


def test_an_answer_that_must_have_a_form_has_no_reasoning(door: Scripted, client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    says(door, '{"a": "</think>"}', v1.FINISH_REASON_STRUCTURE)
    assert streamed(client, tools=[], response_format=form)[:2] == ("", '{"a": "</think>"}')
    message = client.chat.completions.create(**{**ASK, "tools": []}, response_format=form).choices[0].message
    assert (message.content, hasattr(message, "reasoning_content")) == ('{"a": "</think>"}', False)
    text: Any = {"format": {"type": "json_object"}}
    assert client.responses.create(model="demo", input="x", text=text).output_text == '{"a": "</think>"}'
    says(door, '[{"name": "weather", "parameters": {"city": "Rome"}}]', v1.FINISH_REASON_STRUCTURE)
    calls = client.chat.completions.create(**ASK, tool_choice="required").choices[0].message.tool_calls
    assert [call.function.name for call in calls or []] == ["weather"]


def test_an_answer_has_its_form_or_is_calls_where_it_may_be_both(door: Scripted, client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    says(door, f"\n{CALL}", v1.FINISH_REASON_STRUCTURE)
    answer = client.chat.completions.create(**ASK, response_format=form).choices[0]
    assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
    assert [call.function.name for call in answer.message.tool_calls or []] == ["weather"]
    says(door, json.dumps({"a": CALL}), v1.FINISH_REASON_STRUCTURE)
    answer = client.chat.completions.create(**ASK, response_format=form).choices[0]
    assert (answer.finish_reason, answer.message.content) == ("stop", json.dumps({"a": CALL}))
    assert door.llm.requests[-1].chat.calls_or_form
    client.chat.completions.create(**ASK, response_format=form, tool_choice="none")
    assert not door.llm.requests[-1].chat.calls_or_form


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_where_a_call_must_be_made_the_form_waits_for_another_turn(
    door: Scripted, client: openai.OpenAI, choice: Any
) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": 5}}}
    says(door, '{"city": "Rome"}', v1.FINISH_REASON_STRUCTURE)
    client.chat.completions.create(**ASK, response_format=form, tool_choice=choice)
    asked = door.llm.requests[-1]
    assert "city" in asked.sampling.json_schema
    assert "const" not in asked.sampling.json_schema
    assert not asked.chat.calls_or_form


def test_what_the_operator_has_left_in_the_text_is_words(client: openai.OpenAI) -> None:
    llm = FakeLlm()
    llm.tool_format = v1.TOOL_FORMAT_NONE
    with scripted(llm) as unread:
        said = f"<think>Hm.</think>{CALL}"
        says(unread, said, unread=True)
        other = client.with_options(base_url=f"http://{unread.gateway.address}/v1")
        choice = other.chat.completions.create(**ASK).choices[0]
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (said, None, "stop")
        assert [tool.name for tool in llm.requests[-1].chat.tools] == ["weather"]


@pytest.mark.parametrize("off", [{"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}])
def test_an_answer_has_its_form_behind_reasoning_that_the_model_opens_unless_it_is_not_to_think(
    door: Scripted, client: openai.OpenAI, off: dict[str, Any]
) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    says(door, '<think>\nHm.\n</think>\n\n{"a": 1}', v1.FINISH_REASON_STRUCTURE)
    assert streamed(client, tools=[], response_format=form)[:2] == ("Hm.", '{"a": 1}')
    assert door.llm.requests[-1].chat.thinks_before_form
    says(
        door,
        '<think>[{"name": "weather", "parameters": {}}]</think>[{"name": "weather", "parameters": {"city": "Rome"}}]',
    )
    thought, words, (call,), _ = streamed(client, tool_choice="required")
    assert (words, json.loads(call["arguments"])) == ("", {"city": "Rome"})
    assert thought.startswith("[{")
    says(door, "<think>", v1.FINISH_REASON_STRUCTURE)
    assert streamed(client, tools=[], extra_body={"guided_regex": "<thi.*", **off})[:2] == ("", "<think>")
    assert not door.llm.requests[-1].chat.thinks_before_form
    says(door, "Hello")
    client.chat.completions.create(**ASK)
    assert not door.llm.requests[-1].chat.thinks_before_form


def test_an_answer_has_its_form_behind_the_reasoning_that_its_prompt_begins(
    door: Scripted, client: openai.OpenAI
) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    says(door, 'Hm.\n</think>\n\n{"a": "</think>"}', v1.FINISH_REASON_STRUCTURE, thinking=True)
    assert streamed(client, tools=[], response_format=form)[:2] == ("Hm.", '{"a": "</think>"}')
    text: Any = {"format": {"type": "json_object"}}
    thought, said = client.responses.create(model="demo", input="x", text=text).output
    assert (thought.type, said.type, said.content[0].text) == ("reasoning", "message", '{"a": "</think>"}')  # type: ignore[union-attr]
    says(door, 'Hm.</think>\n{"city": "Rome"}', v1.FINISH_REASON_STRUCTURE, thinking=True)
    named = {"type": "function", "function": {"name": "weather"}}
    thought, words, (call,), _ = streamed(client, tool_choice=named)
    assert (thought, words, call["name"], call["arguments"]) == ("Hm.", "", "weather", '{"city": "Rome"}')
    says(door, 'Hm.</think>[{"name": "weather", "parameters": {"city": "Rome"}}]', thinking=True)
    thought, words, (call,), _ = streamed(client, tool_choice="required")
    assert (thought, words, call["name"], json.loads(call["arguments"])) == ("Hm.", "", "weather", {"city": "Rome"})


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "tool", "content": "x"}, "messages[1].tool_call_id"),
        ({"role": "assistant"}, "messages[1].content"),
        ({"role": "assistant", "tool_calls": [{"id": "a"}]}, "messages[1].tool_calls[0].function"),
    ],
)
def test_a_turn_that_lacks_something_is_refused_where(door: Scripted, message: Any, param: str) -> None:
    reply = door.post("/v1/chat/completions", {"messages": [said("x"), message]})
    assert (reply.status, reply.error["param"]) == (400, param)


def test_a_template_that_knows_tools_lays_them_out_and_says_so(checkpoint: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint, tmp_path / "tools"))
    (folder / "chat_template.jinja").write_text(TEMPLATE, "utf-8")
    arguments = {"city": 'the "eternal"\none', "days": 2}
    prompt = ChatPrompt(
        (
            Message("user", ("Rome?",)),
            Message("assistant", ("Let me see.",), (ToolCall("c1", "weather", arguments),), reasoning="Hm."),
            Message("tool", ("Sun.",), tool_call_id="c1"),
        ),
        (ToolDefinition("weather", "The weather", TOOL["function"]["parameters"]),),
    )
    function = {"name": "weather", "arguments": json.dumps(arguments)}
    own = {"role": "assistant", "content": "Let me see.", "reasoning_content": "Hm."}
    messages = [
        said("Rome?"),
        {**own, "tool_calls": [{"id": "c1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c1", "content": "Sun."},
    ]
    with trio(folder) as door:
        info = door.services.text.get_info()
        assert info.tool_format == v1.TOOL_FORMAT_JSON
        assert list(info.modalities) == [v1.MODALITY_IMAGE, v1.MODALITY_VIDEO]
        reply = door.chat(messages=messages, tools=[TOOL])  # this tokenizer has no tokens for the marks of a call
        assert (reply.status, reply.error["code"]) == (400, "NO_STRICT_TOOLS")
        assert reply.error["param"] == "tools[0].function.strict"
        free = {**TOOL, "function": {**TOOL["function"], "strict": False}}
        reply = door.chat(messages=messages, tools=[free])
        assert reply.status == 200, reply.body
        expected = door.services.text.tokenize(plain(prompt), allow_special=True)
        assert json.loads(reply.body)["usage"]["prompt_tokens"] == len(expected)
        forced = door.chat(messages=messages[:1], tools=[TOOL], tool_choice="required", max_tokens=200, seed=1)
        (choice,) = json.loads(forced.body)["choices"]
        assert {call["function"]["name"] for call in choice["message"].get("tool_calls", ())} <= {"weather"}
        assert choice["finish_reason"] in ("tool_calls", "length")  # the last call may be cut off
    with pair(folder, strict_tools="best-effort") as services, fronted(services) as door:
        reply = door.chat(messages=messages, tools=[TOOL])
        assert reply.status == 200, reply.body


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_parameters_that_cannot_be_followed_are_those_of_the_tools(door: Scripted, choice: Any) -> None:
    code = grpc.StatusCode.INVALID_ARGUMENT
    status = v1.Status(code=code.value[0], reason="BAD_STRUCTURE", message="no", field="sampling.json_schema")
    door.llm.play, door.llm.refusal = lambda _: iter(()), (code, status)
    try:
        tools = [{"type": "function", "function": {"name": "f"}}]
        message = {"role": "user", "content": "Hello"}
        reply = door.post("/v1/chat/completions", {"messages": [message], "tools": tools, "tool_choice": choice})
    finally:
        door.llm.refusal = None
    assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "BAD_STRUCTURE", "tools")
