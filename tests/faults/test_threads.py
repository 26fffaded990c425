"""Services of users who have as many threads as they may."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import grpc
import pytest

from tests import pictures
from tests.gateway.trio import Door
from tests.launch import launch
from tests.rpc.pairs import asked, greedy, refusal
from twinlens import EncoderClient, LlmClient, image, user

CALLERS = 12
LONG = "word " * 30_000
"""So long that a thread reads or cuts it up, and longer than any context."""

Said = TypeVar("Said")


def at_once(ask: Callable[[int], Said]) -> list[Said]:
    with ThreadPoolExecutor(CALLERS) as threads:
        return list(threads.map(ask, range(CALLERS)))


def test_an_llm_service_goes_on_with_the_threads_that_it_has(checkpoint: Path) -> None:
    flags = (f"--model={checkpoint}", "--listen=127.0.0.1:0", "--kv-cache-bytes=32MiB", "--row-cache-bytes=16MiB")
    with (
        launch("tests.faults.threadless", "testkit.light.llm", *flags, fork=False) as llm,
        LlmClient(llm.address) as client,
    ):
        counts = at_once(lambda number: len(client.tokenize(LONG + str(number))))
        assert all(counts)
        errors = at_once(lambda number: refusal(client, asked(user(f"{number} {LONG}"), greedy())))
        assert {error.code for error in errors} == {grpc.StatusCode.INVALID_ARGUMENT}


def test_an_encoder_goes_on_with_the_threads_that_it_has(checkpoint: Path) -> None:
    flags = (f"--model={checkpoint}", "--listen=127.0.0.1:0", "--decode-processes=1", "--store-bytes=64MiB")
    files = [pictures.encoded(pictures.noise(640, 480, 9_900 + number)) for number in range(CALLERS)]
    with (
        launch("tests.faults.threadless", "testkit.light.encoder", *flags, fork=False) as encoder,
        EncoderClient(encoder.address) as client,
    ):
        ends = at_once(lambda number: [event.WhichOneof("event") for event in client.encode(image(files[number]))][-1])
        assert set(ends) == {"done"}


@pytest.mark.parametrize("size", [1, 3_000_000])
def test_a_gateway_goes_on_with_the_threads_that_it_has(size: int) -> None:
    body = {"model": "any", "messages": [{"role": "user", "content": "x" * size}]}
    flags = ("--listen=127.0.0.1:0", "--llm=127.0.0.1:1")
    with launch("tests.faults.threadless", "gateway.__main__", *flags, fork=False) as service:
        replies = at_once(lambda _: Door(service).post("/v1/chat/completions", body))
        assert {(reply.status, reply.error["code"]) for reply in replies} == {(503, "NO_LLM_SERVICE")}
