"""Responses by the real client: the same as a chat, told as items, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import grpc
import openai
import pytest
from openai.types.responses import ResponseErrorEvent, ResponseFailedEvent
from openai.types.responses import input_token_count_params as count_params
from openai.types.responses import response_create_params as params

from gateway.api.responses_request import InputTokensRequest, ResponsesRequest
from tests.gateway.scripted import Scripted, scripted
from tests.gateway.test_tools import TEXT, says
from tests.gateway.trio import PICTURE, Trio, data_url, image, said, text
from twinlens import v1

TOOL: Any = {
    "type": "function",
    "name": "weather",
    "description": "The weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
URL = data_url(PICTURE, "image/png")


@pytest.fixture(scope="module")
def scripted_door() -> Iterator[Scripted]:
    with scripted() as running:
        yield running


@pytest.fixture
def client(scripted_door: Scripted) -> Iterator[openai.OpenAI]:
    scripted_door.llm.requests.clear()
    address = scripted_door.gateway.address
    with openai.OpenAI(base_url=f"http://{address}/v1", api_key="x", max_retries=0) as client:
        yield client


def test_a_response_has_the_words_and_counts_of_the_chat(door: Trio) -> None:
    parts = [{"type": "input_image", "image_url": URL, "detail": "auto"}, {"type": "input_text", "text": "What?"}]
    conversation: Any = [{"role": "user", "content": parts}]
    fields: Any = {"model": door.model, "temperature": 0, "max_output_tokens": 8}
    chat = door.client.chat.completions.create(
        model=door.model,
        messages=[{"role": "system", "content": "Be brief."}, said(image(), text("What?"))],  # type: ignore[list-item]
        temperature=0,
        max_tokens=8,
    )
    response = door.client.responses.create(**fields, input=conversation, instructions="Be brief.")
    assert response.output_text == chat.choices[0].message.content
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")  # type: ignore[union-attr]
    assert chat.usage is not None
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (
        chat.usage.prompt_tokens,
        chat.usage.completion_tokens,
    )
    with door.client.responses.stream(**fields, input=conversation, instructions="Be brief.") as stream:
        words = "".join(each.delta for each in stream if each.type == "response.output_text.delta")
        assert words == response.output_text


GROUP: Any = {
    "type": "namespace",
    "name": "sky",
    "description": "All about the sky.",
    "tools": [TOOL, {"type": "function", "name": "stars"}],
}


def test_functions_of_a_namespace_are_offered_and_called(scripted_door: Scripted, client: openai.OpenAI) -> None:
    says(scripted_door, TEXT)
    other: Any = {"type": "function", "name": "other", "parameters": None, "strict": False}
    fields: Any = {"model": "demo", "tools": [other, GROUP]}
    response = client.responses.create(**fields, input="Rome?")
    told = [(tool.name, tool.description) for tool in scripted_door.llm.requests[0].chat.tools]
    assert told == [
        ("other", ""),
        ("weather", "All about the sky.\n\nThe weather"),
        ("stars", "All about the sky."),
    ]
    *_, call = response.output
    assert call.type == "function_call"
    assert (call.name, call.namespace, json.loads(call.arguments)) == ("weather", "sky", {"city": "Rome"})
    assert [tool.type for tool in response.tools] == ["function", "namespace"]
    events = list(client.responses.create(**fields, input="Rome?", stream=True))
    begun = [each.item for each in events if each.type == "response.output_item.added"]
    assert begun[-1].namespace == "sky"  # type: ignore[union-attr]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Sun.", "namespace": "sky"}
    turns: Any = [{"role": "user", "content": "Rome?"}, *(item.to_dict() for item in response.output), result]
    client.responses.create(**fields, input=turns)
    assert [each.role for each in scripted_door.llm.requests[-1].chat.messages] == ["user", "assistant", "tool"]


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([TOOL, {"type": "web_search"}], "tools[1].type"),
        ([{**GROUP, "tools": [{"type": "custom", "name": "x"}]}], "tools[0].tools[0].type"),
        ([TOOL, GROUP], None),
    ],
)
def test_a_tool_that_cannot_be_offered_is_refused(scripted_door: Scripted, tools: Any, param: str | None) -> None:
    for path in ("/v1/responses", "/v1/responses/input_tokens"):
        reply = scripted_door.post(path, {"input": "x", "tools": tools})
        assert (reply.status, reply.error["param"]) == (400, param)


def test_reasoning_words_and_calls_are_items(scripted_door: Scripted, client: openai.OpenAI) -> None:
    says(scripted_door, TEXT)
    response = client.responses.create(model="demo", input="Rome?", tools=[TOOL])
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
    thought, message, call, _ = response.output
    assert thought.content[0].text == "Hm."  # type: ignore[union-attr,index]
    assert (message.content[0].text, response.output_text) == ("Let me see.", "Let me see.")  # type: ignore[union-attr]
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Rome"})  # type: ignore[union-attr]
    assert (response.status, response.store, response.error) == ("completed", False, None)
    (tool,) = scripted_door.llm.requests[0].chat.tools
    assert (tool.name, json.loads(tool.parameters)) == ("weather", TOOL["parameters"])


def test_a_stream_tells_the_same_in_order(scripted_door: Scripted, client: openai.OpenAI) -> None:
    says(scripted_door, TEXT)
    events = list(client.responses.create(model="demo", input="Rome?", tools=[TOOL], stream=True))
    assert [each.sequence_number for each in events] == list(range(len(events)))
    kinds = [each.type for each in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 4
    open_item: int | None = None
    for each in events:
        if each.type == "response.output_item.added":
            assert open_item is None
            open_item = each.output_index
        elif each.type == "response.output_item.done":
            assert each.output_index == open_item
            open_item = None
        elif hasattr(each, "output_index"):
            assert each.output_index == open_item
    final = events[-1].response  # type: ignore[union-attr]
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]
    done = [each.item for each in events if each.type == "response.output_item.done"]
    assert [item.id for item in done] == [item.id for item in final.output]
    with client.responses.stream(model="demo", input="Rome?", tools=[TOOL]) as stream:
        assert stream.get_final_response().output_text == "Let me see."
    arguments = [each.arguments for each in events if each.type == "response.function_call_arguments.done"]
    assert [json.loads(each) for each in arguments] == [{"city": "Rome"}] * 2


LIKELY: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


def test_the_logprobs_of_a_message_are_those_of_the_chat(door: Trio) -> None:
    chat = door.client.chat.completions.create(
        model=door.model,
        messages=[said("Hello")],  # type: ignore[list-item]
        temperature=0,
        max_tokens=8,
        logprobs=True,
        top_logprobs=2,
    )
    fields: Any = {"model": door.model, "input": "Hello", "temperature": 0, "max_output_tokens": 8, **LIKELY}
    response = door.client.responses.create(**fields)
    (message,) = response.output
    expected = [each.model_dump() for each in chat.choices[0].logprobs.content]  # type: ignore[union-attr]
    assert len(expected) == 8
    assert [each.model_dump() for each in message.content[0].logprobs] == expected  # type: ignore[union-attr]
    assert response.top_logprobs == 2
    events = list(door.client.responses.create(**fields, stream=True))
    pieces = [each for event in events if event.type == "response.output_text.delta" for each in event.logprobs]
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    assert [each.token for each in pieces] == [each.token for each in done.logprobs]
    assert [(each.token, each.logprob, len(each.top_logprobs or ())) for each in done.logprobs] == [
        (each["token"], each["logprob"], 2) for each in expected
    ]


def test_reasoning_and_calls_have_no_logprobs(scripted_door: Scripted, client: openai.OpenAI) -> None:
    scripted_door.llm.play = scored(TEXT)
    (message,) = [
        item
        for item in client.responses.create(model="demo", input="Rome?", tools=[TOOL], **LIKELY).output
        if item.type == "message"
    ]
    likely = message.content[0].logprobs  # type: ignore[union-attr]
    assert "".join(each.token for each in likely or ()).partition("</think>")[2].strip() == "Let me see."
    assert scripted_door.llm.requests[0].sampling.logprobs == 2
    scripted_door.llm.play = scored("<think>\nHm.")
    (thought,) = client.responses.create(model="demo", input="Rome?", **LIKELY).output
    assert thought.type == "reasoning"
    assert b"logprobs" not in scripted_door.post("/v1/responses", {"input": "x"}).body.replace(b"top_logprobs", b"")


def scored(text: str) -> Callable[[v1.GenerateRequest], Iterator[v1.GenerateResponse]]:
    """A generation of this text, three signs a token, each scored."""

    def play(request: v1.GenerateRequest) -> Iterator[v1.GenerateResponse]:
        yield v1.GenerateResponse(started=v1.GenerateStarted(prompt_tokens=9))
        for at in range(0, len(text), 3):
            new = text[at : at + 3]
            likely = [v1.TokenLogprobs(logprob=-0.5, text=new)] if request.sampling.HasField("logprobs") else []
            yield v1.GenerateResponse(delta=v1.GenerateDelta(text=new, token_ids=[at], logprobs=likely))
        yield v1.GenerateResponse(finished=v1.GenerateFinished(reason=v1.FINISH_REASON_STOP))

    return play


def test_logprobs_are_asked_for_by_both_fields(scripted_door: Scripted) -> None:
    reply = scripted_door.post("/v1/responses", {"input": "x", "top_logprobs": 2})
    assert (reply.status, reply.error["code"]) == (400, "BAD_FIELD")
    assert "top_logprobs need include" in reply.error["message"]
    reply = scripted_door.post("/v1/responses", {"input": "x", "include": ["file_search_call.results"]})
    assert (reply.status, reply.error["param"]) == (400, "include[0]")


def test_a_prompt_that_is_too_long_loses_its_beginning_where_that_is_asked_for(door: Trio) -> None:
    context = door.services.text.get_info().context_tokens
    fields: Any = {"model": door.model, "input": "a " * context, "max_output_tokens": 4, "temperature": 0}
    with pytest.raises(openai.BadRequestError, match="prompt is too long"):
        door.client.responses.create(**fields, truncation="disabled")
    response = door.client.responses.create(**fields, truncation="auto")
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (context - 4, 4)
    assert response.truncation == "auto"
    picture = [{"type": "input_image", "image_url": URL}, {"type": "input_text", "text": "a " * context}]
    reply = door.post("/v1/responses", {"input": [{"role": "user", "content": picture}], "truncation": "auto"})
    assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "CUTS_MEDIA", "truncation")
    short: Any = {**fields, "input": "Hello"}
    whole, cut = (door.client.responses.create(**short, truncation=each) for each in ("disabled", "auto"))
    assert (whole.output_text, whole.usage) == (cut.output_text, cut.usage)


COUNTED: Any = [
    {"input": "Rome?"},
    {"input": "Rome?", "instructions": "Be brief."},
    {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": URL}]}]},
]


@pytest.mark.parametrize("prompt", COUNTED, ids=["a text", "instructions", "a picture"])
def test_a_prompts_tokens_are_counted_as_for_an_answer(door: Trio, prompt: Any) -> None:
    counted = door.client.responses.input_tokens.count(model=door.model, **prompt)
    answered = door.client.responses.create(model=door.model, **prompt, max_output_tokens=1)
    assert counted.object == "response.input_tokens"
    assert answered.usage is not None
    assert counted.input_tokens == answered.usage.input_tokens


def test_fields_of_a_count_reach_the_llm_service_or_are_refused(scripted_door: Scripted) -> None:
    known = {*InputTokensRequest.model_fields, *InputTokensRequest.without_effect}
    for field in {*count_params.InputTokenCountParams.__annotations__} - known:
        reply = scripted_door.post("/v1/responses/input_tokens", {"input": "x", field: {"some": "value"}})
        assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "FIELD_NOT_SERVED", field)
    reply = scripted_door.post("/v1/responses/input_tokens", {"input": [{"role": "ghost", "content": "x"}]})
    assert (reply.status, reply.error["param"]) == (400, "input[0].role")


def test_a_count_that_the_services_refuse_names_the_field(door: Trio) -> None:
    bad = {"type": "input_image", "image_url": data_url(b"no picture", "image/png")}
    reply = door.post(
        "/v1/responses/input_tokens", {"input": [{"role": "user", "content": [bad]}], "instructions": "x"}
    )
    assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "MEDIA_FORMAT", "input[0].content[0]")
    reply = door.post("/v1/responses/input_tokens", {"input": "x", "model": "ghost"})
    assert (reply.status, reply.error["code"]) == (404, "UNKNOWN_MODEL")


def test_a_call_is_told_as_it_is_made_and_its_pieces_are_the_whole_answers(
    scripted_door: Scripted, client: openai.OpenAI
) -> None:
    says(scripted_door, TEXT)
    whole = client.responses.create(model="demo", input="Rome?", tools=[TOOL]).output
    pieces: dict[int, list[str]] = {}
    done: dict[int, str] = {}
    for each in client.responses.create(model="demo", input="Rome?", tools=[TOOL], stream=True):
        if each.type == "response.function_call_arguments.delta":
            pieces.setdefault(each.output_index, []).append(each.delta)
        elif each.type == "response.function_call_arguments.done":
            done[each.output_index] = each.arguments
        elif each.type == "response.completed":
            assert [getattr(item, "status", "") for item in each.response.output] == ["completed"] * 4
    assert {index: "".join(told) for index, told in pieces.items()} == done
    assert done == {index: item.arguments for index, item in enumerate(whole) if item.type == "function_call"}
    assert all(len(told) > 3 for told in pieces.values()), "they come as the model writes them"
    with client.responses.stream(model="demo", input="Rome?", tools=[TOOL]) as stream:
        snapshots = [each.snapshot for each in stream if each.type == "response.function_call_arguments.delta"]
        final = stream.get_final_response()
    assert all(later.startswith(each) for each, later in pairwise(snapshots[: len(snapshots) // 2]))
    assert [each.parsed_arguments for each in final.output if each.type == "function_call"] == [{"city": "Rome"}] * 2


@pytest.mark.parametrize(
    ("reason", "ending"),
    [(v1.FINISH_REASON_LENGTH, "incomplete"), (v1.FINISH_REASON_STOP, "completed")],
    ids=["cut", "broken"],
)
def test_a_call_that_a_stream_has_begun_and_that_never_ends_is_incomplete(
    scripted_door: Scripted, client: openai.OpenAI, reason: v1.FinishReason, ending: str
) -> None:
    text = 'Hm.\n<tool_call>\n{"name": "weather", "arguments": {"city":"Ro'
    says(scripted_door, text, reason)
    *events, last = client.responses.create(model="demo", input="Rome?", tools=[TOOL], stream=True)
    assert last.type == f"response.{ending}"
    before, call, behind = last.response.output  # type: ignore[union-attr]
    assert (call.type, call.arguments, call.status) == ("function_call", '{"city": "Ro"]', "incomplete")
    assert before.content[0].text + behind.content[0].text == text
    assert [each.item.status for each in events if each.type == "response.output_item.done"][1] == "incomplete"


def test_a_second_turn_brings_everything_back_as_one_message(scripted_door: Scripted, client: openai.OpenAI) -> None:
    says(scripted_door, TEXT)
    first = client.responses.create(model="demo", input="Rome?", tools=[TOOL])
    calls = [item for item in first.output if item.type == "function_call"]
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "Sun."} for call in calls]
    says(scripted_door, "It is sunny.")
    scripted_door.llm.requests.clear()
    turns: Any = [{"role": "user", "content": "Rome?"}, *first.output, *results]
    assert client.responses.create(model="demo", input=turns, tools=[TOOL]).output_text == "It is sunny."
    user, own, *given = scripted_door.llm.requests[0].chat.messages
    assert (user.role, own.role, own.reasoning, own.parts[0].text) == ("user", "assistant", "Hm.", "Let me see.")
    assert [call.id for call in own.tool_calls] == [call.call_id for call in calls]
    assert [(each.role, each.tool_call_id, each.parts[0].text) for each in given] == [
        ("tool", call.call_id, "Sun.") for call in calls
    ]


def test_the_form_of_an_answer_and_a_named_function_are_compiled(
    scripted_door: Scripted, client: openai.OpenAI
) -> None:
    says(scripted_door, '{"a": 1}', v1.FINISH_REASON_STRUCTURE)
    form: Any = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}
    assert client.responses.create(model="demo", input="x", text=form).output_text == '{"a": 1}'
    assert json.loads(scripted_door.llm.requests[-1].sampling.json_schema) == SCHEMA
    named: Any = {"type": "function", "name": "weather"}
    (call,) = client.responses.create(model="demo", input="x", tools=[TOOL], tool_choice=named).output
    assert (call.type, call.arguments) == ("function_call", '{"a": 1}')  # type: ignore[union-attr]


def test_allowed_tools_are_those_that_are_offered(scripted_door: Scripted, client: openai.OpenAI) -> None:
    says(scripted_door, "No.")
    tools: Any = [TOOL, {**TOOL, "name": "other"}]
    allowed: Any = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "other"}]}
    response = client.responses.create(model="demo", input="x", tools=tools, tool_choice=allowed)
    assert [tool.name for tool in scripted_door.llm.requests[-1].chat.tools] == ["other"]
    assert response.tool_choice.model_dump(exclude_none=True) == allowed  # type: ignore[union-attr]
    reply = scripted_door.post("/v1/responses", {"input": "x", "tools": [TOOL], "tool_choice": allowed})
    assert (reply.status, reply.error["param"]) == (400, "tool_choice.tools")


REFUSED: dict[str, Any] = {
    "store": True,
    "background": True,
    "previous_response_id": "resp_1",
    "conversation": "c",
    "service_tier": "flex",
    "max_tool_calls": 3,
    "prompt": {"id": "x"},
}


@pytest.mark.parametrize("field", REFUSED)
def test_a_field_that_is_not_served_is_refused_by_name(scripted_door: Scripted, field: str) -> None:
    reply = scripted_door.post("/v1/responses", {"input": "x", field: REFUSED[field]})
    assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "FIELD_NOT_SERVED", field)


def test_how_much_to_think_reaches_the_llm_service(scripted_door: Scripted, client: openai.OpenAI) -> None:
    says(scripted_door, "Four.", v1.FINISH_REASON_STOP)
    response = client.responses.create(model="demo", input="x", reasoning={"effort": "low", "summary": "auto"})
    assert scripted_door.llm.requests[-1].chat.reasoning_effort == "low"
    assert response.reasoning is not None
    assert (response.reasoning.effort, response.reasoning.summary) == ("low", "auto")


SUMMARISED: Any = [{"summary": "auto"}, {"summary": "detailed"}, {"generate_summary": "auto"}]


@pytest.mark.parametrize("reasoning", SUMMARISED, ids=["auto", "detailed", "by its old name"])
def test_a_summary_is_all_of_the_reasoning(
    scripted_door: Scripted, client: openai.OpenAI, reasoning: dict[str, Any]
) -> None:
    says(scripted_door, TEXT)
    fields: Any = {"model": "demo", "input": "Rome?", "reasoning": reasoning}
    thought = client.responses.create(**fields).output[0]
    assert thought.type == "reasoning"
    assert ([each.text for each in thought.summary], thought.content) == (["Hm."], None)
    events = [each for each in client.responses.create(**fields, stream=True) if "reasoning" in each.type]
    assert [each.type.removeprefix("response.reasoning_summary_") for each in events if "delta" not in each.type] == [
        *("part.added", "text.done", "part.done")
    ]
    deltas = [each for each in events if each.type == "response.reasoning_summary_text.delta"]
    assert ("".join(each.delta for each in deltas), {each.summary_index for each in deltas}) == ("Hm.", {0})
    with client.responses.stream(**fields) as stream:
        (whole, *_) = stream.get_final_response().output
    assert whole.type == "reasoning"
    assert [each.text for each in whole.summary] == ["Hm."]


def test_a_summary_that_would_be_shorter_is_refused(scripted_door: Scripted) -> None:
    for reasoning, param in (({"summary": "concise"}, "reasoning.summary"), (BOTH, "reasoning")):
        reply = scripted_door.post("/v1/responses", {"input": "x", "reasoning": reasoning})
        assert (reply.status, reply.error["param"]) == (400, param)


BOTH = {"summary": "auto", "generate_summary": "detailed"}
SEALED: Any = {"include": ["reasoning.encrypted_content"]}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_sealed_reasoning_is_read_when_it_comes_back(
    scripted_door: Scripted, client: openai.OpenAI, stream: bool
) -> None:
    says(scripted_door, "<think>\nHm, ä.\n</think>\n\nFour.")
    asked: Any = client.responses.create(model="demo", input="x", **SEALED, stream=stream)
    items = [each.item for each in asked if each.type == "response.output_item.done"] if stream else asked.output
    thought = items[0]
    assert "Hm" not in thought.encrypted_content
    alone = {"type": "reasoning", "summary": [], "encrypted_content": thought.encrypted_content}
    turns: Any = [{"role": "user", "content": "x"}, alone, {"role": "assistant", "content": "Four."}]
    client.responses.create(model="demo", input=[*turns, {"role": "user", "content": "And?"}])
    assert [each.reasoning for each in scripted_door.llm.requests[-1].chat.messages] == ["", "Hm, ä.", ""]
    assert client.responses.create(model="demo", input="x").output[0].encrypted_content is None  # type: ignore[union-attr]


@pytest.mark.parametrize("sealed", ["gAAAAABo", "unencrypted:@", "unencrypted:/w==", ""])
def test_reasoning_that_another_server_has_sealed_is_refused(scripted_door: Scripted, sealed: str) -> None:
    thought = {"type": "reasoning", "summary": [], "encrypted_content": sealed}
    reply = scripted_door.post("/v1/responses", {"input": [thought, {"role": "user", "content": "x"}]})
    assert (reply.status, reply.error["param"]) == (400, "input[0].encrypted_content")


@pytest.mark.parametrize("options", [{}, {"include_obfuscation": False}, {"include_usage": True}])
def test_options_of_a_stream_that_change_nothing_are_taken(scripted_door: Scripted, options: dict[str, Any]) -> None:
    says(scripted_door, "Four.", v1.FINISH_REASON_STOP)
    reply = scripted_door.post("/v1/responses", {"input": "x", "stream": True, "stream_options": options})
    assert reply.status == 200
    assert b'"usage":{"input_tokens":' in reply.body
    reply = scripted_door.post("/v1/responses", {"input": "x", "stream_options": options})
    assert (reply.status, reply.error["code"]) == (400, "BAD_FIELD")


def test_options_of_a_stream_that_change_something_are_refused(scripted_door: Scripted) -> None:
    asked = {"input": "x", "stream": True, "stream_options": {"include_obfuscation": True}}
    reply = scripted_door.post("/v1/responses", asked)
    assert (reply.status, reply.error["code"]) == (400, "FIELD_NOT_SERVED")
    assert reply.error["param"] == "stream_options.include_obfuscation"


def test_every_field_of_openais_is_served_accepted_or_refused(scripted_door: Scripted) -> None:
    known = {*ResponsesRequest.model_fields, *ResponsesRequest.without_effect}
    for field in {*params.ResponseCreateParamsBase.__annotations__} - known:
        reply = scripted_door.post("/v1/responses", {"input": "x", field: {"some": "value"}})
        assert (reply.status, reply.error["param"]) == (400, field)


@pytest.mark.parametrize(
    ("items", "param"),
    [
        ([], "input"),
        ([{"role": "ghost", "content": "x"}], "input[0].role"),
        ([{"type": "web_search_call", "id": "x"}], "input[0].type"),
        ([{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}], "input[0].content[0].type"),
        ([{"role": "user", "content": "x"}, {"type": "function_call", "call_id": "1"}], "input[1].name"),
    ],
)
def test_an_item_that_is_none_is_refused_where_it_is_wrong(scripted_door: Scripted, items: Any, param: str) -> None:
    reply = scripted_door.post("/v1/responses", {"input": items})
    assert (reply.status, reply.error["param"]) == (400, param)


def test_sampling_templates_and_forms_are_set_as_in_a_chat(scripted_door: Scripted) -> None:
    sampling = {"top_k": 5, "min_p": 0.5, "seed": 3, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    sampling |= {"repetition_penalty": 1.5, "ignore_eos": True, "skip_special_tokens": False}
    sampling |= {"thinking_token_budget": 7}
    more = {"stop": "a", "include_stop_str_in_output": True, "logit_bias": {"5": 1.5}, "cache_salt": "s", "priority": 2}
    more |= {"structured_outputs": {"json": {"type": "object"}}, "chat_template_kwargs": {"enable_thinking": False}}
    more |= {"mm_processor_kwargs": {"max_pixels": 5000}}
    picture = {"type": "input_image", "image_url": data_url(b"x", "image/png")}
    asked = {"input": [{"role": "user", "content": [picture]}], **sampling, **more}
    assert scripted_door.post("/v1/responses", asked).status == 200
    request = scripted_door.llm.requests[-1]
    assert {name: getattr(request.sampling, name) for name in sampling} == sampling
    assert (list(request.sampling.stop), request.sampling.include_stop_str_in_output) == (["a"], True)
    assert (dict(request.sampling.logit_bias), request.sampling.json_schema) == ({5: 1.5}, '{"type":"object"}')
    assert (request.cache_salt, request.priority, request.chat.thinking) == ("s", 2, False)
    assert request.chat.messages[0].parts[0].media.options.max_pixels == 5000
    reply = scripted_door.post("/v1/responses", {**asked, "text": {"format": {"type": "json_object"}}})
    assert (reply.status, reply.error["param"]) == (400, "structured_outputs")


def test_what_other_servers_answer_may_be_sent_back(scripted_door: Scripted) -> None:
    text = {"type": "output_text", "text": "Rome.", "annotations": [{"type": "url_citation"}], "logprobs": [{}]}
    own = {"type": "message", "role": "assistant", "phase": "final_answer"}
    items = [{**own, "content": [text]}, {**own, "content": [{"type": "refusal", "refusal": "No."}]}]
    assert scripted_door.post("/v1/responses", {"input": [{"role": "user", "content": "x"}, *items]}).status == 200
    _, *said = scripted_door.llm.requests[-1].chat.messages
    assert [part.text for each in said for part in each.parts] == ["Rome.", "No."]
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "output_text", "text": "Hm."}]}
    assert scripted_door.post("/v1/responses", {"input": [thought, {"role": "user", "content": "x"}]}).status == 200
    assert scripted_door.llm.requests[-1].chat.messages[0].reasoning == "Hm."


def test_a_reference_to_an_item_is_answered_with_what_to_do(scripted_door: Scripted) -> None:
    items = [{"role": "user", "content": "x"}, {"type": "item_reference", "id": "fc_1"}]
    error = scripted_door.post("/v1/responses", {"input": items}).error
    assert (error["code"], error["param"]) == ("FIELD_NOT_SERVED", "input[1]")
    assert "store: false" in error["message"]


def test_a_function_is_named_as_the_caller_has_it(scripted_door: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    reply = scripted_door.post(
        "/v1/responses", {"input": "x", "tools": [TOOL], "tool_choice": {"type": "function", "name": "none"}}
    )
    assert (reply.status, reply.error["param"]) == (400, "tool_choice.name")
    refusal = v1.Status(code=3, reason="BAD_TOOL", field="chat.tools[0].parameters")
    monkeypatch.setattr(scripted_door.llm, "play", lambda _: iter(()))
    monkeypatch.setattr(scripted_door.llm, "refusal", (grpc.StatusCode.INVALID_ARGUMENT, refusal))
    reply = scripted_door.post("/v1/responses", {"input": "x", "tools": [TOOL]})
    assert (reply.status, reply.error["param"]) == (400, "tools[0].parameters")
    reply = scripted_door.post("/v1/responses", {"input": "x", "tools": [GROUP]})
    assert (reply.status, reply.error["param"]) == (400, "tools[0].tools[0].parameters")


def test_an_answer_that_was_cut_off_while_the_model_thought_may_be_sent_back(scripted_door: Scripted) -> None:
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "status": "incomplete"}
    thought["content"] = [{"type": "reasoning_text", "text": "Hm"}]
    scripted_door.llm.requests.clear()
    said = [{"role": "user", "content": "x"}, thought, {"role": "user", "content": "And?"}, thought]
    assert scripted_door.post("/v1/responses", {"input": said}).status == 200
    messages = scripted_door.llm.requests[0].chat.messages
    assert [each.role for each in messages] == ["user", "assistant"] * 2
    assert [each.reasoning for each in messages] == ["", "Hm"] * 2
    assert [part.text for each in messages for part in each.parts] == ["x", "", "And?", ""]


def test_what_the_services_refuse_is_named_as_the_caller_knows_it(door: Trio) -> None:
    bad = {"type": "input_image", "image_url": data_url(b"no picture", "image/png")}
    items = [
        {"role": "user", "content": "x"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "y"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "z"}, bad]},
    ]
    reply = door.post("/v1/responses", {"input": items, "instructions": "Be brief."})
    assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "MEDIA_FORMAT", "input[2].content[1]")
    reply = door.post("/v1/responses", {"input": "x", "max_output_tokens": 0})
    assert (reply.error["code"], reply.error["param"]) == ("OUT_OF_RANGE", "max_output_tokens")


def test_a_stream_that_fails_ends_with_an_error(scripted_door: Scripted, client: openai.OpenAI) -> None:
    def play(request: v1.GenerateRequest) -> Iterator[v1.GenerateResponse]:
        yield v1.GenerateResponse(started=v1.GenerateStarted(prompt_tokens=9))
        yield v1.GenerateResponse(delta=v1.GenerateDelta(text="Rome", token_ids=[1]))

    scripted_door.llm.play = play
    status = v1.Status(code=14, message="gone", reason="ENGINE_UNAVAILABLE", retry_after_ms=1000)
    scripted_door.llm.refusal = (grpc.StatusCode.UNAVAILABLE, status)
    try:
        alone: Any = {"input": "x", "stream": True, "max_handovers": 0}
        events = list(client.responses.create(model="demo", input="x", stream=True, extra_body=alone))
        raw = scripted_door.post("/v1/responses", alone).body
    finally:
        scripted_door.llm.refusal = None
    assert [each.sequence_number for each in events] == list(range(len(events)))
    *_, error, last = events
    assert isinstance(error, ResponseErrorEvent)
    assert (error.type, error.code, error.message, error.param) == ("error", "ENGINE_UNAVAILABLE", "gone", None)
    assert isinstance(last, ResponseFailedEvent)
    assert (last.response.status, last.response.output_text) == ("failed", "Rome")
    assert last.response.output[0].status == "incomplete"  # type: ignore[union-attr]
    assert last.response.error is not None
    assert (last.response.error.code, last.response.error.message) == ("server_error", "gone")
    assert b'event: error\ndata: {"type":"error"' in raw
    assert b"event: response.failed\n" in raw


def test_token_ids_have_their_text_back(door: Trio) -> None:
    ids = json.loads(door.post("/tokenize", {"prompt": "Hello there<|im_end|>"}).body)["tokens"]
    assert json.loads(door.post("/detokenize", {"tokens": ids}).body) == {"prompt": "Hello there<|im_end|>"}
    assert door.services.text.detokenize(*ids) == "Hello there<|im_end|>"
    reply = door.post("/detokenize", {"tokens": [1 << 31]})
    assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "TOKEN_OUT_OF_RANGE", "tokens")


def test_a_schema_that_cannot_be_followed_is_refused_by_the_field_that_has_it(door: Trio) -> None:
    schema = {"type": "json_schema", "name": "a", "schema": {"type": "nonsense"}}
    reply = door.post("/v1/responses", {"input": "Hello", "text": {"format": schema}})
    assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "BAD_STRUCTURE", "text.format")
