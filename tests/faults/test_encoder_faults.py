"""Encoders that die, in the middle of things."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import grpc
import pytest

from tests import pictures
from tests.launch import Service, encoder_server, llm_server, send, stopped
from tests.rpc.pairs import (
    ENCODER_FLAGS,
    LLM_FLAGS,
    Pair,
    about,
    answer,
    asked,
    greedy,
    idle,
    pair,
    quiet,
    tokens,
    usable,
)
from tests.waiting import until
from twinlens import EncoderClient, LlmClient, TwinlensError, image, user, v1

WORKER = "encoder_service.worker"
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
_seed = itertools.count(9_000)


def new_picture() -> bytes:
    """A picture that no encoder has seen."""
    return pictures.encoded(pictures.noise(96, 96, next(_seed)))


@contextmanager
def encoder(checkpoint: Path, address: str = "127.0.0.1:0", *, dies: bool = False) -> Iterator[Service]:
    """An encoder that may be killed where `dies` says so."""
    code = -signal.SIGKILL if dies else 0
    with encoder_server(checkpoint, exit_code=code, **{**ENCODER_FLAGS, "listen": address}) as service:
        yield service


def frozen(service: Service) -> AbstractContextManager[None]:
    """The encoder's device workers stand still, so that what it was sent stays in the middle."""
    return stopped(*service.children(WORKER))


def test_kill_of_the_only_encoder_fails_its_pictures_alone_and_they_work_again_when_it_is_back(
    checkpoint: Path,
) -> None:
    with ExitStack() as stack:
        first = stack.enter_context(encoder(checkpoint, dies=True))
        llm = stack.enter_context(llm_server(checkpoint, first.address, **LLM_FLAGS))
        client = stack.enter_context(LlmClient(llm.address))
        media = stack.enter_context(EncoderClient(first.address))
        until(lambda: usable(client, 1), "the encoder is usable")
        before = new_picture()
        good = tokens(client, asked(about(before)))
        with ThreadPoolExecutor(2) as threads, frozen(first):
            talking = threads.submit(answer, client, asked(user("count"), greedy(600)))
            looking = threads.submit(answer, client, asked(about(new_picture())))
            until(lambda: media.get_load().open_streams == 1, "the encoder is at work on it")
            first.process.kill()
            with pytest.raises(TwinlensError) as error:
                looking.result()
            assert error.value.code is UNAVAILABLE
            assert error.value.retry_after is not None
            assert talking.result().usage.completion_tokens == 600
        with pytest.raises(TwinlensError) as error:
            answer(client, asked(about(new_picture())))
        assert error.value.code is UNAVAILABLE
        assert tokens(client, asked(user("and text?")))

        stack.enter_context(encoder(checkpoint, first.address))
        until(lambda: usable(client, 1), "the encoder is usable again")
        assert tokens(client, asked(about(before))) == good
        until(lambda: idle(client), "nothing is held")


def test_with_two_encoders_the_death_of_one_costs_no_request(checkpoint: Path) -> None:
    with (
        encoder(checkpoint) as steady,
        encoder(checkpoint, dies=True) as doomed,
        llm_server(checkpoint, steady.address, doomed.address, **LLM_FLAGS) as llm,
        LlmClient(llm.address) as client,
        EncoderClient(doomed.address) as media,
        EncoderClient(steady.address) as other,
    ):
        until(lambda: usable(client, 2), "both encoders are usable")
        asking = [asked(about(new_picture())) for _ in range(12)]
        with ThreadPoolExecutor(len(asking)) as threads, frozen(doomed):
            answers = [threads.submit(tokens, client, each) for each in asking]
            until(lambda: media.get_load().open_streams > 0, "the doomed one is at work")
            doomed.process.kill()
            said = [each.result() for each in answers]
        until(lambda: usable(client, 1), "one is known to be gone")
        client.flush_cache()
        assert [tokens(client, each) for each in asking] == said
        until(lambda: idle(client) and quiet(other), "nothing is held")


@pytest.fixture(scope="module")
def both(checkpoint: Path) -> Iterator[Pair]:
    """Both services, for tests that kill neither."""
    with pair(checkpoint) as running:
        yield running


def test_a_caller_who_leaves_while_the_encoder_is_at_work_stops_the_encode(both: Pair) -> None:
    client, media = both.text, both.media
    client.flush_cache()
    with frozen(both.encoder):
        passed = media.get_load().encoded_items
        # One fills the worker; the others wait behind it and must never be computed.
        streams = [client.generate(asked(about(new_picture()))) for _ in range(3)]
        until(lambda: media.get_load().open_streams == 3, "the encoder is at work on all")
        for stream in streams:
            stream.cancel()
        until(lambda: media.get_load().open_streams == 0, "the encoder has heard of it")
        until(lambda: media.get_load().queued_items == 0, "nothing waits for the worker")
        until(lambda: idle(client), "the LLM service holds nothing")
        until(lambda: client.get_load().row_bytes == 0, "nor any row")
    until(both.idle, "the encoder has nothing to do")
    assert media.get_load().encoded_items <= passed + 1
    assert tokens(client, asked(about(new_picture())))


def test_one_who_shares_a_picture_is_not_hurt_by_the_other_leaving(both: Pair) -> None:
    client, shared = both.text, new_picture()
    client.flush_cache()
    before, calls = client.get_load(), both.media.get_load().vit_calls
    with ThreadPoolExecutor(1) as threads, frozen(both.encoder):
        leaver = client.generate(asked(about(shared)))
        until(lambda: client.get_load().row_bytes > 0, "its rows have a place")
        stayer = threads.submit(tokens, client, asked(about(shared)))
        until(lambda: client.get_load().row_hits == before.row_hits + 1, "the other shares them")
        hasty = client.generate(asked(about(shared)), timeout=0.2)
        with pytest.raises(TwinlensError) as error:
            _read(hasty)
        assert error.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
        until(lambda: under_way(client) == 2, "the service has heard of that")
        leaver.cancel()
        until(lambda: under_way(client) == 1, "and of this")
        send(both.encoder.children(WORKER)[0], signal.SIGCONT)
        said = stayer.result()
    assert said == tokens(client, asked(about(shared)))
    assert both.media.get_load().vit_calls == calls + 1


def under_way(client: LlmClient) -> int:
    """Requests that the LLM service has not come to the end of."""
    load = client.get_load()
    return load.running + load.waiting


def _read(stream: Iterator[v1.GenerateResponse]) -> None:
    for _ in stream:
        pass


def test_pictures_that_do_not_fit_the_row_memory_together_go_one_after_the_other(checkpoint: Path) -> None:
    """1 row is 3 levels of 64 float32: a picture of 64 rows takes 48 KiB, and there is room for one and a half."""
    with (
        encoder(checkpoint) as service,
        llm_server(checkpoint, service.address, **{**LLM_FLAGS, "row_cache_bytes": 72 << 10}) as llm,
        LlmClient(llm.address) as client,
    ):
        until(lambda: usable(client, 1), "the encoder is usable")
        large = [pictures.encoded(pictures.noise(256, 256, next(_seed))) for _ in range(8)]
        with ThreadPoolExecutor(8) as threads:
            said = list(threads.map(lambda each: answer(client, asked(about(each))), large))
        assert all(each.started.spans[0].rows == 64 for each in said)
        with pytest.raises(TwinlensError) as error:
            answer(client, asked(user(image(large[0]), image(large[1]), "which?")))
        assert (error.value.code, error.value.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "EMBEDDINGS_TOO_LARGE")
        until(lambda: idle(client), "nothing is held")
