"""The load: callers that ask about pictures, through gateways by HTTP and at LLM services by gRPC.

It runs in a container of the image, in the network of the deployment, and imports only what the image has. First a
drawing must be named correctly. Then every second request has a new picture; the others repeat a few whose answers
were recorded at the start and must not change. Standard output has a JSON object for each request; the end of standard
input ends the load.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import io
import json
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

from PIL import Image, ImageDraw

from twinlens import LlmClient, SamplingParams, TwinlensError, image

QUESTION = "What is in the picture?"
TOKENS = 24
DRAWN = ("red circle", "blue square")
KNOWN = 4
"""Pictures whose answers are noted at the start."""
PAUSE = 0.3
"""Seconds between a caller's requests."""
CONNECT_SECONDS, ANSWER_SECONDS, RETRY_SECONDS = 2.0, 120.0, 60.0

Asker = Callable[[bytes], tuple[str, int]]
"""Asks about a picture; returns the answer, and how often it was sent again. Raises OSError where there was none."""


def drawing() -> bytes:
    """A red circle left of a blue square, as a PNG."""
    canvas = Image.new("RGB", (320, 224), (250, 250, 250))
    pen = ImageDraw.Draw(canvas)
    pen.ellipse((40, 62, 140, 162), fill=(220, 50, 47))
    pen.rectangle((190, 67, 280, 157), fill=(40, 90, 210))
    out = io.BytesIO()
    canvas.save(out, "PNG")
    return out.getvalue()


def picture(draw: random.Random) -> bytes:
    """A few shapes, as a JPEG of 112 × 112."""
    canvas = Image.new("RGB", (112, 112), tuple(draw.choices(range(256), k=3)))
    pen = ImageDraw.Draw(canvas)
    for _ in range(6):
        left, top = draw.randrange(90), draw.randrange(90)
        box = left, top, left + draw.randrange(8, 50), top + draw.randrange(8, 50)
        pen.rectangle(box, fill=tuple(draw.choices(range(256), k=3)))
    out = io.BytesIO()
    canvas.save(out, "JPEG", quality=90)
    return out.getvalue()


class Gateways:
    """Their addresses, looked up again and again beside the requests: a compose network's name server may take half a
    minute to answer while containers come and go."""

    def __init__(self, target: str) -> None:
        self._host, _, self._port = target.rpartition(":")
        self._known: list[str] = []

    def keep(self) -> None:
        """Looks the name up for ever; the last addresses stay where it is not known."""
        while True:
            with suppress(OSError):
                self._known = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(self._host, self._port)})
            time.sleep(0.5)

    @contextmanager
    def connected(self) -> Iterator[tuple[http.client.HTTPConnection, int]]:
        """A connection to one of them, as a proxy makes it: to the next where one cannot be connected to. With it, how
        many could not."""
        end, failed = time.monotonic() + RETRY_SECONDS, 0
        while True:
            known = self._known
            for address in random.sample(known, len(known)):
                connection = http.client.HTTPConnection(address, int(self._port), timeout=CONNECT_SECONDS)
                try:
                    connection.connect()
                except OSError:
                    failed += 1
                    continue
                connection.sock.settimeout(ANSWER_SECONDS)
                try:
                    yield connection, failed
                finally:
                    connection.close()
                return
            if time.monotonic() > end:
                raise OSError("no gateway can be connected to")
            time.sleep(0.2)


def by_http(gateways: Gateways, token: str, data: bytes) -> tuple[str, int]:
    """Asks a gateway for a stream, once, and reads it to its end."""
    headers = {"content-type": "application/json", **({"authorization": f"Bearer {token}"} if token else {})}
    url = "data:image/jpeg;base64," + base64.b64encode(data).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": QUESTION}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": TOKENS, "temperature": 0, "stream": True}
    said, ended = "", False
    with gateways.connected() as (connection, failed):
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            if answer.status != 200:
                raise OSError(f"{answer.status} {answer.read()[:300]!r}")
            for line in answer:
                event = line.removeprefix(b"data: ").strip()
                if event == b"[DONE]":
                    ended = True
                elif event:
                    read = json.loads(event)
                    if "error" in read:
                        raise OSError(f"{read['error']}")
                    said += "".join(choice["delta"].get("content") or "" for choice in read["choices"])
        except http.client.HTTPException as error:
            raise OSError(repr(error)) from error
    if not ended:
        raise OSError("the stream ended without [DONE]")
    return said, failed


def by_grpc(client: LlmClient) -> Asker:
    """Asks LLM services; again where one says that it is to be tried again, as docs/API.md has it."""

    def ask(data: bytes) -> tuple[str, int]:
        sampling = SamplingParams(max_tokens=TOKENS, temperature=0)
        end, again = time.monotonic() + RETRY_SECONDS, 0
        while True:
            try:
                return client.ask(QUESTION, image(data), sampling=sampling, timeout=ANSWER_SECONDS).text, again
            except TwinlensError as error:
                if not error.retryable or time.monotonic() > end:
                    raise OSError(f"{error.code} {error.reason} {error}") from error
                again += 1
                time.sleep(error.retry_after or 0.2)

    return ask


class Callers:
    """Threads that ask until they are told to stop."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._writing = threading.Lock()
        draw = random.Random(5)
        self._known = [picture(draw) for _ in range(KNOWN)]
        self._answers: list[str] = []

    def note(self, *askers: Asker) -> None:
        """Asks all about the drawing and the known pictures; SystemExit where one is wrong, or they do not agree."""
        for ask in askers:
            text, _ = ask(drawing())
            if not all(word in text for word in DRAWN):
                sys.exit(f"the drawing is not a {' and a '.join(DRAWN)} but {text!r}")
        for data in self._known:
            said = {ask(data)[0] for ask in askers}
            if len(said) != 1:
                sys.exit(f"answers differ before anything has happened: {said}")
            self._answers.extend(said)

    def run(self, name: str, ask: Asker, seed: int) -> None:
        """One caller."""
        draw = random.Random(seed)
        while not self._stop.wait(PAUSE):
            number = draw.randrange(2 * KNOWN)
            known = number < KNOWN
            began = time.monotonic()
            said = {"way": name, "failure": "", "again": 0}
            try:
                text, said["again"] = ask(self._known[number] if known else picture(draw))
                if known and text != self._answers[number]:
                    said["failure"] = f"{text!r} is not {self._answers[number]!r}"
            except OSError as error:
                said["failure"] = str(error)
            said["seconds"] = round(time.monotonic() - began, 3)
            with self._writing:
                print(json.dumps(said), flush=True)

    def stop(self) -> None:
        """No request begins from now on."""
        self._stop.set()


def main() -> None:
    """Asks until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gateway", default="gateway:8000", help="HOST:PORT of gateways: all addresses of the name")
    parser.add_argument("--llm", default="dns:///llm:7002")
    parser.add_argument("--token", default="", help="token for gateways")
    given = parser.parse_args()
    callers, gateways = Callers(), Gateways(given.gateway)
    threading.Thread(target=gateways.keep, daemon=True).start()
    with LlmClient(given.llm) as client:
        askers: list[tuple[str, Asker]] = [("http", partial(by_http, gateways, given.token)), ("grpc", by_grpc(client))]
        callers.note(*(ask for _, ask in askers))
        threads = [
            threading.Thread(target=callers.run, args=(name, ask, seed))
            for seed, (name, ask) in enumerate(askers * 2, start=1)
        ]
        for thread in threads:
            thread.start()
        sys.stdin.read()
        callers.stop()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main()
