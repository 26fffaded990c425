"""Transcriptions by the real client: what an LLM service is asked, and how its words are told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import openai
import pytest
from openai.types.audio import transcription_create_params as params

from gateway.api.transcriptions import TranscriptionRequest
from tests.gateway.scripted import Scripted, scripted
from twinlens import v1

SOUND = b"RIFF" + bytes(range(256)) * 20
SERVED = {"file", "model", "language", "prompt", "response_format", "stream", "temperature", "include"}
ACCEPTED = {"chunking_strategy"}


@pytest.fixture(scope="module")
def door() -> Iterator[Scripted]:
    with scripted() as running:
        yield running


@pytest.fixture
def client(door: Scripted) -> Iterator[openai.OpenAI]:
    door.llm.requests.clear()
    door.llm.refusal = None
    door.llm.play = say
    with openai.OpenAI(base_url=f"http://{door.gateway.address}/v1", api_key="x", max_retries=0) as client:
        yield client


def say(request: v1.GenerateRequest) -> Iterator[v1.GenerateResponse]:
    """Two turns of words, between which there are tokens without."""
    span = v1.MediaSpan(start=3, length=5, rows=5)
    yield v1.GenerateResponse(started=v1.GenerateStarted(prompt_tokens=9, spans=[span]))
    yield v1.GenerateResponse()  # an event of a newer service
    turns = [
        v1.TranscriptTurn(end_seconds=1.5, speaker="0", text="Hello."),
        v1.TranscriptTurn(start_seconds=1.5, end_seconds=2, speaker="1", text="Hi."),
    ]
    for number, (text, turn) in enumerate([("Hello.", turns[0]), ("", None), (" Hi.", turns[1])]):
        scores = [v1.TokenLogprobs(logprob=-0.5, text=text, text_bytes=text.encode())]
        given = scores if request.sampling.HasField("logprobs") else []
        delta = v1.GenerateDelta(text=text, token_ids=[number], logprobs=given, turns=[turn] if turn else [])
        yield v1.GenerateResponse(delta=delta)
    usage = v1.Usage(prompt_tokens=9, completion_tokens=3)
    yield v1.GenerateResponse(finished=v1.GenerateFinished(reason=v1.FINISH_REASON_LENGTH, usage=usage))


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    return client.audio.transcriptions.create(**{"model": "demo", "file": ("a.wav", SOUND), **fields})


def test_a_file_becomes_a_request_and_its_words_an_answer(door: Scripted, client: openai.OpenAI) -> None:
    extra = {"seed": "-1", "max_completion_tokens": "7", "cache_salt": "tenant", "priority": "2", "top_k": "3"}
    said = ask(client, language="de", prompt="Ulm, Linz", temperature=0.25, extra_body=extra)
    (request,) = door.llm.requests
    sound = v1.Media(modality=v1.MODALITY_AUDIO, data=SOUND)
    assert request.transcription == v1.TranscriptionInput(audio=sound, language="de", prompt="Ulm, Linz")
    assert request.sampling == v1.SamplingParams(temperature=0.25, max_tokens=7, seed=(1 << 64) - 1, top_k=3)
    assert (request.model, request.cache_salt, request.priority) == ("demo", "tenant", 2)
    assert (said.text, said.logprobs, said.finish_reason) == ("Hello. Hi.", None, "length")
    usage = said.usage
    assert (usage.type, usage.input_tokens, usage.output_tokens, usage.total_tokens) == ("tokens", 9, 3, 12)
    assert (usage.input_token_details.audio_tokens, usage.input_token_details.text_tokens) == (5, 4)


def test_what_is_left_out_is_greedy_and_unsaid(door: Scripted, client: openai.OpenAI) -> None:
    ask(client)
    sampling = v1.SamplingParams(temperature=0)
    assert (door.llm.requests[0].sampling, door.llm.requests[0].transcription.turns) == (sampling, False)


def test_words_may_be_plain_text(client: openai.OpenAI) -> None:
    assert ask(client, response_format="text") == "Hello. Hi."


def test_turns_say_who_speaks_when(door: Scripted, client: openai.OpenAI) -> None:
    said = ask(client, response_format="diarized_json", chunking_strategy="auto")
    assert door.llm.requests[0].transcription.turns
    assert [(each.id, each.start, each.end, each.speaker, each.text) for each in said.segments] == [
        ("seg_0", 0, 1.5, "0", "Hello."),
        ("seg_1", 1.5, 2, "1", "Hi."),
    ]
    assert (said.task, said.text) == ("transcribe", "Hello. Hi.")


def test_turns_are_subtitles(door: Scripted, client: openai.OpenAI) -> None:
    times = [("00:00:00{0}000", "00:00:01{0}500"), ("00:00:01{0}500", "00:00:02{0}000")]
    (one, two), (three, four) = [[each.format(",") for each in pair] for pair in times]
    said = ask(client, response_format="srt")
    assert said == f"1\n{one} --> {two}\nHello.\n\n2\n{three} --> {four}\nHi.\n\n"
    assert door.llm.requests[0].transcription.turns
    (one, two), (three, four) = [[each.format(".") for each in pair] for pair in times]
    said = ask(client, response_format="vtt")
    assert said == f"WEBVTT\n\n{one} --> {two}\n<v 0>Hello.\n\n{three} --> {four}\n<v 1>Hi.\n\n"


def test_scores_are_those_of_all_tokens(client: openai.OpenAI) -> None:
    said = ask(client, include=["logprobs"])
    assert [(each.token, each.logprob, each.bytes) for each in said.logprobs] == [
        ("Hello.", -0.5, list(b"Hello.")),
        ("", -0.5, []),
        (" Hi.", -0.5, list(b" Hi.")),
    ]


@pytest.mark.parametrize(
    ("fields", "kinds"),
    [
        ({}, ["delta", "delta", "done"]),
        ({"include": ["logprobs"]}, ["delta", "delta", "delta", "done"]),
        ({"response_format": "diarized_json"}, ["delta", "segment", "delta", "segment", "done"]),
    ],
)
def test_a_stream_has_the_client_s_events(client: openai.OpenAI, fields: dict[str, Any], kinds: list[str]) -> None:
    events = list(ask(client, stream=True, **fields))
    assert [event.type.removeprefix("transcript.text.") for event in events] == kinds
    assert "".join(event.delta for event in events if event.type == "transcript.text.delta") == events[-1].text
    assert (events[-1].text, events[-1].usage.total_tokens) == ("Hello. Hi.", 12)


def test_a_failure_in_the_middle_is_the_last_event(door: Scripted, client: openai.OpenAI) -> None:
    def breaks(request: v1.GenerateRequest) -> Iterator[v1.GenerateResponse]:
        yield from list(say(request))[:3]

    code = grpc.StatusCode.INVALID_ARGUMENT
    door.llm.play = breaks
    door.llm.refusal = code, v1.Status(code=code.value[0], reason="NO_LANGUAGE", field="transcription.language")
    with pytest.raises(openai.APIError) as caught:
        list(ask(client, stream=True))
    assert caught.value.body["code"] == "NO_LANGUAGE"  # type: ignore[index]


@pytest.mark.parametrize(
    ("field", "param"),
    [("transcription.language", "language"), ("transcription.audio.modality", "file"), ("input", "input")],
)
def test_a_refusal_names_the_form_s_field(door: Scripted, client: openai.OpenAI, field: str, param: str) -> None:
    code = grpc.StatusCode.INVALID_ARGUMENT
    door.llm.play = lambda _: iter(())
    door.llm.refusal = code, v1.Status(code=code.value[0], reason="NO_LANGUAGE", field=field)
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client)
    assert (caught.value.code, caught.value.param) == ("NO_LANGUAGE", param)


@pytest.mark.parametrize("name", sorted({*params.TranscriptionCreateParamsBase.__annotations__, "stream"}))
def test_every_field_of_the_client_is_served_or_refused_by_name(client: openai.OpenAI, name: str) -> None:
    values: dict[str, Any] = {
        "model": "demo",
        "include": ["logprobs"],
        "response_format": "text",
        "stream": False,
        "temperature": 0.5,
    }
    if name in SERVED | ACCEPTED:
        value = {"chunking_strategy": "auto", "file": ("a.wav", SOUND)}.get(name, values.get(name, "x"))
        ask(client, **{name: value})
        return
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, extra_body={name: "word"})
    assert (caught.value.code, caught.value.param) == ("FIELD_NOT_SERVED", name)


def posted(door: Scripted, content: bytes, kind: str = "multipart/form-data; boundary=b") -> dict[str, Any]:
    reply = door.post("/v1/audio/transcriptions", content, {"content-type": kind})
    assert reply.status == 400
    return reply.error


def part(name: str, value: bytes, filename: str = "") -> bytes:
    named = f'; filename="{filename}"' if filename else ""
    return f'--b\r\ncontent-disposition: form-data; name="{name}"{named}\r\n\r\n'.encode() + value + b"\r\n"


END = b"--b--\r\n"
FILE = part("file", SOUND, "a.wav")


@pytest.mark.parametrize(
    ("content", "code", "param"),
    [
        (b"no form", "BAD_FORM", None),
        (FILE.replace(b"content-disposition", b"x") + END, "BAD_FORM", None),
        (FILE + FILE + END, "BAD_FORM", None),
        (b"".join(part(f"a{n}", b"") for n in range(65)) + FILE + END, "BAD_FORM", None),
        (part("prompt", b"x" * (1 << 20) + b"x") + FILE + END, "BAD_FORM", None),
        (part("model", b"demo") + END, "BAD_FIELD", "file"),
        (END, "BAD_FIELD", "file"),
        (part("file", b"text") + END, "BAD_FIELD", "file"),
        (part("other", b"x", "b.wav") + END, "BAD_FIELD", "other"),
        (FILE + part("prompt", b"a") + part("prompt", b"b") + END, "BAD_FIELD", "prompt"),
        (FILE + part("stream", b"perhaps") + END, "BAD_FIELD", "stream"),
        (FILE + part("temperature", b"NaN") + END, "BAD_FIELD", "temperature"),
        (FILE + part("response_format", b"verbose_json") + END, "BAD_FIELD", "response_format"),
        (FILE + part("response_format", b"srt") + part("stream", b"true") + END, "BAD_FIELD", None),
        (FILE + part("response_format", b"vtt") + part("include[]", b"logprobs") + END, "BAD_FIELD", None),
        (FILE + part("include[]", b"logprobs") + part("include[]", b"all") + END, "BAD_FIELD", "include[]"),
    ],
)
def test_a_form_that_is_none_is_refused(door: Scripted, content: bytes, code: str, param: str | None) -> None:
    error = posted(door, content)
    assert (error["code"], error["param"]) == (code, param)


@pytest.mark.parametrize("charset", ["undefined", "punycode", '"Punycode"', "unheard-of"])
def test_a_charset_whose_decoder_may_take_minutes_is_not_asked(door: Scripted, charset: str) -> None:
    content = FILE + part("prompt", b"a-b") + END
    error = posted(door, content, f"multipart/form-data; boundary=b; charset={charset}")
    assert (error["code"], error["message"]) == ("BAD_FORM", "the form cannot be read: its charset is not UTF-8")


@pytest.mark.parametrize(("charset", "text"), [("UTF-8", "Löß"), ("us-ascii", "Loss"), ("iso-8859-1", "Löß")])
def test_a_charset_of_texts_is_that_of_its_fields(door: Scripted, charset: str, text: str) -> None:
    content = FILE + part("prompt", text.encode(charset)) + END
    door.llm.requests.clear()
    kind = {"content-type": f"multipart/form-data; boundary=b; charset={charset}"}
    reply = door.post("/v1/audio/transcriptions", content, kind)
    assert (reply.status, door.llm.requests[0].transcription.prompt) == (200, text)


def test_all_tokens_may_be_asked_for_as_vllm_has_it(door: Scripted, client: openai.OpenAI) -> None:
    ask(client, extra_body={"top_k": "-1"})
    assert door.llm.requests[0].sampling == v1.SamplingParams(temperature=0, top_k=0)


def test_scores_have_no_place_in_a_plain_text(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="plain text cannot carry logprobs"):
        ask(client, response_format="text", include=["logprobs"])
    assert list(ask(client, response_format="text", include=["logprobs"], stream=True))[-1].logprobs


def test_json_is_no_form(door: Scripted) -> None:
    assert posted(door, b"{}", "application/json")["code"] == "BAD_FORM"
    assert posted(door, FILE + END, "multipart/form-data")["code"] == "BAD_FORM"


def test_large_files_are_taken_whole(door: Scripted, client: openai.OpenAI) -> None:
    sound = bytes(range(251)) * 12_000
    ask(client, file=("a.wav", sound))
    assert door.llm.requests[0].transcription.audio.data == sound


def test_what_the_page_of_fields_says_is_what_is_taken() -> None:
    known = {field.alias or name for name, field in TranscriptionRequest.model_fields.items()}
    assert known | {"file"} >= (SERVED - {"include"}) | {"include[]"}
