"""Processes that die or stand still in the middle of clips: the same answers come from others, and nothing is left."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from testkit import audio_checkpoint
from tests import sounds
from tests.launch import encoder_server, llm_server, send, stop, stopped
from tests.rpc.encoder_client import DECODER, WORKER, Client, follow, frozen
from tests.rpc.pairs import (
    ENCODER_FLAGS,
    LLM_FLAGS,
    Pair,
    asked,
    greedy,
    idle,
    pair,
    quiet,
    refusal,
    sharing,
    tokens,
    usable,
)
from tests.waiting import until
from twinlens import EncoderClient, LlmClient, audio, user, v1

_seed = itertools.count(40_000)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2-Audio."""
    return audio_checkpoint.make_audio_checkpoint(tmp_path_factory.mktemp("audio"))


@pytest.fixture(scope="module")
def both(checkpoint: Path) -> Iterator[Pair]:
    """Both services, of which no test kills more than a child."""
    with pair(checkpoint, encoder_flags={"workers": 2}) as running:
        yield running


def new_clip(kind: str = "flac") -> v1.Media:
    """A clip that no encoder has heard."""
    return audio(sounds.encoded(sounds.tune(1.2, next(_seed)), kind))


def about(*clips: v1.Media) -> v1.GenerateRequest:
    return asked(user(*clips, "What is heard?"), greedy(8))


def nothing_is_leased(client: EncoderClient) -> bool:
    return quiet(client) and client.get_load().leases == 0


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.soak)], ids=["killed", "frozen"]
)
def test_of_two_encoders_one_may_die_or_freeze_in_the_middle_of_clips(checkpoint: Path, how: signal.Signals) -> None:
    with ExitStack() as stack:
        steady, doomed = (
            stack.enter_context(encoder_server(checkpoint, exit_code=code, **ENCODER_FLAGS)) for code in (0, None)
        )
        addresses = steady.address, doomed.address
        llm = stack.enter_context(llm_server(checkpoint, *addresses, **LLM_FLAGS))
        client = stack.enter_context(LlmClient(llm.address))
        media, other = (stack.enter_context(EncoderClient(each)) for each in addresses)
        until(lambda: sharing(client, 2), "both encoders are usable")
        stack.callback(send, doomed.pid, signal.SIGCONT)  # whatever happens, it can end
        asking = [about(*(new_clip() for _ in range(1 + number % 2))) for number in range(8)]
        with ThreadPoolExecutor(len(asking)) as threads, stopped(*doomed.children(WORKER)):
            answers = [threads.submit(tokens, client, each) for each in asking]
            until(lambda: other.get_load().running_items > 0, "it is in the middle of a clip")
            stop(doomed.pid) if how is signal.SIGSTOP else send(doomed.pid, how)
            said = [each.result() for each in answers]
            encoded = media.get_load().encoded_items
        assert len(set(map(tuple, said))) == len(asking), "the answers prove nothing"
        assert encoded == sum(len(each.chat.messages[0].parts) - 1 for each in asking), "all came from the steady one"
        if how is signal.SIGSTOP:
            send(doomed.pid, signal.SIGCONT)
        until(lambda: usable(client, 1 + (how is signal.SIGSTOP)), "what became of it is known")
        assert client.get_load().rows_shared > 0
        client.flush_cache()
        assert [tokens(client, each) for each in asking] == said
        until(lambda: idle(client) and nothing_is_leased(media), "nothing is held")
        if how is signal.SIGSTOP:
            until(lambda: nothing_is_leased(other), "nor of the one that froze")


def test_a_decode_process_that_is_killed_with_a_clip_costs_no_error(both: Pair) -> None:
    clip = new_clip("mp3")
    with Client(both.encoder) as client:
        with frozen(both.encoder, DECODER):
            stream = client.start([clip])
            until(lambda: client.load().queued_items == 1, "the clip is with the decode process")
            (pid,) = both.encoder.children(DECODER)
            send(pid, signal.SIGKILL)
        found = follow(stream, "done")
        assert len(found.rows) == found.header.tokens == 30
        until(lambda: both.encoder.children(DECODER) not in ([], [pid]), "it is replaced")
    until(lambda: nothing_is_leased(both.media), "nothing is held")


def test_a_worker_that_is_killed_with_a_clip_costs_no_error_where_there_is_another(both: Pair) -> None:
    question, before = about(new_clip()), both.media.get_load().encoded_items
    with ThreadPoolExecutor(1) as threads, frozen(both.encoder, WORKER):
        said = threads.submit(tokens, both.text, question)
        until(lambda: both.media.get_load().running_items == 1, "it is with a worker")
        workers = both.encoder.children(WORKER)
        send(workers[0], signal.SIGKILL)  # idle workers are given work in order
        send(workers[1], signal.SIGCONT)
        answered = said.result()
    assert both.media.get_load().encoded_items == before + 1
    until(lambda: len(set(both.encoder.children(WORKER)) - {workers[0]}) == 2, "it is replaced")
    both.text.flush_cache()
    assert tokens(both.text, question) == answered
    until(lambda: both.idle() and nothing_is_leased(both.media), "nothing is held")


def test_a_caller_who_leaves_in_the_middle_of_a_clip_leaves_nothing(both: Pair) -> None:
    both.text.flush_cache()
    passed = both.media.get_load().encoded_items
    with frozen(both.encoder, WORKER):
        # Two fill the workers; the others wait behind them and must never be computed.
        streams = [both.text.generate(about(new_clip())) for _ in range(4)]
        until(lambda: both.media.get_load().open_streams == 4, "the encoder is at work on all")
        assert refusal(both.text, about(new_clip()), timeout=0.1).code is grpc.StatusCode.DEADLINE_EXCEEDED
        for stream in streams:
            stream.cancel()
        until(lambda: both.media.get_load().open_streams == 0, "the encoder has heard of it")
        until(lambda: both.media.get_load().queued_items == 0, "nothing waits for a worker")
        until(lambda: idle(both.text), "the LLM service holds nothing")
        until(lambda: both.text.get_load().row_bytes == 0, "nor any row")
    until(lambda: nothing_is_leased(both.media), "nor does the encoder")
    assert both.media.get_load().encoded_items <= passed + 2


def test_what_a_reader_has_leased_that_stands_still_is_given_back_when_it_is_killed(both: Pair) -> None:
    with (
        llm_server(both.checkpoint, both.encoder.address, exit_code=None, **LLM_FLAGS) as llm,
        LlmClient(llm.address) as text,
    ):
        until(lambda: usable(text, 1), "the encoder is usable")
        with frozen(both.encoder, WORKER), text.generate(about(new_clip())):
            until(lambda: both.media.get_load().running_items == 1, "the encoder is at work on it")
            stop(llm.pid)
            for worker in both.encoder.children(WORKER):
                send(worker, signal.SIGCONT)
            until(lambda: both.media.get_load().leases == 1, "its rows are leased")
            llm.process.kill()
        until(lambda: nothing_is_leased(both.media), "nothing is held")
    assert tokens(both.text, about(new_clip()))
