"""An encoder and an LLM service over one tiny checkpoint, and what tests ask them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from testkit.light.slow import SLOW
from tests.launch import Service, encoder_server, llm_server
from tests.waiting import until
from twinlens import Answer, EncoderClient, LlmClient, TwinlensError, image, user, v1
from twinlens.prompts import generate_request

ENCODER_FLAGS: dict[str, object] = {
    "threads": 1,
    "decode_processes": 1,
    "store_bytes": "64MiB",
    "staging_bytes": "256MiB",
}
LLM_FLAGS: dict[str, object] = {
    "threads": 1,
    "kv_cache_bytes": "32MiB",
    "row_cache_bytes": "64MiB",
    "overlap": "yes",  # as on a GPU
}


@dataclass(frozen=True, slots=True)
class Pair:
    """Both services, a client of each, and the checkpoint that they serve."""

    checkpoint: Path
    encoder: Service
    llm: Service
    media: EncoderClient
    text: LlmClient

    def idle(self) -> bool:
        """Nothing is held for anyone."""
        return idle(self.text) and quiet(self.media)


def greedy(max_tokens: int = 8, **more: Any) -> v1.SamplingParams:
    """The likeliest tokens, exactly this many."""
    return v1.SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, **more})


def lasting(**more: Any) -> v1.SamplingParams:
    """From a light LLM service: the likeliest tokens, for several minutes. For what is to last until a test is through
    with it; whatever is computed beside it is as slow."""
    return greedy(4000, logit_bias={SLOW: 0.0}, **more)


def asked(prompt: Any, sampling: v1.SamplingParams | None = None, **fields: Any) -> v1.GenerateRequest:
    """A request, with any of its other fields."""
    request = generate_request(prompt, sampling or greedy())
    request.MergeFrom(v1.GenerateRequest(**fields))
    return request


def answer(client: LlmClient, request: v1.GenerateRequest, timeout: float = 180) -> Answer:
    """The whole answer to a request. Checks the order of its events on the way."""
    out, ended = Answer(), set()
    with client.generate(request, timeout=timeout) as events:
        for number, event in enumerate(events):
            kind = event.WhichOneof("event")
            assert (kind == "started") == (number == 0), "started comes first, and once"
            if kind == "delta":
                assert event.delta.index not in ended, "a delta after its choice had finished"
            elif kind == "finished":
                assert event.finished.index not in ended, "a choice finished twice"
                ended.add(event.finished.index)
            out.add(event)
    assert ended == set(range(max(1, request.sampling.n))), "a choice never finished"
    return out


def refusal(client: LlmClient, request: v1.GenerateRequest, timeout: float = 180) -> TwinlensError:
    """The error that a request ends in."""
    with pytest.raises(TwinlensError) as error:
        answer(client, request, timeout)
    return error.value


def tokens(client: LlmClient, request: v1.GenerateRequest) -> list[int]:
    """The first choice's tokens."""
    return answer(client, request).choices[0].token_ids


def about(picture: bytes, question: str = "What is it?") -> v1.ChatMessage:
    """A question about a picture."""
    return user(image(picture), question)


def idle(client: LlmClient) -> bool:
    """The LLM service computes nothing and holds nothing for anyone."""
    load = client.get_load()
    return (load.running, load.waiting, load.kv_blocks_used) == (0, 0, 0)


def holds_nothing(client: LlmClient) -> bool:
    """An engine serves, and nothing is held for anyone."""
    try:
        return idle(client)
    except TwinlensError as error:
        if error.reason != "ENGINE_UNAVAILABLE":
            raise
        return False


def quiet(client: EncoderClient) -> bool:
    """The encoder has nothing to do."""
    load = client.get_load()
    return (load.queued_items, load.running_items, load.open_streams) == (0, 0, 0)


def usable(client: LlmClient, count: int) -> bool:
    """Whether exactly `count` encoders can be used."""
    return sum(encoder.usable for encoder in client.get_load().encoders) == count


def sharing(client: LlmClient, count: int) -> bool:
    """Whether exactly `count` encoders can be used, and their memory is shared: one that had no core to greet in time
    sends its rows inline until it is asked again."""
    return sum(encoder.usable and encoder.shared_memory for encoder in client.get_load().encoders) == count


@contextmanager
def pair(
    checkpoint: Path,
    *,
    light: bool = True,
    fork: bool = True,
    encoder_flags: Mapping[str, object] | None = None,
    **llm_flags: object,
) -> Iterator[Pair]:
    """Both services for the length of the block; asserts that nothing is held at its end."""
    with (
        encoder_server(checkpoint, light=light, fork=fork, **{**ENCODER_FLAGS, **(encoder_flags or {})}) as encoder,
        llm_server(checkpoint, encoder.address, light=light, fork=fork, **{**LLM_FLAGS, **llm_flags}) as llm,
        EncoderClient(encoder.address) as media,
        LlmClient(llm.address) as text,
    ):
        both = Pair(checkpoint, encoder, llm, media, text)
        until(lambda: usable(text, 1), "the encoder is usable")
        yield both
        until(both.idle, "nothing is held at the end")
