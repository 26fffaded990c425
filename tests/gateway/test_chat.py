"""Chat completions by the real client: the same tokens and counts as by gRPC, streamed or whole."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion

from tests import pictures
from tests.gateway.trio import CLIP, PICTURE, Trio, data_url, image, said, text, video
from tests.launch import Service
from tests.rpc.pairs import answer, asked
from tests.waiting import until
from twinlens import Answer, assistant, system, user, v1
from twinlens import image as an_image
from twinlens import video as a_video

SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "count": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["colour", "count"],
    "additionalProperties": False,
}


def low_detail(picture: bytes) -> v1.Media:
    media = an_image(picture, max_pixels=512 * 512)
    media.options.clamp_max_pixels = True
    return media


CONVERSATIONS: dict[str, tuple[list[Any], list[v1.ChatMessage]]] = {
    "a text": ([said("Hello")], [user("Hello")]),
    "turns": (
        [
            said("Be brief.", role="system"),
            said("One?", role="user"),
            said("Two.", role="assistant"),
            said(text("Three?"), text("Four?")),
        ],
        [system("Be brief."), user("One?"), assistant("Two."), user("Three?", "Four?")],
    ),
    "a developer": ([said("Be brief.", role="developer"), said("Hi")], [system("Be brief."), user("Hi")]),
    "a picture": ([said(image(), text("What is it?"))], [user(an_image(PICTURE), "What is it?")]),
    "a small picture": (
        [said(image(detail="low"), text("What is it?"))],
        [user(low_detail(PICTURE), "What is it?")],
    ),
    "a video": ([said(text("Look:"), video(), text("What happens?"))], [user("Look:", a_video(CLIP), "What happens?")]),
}


def by_grpc(door: Trio, messages: list[v1.ChatMessage], **sampling: Any) -> Answer:
    params = v1.SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **sampling})
    return answer(door.services.text, asked(messages, params))


def by_http(door: Trio, messages: list[Any], **fields: Any) -> ChatCompletion:
    return door.client.chat.completions.create(
        **{"model": door.model, "messages": messages, "max_tokens": 8, "temperature": 0, **fields}
    )


def streamed(door: Trio, messages: list[Any], **fields: Any) -> list[Any]:
    return list(
        door.client.chat.completions.create(
            **{"model": door.model, "messages": messages, "max_tokens": 8, "temperature": 0, **fields}, stream=True
        )
    )


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_the_same_request_has_the_same_words_and_counts_as_by_grpc(door: Trio, name: str) -> None:
    http, grpc = CONVERSATIONS[name]
    door.services.text.flush_cache()
    theirs = by_grpc(door, grpc)
    door.services.text.flush_cache()
    ours = by_http(door, http)
    assert ours.choices[0].message.content == theirs.text
    assert ours.choices[0].finish_reason == "length"
    assert ours.usage is not None
    counted = (ours.usage.prompt_tokens, ours.usage.completion_tokens, ours.usage.total_tokens)
    usage = theirs.usage
    assert counted == (usage.prompt_tokens, usage.completion_tokens, usage.prompt_tokens + usage.completion_tokens)
    again = by_http(door, http)
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens == by_grpc(door, grpc).usage.cached_tokens


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_stream_says_what_the_whole_answer_says(door: Trio, name: str) -> None:
    messages = CONVERSATIONS[name][0]
    by_http(door, messages)  # so that both find as much in the cache
    whole = by_http(door, messages)
    *chunks, last = streamed(door, messages, stream_options={"include_usage": True})
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert (last.choices, last.usage) == ([], whole.usage)
    assert {chunk.id for chunk in chunks} == {last.id}


def test_each_chunk_says_the_usage_so_far_where_that_is_asked_for(door: Trio) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = streamed(door, [said("Hello")], max_tokens=6, stream_options=options)
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert (counts[0], counts[-1]) == (0, last.usage.completion_tokens)
    assert counts == sorted(counts)
    assert len(set(counts)) > 2
    assert {chunk.usage.prompt_tokens for chunk in chunks} == {last.usage.prompt_tokens}


def test_a_stream_has_no_usage_unless_asked(door: Trio) -> None:
    assert all(chunk.usage is None and chunk.choices for chunk in streamed(door, [said("Hello")]))


LETTERS = [chr(code) for code in range(33, 127)]
SAMPLING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "temperature, top_p and seed": ({"temperature": 1.2, "top_p": 0.8, "seed": 7},) * 2,
    "a negative seed": ({"temperature": 1.2, "seed": -3}, {"temperature": 1.2, "seed": (1 << 64) - 3}),
    "penalties": (
        {"presence_penalty": 0.7, "frequency_penalty": 0.9, "seed": 5, "temperature": 0.9},
        {"presence_penalty": 0.7, "frequency_penalty": 0.9, "seed": 5, "temperature": 0.9},
    ),
    "logit_bias": ({"logit_bias": {"120": 90}}, {"logit_bias": {120: 90}}),
    "bad_words": (
        {"extra_body": {"bad_words": LETTERS}, "temperature": 1, "seed": 1},
        {"bad_words": LETTERS, "temperature": 1, "seed": 1},
    ),
    "max_completion_tokens": ({"max_tokens": None, "max_completion_tokens": 3}, {"max_tokens": 3}),
    "top_k": ({"extra_body": {"top_k": 3}, "temperature": 1, "seed": 1}, {"top_k": 3, "temperature": 1, "seed": 1}),
    "min_p": ({"extra_body": {"min_p": 0.2}, "temperature": 1, "seed": 1}, {"min_p": 0.2, "temperature": 1, "seed": 1}),
    "repetition_penalty": ({"extra_body": {"repetition_penalty": 1.8}}, {"repetition_penalty": 1.8}),
    "min_tokens and ignore_eos": (
        {"extra_body": {"min_tokens": 4, "ignore_eos": True}},
        {"min_tokens": 4, "ignore_eos": True},
    ),
}


@pytest.mark.parametrize("name", SAMPLING)
def test_each_way_to_choose_tokens_is_the_contracts(door: Trio, name: str) -> None:
    http, grpc = SAMPLING[name]
    question = "Which tokens follow?"
    ours = by_http(door, [said(question)], **http)
    assert ours.choices[0].message.content == by_grpc(door, [user(question)], **grpc).text


def test_an_answer_has_no_bad_word(door: Trio) -> None:
    words = by_http(door, [said("Hello")], max_tokens=12, extra_body={"bad_words": LETTERS}).choices[0].message.content
    plain = by_http(door, [said("Hello")], max_tokens=12).choices[0].message.content
    single = {
        token for letter in LETTERS for text in (letter, f" {letter}") for token in door.services.text.tokenize(text)
    }
    ids = by_grpc(door, [user("Hello")], max_tokens=12, bad_words=LETTERS).choices[0].token_ids
    assert words != plain
    assert not single & {*ids}


def test_every_choice_of_n_is_there_streamed_as_well(door: Trio) -> None:
    fields = {"n": 3, "temperature": 1.5, "seed": 11}
    theirs = by_grpc(door, [user("Hello")], **fields)
    ours = by_http(door, [said("Hello")], **fields)
    expected = [choice.text for choice in theirs.choices]
    assert [choice.message.content for choice in ours.choices] == expected
    assert ours.usage is not None
    assert ours.usage.completion_tokens == sum(choice.usage.completion_tokens for choice in theirs.choices)
    said_so_far = {0: "", 1: "", 2: ""}
    for chunk in streamed(door, [said("Hello")], **fields):
        said_so_far[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert list(said_so_far.values()) == expected


def test_tokens_are_named_by_their_ids_where_that_is_asked_for(door: Trio) -> None:
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 2}
    named = {"extra_body": {"return_tokens_as_token_ids": True, "return_token_ids": True}}
    plain = by_http(door, [said("Hello")], **fields).choices[0].logprobs
    choice: Any = by_http(door, [said("Hello")], **fields, **named).choices[0]
    chunks = streamed(door, [said("Hello")], **fields, **named)
    found = [each for chunk in chunks if (given := chunk.choices[0].logprobs) for each in given.content]
    assert found == choice.logprobs.content
    assert [each.token for each in found] == [f"token_id:{token}" for token in choice.token_ids]
    assert plain
    for each, other in zip(found, plain.content or [], strict=True):
        assert (each.logprob, each.bytes) == (other.logprob, other.bytes)
        assert [(top.logprob, top.bytes) for top in each.top_logprobs] == [
            (top.logprob, top.bytes) for top in other.top_logprobs
        ]
        assert each.token in [top.token for top in each.top_logprobs]


def test_ids_of_tokens_are_there_where_they_are_asked_for(door: Trio) -> None:
    asked_for: dict[str, Any] = {"n": 2, "temperature": 1, "seed": 3, "extra_body": {"return_token_ids": True}}
    messages = [said(text("Look"), image())]
    whole: Any = by_http(door, messages, **asked_for)
    theirs = by_grpc(door, [user("Look", an_image(PICTURE))], n=2, temperature=1, seed=3, prompt_logprobs=0)
    assert whole.prompt_token_ids[1:] == theirs.prompt_token_ids
    assert len(whole.prompt_token_ids) == whole.usage.prompt_tokens
    assert [choice.token_ids for choice in whole.choices] == [choice.token_ids for choice in theirs.choices]
    first, *chunks = streamed(door, messages, **asked_for)
    found: list[list[int]] = [[], []]
    for chunk in chunks:
        found[chunk.choices[0].index] += getattr(chunk.choices[0], "token_ids", ())
    assert (first.prompt_token_ids, found) == (whole.prompt_token_ids, [each.token_ids for each in whole.choices])
    assert not any(hasattr(chunk, "prompt_token_ids") for chunk in chunks)
    assert not hasattr(by_http(door, messages), "prompt_token_ids")


def test_logprobs_of_the_prompt_are_those_by_grpc(door: Trio) -> None:
    messages = [said(text("Look"), image())]
    whole: Any = by_http(door, messages, extra_body={"prompt_logprobs": 2})
    theirs = by_grpc(door, [user("Look", an_image(PICTURE))], prompt_logprobs=2)
    none, *prompt_logprobs = whole.prompt_logprobs
    assert none is None
    assert len(prompt_logprobs) == whole.usage.prompt_tokens - 1
    for found, token, their in zip(prompt_logprobs, theirs.prompt_token_ids, theirs.prompt_logprobs, strict=True):
        assert found[str(token)]["logprob"] == their.logprob
        for rank, top in enumerate(their.top, 1):
            named = {"logprob": top.logprob, "rank": rank, "decoded_token": top.text}
            assert found[str(top.token_id)] == named
    assert not hasattr(by_http(door, messages), "prompt_logprobs")
    first, *chunks = streamed(door, messages, n=2, extra_body={"prompt_logprobs": 2})
    assert first.prompt_logprobs == whole.prompt_logprobs
    assert first.choices[0].delta.role == "assistant"
    assert not any(hasattr(chunk, "prompt_logprobs") for chunk in chunks)
    said_of_first = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices[0].index == 0)
    assert said_of_first == whole.choices[0].message.content


def test_a_medium_need_not_be_sent_again(door: Trio) -> None:
    picture = pictures.encoded(pictures.noise(64, 48, 77))
    fields = {"extra_body": {"return_media_uuids": True, "mm_processor_kwargs": {"max_pixels": 2048}}}
    first: Any = by_http(door, [said(image(picture), video(), text("Look"))], **fields)
    assert len(first.media_uuids) == 2
    pixels, clip = first.media_uuids
    known = [{"type": "image_url", "uuid": pixels}, {"type": "video_url", "video_url": None, "uuid": clip}]
    again: Any = by_http(door, [said(*known, text("Look"))], **fields)
    assert again.choices[0].message.content == first.choices[0].message.content
    assert again.usage.prompt_tokens == first.usage.prompt_tokens
    begun, *rest = streamed(door, [said(*known, text("Look"))], **fields)
    assert begun.media_uuids == again.media_uuids == first.media_uuids
    assert not any(hasattr(chunk, "media_uuids") for chunk in rest)


def test_a_medium_of_another_salt_or_of_none_is_not_there(door: Trio) -> None:
    body: dict[str, Any] = {"return_media_uuids": True, "cache_salt": "one"}
    salted: Any = by_http(door, [said(image(), text("Look"))], extra_body=body)
    plain: Any = by_http(door, [said(image(), text("Look"))], extra_body={"return_media_uuids": True})
    assert salted.media_uuids != plain.media_uuids
    with pytest.raises(openai.NotFoundError) as error:
        by_http(door, [said(text("Look"), {"type": "image_url", "uuid": "00" * 32})])
    assert (error.value.code, error.value.param) == ("KEY_NOT_FOUND", "messages[0].content[1]")


def test_a_stop_text_ends_an_answer_and_is_not_part_of_it(door: Trio) -> None:
    whole = by_http(door, [said("Hello")], max_tokens=12).choices[0].message.content
    assert whole
    stop = whole[5]
    choice = by_http(door, [said("Hello")], max_tokens=12, stop=stop).choices[0]
    assert (choice.message.content, choice.finish_reason) == (whole[: whole.index(stop)], "stop")
    assert choice.stop_reason == stop  # type: ignore[attr-defined]
    assert by_http(door, [said("Hello")], max_tokens=12, stop=["\x07", stop]).choices[0] == choice


def test_a_stop_token_that_ended_an_answer_is_its_reason(door: Trio) -> None:
    ids = by_grpc(door, [user("Hello")]).choices[0].token_ids
    choice: Any = by_http(door, [said("Hello")], extra_body={"stop_token_ids": [ids[3], 1]}).choices[0]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", ids[3])
    assert by_http(door, [said("Hello")]).choices[0].stop_reason is None  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["include_stop_str_in_output", "no_stop_trim"])
def test_a_stop_text_is_part_of_an_answer_where_that_is_asked_for(door: Trio, name: str) -> None:
    whole = by_http(door, [said("Hello")], max_tokens=12).choices[0].message.content
    assert whole
    stop = whole[5]
    fields: dict[str, Any] = {"max_tokens": 12, "stop": stop, "extra_body": {name: True}}
    choice = by_http(door, [said("Hello")], **fields).choices[0]
    shown = whole[: whole.index(stop) + 1]
    assert (choice.message.content, choice.finish_reason) == (shown, "stop")
    chunks = [chunk.choices[0] for chunk in streamed(door, [said("Hello")], **fields)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == shown
    assert chunks[-1].stop_reason == stop


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_scores_have_texts_and_bytes(door: Trio, stream: bool) -> None:
    theirs = by_grpc(door, [user("Hello")], logprobs=2).choices[0].logprobs
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 2}
    if stream:
        chunks = streamed(door, [said("Hello")], **fields)
        found = [each for chunk in chunks if (given := chunk.choices[0].logprobs) for each in given.content]
    else:
        logprobs = by_http(door, [said("Hello")], **fields).choices[0].logprobs
        assert logprobs is not None
        found = logprobs.content or []
    assert [(each.token, each.logprob, bytes(each.bytes or [])) for each in found] == [
        (each.text, each.logprob, each.text_bytes) for each in theirs
    ]
    assert [[top.token for top in each.top_logprobs] for each in found] == [
        [top.text for top in each.top] for each in theirs
    ]


FORMS: dict[str, dict[str, Any]] = {
    "json_schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    },
    "guided_json": {"extra_body": {"guided_json": SCHEMA}},
    "guided_json as a text": {"extra_body": {"guided_json": json.dumps(SCHEMA)}},
    "structured_outputs": {"extra_body": {"structured_outputs": {"json": SCHEMA}}},
}


@pytest.mark.parametrize("name", FORMS)
def test_a_schema_gives_json_that_fits_it(door: Trio, name: str) -> None:
    choice = by_http(door, [said("Hello")], max_tokens=200, temperature=1.2, seed=3, **FORMS[name]).choices[0]
    value = json.loads(choice.message.content or "")
    assert set(value) == {"colour", "count"}
    assert choice.finish_reason == "stop"


@pytest.mark.parametrize("form", ["json_schema", "json_object"])
def test_a_completion_has_the_form_as_well(door: Trio, form: str) -> None:
    asked = FORMS["json_schema"] if form == "json_schema" else {"response_format": {"type": form}}
    body = {"prompt": "Hello", "max_tokens": 300, "temperature": 0.4, "seed": 2, **asked}
    (choice,) = json.loads(door.post("/v1/completions", body).body)["choices"]
    if form == "json_schema":
        assert set(json.loads(choice["text"])) == {"colour", "count"}
    assert choice["text"].lstrip().startswith("{")


def test_json_without_a_schema_is_an_object(door: Trio) -> None:
    fields: dict[str, Any] = {"response_format": {"type": "json_object"}, "temperature": 0.4, "seed": 2}
    choice = by_http(door, [said("Hello")], max_tokens=300, **fields).choices[0]
    assert (choice.message.content or "").lstrip().startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content or ""), dict)


@pytest.mark.parametrize(
    ("form", "options"),
    [
        ({"guided_choice": ["left", "right"]}, ["left", "right"]),
        ({"guided_regex": "[ab]"}, ["a", "b"]),
        ({"guided_grammar": 'start: "x" | "y"'}, ["x", "y"]),
        ({"structured_outputs": {"choice": ["left", "right"]}}, ["left", "right"]),
        ({"structured_outputs": {"regex": "[ab]"}}, ["a", "b"]),
    ],
    ids=["guided_choice", "guided_regex", "guided_grammar", "choice", "regex"],
)
def test_other_forms_are_kept(door: Trio, form: dict[str, Any], options: list[str]) -> None:
    content = by_http(door, [said("Hello")], max_tokens=20, extra_body=form).choices[0].message.content
    assert content in options


def test_the_request_id_goes_through(door: Trio) -> None:
    reply = door.chat(model=door.model)
    assert json.loads(reply.body)["id"] == f"chatcmpl-{reply.headers['x-request-id']}"
    reply = door.post(
        "/v1/chat/completions", {"messages": [said("Hello")], "max_tokens": 2}, {"x-request-id": "mine-17"}
    )
    assert (reply.headers["x-request-id"], json.loads(reply.body)["id"]) == ("mine-17", "chatcmpl-mine-17")
    assert '"request_id": "mine-17"' in door.services.llm.log.read_text()
    reply = door.chat(request_id="mine-18", max_tokens=2)
    assert (reply.headers["x-request-id"], json.loads(reply.body)["id"]) == ("mine-18", "chatcmpl-mine-18")
    logs = door.services.llm.log, door.gateway.log
    until(lambda: all('"request_id": "mine-18"' in log.read_text() for log in logs), "both have logged it")


def test_the_logs_last_line_about_a_request_says_what_it_was_and_what_took_its_time(door: Trio) -> None:
    reply = door.post(
        "/v1/chat/completions",
        {"messages": [said(text("What is this?"), image())], "max_tokens": 3},
        {"x-request-id": "lasting-line"},
    )
    usage = json.loads(reply.body)["usage"]
    call, request = (lines(each, "lasting-line") for each in (door.services.llm, door.gateway))
    until(lambda: call() and request(), "both lines are there")
    (said_by_llm,), (said_by_gateway,) = call(), request()
    assert {name: said_by_llm[name] for name in ("prompt_tokens", "completion_tokens")} == {
        name: usage[name] for name in ("prompt_tokens", "completion_tokens")
    }
    stages = said_by_llm["stages"]
    assert list(stages)[:2] == ["prompt", "encode_header"]
    assert {"queue", "first_token", "decode_tokens"} <= stages.keys()
    assert sum(stages.values()) <= said_by_llm["seconds"] + 0.01
    assert said_by_gateway["llm"] == door.services.llm.address
    assert 0 < said_by_gateway["first_byte_seconds"] <= said_by_gateway["seconds"]


def lines(service: Service, request_id: str) -> Callable[[], list[dict[str, Any]]]:
    """A service's lines at the end of a request."""

    def read() -> list[dict[str, Any]]:
        found = (json.loads(line) for line in service.log.read_text().splitlines() if request_id in line)
        return [each for each in found if each["event"] in ("call", "request") and each.get("method") != "Encode"]

    return read


@pytest.mark.parametrize("kind", ["image/jpeg", "application/octet-stream", ""])
def test_a_picture_is_what_its_bytes_say_whatever_its_address_calls_it(door: Trio, kind: str) -> None:
    content = data_url(PICTURE, kind)
    other = by_http(door, [said(text("Look"), {"type": "image_url", "image_url": {"url": content}})])
    same = by_http(door, [said(text("Look"), image())])
    assert other.choices[0].message.content == same.choices[0].message.content


@pytest.mark.parametrize("write", [base64.encodebytes, base64.urlsafe_b64encode])
def test_a_picture_may_be_written_in_lines_and_as_in_addresses(door: Trio, write: Callable[[bytes], bytes]) -> None:
    content = f"data:image/png;base64,{write(PICTURE).decode()}"
    other = by_http(door, [said(text("Look"), {"type": "image_url", "image_url": {"url": content}})])
    same = by_http(door, [said(text("Look"), image())])
    assert other.choices[0].message.content == same.choices[0].message.content


def test_a_medium_has_one_content_key_whichever_way_it_came(door: Trio) -> None:
    written = base64.b64encode(PICTURE).decode()
    addresses = [
        f"data:image/png;base64,{written}",
        f"DATA:;base64,{base64.urlsafe_b64encode(PICTURE).decode()}",
        f"data:image/jpeg;charset=x;base64,{base64.encodebytes(PICTURE).decode()}",
        f"data:;base64,{written.replace('+', '%2B').replace('/', '%2f').replace('=', '%3D')}",
    ]
    shown = [{"type": "image_url", "image_url": {"url": each}} for each in addresses]
    told: Any = by_http(door, [said(text("Look"), *shown)], extra_body={"return_media_uuids": True})
    direct = by_grpc(door, [user("Look", an_image(PICTURE))])
    assert set(told.media_uuids) == {direct.started.spans[0].key.hex()}


def test_a_picture_that_is_none_is_refused_where_it_stands(door: Trio) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        by_http(door, [said("Hi"), said("Yes?", role="assistant"), said(text("Look"), image(b"no picture"))])
    assert (error.value.code, error.value.param) == ("MEDIA_FORMAT", "messages[2].content[1]")
    assert "the bytes are text; an image is taken as JPEG, PNG, WebP, GIF, BMP, AVIF" in error.value.message


def test_an_address_that_may_not_be_fetched_is_refused_with_what_may(door: Trio) -> None:
    elsewhere = {"type": "image_url", "image_url": {"url": "http://10.0.0.7/secret.png"}}
    with pytest.raises(openai.PermissionDeniedError) as error:
        by_http(door, [said(text("Look"), image(), elsewhere)])
    assert (error.value.code, error.value.param) == ("FETCH_FORBIDDEN", "messages[0].content[2]")
    assert "only from hosts that the encoders' --allow-media-host names" in error.value.message
    assert "or a data address" in error.value.message
    assert "10.0.0.7" not in error.value.message


@pytest.mark.parametrize(
    "clip",
    [
        {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,UklGRg=="}},
    ],
)
def test_a_clip_is_refused_by_a_model_that_does_not_hear(door: Trio, clip: dict[str, Any]) -> None:
    reply = door.chat(messages=[said(text("Listen"), clip)])
    assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "NO_AUDIO", "messages[0].content[1]")
    assert reply.headers["x-should-retry"] == "false"


def test_tools_are_refused_by_name_where_the_template_knows_none(door: Trio) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    reply = door.chat(tools=[tool])
    assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "NO_TOOLS", "tools")
    reply = door.chat(tools=[tool], tool_choice="required")
    assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "NO_TOOLS", "tools")
    result = {"role": "tool", "content": "x", "tool_call_id": "y"}
    reply = door.chat(messages=[said("x"), result])
    assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "NO_TOOLS", "messages[1]")
    reply = door.chat(chat_template_kwargs={"enable_thinking": True})
    assert (reply.status, reply.error["code"]) == (400, "NO_THINKING")
    assert reply.error["param"] == "chat_template_kwargs.enable_thinking"
    assert door.chat(chat_template_kwargs={"enable_thinking": False}).status == 200
    reply = door.chat(thinking={"type": "enabled"})
    assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "NO_THINKING", "thinking")
    assert door.chat(thinking={"type": "disabled"}).status == 200


def test_documents_are_refused_by_name_where_the_template_asks_for_none(door: Trio) -> None:
    reply = door.chat(documents=[{"text": "The sea is blue."}])
    assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "BAD_VARIABLE", "documents")


def test_effort_is_refused_by_name_where_the_template_leaves_no_choice(door: Trio) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        by_http(door, [said("Hello")], reasoning_effort="high")
    assert (error.value.code, error.value.param) == ("NO_THINKING", "reasoning_effort")
    assert by_http(door, [said("Hello")], reasoning_effort="none").choices[0].message.content
