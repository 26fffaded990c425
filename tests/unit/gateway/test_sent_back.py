"""What clients send as other servers have taught them, and what they send back of other servers' answers, is taken."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from gateway.api.chat_request import ChatRequest
from gateway.api.responses_input import as_chat
from gateway.api.responses_request import ResponsesRequest
from gateway.convert import conversation
from twinlens import v1

ASKED = {"role": "user", "content": "Hello"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def asked(*messages: dict[str, Any], **fields: Any) -> v1.GenerateRequest:
    body = ChatRequest.model_validate({"messages": [ASKED, *messages], **fields})
    return conversation.chat_request(body, "r")


def texts(request: v1.GenerateRequest) -> list[list[str]]:
    return [[part.text for part in message.parts] for message in request.chat.messages]


def test_the_most_tokens_may_be_said_twice_where_they_are_the_same() -> None:
    assert asked(max_tokens=5, max_completion_tokens=5).sampling.max_tokens == 5
    with pytest.raises(ValidationError, match="have different values"):
        asked(max_tokens=5, max_completion_tokens=6)


@pytest.mark.parametrize(
    ("kind", "modality"),
    [("image_url", v1.MODALITY_IMAGE), ("video_url", v1.MODALITY_VIDEO), ("audio_url", v1.MODALITY_AUDIO)],
)
def test_an_address_may_stand_without_an_object_around_it(kind: str, modality: v1.Modality) -> None:
    part = {"type": kind, kind: "https://example.org/a"}
    media = asked({"role": "user", "content": [part]}).chat.messages[1].parts[0].media
    assert (media.modality, media.url) == (modality, "https://example.org/a")


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_text", "text": "x"},
        {"type": "output_text", "text": "x", "annotations": [], "logprobs": []},
        {"type": "refusal", "refusal": "x"},
    ],
)
def test_a_text_may_be_called_otherwise(part: dict[str, Any]) -> None:
    assert texts(asked({"role": "assistant", "content": [part]})) == [["Hello"], ["x"]]


def test_a_message_may_be_what_the_model_thought_alone_or_a_refusal() -> None:
    (_, message) = asked({"role": "assistant", "content": None, "reasoning_content": "Hm."}).chat.messages
    assert (list(message.parts), message.reasoning) == ([], "Hm.")
    assert texts(asked({"role": "assistant", "content": None, "refusal": "No."}))[1] == ["No."]


def test_what_other_servers_tell_beside_an_answer_lays_nothing_out() -> None:
    beside = {
        "refusal": None,
        "audio": None,
        "function_call": None,
        "annotations": [{"type": "url_citation"}],
        "reasoning_details": [{"type": "reasoning.text", "text": "Hm."}],
        "thinking_blocks": [{"type": "thinking", "thinking": "Hm.", "signature": "s"}],
        "extra_content": {"google": {"thought_signature": "s"}},
        "provider_specific_fields": {"a": 1},
    }
    own = {"role": "assistant", "content": "Yes.", "tool_calls": [CALL]}
    also = {**own, **beside, "tool_calls": [{**CALL, "extra_content": {"a": 1}, "provider_specific_fields": {"a": 1}}]}
    assert asked(also) == asked(own)


def test_a_summary_of_reasoning_is_taken_for_it() -> None:
    thought = {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "Hm."}]}
    include = ["reasoning.encrypted_content"]
    body = ResponsesRequest.model_validate(
        {"input": [ASKED, thought, {"role": "assistant", "content": "Yes."}], "include": include}
    )
    *_, message = as_chat(body, [])["messages"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")
