"""Every field of OpenAI's chat request is served, accepted, or refused by name, as docs/HTTP.md says."""

from __future__ import annotations

import ast
import base64
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from openai.types.chat import completion_create_params as chat_params

from gateway.api.chat_request import ChatRequest
from tests.gateway.scripted import Scripted, scripted
from tests.launch import ROOT
from twinlens import v1

PAGE = (ROOT / "docs/HTTP.md").read_text()
ROW = re.compile(r"^\| (`\w+`(?:, `\w+`)*) \| (served|accepted|refused) \|(.*)\|$", re.MULTILINE)
TABLE = {name: kind for names, kind, _ in ROW.findall(PAGE) for name in re.findall(r"\w+", names)}
OPENAI = {*chat_params.CompletionCreateParamsBase.__annotations__, "stream"}

SAMPLES: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "another"}],
    "temperature": 0.5,
    "top_p": 0.5,
    "n": 2,
    "seed": 5,
    "stop": "x",
    "max_tokens": 9,
    "max_completion_tokens": 9,
    "presence_penalty": 1,
    "frequency_penalty": 1,
    "logit_bias": {"5": 1},
    "logprobs": True,
    "response_format": {"type": "json_object"},
    "prompt_cache_key": "talk",
    "session_id": "talk",
    "user": "me",
    "metadata": {"a": "b"},
    "safety_identifier": "me",
    "store": True,
    "modalities": ["text", "audio"],
    "service_tier": "flex",
    "verbosity": "low",
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "chat_template_kwargs": {"enable_thinking": False},
    "documents": [{"text": "Blue."}],
    "continue_final_message": True,
    "reasoning_effort": "high",
    "functions": [{"name": "f"}],
    "function_call": {"name": "f"},
    "audio": {"voice": "alloy", "format": "wav"},
    "moderation": {"model": "m"},
    "prediction": {"type": "content", "content": "x"},
    "prompt_cache_options": {},
    "prompt_cache_retention": "24h",
    "web_search_options": {},
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "min_tokens": 1,
    "include_stop_str_in_output": True,
    "no_stop_trim": True,
    "bad_words": ["x"],
    "skip_special_tokens": False,
    "allowed_token_ids": [5, 6],
    "thinking_token_budget": 0,
    "thinking": {"type": "disabled"},
    "ignore_eos": True,
    "return_token_ids": True,
    "prompt_logprobs": 2,
    "stop_token_ids": [5],
    "guided_json": {"type": "object"},
    "guided_regex": "a",
    "guided_choice": ["a"],
    "regex": "a",
    "ebnf": 'root ::= "a"',
    "guided_grammar": "start: 'a'",
    "structured_outputs": {"regex": "a"},
    "truncate_prompt_tokens": 5,
    "cache_salt": "mine",
    "priority": 3,
    "request_id": "mine",
    "rid": "mine",
    "max_handovers": 0,
}
IN_THE_ANSWER = {
    "include_reasoning",
    "return_tokens_as_token_ids",
    "stream",
    "stream_options",
    "add_generation_prompt",
    "return_media_uuids",
}
"""Served by what comes back, not by what the LLM service is asked."""
OF_MEDIA = {"mm_processor_kwargs", "media_io_kwargs", "use_audio_in_video"}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
TOGETHER: dict[str, dict[str, Any]] = {
    "truncation_side": {"truncate_prompt_tokens": 5, "truncation_side": "right"},
    "top_logprobs": {"logprobs": True, "top_logprobs": 3},
    "tool_choice": {"tools": TOOLS, "tool_choice": "required"},
    "parallel_tool_calls": {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
QUESTION = [{"role": "user", "content": "What?"}]


@pytest.fixture(scope="module")
def door() -> Iterator[Scripted]:
    with scripted() as running:
        yield running


@dataclass(frozen=True)
class Outcome:
    status: int
    body: dict[str, Any]
    asked: Any


def post(door: Scripted, **fields: Any) -> Outcome:
    door.llm.requests.clear()
    reply = door.post("/v1/chat/completions", {"messages": QUESTION, **fields}, {"x-request-id": "same"})
    return Outcome(reply.status, json.loads(reply.body), door.llm.requests[0] if door.llm.requests else None)


def test_the_table_has_every_field_of_openais() -> None:
    assert set(TABLE) >= OPENAI


def test_the_table_has_every_field_that_is_taken() -> None:
    assert set(TABLE) == OPENAI | set(ChatRequest.model_fields)


def test_every_field_is_tried() -> None:
    assert set(TABLE) == {*SAMPLES, *IN_THE_ANSWER, *TOGETHER, *OF_MEDIA}


@pytest.mark.parametrize("field", [name for name, kind in TABLE.items() if kind == "served" and name in SAMPLES])
def test_a_field_that_is_served_reaches_the_llm_service(door: Scripted, field: str) -> None:
    plain, with_field = post(door), post(door, **{field: SAMPLES[field]})
    assert (plain.status, with_field.status) == (200, 200), with_field.body
    assert plain.asked != with_field.asked


@pytest.mark.parametrize("field", [name for name, kind in TABLE.items() if kind == "accepted"])
def test_a_field_that_is_accepted_changes_nothing(door: Scripted, field: str) -> None:
    plain, with_field = post(door), post(door, **{field: SAMPLES[field]})
    assert with_field.status == 200, with_field.body
    assert plain.asked == with_field.asked


@pytest.mark.parametrize("field", [name for name, kind in TABLE.items() if kind == "refused"])
def test_a_field_that_is_refused_is_refused_by_name(door: Scripted, field: str) -> None:
    outcome = post(door, **{field: SAMPLES[field]})
    error = outcome.body["error"]
    assert (outcome.status, error["code"], error["param"], outcome.asked) == (400, "FIELD_NOT_SERVED", field, None)


@pytest.mark.parametrize("field", ChatRequest.without_effect)
def test_what_is_done_anyway_may_be_asked_for(door: Scripted, field: str) -> None:
    plain = post(door)
    for value in ChatRequest.without_effect[field]:
        outcome = post(door, **{field: value})
        assert outcome.status == 200, outcome.body
        assert outcome.asked == plain.asked


def test_a_field_that_is_null_counts_as_not_given(door: Scripted) -> None:
    plain, nulls = post(door), post(door, **dict.fromkeys(TABLE.keys() - {"messages"}))
    assert nulls.status == 200, nulls.body
    assert plain.asked == nulls.asked


def test_a_field_that_nobody_knows_is_refused_by_name(door: Scripted) -> None:
    assert post(door, add_magic=True).body["error"]["param"] == "add_magic"


def test_fields_that_go_together(door: Scripted) -> None:
    assert post(door, **TOGETHER["top_logprobs"]).asked.sampling.logprobs == 3
    assert '"minItems":1,"x' in post(door, **TOGETHER["tool_choice"]).asked.sampling.json_schema
    assert '"maxItems":1,"x' in post(door, **TOGETHER["parallel_tool_calls"]).asked.sampling.json_schema
    for pair in (
        {"top_logprobs": 3},
        {"max_tokens": 1, "max_completion_tokens": 2},
        {"prompt_cache_key": "a", "session_id": "b"},
        {"mm_processor_kwargs": {"use_audio_in_video": True}, "use_audio_in_video": False},
        {"stream_options": {"include_usage": True}},
        {"guided_regex": "a", "guided_choice": ["a"]},
        {"guided_regex": "a", "regex": "b"},
        {"regex": "a", "ebnf": 'root ::= "a"'},
        {"include_stop_str_in_output": True, "no_stop_trim": False},
        {"messages": [*QUESTION, {"role": "assistant", "content": "x", "reasoning": "a", "reasoning_content": "b"}]},
        {"guided_regex": "a", "response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema"}},
        {"tool_choice": "required"},
        {"reasoning_effort": "high", "chat_template_kwargs": {"reasoning_effort": "low"}},
        {"reasoning_effort": "much"},
        {"documents": ["A text."]},
        {"documents": [{"text": "a"}], "chat_template_kwargs": {"documents": [{"text": "b"}]}},
        {"continue_final_message": True, "add_generation_prompt": True},
        {"chat_template_kwargs": {"enable_thinking": True, "thinking": False}},
        {"chat_template_kwargs": {"thinking": True}, "thinking": {"type": "disabled"}},
        {"thinking": {"type": "disabled", "budget_tokens": 5}},
        {"thinking": {"type": "enabled", "budget_tokens": 5}, "thinking_token_budget": 6},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}},
        {"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"},
        {"tools": TOOLS, "tool_choice": allowed("auto", "f", "g")},
        {"tool_choice": allowed("auto", "f")},
        {"include_reasoning": False, "logprobs": True},
        {"include_reasoning": False, "return_token_ids": True},
    ):
        outcome = post(door, **pair)
        assert (outcome.status, outcome.body["error"]["code"]) == (400, "BAD_FIELD"), pair


@pytest.mark.parametrize("names", [["reasoning"], ["reasoning_content"], ["reasoning", "reasoning_content"]])
def test_reasoning_comes_back_by_either_name_of_it(door: Scripted, names: list[str]) -> None:
    own = {"role": "assistant", "content": "x", **dict.fromkeys(names, "Hm.")}
    assert post(door, messages=[*QUESTION, own, *QUESTION]).asked.chat.messages[1].reasoning == "Hm."


@pytest.mark.parametrize("name", ["include_stop_str_in_output", "no_stop_trim"])
def test_the_stop_text_is_kept_by_either_name_of_that(door: Scripted, name: str) -> None:
    assert post(door, **{name: True}).asked.sampling.include_stop_str_in_output is True
    told = post(door, **{name: False}).asked.sampling
    assert told.HasField("include_stop_str_in_output")
    assert not told.include_stop_str_in_output


@pytest.mark.parametrize("settings", [{"enable_thinking": True}, {"thinking": True}])
def test_thinking_is_asked_for_by_either_name_of_it(door: Scripted, settings: dict[str, bool]) -> None:
    assert post(door, chat_template_kwargs=settings).asked.chat.thinking is True


def test_thinking_is_asked_for_as_an_object_too(door: Scripted) -> None:
    told = post(door, thinking={"type": "enabled", "budget_tokens": 9}, thinking_token_budget=9).asked
    assert (told.chat.thinking, told.sampling.thinking_token_budget) == (True, 9)
    told = post(door, thinking={"type": "disabled"}, chat_template_kwargs={"thinking": False, "a": "b"}).asked
    assert (told.chat.thinking, told.sampling.HasField("thinking_token_budget")) == (False, False)
    assert json.loads(told.chat.template_variables) == {"a": "b"}
    assert post(door, thinking={"type": "adaptive"}).asked == post(door).asked


def test_other_variables_of_a_template_are_told_as_they_are(door: Scripted) -> None:
    told = post(door, chat_template_kwargs={"thinking": False, "add_vision_id": True, "documents": [{"a": "ü"}]}).asked
    assert told.chat.thinking is False
    assert json.loads(told.chat.template_variables) == {"add_vision_id": True, "documents": [{"a": "ü"}]}


def test_documents_are_told_to_the_template(door: Scripted) -> None:
    """As vLLM's callers send them: beside the other variables."""
    documents = [{"title": "Sea", "text": "ü"}, {"text": "Blue."}]
    told = post(door, documents=documents, chat_template_kwargs={"add_vision_id": True}).asked
    assert json.loads(told.chat.template_variables) == {"add_vision_id": True, "documents": documents}
    assert json.loads(post(door, documents=documents).asked.chat.template_variables) == {"documents": documents}
    assert post(door, documents=[]).asked.chat.template_variables == ""


def test_effort_is_asked_for_in_either_place(door: Scripted) -> None:
    told = post(door, chat_template_kwargs={"reasoning_effort": "low"}, reasoning_effort="low").asked
    assert told.chat.reasoning_effort == "low"
    assert post(door, chat_template_kwargs={"reasoning_effort": "max"}).asked.chat.reasoning_effort == "max"


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_are_those_that_are_offered(door: Scripted, mode: str) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in "fgh"]
    told = post(door, tools=tools, tool_choice=allowed(mode, "h", "f")).asked
    assert told == post(door, tools=[tools[0], tools[2]], tool_choice=mode).asked
    assert [tool.name for tool in told.chat.tools] == ["f", "h"]
    assert bool(told.sampling.json_schema) is (mode == "required")
    for wrong in ({"type": "custom", "custom": {"name": "f"}}, {"type": "allowed_tools", "allowed_tools": {}}):
        assert post(door, tools=tools, tool_choice=wrong).status == 400


def test_what_clients_mark_for_anothers_cache_changes_nothing(door: Scripted) -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    parts = [{"type": "text", "text": "What?"}, PICTURE]
    plain = post(door, messages=[{"role": "user", "content": parts}], tools=TOOLS)
    marked = post(
        door,
        messages=[{"role": "user", "content": [{**part, **mark} for part in parts], **mark}],
        tools=[{**tool, **mark} for tool in TOOLS],
    )
    assert (marked.status, marked.asked) == (200, plain.asked)


def test_a_message_that_is_continued_begins_no_other(door: Scripted) -> None:
    assert post(door, add_generation_prompt=True).asked == post(door).asked
    told = post(door, continue_final_message=True, add_generation_prompt=False).asked
    assert told == post(door, continue_final_message=True).asked
    assert told.chat.continue_final_message


def test_media_settings_reach_pictures_and_videos_alike_where_they_can(door: Scripted) -> None:
    parts = [PICTURE, {"type": "video_url", "video_url": {"url": "https://example.org/a.mp4"}}]
    settings = {"min_pixels": 4096, "max_pixels": 8192, "fps": 1.5, "max_frames": 8, "video_pruning_rate": 0.5}
    settings["with_sound"] = False
    outcome = post(door, messages=[{"role": "user", "content": parts}], mm_processor_kwargs=settings)
    picture, video = (part.media for part in outcome.asked.chat.messages[0].parts)
    assert {field.name: value for field, value in video.options.ListFields()} == settings
    assert {field.name for field, _ in picture.options.ListFields()} == {"min_pixels", "max_pixels"}
    assert video.url == "https://example.org/a.mp4"


@pytest.mark.parametrize(("most", "told"), [(None, 512 * 512), (20_000, 20_000), (300_000, 512 * 512)])
def test_low_detail_only_lowers_the_bound_on_a_picture(door: Scripted, most: int | None, told: int) -> None:
    low = {**PICTURE, "image_url": {**PICTURE["image_url"], "detail": "low"}}
    outcome = post(door, messages=[{"role": "user", "content": [low]}], mm_processor_kwargs={"max_pixels": most})
    options = outcome.asked.chat.messages[0].parts[0].media.options
    assert options == v1.MediaOptions(max_pixels=told, clamp_max_pixels=True)


def test_frames_are_chosen_by_either_field(door: Scripted) -> None:
    messages = [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "https://example.org/a.mp4"}}]}]
    loading = {"video": {"num_frames": 8, "fps": 2}, "image": {}}
    processing = {"max_frames": 8, "fps": 2.0}
    one = post(door, messages=messages, media_io_kwargs=loading)
    assert one.asked == post(door, messages=messages, mm_processor_kwargs=processing).asked
    assert one.asked == post(door, messages=messages, mm_processor_kwargs=processing, media_io_kwargs=loading).asked
    assert one.asked.chat.messages[0].parts[0].media.options == v1.MediaOptions(fps=2, max_frames=8)
    for wrong in ({"video": {"num_frames": 9}}, {"video": {"num_frames": -1}}, {"image": {"rgba_background_color": 5}}):
        outcome = post(door, messages=messages, mm_processor_kwargs=processing, media_io_kwargs=wrong)
        assert outcome.status == 400, wrong


@pytest.mark.parametrize("content", [b"", b"\xfb\xff\xfe", bytes(range(256)) * 300])
@pytest.mark.parametrize("write", [base64.b64encode, base64.urlsafe_b64encode, base64.encodebytes])
def test_content_that_comes_in_base64_goes_on_as_it_is(
    door: Scripted, content: bytes, write: Callable[[bytes], bytes]
) -> None:
    written = write(content).decode()
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{written}"}},
        {"type": "video_url", "video_url": {"url": f"DATA:;charset=x;BASE64,{written.replace('=', '%3d')}"}},
        {"type": "audio_url", "audio_url": {"url": f"data:;base64,{written}"}},
        {"type": "input_audio", "input_audio": {"data": written, "format": "wav"}},
    ]
    (message,) = post(door, messages=[{"role": "user", "content": parts}]).asked.chat.messages
    given = [part.media for part in message.parts]
    assert [(each.WhichOneof("source"), each.data, each.mime_type) for each in given] == [("data", content, "")] * 4
    sound = {"type": "input_audio", "input_audio": {"data": "@", "format": "wav"}}
    refused = door.post("/v1/chat/completions", {"messages": [{"role": "user", "content": [sound]}]}).error
    assert (refused["code"], refused["param"]) == ("BAD_BASE64", "messages[0].content[0]")


TAG = {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"}
STRUCTURES = [{"begin": "<a>", "schema": {"type": "object"}, "end": "</a>"}]


@pytest.mark.parametrize("said", [{"format": TAG}, {"structures": STRUCTURES, "triggers": ["<a"]}])
def test_structural_tags_are_said_in_either_form_and_place(door: Scripted, said: dict[str, Any]) -> None:
    one = post(door, response_format={"type": "structural_tag", **said})
    assert json.loads(one.asked.sampling.structural_tag) == said
    for told in (said, json.dumps(said)):
        other = post(door, structured_outputs={"structural_tag": told})
        assert json.loads(other.asked.sampling.structural_tag) == said
    for wrong in ({"type": "structural_tag"}, {"type": "json_object", **said}):
        assert post(door, response_format=wrong).body["error"]["code"] == "BAD_FIELD"


def medium(door: Scripted, part: dict[str, Any], **fields: Any) -> v1.Media:
    """What the LLM service is asked of a part."""
    outcome = post(door, messages=[{"role": "user", "content": [part]}], **fields)
    assert outcome.status == 200, outcome.body
    return outcome.asked.chat.messages[0].parts[0].media


SENT = [f"data:image/png;base64,{base64.b64encode(each).decode()}" for each in (b"one", b"two")]
AT = "https://example.org/a"


def test_parts_as_qwen_s_own_tools_write_them_are_the_same_as_others(door: Scripted) -> None:
    for kind in ("image", "video", "audio"):
        for address in (SENT[0], AT):
            assert medium(door, {"type": kind, kind: address}) == medium(
                door, {"type": f"{kind}_url", f"{kind}_url": {"url": address}}
            )
    pixels = {"min_pixels": 64, "max_pixels": 4096}
    picture = {"type": "image", "image": AT, "max_pixels": 512}
    assert medium(door, picture, mm_processor_kwargs=pixels).options == v1.MediaOptions(min_pixels=64, max_pixels=512)
    clip = {"type": "video", "video": AT, "fps": 1.0, "max_frames": 8}
    settings = {"fps": 4.0, "max_pixels": 4096}
    expected = v1.MediaOptions(fps=1, max_frames=8, max_pixels=4096)
    assert medium(door, clip, mm_processor_kwargs=settings).options == expected


@pytest.mark.parametrize("rate", [{"fps": 4.0}, {"sample_fps": 4.0}, {"fps": 4.0, "sample_fps": 4.0}])
def test_a_list_of_frames_is_one_video(door: Scripted, rate: dict[str, float]) -> None:
    asked = medium(door, {"type": "video", "video": SENT, **rate})
    assert (asked.modality, asked.data, asked.options) == (v1.MODALITY_VIDEO, b"onetwo", v1.MediaOptions(fps=4))
    for listed in (SENT, {"url": SENT}):
        asked = medium(door, {"type": "video_url", "video_url": listed})
        assert (asked.modality, asked.data) == (v1.MODALITY_VIDEO, b"onetwo")


@pytest.mark.parametrize(
    ("part", "code", "param"),
    [
        ({"video": [SENT[0], AT]}, "FIELD_NOT_SERVED", ".video[1]"),
        ({"video": [SENT[0], "data:image/png;base64,?"]}, "BAD_BASE64", ".video[1]"),
        ({"video": []}, "BAD_FIELD", ".video"),
        ({"video": [b"x".hex()] * 10_001}, "BAD_FIELD", ".video"),
        ({"video": AT, "sample_fps": 2.0}, "BAD_FIELD", ""),
        ({"video": SENT, "fps": 1.0, "sample_fps": 2.0}, "BAD_FIELD", ""),
        ({"video": SENT, "nframes": 4}, "FIELD_NOT_SERVED", ".nframes"),
        ({"video": SENT, "max_pixels": 4096}, "FIELD_NOT_SERVED", ".max_pixels"),
        ({}, "BAD_FIELD", ""),
    ],
    ids=["an address", "no base64", "none", "a flood", "of a file", "two rates", "nframes", "max_pixels", "nothing"],
)
def test_what_is_no_video_of_qwen_s_is_refused(door: Scripted, part: dict[str, Any], code: str, param: str) -> None:
    outcome = post(door, messages=[{"role": "user", "content": [{"type": "video", **part}]}])
    error = outcome.body["error"]
    assert (outcome.status, error["code"], error["param"]) == (400, code, f"messages[0].content[0]{param}")


@pytest.mark.parametrize("kind", ["image_url", "video_url", "audio_url", "input_audio", "image", "video", "audio"])
def test_a_medium_is_named_by_its_uuid_alone(door: Scripted, kind: str) -> None:
    part = {"type": kind, kind: None, "uuid": "0f" * 32}
    settings = {"max_pixels": 4096}
    outcome = post(door, messages=[{"role": "user", "content": [part]}], mm_processor_kwargs=settings)
    media = outcome.asked.chat.messages[0].parts[0].media
    assert (media.key, media.HasField("options")) == (b"\x0f" * 32, False)


@pytest.mark.parametrize("uuid", [None, "", "mine", "0F" * 32, "0f" * 31, "0f" * 33])
def test_a_medium_that_is_not_there_has_an_uuid_that_an_answer_told(door: Scripted, uuid: str | None) -> None:
    outcome = post(door, messages=[{"role": "user", "content": [{"type": "image_url", "uuid": uuid}]}])
    error = outcome.body["error"]
    assert (outcome.status, error["code"], error["param"]) == (400, "BAD_FIELD", "messages[0].content[0]")


def test_an_uuid_beside_a_medium_changes_nothing(door: Scripted) -> None:
    plain = post(door, messages=[{"role": "user", "content": [PICTURE]}])
    named = post(door, messages=[{"role": "user", "content": [{**PICTURE, "uuid": "mine"}]}])
    assert (named.status, named.asked) == (200, plain.asked)


@pytest.mark.parametrize(
    "fields",
    [
        {"mm_processor_kwargs": {"use_audio_in_video": True}},
        {"mm_processor_kwargs": {"with_sound": True, "use_audio_in_video": True}},
        {"use_audio_in_video": True},
    ],
)
def test_sound_between_frames_is_asked_for_by_either_name(door: Scripted, fields: dict[str, Any]) -> None:
    parts = [{"type": "video_url", "video_url": {"url": "https://example.org/a.mp4"}}]
    messages = [{"role": "user", "content": parts}]
    outcome = post(door, messages=messages, **fields)
    assert outcome.asked.chat.messages[0].parts[0].media.options == v1.MediaOptions(with_sound=True)
    both = post(door, messages=messages, mm_processor_kwargs={"with_sound": False, "use_audio_in_video": True})
    assert (both.status, both.body["error"]["code"]) == (400, "BAD_FIELD")


def test_a_conversation_is_named_as_the_caller_does(door: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = v1.Status(code=3, reason="OUT_OF_RANGE", field="session_id")
    monkeypatch.setattr(door.llm, "refusal", (grpc.StatusCode.INVALID_ARGUMENT, refusal))
    monkeypatch.setattr(door.llm, "play", lambda _: iter(()))
    assert post(door, session_id="x").body["error"]["param"] == "session_id"
    assert post(door, prompt_cache_key="x").body["error"]["param"] == "prompt_cache_key"


def test_reasons_on_the_page_are_those_that_the_gateway_gives() -> None:
    sources = [path.read_text() for path in (ROOT / "gateway").rglob("*.py")]
    words = {
        keyword.value.value
        for source in sources
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "reason" and isinstance(keyword.value, ast.Constant)
    }
    words |= {
        reason for source in sources for reason in re.findall(r'^    default_reason = "(\w+)"$', source, re.MULTILINE)
    }
    listed = set(re.findall(r"^\| \d+ \| `([A-Z_]+)` \|", PAGE, re.MULTILINE))
    known = set(re.findall(r"^\| [A-Z_]+ \| `([A-Z_]+)` \|", (ROOT / "docs/API.md").read_text(), re.MULTILINE))
    assert words <= listed | known
    assert listed <= words | {"NOT_FOUND", "METHOD_NOT_ALLOWED"}


def test_metrics_on_the_page_are_those_that_are_there(door: Scripted) -> None:
    page = (ROOT / "docs/operations/gateway.md").read_text()
    table = page.partition("| `twinlens_gateway_…` | |")[2].partition("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines()[2:]]
    named = {name.removesuffix("_total") for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    text = door.get("/metrics").body.decode()
    there = set(re.findall(r"^# TYPE twinlens_gateway_(\w+) ", text, re.MULTILINE))
    assert named == {name.removesuffix("_total") for name in there if not name.endswith("_created")}


OF_DEPLOYMENTS: dict[str, dict[str, Any]] = {
    "a chat page": {
        "model": "demo",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "What?"}, PICTURE]},
            {"role": "assistant", "content": "A cat."},
            {"role": "user", "content": "Sure?"},
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.8,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.0,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.0,
        "seed": 0,
        "stop": [],
        "logit_bias": {},
        "max_tokens": 64,
        "chat_template_kwargs": {"enable_thinking": False},
    },
    "a title for it": {
        "model": "demo",
        "messages": [{"role": "user", "content": "Give it a title, as JSON."}],
        "stream": False,
        "max_completion_tokens": 1000,
        "response_format": {"type": "json_object"},
    },
    "vLLM's defaults": {
        "top_k": -1,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "length_penalty": 1.0,
        "use_beam_search": False,
        "ignore_eos": False,
        "min_tokens": 0,
        "stop_token_ids": [],
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "add_generation_prompt": True,
        "continue_final_message": False,
        "logprobs": False,
        "top_logprobs": 0,
        "priority": 0,
    },
    "vLLM's forms": {"structured_outputs": {"choice": ["yes", "no"]}, "chat_template_kwargs": {}},
}


@pytest.mark.parametrize("name", OF_DEPLOYMENTS)
def test_what_deployments_send_is_taken(door: Scripted, name: str) -> None:
    door.llm.requests.clear()
    reply = door.post("/v1/chat/completions", {"messages": QUESTION, **OF_DEPLOYMENTS[name]})
    assert reply.status == 200, reply.body
    (asked,) = door.llm.requests
    assert asked.sampling.top_k == max(0, OF_DEPLOYMENTS[name].get("top_k", 0))


def test_vllms_own_fields_are_refused_where_they_would_change_something(door: Scripted) -> None:
    for field in ("add_generation_prompt", "spaces_between_special_tokens"):
        outcome = post(door, **{field: False})
        assert (outcome.status, outcome.body["error"]["param"], outcome.asked) == (400, field, None)
    reply = door.post("/v1/completions", {"prompt": "x", "skip_special_tokens": True, "use_beam_search": True})
    assert (reply.status, reply.error["param"]) == (400, "use_beam_search")
