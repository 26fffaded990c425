"""What the gateway refuses, at once and by name: bad bodies, wrong types, strangers, slow senders, floods."""

from __future__ import annotations

import gzip
import json
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import pytest

from testkit.light.slow import SLOW
from tests.gateway.trio import Trio, fronted, said
from tests.waiting import until

CHAT = "/v1/chat/completions"


def wrapped(depth: int) -> bytes:
    return b'{"messages":[{"role":"user","content":' + b"[" * depth + b"]" * depth + b"}]}"


BODIES = {
    "nothing": b"",
    "no JSON": b"hello",
    "JSON that breaks off": b'{"messages": [{"role": "user"',
    "bytes that are no text": b'{"model": "\xff\xfe"}',
    "half a pair of surrogates": rb'{"messages": [{"role": "user", "content": "\ud800"}]}',
    "a number without an end": b'{"seed": 1' + b"0" * 100_000 + b"}",
    "brackets a hundred thousand deep": wrapped(100_000),
    "brackets two hundred deep": wrapped(250),
    "not a number": b'{"messages":[{"role":"user","content":"x"}],"temperature":NaN}',
}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/tokenize"])
def test_a_body_that_cannot_be_read_is_refused(door: Trio, path: str, name: str) -> None:
    reply = door.post(path, BODIES[name])
    assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")
    assert reply.error["code"] in ("BAD_JSON", "BAD_FIELD", "FIELD_NOT_SERVED")


WRONG: dict[str, tuple[Any, str]] = {
    "model": (5, "model"),
    "messages": ("hello", "messages"),
    "temperature": ("0.5", "temperature"),
    "max_tokens": (2.5, "max_tokens"),
    "n": (True, "n"),
    "seed": (1 << 70, "seed"),
    "stop": ([1], "stop[0]"),
    "stream": ("yes", "stream"),
    "stream_options": ({"include_usage": 1}, "stream_options.include_usage"),
    "logit_bias": ({"x": 1}, "logit_bias"),
    "response_format": ({"type": "yaml"}, "response_format.type"),
    "metadata": ({"a": 1}, "metadata.a"),
    "user": (["me"], "user"),
    "top_logprobs": (2, ""),
    "min_tokens": (1 << 40, "min_tokens"),
}


@pytest.mark.parametrize("field", WRONG)
def test_a_value_of_a_wrong_type_is_refused_by_name(door: Trio, field: str) -> None:
    value, param = WRONG[field]
    reply = door.chat(**{field: value})
    assert (reply.status, reply.error["code"]) == (400, "BAD_FIELD")
    assert (reply.error["param"] or "") == param


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", 101), ("top_p", 0), ("n", 1000), ("max_tokens", 0), ("logit_bias", {"5": 1000.0})],
)
def test_a_value_out_of_range_is_refused_by_name(door: Trio, field: str, value: Any) -> None:
    reply = door.chat(**{field: value})
    assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "OUT_OF_RANGE", field)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "ghost", "content": "boo"}], "messages[0].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"text": "x"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "file", "file": {}}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages[0].content[0].text"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": 5}]}],
            "messages[0].content[0].image_url",
        ),
        ([said("x"), {"role": "user", "content": "x", "more": 1}], "messages[1].more"),
    ],
)
def test_a_message_that_is_none_is_refused_where_it_is_wrong(door: Trio, messages: Any, param: str) -> None:
    reply = door.chat(messages=messages)
    assert (reply.status, reply.error["param"]) == (400, param)


def test_what_a_caller_calls_a_field_is_not_said_back_at_length(door: Trio) -> None:
    reply = door.chat(**{"x" * 1_000_000: 1})
    assert reply.status == 400
    assert len(reply.body) < 1000


def test_another_model_is_not_found(door: Trio) -> None:
    with pytest.raises(openai.NotFoundError) as error:
        door.client.chat.completions.create(model="another", messages=[{"role": "user", "content": "x"}])
    assert (error.value.code, error.value.param) == ("UNKNOWN_MODEL", "model")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "NOT_FOUND"),
        ("GET", CHAT, 405, "METHOD_NOT_ALLOWED"),
        ("POST", "/v1/models", 405, "METHOD_NOT_ALLOWED"),
        ("GET", "/v1/models/other/one", 404, "UNKNOWN_MODEL"),
    ],
)
def test_a_path_that_is_not_there_has_openais_shape(door: Trio, method: str, path: str, status: int, code: str) -> None:
    reply = door.post(path, b"", method=method)
    assert (reply.status, reply.error["code"]) == (status, code)


def test_a_path_says_which_methods_it_has(door: Trio) -> None:
    assert door.post(CHAT, b"", method="GET").error["message"] == "this path accepts only POST"


HI = {"messages": [said("Hi")]}


def picture(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


PICTURE = picture("drawing.png")


def schema(**given: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": given}}}


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        (CHAT, {**HI, "top_p": 0}, "top_p", "top_p must be above 0.0, and at most 1.0"),
        (CHAT, {**HI, "n": 99}, "n", "n must be between 1 and 8"),
        (
            CHAT,
            {**HI, "max_completion_tokens": 0},
            "max_completion_tokens",
            "max_completion_tokens must be between 1 and",
        ),
        (CHAT, {**HI, "max_tokens": 0}, "max_tokens", "max_tokens must be between 1 and"),
        (CHAT, {**HI, "logprobs": True, "top_logprobs": 30}, "top_logprobs", "top_logprobs must be between 0 and 20"),
        (CHAT, {**HI, "top_logprobs": 3}, None, "top_logprobs need logprobs: true"),
        (CHAT, {**HI, "stream_options": {}}, None, "stream_options need stream: true"),
        (CHAT, {**HI, "stop": 5}, "stop", "it is neither a string nor an array"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "neither a string nor an array"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content", "a message needs content"),
        (CHAT, {"messages": []}, "messages", "it has fewer than 1 item"),
        (CHAT, {"messages": [said("a " * 20_000)]}, "messages", "this model's maximum context length is 4096 tokens"),
        (CHAT, {"messages": [said(*[PICTURE] * 17)]}, "messages", "at most 16 images, and this one has 17"),
        (CHAT, {"messages": [said(PICTURE)]}, "messages[0].content[0]", "does not begin with http:, https: or data:"),
        (
            CHAT,
            {"messages": [said(picture("data:image/png,iVBO"))]},
            "messages[0].content[0]",
            "the data address does not say ;base64 before its comma",
        ),
        (
            CHAT,
            {"messages": [said(picture("data:;base64,@@@@"))]},
            "messages[0].content[0]",
            "the part after the comma of the data address is not base64",
        ),
        (
            CHAT,
            {"messages": [said({"type": "file", "file": {}})]},
            "messages[0].content[0].type",
            "refusal, image_url, video_url, input_audio, audio_url, image, video and audio",
        ),
        (CHAT, {**HI, **schema(type="colour")}, "response_format", "cannot be compiled: Invalid type: colour"),
        (CHAT, {**HI, **schema(enum=[])}, "response_format", "cannot be compiled: Unsatisfiable schema"),
        ("/v1/completions", {"prompt": "a " * 20_000}, "prompt", "this model's maximum context length is 4096 tokens"),
        ("/v1/responses", {"input": "a " * 20_000}, "input", "this model's maximum context length is 4096 tokens"),
        ("/v1/responses", {"input": "a" * 2_000_000}, "input", "prompt is too long: 2000000 bytes of text > "),
        (
            "/v1/responses",
            {"input": "a", "max_output_tokens": 0},
            "max_output_tokens",
            "max_output_tokens must be between 1 and",
        ),
        ("/v1/files", {}, None, "OpenAI's API is below /v1"),
    ],
)
def test_a_refusal_says_what_is_wanted_in_the_callers_words(
    door: Trio, path: str, body: dict[str, Any], param: str | None, says: str
) -> None:
    error = door.post(path, body).error
    assert error["param"] == param
    assert says in error["message"]


NO_BASE64 = picture("data:image/png;base64,@@@@")
WHY = "the part after the comma of the data address is not base64"
TURNS = [said("x"), said({"type": "text", "text": "y"}, NO_BASE64)]
SOURCE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "@@@@"}}
PLACES: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": TURNS}, "messages[1].content[1]"),
    ("/v1/embeddings", {"messages": TURNS}, "messages[1].content[1]"),
    ("/v1/embeddings", {"messages": [[said("x")], TURNS]}, "messages[1][1].content[1]"),
    ("/v1/rerank", {"query": "x", "documents": ["y", {"content": [NO_BASE64]}]}, "documents[1].content[0]"),
    ("/score", {"text_1": {"content": [NO_BASE64]}, "text_2": ["x"]}, "text_1.content[0]"),
    (
        "/v1/responses",
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:;base64,@@@@"}]}]},
        "input[0].content[0]",
    ),
    ("/v1/messages", {"max_tokens": 9, "messages": [said("x"), said(SOURCE)]}, "messages[1].content[0]"),
    ("/v1/messages/count_tokens", {"messages": [said(SOURCE)]}, "messages[0].content[0]"),
]


@pytest.mark.parametrize(("path", "body", "param"), PLACES)
def test_what_is_no_base64_is_refused_where_it_stands(door: Trio, path: str, body: dict[str, Any], param: str) -> None:
    error = json.loads(door.post(path, body).body)["error"]
    assert error["message"] == f"{param}: {WHY}", "which is all that clients show"
    if "/messages" in path:
        assert error["details"]["error_code"] == "BAD_BASE64"
    else:
        assert (error["code"], error["param"]) == ("BAD_BASE64", param)


def test_a_field_is_named_once(door: Trio) -> None:
    error = door.chat(temperature=-1).error
    assert (error["param"], error["message"].count("temperature")) == ("temperature", 1)


@pytest.mark.parametrize("name", ["", "a b", "ä", "x" * 129, "a\nb", 5])
def test_a_name_that_a_header_could_not_have_is_refused(door: Trio, name: Any) -> None:
    for field in ("request_id", "rid"):
        error = door.chat(**{field: name}).error
        assert (error["code"], error["param"]) == ("BAD_FIELD", field)


def test_two_names_for_one_request_are_refused(door: Trio) -> None:
    assert door.chat(request_id="a", rid="b").error["code"] == "BAD_FIELD"


def test_a_picture_of_no_bytes_is_refused_where_it_stands(door: Trio) -> None:
    error = door.post(CHAT, {"messages": [said(picture("data:;base64,"))]}).error
    assert (error["code"], error["param"]) == ("MEDIA_EMPTY", "messages[0].content[0]")


@pytest.mark.parametrize(("words", "most"), [("a " * 20_000, "4095"), ("a" * 2_000_000, f"{1 << 20}")])
def test_clients_know_a_prompt_that_is_too_long(door: Trio, words: str, most: str) -> None:
    error = door.post(CHAT, {"messages": [said(words)]}).error
    assert error["code"] == "context_length_exceeded", "as OpenAI's say it"
    told = json.loads(door.post("/v1/messages", {"max_tokens": 9, "messages": [said(words)]}).body)["error"]
    assert re.match(rf"prompt is too long: \d+ (tokens|bytes of text) > {most} maximum", told["message"]), "Anthropic's"
    assert told["details"] == {"error_code": "PROMPT_TOO_LONG"}


@pytest.mark.parametrize("name", ["", "two words", "x" * 129, "ü"])
def test_a_request_id_that_no_log_should_hold_makes_way_for_another(door: Trio, name: str) -> None:
    reply = door.post(CHAT, {"messages": [said("x")], "max_tokens": 1}, {"x-request-id": name})
    assert (reply.status, len(reply.headers["x-request-id"])) == (200, 32)


@pytest.mark.parametrize("encoding", ["gzip", "br", "identity, gzip"])
def test_a_body_that_is_compressed_is_refused_by_the_header(door: Trio, encoding: str) -> None:
    body = gzip.compress(json.dumps({"messages": [said("x")], "max_tokens": 1}).encode())
    for path in (CHAT, "/v1/audio/transcriptions"):
        reply = door.post(path, body, {"content-encoding": encoding})
        told = (reply.status, reply.error["code"], reply.error["param"], reply.headers["accept-encoding"])
        assert told == (415, "ENCODING_NOT_SERVED", "content-encoding", "identity")
    assert door.post(CHAT, {"messages": [said("x")], "max_tokens": 1}, {"content-encoding": "Identity"}).status == 200


@pytest.fixture(scope="module")
def narrow(door: Trio, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    """A gateway with tokens and small bounds, of which none is one of time."""
    tokens: Path = tmp_path_factory.mktemp("tokens") / "tokens"
    tokens.write_text("first\n\nsecond\n")
    with fronted(
        door.services,
        auth_token_file=tokens,
        max_requests=2,
        max_connections=16,
        max_body_bytes="1MiB",
        max_inflight_bytes="1200KiB",
        request_stall_seconds=3600,
        answer_stall_seconds=3600,
    ) as three:
        yield three


@pytest.fixture(scope="module")
def impatient(door: Trio) -> Iterator[Trio]:
    """A gateway that waits a second for what a caller sends."""
    with fronted(door.services, request_stall_seconds=1) as three:
        yield three


class TestNarrow:
    @pytest.mark.parametrize("value", [None, "", "Bearer", "Bearer third", "Bearer first\x7f", "Basic first", "first"])
    @pytest.mark.parametrize("path", [CHAT, "/v1/models", "/tokenize", "/nothing"])
    def test_strangers_are_refused(self, narrow: Trio, path: str, value: str | None) -> None:
        reply = narrow.post(path, {}, {} if value is None else {"authorization": value})
        if value == "Bearer first\x7f":
            assert reply.status in (400, 401)  # no header holds such a sign
            return
        assert (reply.status, reply.error["code"]) == (401, "UNAUTHENTICATED")
        assert reply.headers["www-authenticate"] == "Bearer"

    @pytest.mark.parametrize("token", ["first", "second"])
    def test_each_token_of_the_file_opens(self, narrow: Trio, token: str) -> None:
        assert narrow.get("/v1/models", {"authorization": f"bearer {token}"}).status == 200
        client = narrow.client.with_options(api_key=token)
        assert client.models.retrieve(narrow.model).id == narrow.model

    def test_health_and_metrics_need_no_token(self, narrow: Trio) -> None:
        for path in ("/health", "/health/live", "/health/ready", "/metrics", "/version"):
            assert narrow.get(path).status == 200, path

    def test_a_body_that_says_it_is_too_large_is_refused_before_it_is_sent(self, narrow: Trio) -> None:
        with narrow.connect() as connection:
            connection.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer first\r\n"
                b"Content-Length: 60000000\r\n\r\n"
            )
            status, headers, body = answered(connection)
        assert (status, json.loads(body)["error"]["code"]) == (413, "BODY_TOO_LARGE")
        assert b"x-should-retry: false" in headers

    def test_a_body_that_turns_out_too_large_is_refused(self, narrow: Trio) -> None:
        with narrow.connect() as connection:
            connection.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer first\r\n"
                b"Transfer-Encoding: chunked\r\n\r\n"
            )
            for _ in range(20):
                connection.sendall(b"10000\r\n" + b"a" * 65536 + b"\r\n")
            status, _, body = answered(connection)
        assert (status, json.loads(body)["error"]["code"]) == (413, "BODY_TOO_LARGE")
        until(lambda: narrow.metric("body_bytes") == 0, "its bytes are given back")

    def test_bodies_that_are_too_large_together_are_refused(self, narrow: Trio) -> None:
        head = (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer first\r\n"
            b"Content-Length: 1000000\r\n\r\n"
        )
        with narrow.connect() as first:
            first.sendall(head + b" " * 900_000)
            until(lambda: narrow.metric("body_bytes") >= 900_000, "the first body is nearly here")
            with narrow.connect() as second:
                second.sendall(head + b" " * 999_999)
                status, headers, body = answered(second)
        assert (status, json.loads(body)["error"]["code"]) == (429, "TOO_MANY_BYTES")
        assert b"retry-after: 1" in headers
        until(lambda: narrow.metric("body_bytes") == 0, "their bytes are given back")

    def test_a_head_without_end_is_refused(self, narrow: Trio) -> None:
        with narrow.connect() as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X-A: " + b"b" * 70_000)
            assert connection.recv(1000).startswith(b"HTTP/1.1 400")

    def test_what_is_no_http_is_refused(self, narrow: Trio) -> None:
        with narrow.connect() as connection:
            connection.sendall(b"\x16\x03\x01\x02\x00hello\r\n\r\n")
            assert connection.recv(1000).startswith(b"HTTP/1.1 400")

    def test_too_many_requests_at_once_are_refused_with_a_hint(self, narrow: Trio) -> None:
        client = narrow.client.with_options(api_key="first")

        def stream() -> Any:
            return client.chat.completions.create(
                model=narrow.model,
                messages=[{"role": "user", "content": "count"}],
                max_tokens=3000,
                logit_bias={str(SLOW): 0},
                stream=True,
                extra_body={"ignore_eos": True},
            )

        with stream(), stream():
            with pytest.raises(openai.RateLimitError) as error:
                stream()
            assert error.value.code == "TOO_MANY_REQUESTS"
            assert error.value.response.headers["retry-after"] == "1"
            assert narrow.get("/health/ready").status == 200
        until(narrow.idle, "both were given up")
        retrying = narrow.client.with_options(api_key="first", max_retries=2)
        assert retrying.models.list().data

    def test_too_many_connections_are_closed(self, narrow: Trio) -> None:
        open_ones: list[socket.socket] = []
        try:
            open_ones.extend(narrow.connect() for _ in range(17))
            until(lambda: any(gone(each, 0.01) for each in open_ones), "one has no place")
            still_open = [each for each in open_ones if not gone(each, 0.01)]
            assert still_open, "those that have a place keep it"
        finally:
            for each in open_ones:
                each.close()
        until(lambda: narrow.metric("open_connections") <= 4, "there is room again")


class TestImpatient:
    def test_a_body_of_which_nothing_comes_is_given_up(self, impatient: Trio) -> None:
        until(lambda: given_up_in_its_body(impatient), "a head was here in time")

    @pytest.mark.parametrize("start", [b"", b"POST /v1/chat", b"GET / HTTP/1.1\r\nHost: localhost\r\n"])
    def test_a_head_that_does_not_come_is_given_up(self, impatient: Trio, start: bytes) -> None:
        with impatient.connect() as connection:
            with suppress(ConnectionError):  # it may be given up before we send anything
                connection.sendall(start)
            assert gone(connection)

    def test_a_head_that_dribbles_is_given_up(self, impatient: Trio) -> None:
        with impatient.connect() as connection:
            with suppress(ConnectionError):
                connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n")
            until(lambda: dribbled(connection), "the connection is closed")


def given_up_in_its_body(door: Trio) -> bool:
    """Sends a head and the first byte of a body, and checks the answer; false where not even the head was in time."""
    with door.connect() as connection:
        try:
            connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
            status, headers, body = answered(connection)
        except ConnectionError:
            return False
        assert gone(connection), "what may still come is no request"
    assert (status, json.loads(body)["error"]["code"]) == (408, "REQUEST_TOO_SLOW")
    assert b"retry-after: 1" in headers
    return True


def answered(connection: socket.socket) -> tuple[int, bytes, bytes]:
    """Status, headers and body of the answer."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += received(connection)
    headers, _, body = data.partition(b"\r\n\r\n")
    length = int(headers.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    while len(body) < length:
        body += received(connection)
    return int(headers.split()[1]), headers, body


def received(connection: socket.socket) -> bytes:
    data = connection.recv(65536)
    if not data:
        raise ConnectionError("closed without an answer")
    return data


def dribbled(connection: socket.socket) -> bool:
    """Sends one more header; whether the other side has closed the connection."""
    try:
        connection.sendall(b"X-A: b\r\n")
    except OSError:
        return True
    return gone(connection, 0.1)


def gone(connection: socket.socket, seconds: float = 30) -> bool:
    """Whether the other side closes the connection."""
    connection.settimeout(seconds)
    try:
        return connection.recv(1000) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True
