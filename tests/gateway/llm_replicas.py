"""LLM services that die and come back at one address, and callers of gateways who compare what they are told."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.replicas import Replica
from tests.gateway.trio import Door, image, said, text
from tests.launch import Service, encoder_server, gateway, llm_server
from tests.rpc.pairs import ENCODER_FLAGS, LLM_FLAGS, idle, usable
from tests.waiting import until
from twinlens import LlmClient

CHAT = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"names": {"type": "array", "items": {"enum": ["red", "blue", "green"]}, "minItems": 40}},
    "required": ["names"],
    "additionalProperties": False,
}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1, "seed": 5, "n": 2},
    {"temperature": 0.8, "seed": 6, "presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
    {"temperature": 0, "logprobs": True, "top_logprobs": 2},
    {"temperature": 1, "seed": 8, "response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
    {"temperature": 1, "seed": 9, "stop": ["zzzz", "qqqq"]},
]


class LlmReplica(Replica):
    """One LLM service over these encoders."""

    def __init__(self, checkpoint: Path, *encoders: str, **flags: Any) -> None:
        super().__init__(checkpoint)
        self._flags = {**LLM_FLAGS, "grace_seconds": 0.2, **flags}
        self._encoders = encoders

    def _launch(self, **flags: Any) -> AbstractContextManager[Service]:
        return llm_server(self._checkpoint, *self._encoders, exit_code=None, **{**self._flags, **flags})

    def ready(self) -> bool:
        """It serves, and has its encoders."""
        with LlmClient(self.address) as client:
            return usable(client, len(self._encoders))

    def idle(self) -> bool:
        """Nothing is held for anyone."""
        with LlmClient(self.address) as client:
            return idle(client)


@dataclass(frozen=True)
class Fleet:
    """Gateways over LLM services over an encoder."""

    gateways: list[Door]
    services: list[LlmReplica]

    def restart(self, victim: LlmReplica, end: Callable[[LlmReplica], None]) -> None:
        """Ends a service in this way, starts it again, and waits until all gateways know."""
        end(victim)
        victim.start()
        until(victim.ready, "it serves again")
        self.known()

    def known(self) -> None:
        """Waits until all gateways can use all services."""
        for door in self.gateways:
            until(lambda door=door: door.metric("llm_services_usable") == len(self.services), "all can be used")


@contextmanager
def fleet(checkpoint: Path, gateways: int, services: int, **flags: object) -> Iterator[Fleet]:
    """All of them run for the length of the block; asserts that nothing is held at its end."""
    with ExitStack() as stack:
        encoder = stack.enter_context(encoder_server(checkpoint, **ENCODER_FLAGS))
        llms = [LlmReplica(checkpoint, encoder.address) for _ in range(services)]
        for each in llms:
            stack.callback(each.stop)
            each.start()
        addresses = [each.address for each in llms]
        doors = [Door(stack.enter_context(gateway(*addresses, exit_code=None, **flags))) for _ in range(gateways)]
        for each in llms:
            until(each.ready, "it serves")
        running = Fleet(doors, llms)
        running.known()
        yield running
        for each in llms:
            until(each.idle, "nothing is held")


def question(number: int, tokens: int) -> dict[str, Any]:
    """One of a number of requests that are always the same; every third is about a picture."""
    parts = [text(f"Question {number}?"), *([image()] if number % 3 == 0 else [])]
    kind = dict(KINDS[number % len(KINDS)])
    if "response_format" in kind:
        kind["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    else:
        kind["ignore_eos"] = True
    return {"messages": [said(*parts)], "max_tokens": tokens, "stream": True, **kind}


@dataclass
class Stream:
    """One answer as it comes: what each choice says, its logprobs and its end, and what went wrong."""

    texts: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[Any]] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)
    begun: threading.Event = field(default_factory=threading.Event)
    failure: str = "broken off"

    @property
    def told(self) -> tuple[Any, ...]:
        """All that must be the same every time."""
        return self.texts, self.logprobs, self.ends, self.failure

    def ask(self, door: Door, body: dict[str, Any], begins: int = 10) -> Stream:
        """Asks, and reads to the end; it has `begun` after so many events."""
        connection = http.client.HTTPConnection(door.gateway.address, timeout=300)
        try:
            connection.request("POST", CHAT, json.dumps(body))
            answer = connection.getresponse()
            if answer.status != 200:
                self.failure = f"{answer.status} {answer.read()!r}"
                return self
            for number, line in enumerate(line for line in answer if line.startswith(b"data: ")):
                if number == begins:
                    self.begun.set()
                self._take(line.removeprefix(b"data: ").strip())
        except OSError as error:
            self.failure = f"{error!r}"
        except http.client.HTTPException as error:
            self.failure = f"{error!r}"
        finally:
            self.begun.set()
            connection.close()
        return self

    def _take(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.failure = ""
            return
        event = json.loads(data)
        if "error" in event:
            self.failure = event["error"]["code"]
            return
        for choice in event["choices"]:
            index = choice["index"]
            self.texts[index] = self.texts.get(index, "") + choice["delta"].get("content", "")
            self.logprobs.setdefault(index, []).extend((choice["logprobs"] or {}).get("content", ()))
            if choice["finish_reason"]:
                self.ends[index] = choice["finish_reason"]


@contextmanager
def streaming(doors: list[Door], bodies: list[dict[str, Any]]) -> Iterator[list[Stream]]:
    """These requests, all at once and over the doors by turns; the block begins when each has begun, and all have ended
    at its end."""
    streams = [Stream() for _ in bodies]
    threads = [
        threading.Thread(target=stream.ask, args=(doors[number % len(doors)], body))
        for number, (stream, body) in enumerate(zip(streams, bodies, strict=True))
    ]
    for thread in threads:
        thread.start()
    for stream in streams:
        assert stream.begun.wait(180)
    try:
        yield streams
    finally:
        for thread in threads:
            thread.join()
