"""Anthropic's Messages API by the real client: a chat told as blocks, whole and streamed."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from datetime import UTC
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from pydantic import BaseModel

from gateway.api.messages_input import as_chat
from gateway.api.messages_request import CountRequest, MessagesRequest, TextBlock, ThinkingBlock, Turn
from tests.gateway.scripted import Scripted, scripted
from tests.gateway.test_tools import TEXT, says
from tests.gateway.trio import PICTURE, Door, Reply, Trio, image, said, text, trio
from tests.rpc.pairs import answer, greedy
from tests.rpc.pairs import asked as asked_by_grpc
from tests.unit.llm_service.test_tools_in_prompts import TEMPLATE
from tests.waiting import until
from twinlens import image as picture
from twinlens import user, v1

if TYPE_CHECKING:  # it takes a second of those who only collect tests
    import anthropic

PATH = "/v1/messages"
COUNT = f"{PATH}/count_tokens"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: Any = {"name": "weather", "description": "The weather", "input_schema": PARAMETERS, "strict": True}
EAGER: Any = {**TOOL, "eager_input_streaming": True}
FINE = {"anthropic-beta": "some-2025-01-01, fine-grained-tool-streaming-2025-05-14"}
OTHER: Any = {"name": "time", "input_schema": {"type": "object"}}
ASK: Any = {"model": "demo", "max_tokens": 99, "messages": [said("Rome?")]}
LOOK: Any = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PICTURE).decode()},
}


@pytest.fixture(scope="module")
def script() -> Iterator[Scripted]:
    with scripted() as running:
        yield running


def connected(door: Door, **options: Any) -> anthropic.Anthropic:
    import anthropic

    options = {"api_key": "none", "max_retries": 0, **options}
    return anthropic.Anthropic(base_url=f"http://{door.gateway.address}", **options)


@pytest.fixture
def client(script: Scripted) -> Iterator[anthropic.Anthropic]:
    script.llm.requests.clear()
    says(script, TEXT)
    with connected(script) as client:
        yield client


def refused(reply: Reply) -> tuple[int, str, str]:
    """Its status, our reason, and what it says."""
    body = json.loads(reply.body)
    assert (set(body), body["type"]) == ({"type", "error", "request_id"}, "error")
    assert body["request_id"] == reply.headers["request-id"] == reply.headers["x-request-id"]
    return reply.status, body["error"]["details"]["error_code"], body["error"]["message"]


def asked(door: Scripted, **fields: Any) -> v1.GenerateRequest:
    """What the LLM service is asked for a request with these fields."""
    says(door, "Sun.")
    door.llm.requests.clear()
    reply = door.post(PATH, {"max_tokens": 99, "messages": [said("Rome?")], **fields}, {"x-request-id": "same"})
    assert reply.status == 200, reply.body
    return door.llm.requests[0]


def test_a_message_has_the_words_and_counts_of_the_chat(door: Trio) -> None:
    chat = door.client.chat.completions.create(
        model=door.model,
        messages=[said("Be brief.", role="system"), said(image(), text("What?"))],  # type: ignore[list-item]
        temperature=0,
        max_tokens=8,
    )
    fields: Any = {"model": door.model, "max_tokens": 8, "system": "Be brief."}
    fields |= {"extra_headers": {"x-request-id": "me"}, "extra_body": {"temperature": 0}}
    conversation: Any = [said(LOOK, text("What?"))]
    with connected(door) as client:
        message = client.messages.create(**fields, messages=conversation)
        (block,) = message.content
        assert block.type == "text"
        assert block.text == chat.choices[0].message.content
        assert (message.id, message.role, message.model, message.type) == ("msg_me", "assistant", door.model, "message")
        assert (message.stop_reason, message.stop_sequence, message._request_id) == ("max_tokens", None, "me")
        counted, usage = chat.usage, message.usage
        assert counted is not None
        assert (usage.input_tokens + (usage.cache_read_input_tokens or 0), usage.output_tokens) == (
            counted.prompt_tokens,
            counted.completion_tokens,
        )
        with client.messages.stream(**fields, messages=conversation) as stream:
            assert "".join(stream.text_stream) == block.text
            final = stream.get_final_message()
        assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", usage.output_tokens)
        again = client.messages.create(**fields, messages=conversation).usage
        assert again.cache_read_input_tokens
        assert again.input_tokens + again.cache_read_input_tokens == counted.prompt_tokens


def test_tokens_are_counted_as_an_answer_counts_them_with_and_without_pictures(door: Trio) -> None:
    with connected(door) as client:
        for content in (["What?"], [LOOK, text("What?"), LOOK]):
            fields: Any = {"model": door.model, "system": "Be brief.", "messages": [said(*content)]}
            counted = client.messages.count_tokens(**fields).input_tokens
            usage = client.messages.create(**fields, max_tokens=1).usage
            assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    until(door.idle, "nothing is held")


def test_reasoning_words_and_calls_are_blocks(script: Scripted, client: anthropic.Anthropic) -> None:
    message = client.messages.create(**ASK, tools=[TOOL])
    thought, words, call, other = message.content
    assert (thought.type, words.type, call.type, other.type) == ("thinking", "text", "tool_use", "tool_use")
    assert (thought.thinking, words.text) == ("Hm.", "Let me see.")  # type: ignore[union-attr]
    assert (call.name, call.input, call.id != other.id) == ("weather", {"city": "Rome"}, True)  # type: ignore[union-attr]
    assert (message.stop_reason, message.usage.output_tokens) == ("tool_use", -(-len(TEXT) // 3))
    (tool,) = script.llm.requests[0].chat.tools
    assert (tool.name, tool.description, tool.strict) == ("weather", "The weather", True)
    assert json.loads(tool.parameters) == PARAMETERS


def test_a_stream_tells_the_same_in_order(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**ASK, tools=[TOOL])
    events = list(client.messages.create(**ASK, tools=[TOOL], stream=True))
    kinds = [each.type for each in events]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    opened = -1
    for each in events[1:-2]:
        if each.type == "content_block_start":
            opened += 1
        assert each.index == opened  # type: ignore[union-attr]
        if each.type == "content_block_delta":
            kind = whole.content[opened].type
            assert (
                each.delta.type
                in {
                    "text": ("text_delta",),
                    "thinking": ("thinking_delta", "signature_delta"),
                    "tool_use": ("input_json_delta",),
                }[kind]
            )
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == len(whole.content) == 4
    with client.messages.stream(**ASK, tools=[TOOL]) as stream:
        final = stream.get_final_message()
    made_up = {"id"}
    for one, other in zip(final.content, whole.content, strict=True):
        assert one.model_dump(exclude=made_up, exclude_none=True) == other.model_dump(
            exclude=made_up, exclude_none=True
        )
    assert (final.stop_reason, final.usage) == (whole.stop_reason, whole.usage)


def test_a_call_of_an_eager_tool_is_told_as_it_is_made_and_its_pieces_are_the_whole_answers(
    client: anthropic.Anthropic,
) -> None:
    whole = client.messages.create(**ASK, tools=[TOOL])
    pieces: dict[int, list[str]] = {}
    for each in client.messages.create(**ASK, tools=[EAGER], stream=True):
        if each.type == "content_block_delta" and each.delta.type == "input_json_delta":
            pieces.setdefault(each.index, []).append(each.delta.partial_json)
    calls = {index: block for index, block in enumerate(whole.content) if block.type == "tool_use"}
    assert {index: json.loads("".join(told)) for index, told in pieces.items()} == {
        index: block.input for index, block in calls.items()
    }
    assert all(len(told) > 3 for told in pieces.values()), "they come as the model writes them"
    with client.messages.stream(**ASK, tools=[EAGER]) as stream:
        snapshots = [each.snapshot for each in stream if each.type == "input_json"]
    assert snapshots[0] == {}
    assert snapshots[-1] == {"city": "Rome"}


@pytest.mark.parametrize(
    ("reason", "ending"),
    [(v1.FINISH_REASON_LENGTH, "max_tokens"), (v1.FINISH_REASON_STOP, "end_turn")],
    ids=["cut", "broken"],
)
def test_a_call_that_never_ends_is_words_and_not_why_it_stops(
    script: Scripted, client: anthropic.Anthropic, reason: v1.FinishReason, ending: str
) -> None:
    text = 'Hm.\n<tool_call>\n{"name": "weather", "arguments": {"city":"Ro'
    says(script, text, reason)
    fields: Any = {**ASK, "max_tokens": -(-len(text) // 3), "tools": [TOOL]}
    (words,) = client.messages.create(**fields).content
    assert words.text == text  # type: ignore[union-attr]
    with client.messages.stream(**fields) as stream:
        final = stream.get_final_message()
    assert [block.text for block in final.content] == [text]  # type: ignore[union-attr]
    assert final.stop_reason == ending
    with client.messages.stream(**{**fields, "tools": [EAGER]}) as stream:
        final = stream.get_final_message()
    before, call, behind = final.content
    assert (call.type, call.name) == ("tool_use", "weather")  # type: ignore[union-attr]
    assert before.text + behind.text == text  # type: ignore[union-attr]
    assert final.stop_reason == ending


def test_a_second_turn_brings_everything_back(script: Scripted, client: anthropic.Anthropic) -> None:
    first = client.messages.create(**ASK, tools=[TOOL])
    calls = [block for block in first.content if block.type == "tool_use"]
    results: Any = [
        {"type": "tool_result", "tool_use_id": calls[0].id, "content": [text("Sun."), LOOK]},
        {"type": "tool_result", "tool_use_id": calls[1].id, "content": "No such city.", "is_error": True},
        {"type": "text", "text": "And now?", "cache_control": {"type": "ephemeral"}},
    ]
    says(script, "It is sunny.")
    script.llm.requests.clear()
    turns: Any = [*ASK["messages"], first.to_param(), {"role": "user", "content": results}]
    last = client.messages.create(**{**ASK, "messages": turns}, tools=[TOOL])
    assert (last.content[0].text, last.stop_reason) == ("It is sunny.", "end_turn")  # type: ignore[union-attr]
    user, own, seen, failed, more = script.llm.requests[0].chat.messages
    assert [each.role for each in (user, own, seen, failed, more)] == ["user", "assistant", "tool", "tool", "user"]
    assert (own.reasoning, own.parts[0].text) == ("Hm.", "Let me see.")
    assert [(call.id, call.name, json.loads(call.arguments)) for call in own.tool_calls] == [
        (call.id, "weather", {"city": "Rome"}) for call in calls
    ]
    assert [each.tool_call_id for each in (seen, failed)] == [call.id for call in calls]
    assert (seen.parts[0].text, seen.parts[1].media.data) == ("Sun.", PICTURE)
    assert "".join(part.text for part in failed.parts) == "Error:\nNo such city."
    assert more.parts[0].text == "And now?"


CONTENT = """{%- if message.content is string %}{{ message.content }}{%- else %}{%- for part in message.content %}
{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{%- else %}{{ part.text }}{%- endif %}
{%- endfor %}{%- endif %}"""
"""What a template has to lay out a message's pictures, whosever it is."""


def test_a_picture_in_a_result_is_in_the_prompt(checkpoint: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint, tmp_path / "tools"))
    template = TEMPLATE.replace("{{ message.content }}", CONTENT)
    (folder / "chat_template.jinja").write_text(template, "utf-8")
    call: Any = {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Rome"}}
    result: Any = {"type": "tool_result", "tool_use_id": "a", "content": [text("Sun."), LOOK]}
    turns: Any = [said("Rome?"), said(call, role="assistant"), said(result)]
    fields: Any = {"messages": turns, "tools": [{**TOOL, "strict": False}]}
    with trio(folder) as door, connected(door) as client:
        counted = client.messages.count_tokens(**fields, model=door.model).input_tokens
        usage = client.messages.create(**fields, model=door.model, max_tokens=4).usage
        assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)
        result["content"] = [text("Sun.")]
        (rows,) = image_rows(door)
        assert counted - client.messages.count_tokens(**fields, model=door.model).input_tokens == rows + 2


def image_rows(door: Trio) -> list[int]:
    """Rows of the picture, of which each is a token; two more mark where they begin and end."""
    answered = answer(door.services.text, asked_by_grpc(user(picture(PICTURE)), greedy(1)))
    return [span.rows for span in answered.started.spans]


def test_turns_of_one_side_are_one_message(script: Scripted, client: anthropic.Anthropic) -> None:
    turns: Any = [said("a"), said(text("b"), text("c")), said("d", role="assistant"), said("e"), said("f")]
    client.messages.create(**{**ASK, "messages": turns}, system=[text("One."), text("Two.")])  # type: ignore[list-item]
    laid_out = script.llm.requests[0].chat.messages
    assert [(each.role, [part.text for part in each.parts]) for each in laid_out] == [
        ("system", ["One.", "Two."]),
        ("user", ["a", "b", "c"]),
        ("assistant", ["d"]),
        ("user", ["e", "f"]),
    ]


def test_thoughts_of_one_turn_are_joined_once() -> None:
    class Thought(str):
        __slots__ = ()

        def __radd__(self, before: str) -> str:
            raise AssertionError("each is copied once for every one that follows")

    blocks = [ThinkingBlock.model_construct(type="thinking", thinking=Thought(word)) for word in ("Hm. ", "Rome.")]
    own = Turn.model_construct(role="assistant", content=[blocks[0], TextBlock(type="text", text="So:"), blocks[1]])
    chat, _ = as_chat(CountRequest.model_construct(messages=[Turn(role="user", content="Where?"), own]))
    assert chat.messages[1].thought == "Hm. Rome."


def test_a_picture_may_be_given_by_its_address(script: Scripted) -> None:
    block = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
    (message,) = asked(script, messages=[said(block)]).chat.messages
    assert message.parts[0].media.url == "https://example.org/a.png"
    assert message.parts[0].media.modality == v1.MODALITY_IMAGE


@pytest.mark.parametrize(
    ("choice", "said_so", "names", "stops"),
    [
        ({"type": "auto"}, TEXT, ["weather", "weather"], "tool_use"),
        ({"type": "auto", "disable_parallel_tool_use": True}, TEXT, ["weather"], "tool_use"),
        ({"type": "any"}, '[{"name": "time", "parameters": {}}]', ["time"], "tool_use"),
        ({"type": "tool", "name": "weather"}, '{"city": "Rome"}', ["weather"], "tool_use"),
        ({"type": "none"}, TEXT, [], "end_turn"),
    ],
    ids=["auto", "one", "any", "named", "none"],
)
def test_a_choice_of_tools_is_the_chats(
    script: Scripted, client: anthropic.Anthropic, choice: Any, said_so: str, names: list[str], stops: str
) -> None:
    says(script, said_so)
    message = client.messages.create(**ASK, tools=[TOOL, OTHER], tool_choice=choice)
    assert [block.name for block in message.content if block.type == "tool_use"] == names
    assert message.stop_reason == stops
    request = script.llm.requests[0]
    offered = {"tool": ["weather"], "none": []}.get(choice["type"], ["weather", "time"])
    assert [tool.name for tool in request.chat.tools] == offered
    assert request.sampling.HasField("json_schema") == (choice["type"] in ("any", "tool"))


def pieces_of(client: anthropic.Anthropic, **fields: Any) -> list[str]:
    """Of the input of calls, as a stream brings them."""
    return [
        each.delta.partial_json
        for each in client.messages.create(**ASK, stream=True, **fields)
        if each.type == "content_block_delta" and each.delta.type == "input_json_delta"
    ]


@pytest.mark.parametrize(
    ("eager", "headers", "whole"),
    [(None, {}, True), (False, FINE, True), (True, {}, False), (None, FINE, False)],
)
def test_input_is_streamed_when_it_is_complete_unless_eager_streaming_is_asked_for(
    client: anthropic.Anthropic, eager: bool | None, headers: dict[str, str], whole: bool
) -> None:
    tool = {**TOOL, "eager_input_streaming": eager}
    pieces = pieces_of(client, tools=[tool], extra_headers=headers)
    assert [json.loads(piece) for piece in pieces] == [{"city": "Rome"}] * 2 if whole else len(pieces) > 6


def test_only_the_input_of_eager_tools_is_streamed_before_it_is_complete(
    script: Scripted, client: anthropic.Anthropic
) -> None:
    calls = [
        f'<tool_call>{{"name": "{name}", "arguments": {{"city": "Rome"}}}}</tool_call>' for name in ("weather", "time")
    ]
    says(script, "".join(calls))
    assert pieces_of(client, tools=[TOOL, {**OTHER, "eager_input_streaming": True}])[0] == '{"city": "Rome"}'
    says(script, "".join(reversed(calls)))
    assert pieces_of(client, tools=[TOOL, {**OTHER, "eager_input_streaming": True}])[-1] == '{"city": "Rome"}'
    assert len(pieces_of(client, tools=[TOOL, {**OTHER, "eager_input_streaming": True}])) > 3


@pytest.mark.parametrize(
    ("arguments", "there"),
    [
        ('{"city": "Rome", "days": [1, 2', {"city": "Rome"}),
        ('{"city": "Rome", "path": "/tm', {"city": "Rome"}),
        ('{"city": "Ro', {}),
        ('{"city": "Rome"', {"city": "Rome"}),
        ('{"city": "Rome", "days": 1', {"city": "Rome"}),
        ('{"near": {"a": 1}, ', {"near": {"a": 1}}),
    ],
)
def test_a_call_that_had_to_be_made_and_is_cut_off_has_its_complete_fields(
    script: Scripted, client: anthropic.Anthropic, arguments: str, there: dict[str, Any]
) -> None:
    says(script, arguments, v1.FINISH_REASON_LENGTH)
    forced: Any = {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "weather"}}
    fields: Any = {**ASK, "max_tokens": -(-len(arguments) // 3), **forced}
    message = client.messages.create(**fields)
    with client.messages.stream(**fields) as stream:
        streamed = stream.get_final_message()
    for each in (message, streamed):
        (call,) = each.content
        assert (each.stop_reason, call.type, call.name) == ("max_tokens", "tool_use", "weather")  # type: ignore[union-attr]
        assert call.input == there  # type: ignore[union-attr]
    with pytest.raises(json.JSONDecodeError):
        json.loads("".join(pieces_of(client, **forced)))


def test_eager_input_that_is_cut_off_has_what_there_is(script: Scripted, client: anthropic.Anthropic) -> None:
    says(script, '{"city": "Rome", "days": [1, 2', v1.FINISH_REASON_LENGTH)
    fields: Any = {**ASK, "max_tokens": 10, "tools": [EAGER], "tool_choice": {"type": "tool", "name": "weather"}}
    with client.messages.stream(**fields) as stream:
        (streamed,) = stream.get_final_message().content
    assert streamed.input == {"city": "Rome", "days": [1, 2]}  # type: ignore[union-attr]


def test_why_an_answer_ended(script: Scripted, client: anthropic.Anthropic) -> None:
    says(script, "abcdef", v1.FINISH_REASON_LENGTH)
    assert client.messages.create(**{**ASK, "max_tokens": 2}).stop_reason == "max_tokens"
    assert client.messages.create(**{**ASK, "max_tokens": 3}).stop_reason == "max_tokens", "by the operator's bound"

    def fill(request: v1.GenerateRequest) -> Iterator[v1.GenerateResponse]:
        usage = v1.Usage(prompt_tokens=script.llm.context_tokens - 2, completion_tokens=2)
        yield v1.GenerateResponse(started=v1.GenerateStarted(prompt_tokens=usage.prompt_tokens))
        yield v1.GenerateResponse(finished=v1.GenerateFinished(reason=v1.FINISH_REASON_LENGTH, usage=usage))

    script.llm.play = fill
    assert client.messages.create(**ASK).stop_reason == "model_context_window_exceeded"
    assert client.messages.create(**{**ASK, "max_tokens": 2}).stop_reason == "max_tokens"

    def play(request: v1.GenerateRequest) -> Iterator[v1.GenerateResponse]:
        yield v1.GenerateResponse(started=v1.GenerateStarted(prompt_tokens=9, cached_tokens=4))
        usage = v1.Usage(prompt_tokens=9, cached_tokens=4, completion_tokens=3, reasoning_tokens=2)
        finished = v1.GenerateFinished(reason=v1.FINISH_REASON_STOP, usage=usage, stop_text=request.sampling.stop[0])
        yield v1.GenerateResponse(finished=finished)

    script.llm.play = play
    message = client.messages.create(**ASK, stop_sequences=["END"])
    assert (message.content, message.stop_reason, message.stop_sequence) == ([], "stop_sequence", "END")
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (5, 4, 3)
    assert usage.output_tokens_details is not None
    assert usage.output_tokens_details.thinking_tokens == 2
    first, *_ = client.messages.create(**ASK, stop_sequences=["END"], stream=True)
    assert first.type == "message_start"
    assert (first.message.usage.input_tokens, first.message.usage.cache_read_input_tokens) == (5, 4)


@pytest.mark.parametrize(
    ("thinking", "wanted"),
    [
        ({"type": "enabled", "budget_tokens": 2048}, True),
        ({"type": "disabled"}, False),
        ({"type": "adaptive", "display": "summarized"}, None),
        (None, None),
    ],
)
def test_the_template_is_told_whether_to_think(script: Scripted, thinking: Any, wanted: bool | None) -> None:
    request = asked(script, thinking=thinking)
    assert (request.chat.thinking if request.chat.HasField("thinking") else None) == wanted
    assert request.sampling.thinking_token_budget == (2048 if wanted else 0)
    assert request.sampling.HasField("thinking_token_budget") is bool(wanted)


def test_an_answer_goes_on_behind_what_the_assistant_has_said(door: Trio) -> None:
    turns: Any = [said("Rome?"), said(text("It "), text("is"), role="assistant")]
    with connected(door) as client:
        message = client.messages.create(model=door.model, max_tokens=6, messages=turns)
        counted = client.messages.count_tokens(model=door.model, messages=turns)
    laid = "<|im_start|>user\nRome?<|im_end|>\n<|im_start|>assistant\nIt is"
    theirs = door.client.completions.create(model=door.model, prompt=laid, max_tokens=6)
    assert message.content[0].text == theirs.choices[0].text  # type: ignore[union-attr]
    assert theirs.usage is not None
    assert counted.input_tokens == theirs.usage.prompt_tokens


def test_what_ends_with_a_call_is_counted_and_not_gone_on_with(door: Trio, script: Scripted) -> None:
    call: Any = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    body = {"messages": [said("x"), said(text("So."), call, role="assistant")]}
    assert asked(script, **body).chat.continue_final_message
    reply = door.post(f"{PATH}/count_tokens", body)
    assert refused(reply)[1] == "NO_TOOLS", "which its template knows none of"


@pytest.mark.parametrize(("effort", "told"), [("low", "low"), ("max", "max"), ("high", ""), (None, "")])
def test_the_template_is_told_how_much_to_think(script: Scripted, effort: str | None, told: str) -> None:
    assert asked(script, output_config={"effort": effort}).chat.reasoning_effort == told


def test_an_answer_follows_a_schema(script: Scripted, client: anthropic.Anthropic) -> None:
    class City(BaseModel):
        name: str

    says(script, '{"name": "Rome"}', v1.FINISH_REASON_STRUCTURE)
    assert client.messages.parse(**ASK, output_format=City).parsed_output == City(name="Rome")
    assert json.loads(script.llm.requests[0].sampling.json_schema)["properties"]["name"]["type"] == "string"


SERVED: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "stop_sequences": ["END"],
    "system": "Be brief.",
    "model": "demo",
    "tools": [TOOL],
    "cache_salt": "mine",
    "priority": 3,
    "max_handovers": 0,
}
ACCEPTED: dict[str, Any] = {
    "metadata": {"user_id": "me"},
    "user_profile_id": "me",
    "cache_control": {"type": "ephemeral", "ttl": "1h"},
    "tools": [],
    "stream": False,
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "high"},
    "tool_choice": {"type": "auto"},
}
REFUSED: dict[str, Any] = {
    "container": "c",
    "diagnostics": {"previous_message_id": "m"},
    "inference_geo": "eu",
    "service_tier": "batch",
    "speed": "fast",
    "workspace_id": "w",
    "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
    "mcp_servers": [{"type": "url"}],
    "billing_policy": {"type": "standard"},
    "compaction": {"type": "enabled"},
    "fallback_credit_token": "t",
    "fallbacks": [{"model": "m"}],
    "seed": 5,
}
TRIED_ELSEWHERE = {"messages", "max_tokens", "thread"}
HEADERS = {"betas"}
"""Arguments of their client's that are no fields."""


@pytest.mark.parametrize("field", SERVED)
def test_a_field_that_is_served_reaches_the_llm_service(script: Scripted, field: str) -> None:
    assert asked(script, **{field: SERVED[field]}) != asked(script)


@pytest.mark.parametrize("field", ACCEPTED)
def test_a_field_that_is_accepted_changes_nothing(script: Scripted, field: str) -> None:
    assert asked(script, **{field: ACCEPTED[field]}) == asked(script)


@pytest.mark.parametrize("field", MessagesRequest.without_effect)
def test_what_is_done_anyway_may_be_asked_for(script: Scripted, field: str) -> None:
    for value in MessagesRequest.without_effect[field]:
        assert asked(script, **{field: value}) == asked(script)


@pytest.mark.parametrize("field", REFUSED)
def test_a_field_that_is_refused_is_refused_by_name(script: Scripted, field: str) -> None:
    reply = script.post(PATH, {**ASK, field: REFUSED[field]})
    assert refused(reply) == (400, "FIELD_NOT_SERVED", f"{field}: this field is not supported")


def test_every_field_of_anthropics_is_served_accepted_or_refused() -> None:
    from anthropic.types import beta, message_count_tokens_params, message_create_params

    theirs = {*message_create_params.MessageCreateParamsBase.__annotations__, "stream"}
    theirs |= {*beta.message_create_params.MessageCreateParamsBase.__annotations__} - HEADERS
    tried = {*SERVED, *ACCEPTED, *REFUSED, *TRIED_ELSEWHERE}
    assert tried >= theirs | set(MessagesRequest.model_fields)
    counted = set(message_count_tokens_params.MessageCountTokensParams.__annotations__)
    assert counted - set(CountRequest.model_fields) == {"speed", "workspace_id"}
    counted = set(beta.message_count_tokens_params.MessageCountTokensParams.__annotations__) - HEADERS
    assert counted - set(CountRequest.model_fields) <= set(REFUSED)


def test_a_thread_is_refused_by_the_word_for_it(script: Scripted) -> None:
    reply = script.post(PATH, {**ASK, "thread": {"type": "create"}})
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert (reply.status, json.loads(reply.body)["error"]["details"]) == (400, details)
    assert asked(script, thread=None) == asked(script)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_their_client_runs_tools_by_itself(script: Scripted, client: anthropic.Anthropic, stream: bool) -> None:
    import anthropic

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """The weather.

        Args:
            city: Whose.
        """
        says(script, "It is sunny.")
        return f"Sun in {city}."

    says(script, '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>')
    runner: Any = client.beta.messages.tool_runner(**ASK, tools=[weather], stream=stream)
    final = [turn.get_final_message() if stream else turn for turn in runner][-1]
    assert (final.content[0].text, final.stop_reason) == ("It is sunny.", "end_turn")
    _, second = script.llm.requests
    assert [each.role for each in second.chat.messages] == ["user", "assistant", "tool"]
    assert second.chat.messages[2].parts[0].text == "Sun in Rome."


WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "no bound": ({"max_tokens": None}, "BAD_FIELD", "max_tokens"),
    "no messages": ({"messages": []}, "BAD_FIELD", "messages"),
    "prefilled, and thought about": (
        {
            "messages": [said("x"), said("It is", role="assistant")],
            "thinking": {"type": "enabled", "budget_tokens": 1024},
        },
        "BAD_FIELD",
        "thinking",
    ),
    "a server's tool": (
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        "FIELD_NOT_SERVED",
        "tools[0].type",
    ),
    "no object": ({"tools": [{"name": "f", "input_schema": {"type": "string"}}]}, "BAD_FIELD", "tools[0].input_schema"),
    "no such tool": (
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}},
        "BAD_FIELD",
        "tool_choice.name",
    ),
    "no tools": ({"tool_choice": {"type": "any"}}, "BAD_FIELD", "tool_choice needs tools"),
    "a document": (
        {"messages": [said({"type": "document", "source": {"type": "text", "data": "x"}})]},
        "FIELD_NOT_SERVED",
        "messages[0].content[0].type",
    ),
    "a file": (
        {"messages": [said({"type": "image", "source": {"type": "file", "file_id": "x"}})]},
        "FIELD_NOT_SERVED",
        "messages[0].content[0].source.type",
    ),
    "hidden thoughts": (
        {"messages": [said("x"), said({"type": "redacted_thinking", "data": "x"}, role="assistant"), said("y")]},
        "FIELD_NOT_SERVED",
        "messages[1].content[0].type",
    ),
    "a picture of the model's": (
        {"messages": [said("x"), said(LOOK, role="assistant"), said("y")]},
        "BAD_FIELD",
        "messages[1].content[0].type",
    ),
    "thoughts left out": (
        {"thinking": {"type": "adaptive", "display": "omitted"}},
        "FIELD_NOT_SERVED",
        "thinking.display",
    ),
    "no such effort": ({"output_config": {"effort": "huge"}}, "BAD_FIELD", "output_config.effort"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_served_is_refused_where_it_stands(script: Scripted, name: str) -> None:
    fields, reason, where = WRONG[name]
    status, code, message = refused(script.post(PATH, {**ASK, **fields}))
    assert (status, code, message.partition(":")[0]) == (400, reason, where)


def test_what_the_services_refuse_is_named_as_the_caller_knows_it(door: Trio) -> None:
    from anthropic import NotFoundError

    bad = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    turns = [said("a"), said("b"), said("c", role="assistant"), said(text("d"), bad)]
    for path in (PATH, COUNT):
        fields = {"max_tokens": 4} if path == PATH else {}
        reply = door.post(path, {**fields, "messages": turns, "system": "Be brief."})
        status, code, message = refused(reply)
        assert (status, code, message.partition(":")[0]) == (400, "MEDIA_FORMAT", "messages[3].content[1]")
    for field, value in (("max_tokens", 0), ("top_p", 0), ("stop_sequences", ["x"] * 9)):
        _, _, message = refused(door.post(PATH, {"max_tokens": 4, "messages": turns[:1], field: value}))
        assert message.split(maxsplit=1)[0].strip(":") == field
    with connected(door) as client, pytest.raises(NotFoundError) as caught:
        client.messages.create(**{**ASK, "model": "claude"})
    assert (caught.value.type, caught.value.error_code) == ("not_found_error", "UNKNOWN_MODEL")
    assert caught.value.request_id


@pytest.mark.parametrize("body", [b"", b"{", b"[]"])
def test_a_body_that_is_none_is_refused_in_their_shape(script: Scripted, body: bytes) -> None:
    assert refused(script.post(PATH, body))[0] == 400
    assert refused(script.post(PATH, body, method="PUT"))[:2] == (405, "METHOD_NOT_ALLOWED")
    assert refused(script.post(f"{PATH}/batches", body))[:2] == (404, "NOT_FOUND")


def test_a_version_of_the_api_that_is_not_served_is_refused(script: Scripted) -> None:
    for path, body in ((PATH, ASK), (COUNT, {"messages": ASK["messages"]})):
        assert script.post(path, body, {"anthropic-version": "2023-06-01"}).status == 200
        reply = script.post(path, body, {"anthropic-version": "2023-01-01"})
        assert refused(reply)[:2] == (400, "BAD_FIELD")


def test_a_stream_that_fails_ends_with_an_error(script: Scripted, client: anthropic.Anthropic) -> None:
    from anthropic import APIStatusError

    status = v1.Status(code=14, message="gone", reason="ENGINE_UNAVAILABLE", retry_after_ms=1000)
    script.llm.refusal = (grpc.StatusCode.UNAVAILABLE, status)

    def play(request: v1.GenerateRequest) -> Iterator[v1.GenerateResponse]:
        yield v1.GenerateResponse(started=v1.GenerateStarted(prompt_tokens=9))

    script.llm.play = play
    try:
        with pytest.raises(APIStatusError) as caught:
            list(client.messages.create(**ASK, stream=True, extra_body={"max_handovers": 0}))
    finally:
        script.llm.refusal = None
    assert (caught.value.type, caught.value.error_code) == ("overloaded_error", "ENGINE_UNAVAILABLE")


def test_a_client_that_closes_its_stream_ends_the_generation(door: Trio) -> None:
    until(door.idle, "nobody is still to be counted")
    before = door.services.text.get_load().cancelled_requests
    with (
        connected(door) as client,
        client.messages.create(
            model=door.model, max_tokens=3000, messages=[{"role": "user", "content": "Count"}], stream=True
        ) as stream,
    ):
        next(iter(stream))
    until(lambda: door.services.text.get_load().cancelled_requests == before + 1, "it is cancelled")


def test_an_api_key_counts_as_a_token_does(tmp_path: Path) -> None:
    from anthropic import AuthenticationError

    tokens = tmp_path / "tokens"
    tokens.write_text("first\nsecond\n")
    with scripted(auth_token_file=tokens) as door:
        for options in ({"api_key": "first"}, {"api_key": None, "auth_token": "second"}):
            with connected(door, **options) as client:
                assert client.messages.create(**ASK).stop_reason == "end_turn"
                assert client.messages.count_tokens(model="demo", messages=ASK["messages"]).input_tokens == 1
                assert [model.id for model in client.models.list()] == ["demo"]
        with connected(door, api_key="third") as client, pytest.raises(AuthenticationError) as caught:
            client.models.list()
        assert caught.value.type == "authentication_error"
        with connected(door, api_key="third") as client, pytest.raises(AuthenticationError) as caught:
            client.messages.create(**ASK)
        assert caught.value.type == "authentication_error"
        body = {"max_tokens": 9, "messages": ASK["messages"]}
        assert door.post(PATH, body, {"x-api-key": "second"}).status == 200
        assert door.post(PATH, body, {"x-api-key": "third", "authorization": "Bearer third"}).status == 401
        elsewhere = door.post("/v1/chat/completions", {"messages": [said("x")]}, {"x-api-key": "first"})
        assert elsewhere.status == 401
        for path in ("/v1/models", "/v1/models/demo", "/v1/modelsx"):
            assert door.get(path, {"x-api-key": "first"}).status == 401


def test_models_are_told_as_anthropic_has_them(door: Trio) -> None:
    with connected(door) as client:
        (listed,), one = client.models.list(), client.models.retrieve(door.model)
    assert listed == one
    assert (one.id, one.display_name, one.type, one.created_at.tzinfo) == (door.model, door.model, "model", UTC)
    assert one.max_input_tokens == door.services.text.get_info().context_tokens
    page = json.loads(door.get("/v1/models", {"anthropic-version": "2023-06-01"}).body)
    assert (page["has_more"], page["first_id"], page["last_id"]) == (False, door.model, door.model)
    error = door.get("/v1/models/none", {"anthropic-version": "2023-06-01"})
    assert (error.status, json.loads(error.body)["error"]["type"]) == (404, "not_found_error")
