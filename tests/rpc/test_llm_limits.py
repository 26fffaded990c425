"""An LLM service at its limits: full, without an encoder, and shut to whoever has no token."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from tests import pictures
from tests.launch import Service, llm_server
from tests.rpc.pairs import LLM_FLAGS, about, asked, greedy, idle, lasting, refusal, tokens
from tests.waiting import until
from twinlens import Endpoint, LlmClient, user
from twinlens.errors import error_from
from twinlens.v1 import llm_pb2, llm_pb2_grpc

PICTURE = pictures.encoded(pictures.noise(64, 64, 1))
TOKEN = "open sesame"


@pytest.fixture(scope="module")
def narrow(checkpoints: Callable[..., Path]) -> Iterator[Service]:
    """A service for two requests at a time, with a token, and without any encoder."""
    with llm_server(checkpoints("qwen3_vl"), max_requests=2, auth_token=TOKEN, **LLM_FLAGS) as service:
        yield service


@pytest.fixture(scope="module")
def narrow_client(narrow: Service) -> Iterator[LlmClient]:
    with LlmClient(Endpoint(narrow.address, TOKEN)) as client:
        yield client


def test_a_full_queue_refuses_at_once_with_a_hint_and_serves_again_when_there_is_room(narrow_client: LlmClient) -> None:
    with ExitStack() as streams:
        for _ in range(2):
            stream = streams.enter_context(narrow_client.generate(asked(user("count"), lasting())))
            assert next(iter(stream)).HasField("started")
        error = refusal(narrow_client, asked(user("me too")))
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_REQUESTS")
        assert error.retry_after is not None
        assert error.retry_after > 0
    until(lambda: idle(narrow_client), "both streams were given up")
    assert len(tokens(narrow_client, asked(user("me too")))) == 8


def test_a_picture_without_an_encoder_is_unavailable_and_never_answered_as_text(narrow_client: LlmClient) -> None:
    error = refusal(narrow_client, asked(about(PICTURE)))
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_ENCODER")
    assert error.retry_after is not None


def test_a_caller_who_takes_nothing_is_left_and_what_was_held_for_him_comes_back(
    checkpoints: Callable[..., Path],
) -> None:
    """His window is full after some kilobytes; the logprobs of a long answer are megabytes."""
    with (
        llm_server(checkpoints("qwen3_vl"), max_requests=1, stall_seconds=1, **LLM_FLAGS) as service,
        LlmClient(service.address) as client,
        grpc.insecure_channel(service.address, [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16)])
        as channel,
    ):  # fmt: skip
        stalled = llm_pb2_grpc.LlmServiceStub(channel).Generate(asked(user("count"), greedy(2000, n=4, logprobs=20)))
        until(lambda: client.get_load().generated_tokens > 0, "something is computed for him")
        until(lambda: client.get_load().cancelled_requests == 1, "he is left")
        until(lambda: idle(client), "nothing goes on for him")
        with pytest.raises(grpc.RpcError) as ended:
            list(stalled)
        assert error_from(ended.value).reason == "CALLER_STALLED"
        assert len(tokens(client, asked(user("me")))) == 8, "his place is another's"


@pytest.mark.parametrize(
    ("flags", "shorter"),
    [
        ({"max_context": 1 << 20}, True),
        ({"max_context": 1 << 20, "kv_cache_bytes": "320KiB"}, True),
        ({"max_context": 48}, False),
        ({}, False),
    ],
)
def test_a_context_that_is_shorter_than_was_asked_for_is_told(
    checkpoints: Callable[..., Path], flags: dict[str, object], shorter: bool
) -> None:
    with llm_server(checkpoints("qwen3_vl"), **{**LLM_FLAGS, **flags}) as service, LlmClient(service.address) as client:
        lines = [json.loads(line) for line in service.log.read_text("utf-8").splitlines() if line.startswith("{")]
        told = [line for line in lines if line["event"] == "contexts are shorter than --max-context"]
        assert [line["tokens"] for line in told] == ([client.get_info().context_tokens] if shorter else [])


METHODS = ["Generate", "Embed", "Abort", "Tokenize", "GetInfo", "GetLoad", "FlushCache", "LoadAdapter", "UnloadAdapter"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("token", [None, "", "open", TOKEN + " "])
def test_no_rpc_answers_without_the_token(narrow: Service, method: str, token: str | None) -> None:
    assert method in llm_pb2.DESCRIPTOR.services_by_name["LlmService"].methods_by_name
    metadata = None if token is None else [("authorization", f"Bearer {token}x")]
    with grpc.insecure_channel(narrow.address) as channel:
        call = channel.unary_stream(f"/twinlens.v1.LlmService/{method}")(b"", metadata=metadata, timeout=180)
        with pytest.raises(grpc.RpcError) as error:
            list(call)
    assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
