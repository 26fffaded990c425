from __future__ import annotations

import inspect
import json
from typing import Any

import pytest

from twinlens import SamplingParams, assistant, embed_request, generate_request, image, system, tool, user, v1, video


def test_bytes_become_data() -> None:
    media = image(b"png")
    assert (media.modality, media.data) == (v1.MODALITY_IMAGE, b"png")
    assert not media.HasField("options")


def test_a_file_is_read(tmp_path) -> None:
    path = tmp_path / "clip.mp4"
    path.write_bytes(b"frames")
    assert video(path).data == video(str(path)).data == b"frames"
    assert video(path).modality == v1.MODALITY_VIDEO


@pytest.mark.parametrize(
    "address", ["http://host/a.png", "https://host/a.png", "HTTPS://host/a.png", "data:image/png;base64,AA=="]
)
def test_an_address_is_left_to_the_encoder(address: str) -> None:
    assert image(address).url == address


def test_the_key_that_an_address_had_goes_with_it() -> None:
    key = bytes(range(32))
    assert (
        image("https://host/a.png", known_key=key).known_key
        == video("https://host/a.mp4", known_key=key).known_key
        == key
    )
    assert image("https://host/a.png").known_key == b""


def test_a_missing_file_is_an_os_error() -> None:
    with pytest.raises(FileNotFoundError):
        image("/no/such/file.png")


@pytest.mark.parametrize("source", ["ftp://host/a.png", "s3://bucket/a.png", "file:///tmp/a.png", ""])
def test_an_address_that_nobody_fetches_is_refused(source: str) -> None:
    with pytest.raises(ValueError, match="neither a file nor an http, https or data address"):
        image(source)


def test_options_that_are_not_given_stay_unset() -> None:
    options = video(b"x", fps=0.5, max_frames=8).options
    assert (options.fps, options.max_frames) == (0.5, 8)
    assert not options.HasField("max_pixels")
    assert not options.HasField("video_pruning_rate")


def test_a_text_is_one_user_message() -> None:
    request = generate_request("hello")
    assert list(request.chat.messages) == [user("hello")]
    assert not request.HasField("sampling")


def test_parts_keep_their_order() -> None:
    parts = user("before", image(b"1"), "between", image(b"2")).parts
    assert [part.WhichOneof("part") for part in parts] == ["text", "media", "text", "media"]


def test_a_conversation_keeps_its_roles() -> None:
    request = generate_request([system("be brief"), user("hi"), assistant("hello"), user("bye")])
    assert [message.role for message in request.chat.messages] == ["system", "user", "assistant", "user"]


@pytest.mark.parametrize(
    ("prompt", "form"),
    [
        (v1.TextInput(prompt="a"), "text"),
        (v1.TokensInput(ids=[1]), "tokens"),
        (v1.ChatInput(messages=[user("a")]), "chat"),
        (user("a"), "chat"),
    ],
)
def test_every_form_of_prompt_lands_in_its_field(prompt, form: str) -> None:
    assert generate_request(prompt).WhichOneof("input") == form


def test_names_and_sampling_are_carried_over() -> None:
    request = generate_request(
        "q",
        SamplingParams(max_tokens=3),
        request_id="r",
        cache_salt="s",
        priority=2,
        session_id="t",
        model="m",
        resume=[v1.ResumedChoice(index=1, token_ids=[5, 6])],
        max_handovers=0,
    )
    assert (request.resume[0].index, list(request.resume[0].token_ids)) == (1, [5, 6])
    assert (request.HasField("max_handovers"), request.max_handovers) == (True, 0)
    assert request.sampling.max_tokens == 3
    assert (request.request_id, request.cache_salt, request.priority) == ("r", "s", 2)
    assert (request.session_id, request.model) == ("t", "m")


OF_TEMPLATES: dict[str, Any] = {
    "tools": [tool("f")],
    "thinking": False,
    "reasoning_effort": "low",
    "continue_final_message": True,
    "calls_or_form": True,
    "thinks_before_form": True,
    "template_variables": {"style": "é"},
}


@pytest.mark.parametrize("name", OF_TEMPLATES)
def test_what_a_chat_template_is_told_goes_with_a_conversation_alone(name: str) -> None:
    given = {name: OF_TEMPLATES[name]}
    request = generate_request([user("a"), assistant("b")], **given, return_prompt_token_ids=True)
    said = {field.name: value for field, value in request.chat.ListFields() if field.name != "messages"}
    assert said.keys() == given.keys()
    value = said[name]
    assert (json.loads(value) if name == "template_variables" else value) == OF_TEMPLATES[name]
    assert generate_request(request.chat).chat == request.chat, "a conversation that says so already keeps it"
    assert request.return_prompt_token_ids
    with pytest.raises(ValueError, match="need a conversation"):
        generate_request(v1.TokensInput(ids=[1]), **given)


def test_every_field_of_a_request_has_an_argument() -> None:
    """Of the contract: what it takes, the short form can say."""
    fields = {field.name for kind in (v1.GenerateRequest, v1.ChatInput) for field in kind.DESCRIPTOR.fields}
    inputs = {field.name for field in v1.GenerateRequest.DESCRIPTOR.oneofs_by_name["input"].fields}
    assert fields - inputs - {"messages"} == inspect.signature(generate_request).parameters.keys() - {"prompt"}
    fields = {field.name for field in v1.EmbedRequest.DESCRIPTOR.fields}
    assert fields - inputs == inspect.signature(embed_request).parameters.keys() - {"prompt"}
