"""An encoder, an LLM service and a gateway, and what tests ask them: by HTTP, by gRPC, and by bare sockets."""

from __future__ import annotations

import base64
import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

from tests import pictures
from tests.launch import Service, gateway
from tests.rpc.pairs import Pair, pair
from tests.scrape import scrape
from tests.waiting import until

PICTURE = pictures.encoded(pictures.noise(64, 48, 5))
CLIP = pictures.video(pictures.frames(12, 64, 64, seed=3), fps=8)


@dataclass(frozen=True, slots=True)
class Reply:
    """What came over a bare connection."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        """What went wrong, in OpenAI's shape."""
        error = json.loads(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return dict(error)


@dataclass(frozen=True, slots=True)
class Door:
    """A gateway, and ways to talk to it."""

    gateway: Service

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None, method: str = "POST") -> Reply:
        """One request of its own connection; a body that is not bytes is written as JSON."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection = http.client.HTTPConnection(self.gateway.address, timeout=600)
        try:
            connection.request(method, path, content or None, headers or {})
            answer = connection.getresponse()
            named = {name.lower(): value for name, value in answer.getheaders()}
            return Reply(answer.status, named, answer.read())
        finally:
            connection.close()

    def get(self, path: str, headers: dict[str, str] | None = None) -> Reply:
        """One request without a body."""
        return self.post(path, b"", headers, "GET")

    def connect(self) -> socket.socket:
        """A bare connection."""
        host, _, port = self.gateway.address.rpartition(":")
        return socket.create_connection((host, int(port)), timeout=600)

    def metric(self, name: str) -> float:
        """One of the gateway's own metrics."""
        return scrape(self.gateway.address).get(f"twinlens_gateway_{name}", 0.0)


@dataclass(frozen=True, slots=True)
class Trio(Door):
    """Both services, the gateway, the real client, and the model's name."""

    services: Pair
    client: openai.OpenAI
    model: str

    def chat(self, **fields: Any) -> Reply:
        """A chat, with these fields beside a question."""
        return self.post("/v1/chat/completions", {"messages": [said("Hello")], "max_tokens": 4, **fields})

    def idle(self) -> bool:
        """Nothing is under way anywhere."""
        return self.metric("open_requests") == 0 and self.services.idle()


def said(*parts: Any, role: str = "user") -> dict[str, Any]:
    """A message of one text, or of parts."""
    (first, *rest) = parts
    return {"role": role, "content": first if isinstance(first, str) and not rest else list(parts)}


def text(words: str) -> dict[str, Any]:
    """A part."""
    return {"type": "text", "text": words}


def image(picture: bytes = PICTURE, **fields: Any) -> dict[str, Any]:
    """A part with a picture in its address."""
    return {"type": "image_url", "image_url": {"url": data_url(picture, "image/png"), **fields}}


def video(clip: bytes = CLIP) -> dict[str, Any]:
    """A part with a video in its address."""
    return {"type": "video_url", "video_url": {"url": data_url(clip, "video/mp4")}}


def data_url(content: bytes, kind: str) -> str:
    """A file as an address."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


@contextmanager
def fronted(services: Pair, **flags: object) -> Iterator[Trio]:
    """A gateway of its own before services that run; asserts that nothing is held at its end."""
    with (
        gateway(services.llm.address, **flags) as door,
        openai.OpenAI(base_url=f"http://{door.address}/v1", api_key="none", max_retries=0, timeout=600) as client,
    ):
        model = services.text.get_info().model
        three = Trio(door, services, client, model)
        until(lambda: three.get("/health/ready").status == 200, "the gateway is ready")
        yield three
        until(three.idle, "nothing is held at the end")


@contextmanager
def trio(checkpoint: Path, **flags: object) -> Iterator[Trio]:
    """All three of them."""
    with pair(checkpoint) as services, fronted(services, **flags) as three:
        yield three
