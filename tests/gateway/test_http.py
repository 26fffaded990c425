"""HTTP as others speak it: by version 1.0, with a wish for another protocol, or hardly at all."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess

import pytest

from tests.gateway.trio import Trio, said

CHAT = b"/v1/chat/completions"
WISH = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
"""What Java's HttpClient sends along with each request to an http address."""
HOST = b"Host: localhost\r\n"


def chat(stream: bool = False, more: str = "") -> bytes:
    return json.dumps({"messages": [said("Hello" + more)], "max_tokens": 4, "stream": stream}).encode()


def request(body: bytes, headers: bytes = HOST, version: bytes = b"1.1", method: bytes = b"POST") -> bytes:
    return b"%s %s HTTP/%s\r\n%sContent-Length: %d\r\n\r\n%s" % (method, CHAT, version, headers, len(body), body)


def said_until_closed(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(65536), b""))


def exchange(door: Trio, *parts: bytes) -> tuple[bytes, bytes]:
    """Head and body of what is answered until the connection is closed."""
    with door.connect() as connection:
        for part in parts:
            connection.sendall(part)
        head, _, body = said_until_closed(connection).partition(b"\r\n\r\n")
        return head, body


class TestAWishForAnotherProtocol:
    LAST = HOST + b"Connection: close\r\n"

    def test_is_not_followed_and_the_body_is_read(self, door: Trio) -> None:
        head, body = exchange(door, request(chat(), HOST + WISH), request(chat(), self.LAST))
        assert head.startswith(b"HTTP/1.1 200")
        assert body.count(b'"chat.completion"') == 2, "both are answered, on one connection"

    def test_may_have_a_body_that_comes_later_and_in_chunks(self, door: Trio) -> None:
        head_of_it = b"POST %s HTTP/1.1\r\n%sTransfer-Encoding: chunked\r\n\r\n" % (CHAT, HOST + WISH)
        chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in chat()) + b"0\r\n\r\n"
        _, body = exchange(door, head_of_it, chunks, request(chat(), self.LAST))
        assert body.count(b'"chat.completion"') == 2

    def test_may_have_a_body_of_megabytes(self, door: Trio) -> None:
        head, body = exchange(door, request(chat(more="x" * 2_000_000), HOST + WISH), request(chat(), self.LAST))
        assert head.startswith(b"HTTP/1.1 400")
        assert b"context_length_exceeded" in body

    def test_a_thousand_of_them_in_one_go_are_answered(self, door: Trio) -> None:
        one = b"GET /version HTTP/1.1\r\n" + HOST + WISH + b"\r\n"
        _, body = exchange(door, one * 1000 + b"GET /version HTTP/1.1\r\n" + self.LAST + b"\r\n")
        assert body.count(b'{"version"') == 1001

    def test_to_be_a_tunnel_is_refused(self, door: Trio) -> None:
        head, body = exchange(door, b"CONNECT x:1 HTTP/1.1\r\n" + HOST + WISH + b"\r\n")
        assert head.startswith(b"HTTP/1.1 400")
        assert json.loads(body)["error"]["code"] == "BAD_HTTP"

    @pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
    def test_of_curl_is_answered(self, door: Trio) -> None:
        address = f"http://{door.gateway.address}/v1/chat/completions"
        done = subprocess.run(
            ["curl", "-sS", "--http2", address, "-d", "@-"], input=chat(), capture_output=True, timeout=180, check=True
        )
        assert json.loads(done.stdout)["object"] == "chat.completion"


class TestHttp10:
    def test_a_stream_has_no_chunks_and_ends_with_its_connection(self, door: Trio) -> None:
        head, body = exchange(door, request(chat(stream=True), b"", b"1.0"))
        assert b"transfer-encoding" not in head
        assert b"connection: close" in head
        assert body.startswith(b"data: {")
        assert body.endswith(b"data: [DONE]\n\n")

    def test_a_whole_answer_has_its_length(self, door: Trio) -> None:
        head, body = exchange(door, request(chat(), b"", b"1.0"))
        assert b"content-length: %d\r\n" % len(body) in head + b"\r\n"
        assert json.loads(body)["object"] == "chat.completion"


NOT_HTTP = {
    "another protocol": b"\x16\x03\x01\x02\x00hello\r\n\r\n",
    "a method that nobody knows": b"FETCH / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "two lengths": request(b"{}", HOST + b"Content-Length: 3\r\n"),
    "a length and chunks": request(b"{}", HOST + b"Transfer-Encoding: chunked\r\n"),
    "a negative length": b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n" % CHAT,
    "a chunk that is none": b"POST %s HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n" % CHAT,
    "a header of two lines": request(chat(), HOST + b"X-Request-Id: a\r\n Set-Cookie: b\r\n"),
    "a head that is too long": b"GET / HTTP/1.1\r\nHost: localhost\r\nX-A: " + b"b" * 300_000,
}


@pytest.mark.parametrize("name", NOT_HTTP)
def test_what_is_no_http_is_told_so_in_the_shape_of_errors(door: Trio, name: str) -> None:
    with door.connect() as connection:
        connection.sendall(NOT_HTTP[name][:66_000])
        connection.settimeout(600)
        head, _, body = connection.recv(65536).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert b"\r\nconnection: close" in head
    error = json.loads(body)["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "BAD_HTTP")


def test_an_answer_is_cut_off_by_what_is_no_http_and_not_mixed_with_it(door: Trio) -> None:
    body = {"messages": [said("Hello")], "max_tokens": 3000, "stream": True, "ignore_eos": True}
    with door.connect() as connection:
        connection.sendall(request(json.dumps(body).encode()))
        begun = connection.recv(65536)
        connection.sendall(b"\0\r\n\r\n")
        answer = begun + said_until_closed(connection)
    assert b"data: {" in answer
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b"[DONE]" not in answer


def test_a_wrong_method_is_told_which_are_right(door: Trio) -> None:
    assert door.get(CHAT.decode()).headers["allow"] == "POST"
    assert set(door.post("/v1/models", b"").headers["allow"].split(", ")) == {"GET", "HEAD"}


def test_a_model_without_a_name_is_not_there(door: Trio) -> None:
    reply = door.get("/v1/models/")
    assert (reply.status, reply.error["code"], reply.headers["x-should-retry"]) == (404, "NOT_FOUND", "false")


@pytest.mark.parametrize("name", ["tracestate", "traceparent"])
def test_a_trace_context_of_kilobytes_is_left_behind(door: Trio, name: str) -> None:
    reply = door.post(CHAT.decode(), chat(), {name: "a=b," * 5_000})
    assert reply.status == 200
