"""Prefill begins before all rows are here: text, and the pictures that come first. The worker that computes rows is
stopped meanwhile, so that what is seen cannot be luck."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests import pictures
from tests.launch import Service, llm_server, stopped
from tests.rpc.pairs import LLM_FLAGS, Pair, answer, asked, greedy, pair, tokens, usable
from tests.waiting import until
from twinlens import LlmClient, image, user, v1

BLOCK = 16


@pytest.fixture(scope="module")
def both(checkpoints: Callable[..., Path]) -> Iterator[Pair]:
    with pair(checkpoints("qwen3_vl"), max_step_tokens=256, early_prefill_tokens=1) as services:
        yield services


def picture(seed: int) -> v1.Media:
    return image(pictures.encoded(pictures.noise(128, 128, seed)))


def no_row_is_computed(encoder: Service) -> AbstractContextManager[None]:
    """The encoder answers, and computes nothing."""
    return stopped(*encoder.children("encoder_service.worker"))


def test_text_before_a_picture_is_prefilled_before_the_picture_has_a_single_row(both: Pair) -> None:
    question = asked(user("word " * 2000, picture(9_800), "what is it?"))
    before = both.text.get_load()
    with no_row_is_computed(both.encoder):
        stream = both.text.generate(question, timeout=120)
        until(lambda: both.text.get_load().kv_blocks_used >= 2000 // BLOCK, "the text is prefilled")
        during = both.text.get_load()
        assert during.rows_received == before.rows_received
        assert during.generated_tokens == before.generated_tokens
        assert during.steps - before.steps >= 2000 // 256
    early = [token for event in stream for token in event.delta.token_ids]
    both.text.flush_cache()
    assert answer(both.text, question).choices[0].token_ids == early


def test_the_first_pictures_are_prefilled_while_the_last_is_encoded(both: Pair) -> None:
    shown = [picture(9_810 + n) for n in range(4)]
    for known in shown[:3]:
        answer(both.text, asked(user(known, "?")))
    both.text.flush_cache()
    question = asked(user(*shown, "which is the brightest?"))
    with no_row_is_computed(both.encoder):
        stream = both.text.generate(question, timeout=120)
        until(lambda: both.text.get_load().kv_blocks_used >= 3 * 16 // BLOCK, "three pictures are prefilled")
        load = both.media.get_load()
        assert load.running_items + load.queued_items == 1
    events = list(stream)
    early = [token for event in events for token in event.delta.token_ids]
    spans = events[0].started.spans
    assert spans[3].start >= spans[2].start + 16
    both.text.flush_cache()
    assert answer(both.text, question).choices[0].token_ids == early


def test_requests_that_wait_for_their_pictures_keep_no_text_from_being_answered(both: Pair) -> None:
    with (
        llm_server(
            both.checkpoint, both.encoder.address, **{**LLM_FLAGS, "max_running": 2, "early_prefill_tokens": 1}
        ) as service,
        LlmClient(service.address) as client,
    ):
        until(lambda: usable(client, 1), "the encoder is usable")
        good = tokens(client, asked(user("hello")))
        questions = [asked(user("What is it? ", picture(9_830 + n), "Say it.")) for n in range(2)]
        with no_row_is_computed(both.encoder):
            streams = [client.generate(question, timeout=180) for question in questions]
            until(lambda: client.get_load().running == 2, "the text of both is prefilled")
            assert tokens(client, asked(user("hello"))) == good
        early = [[token for event in stream for token in event.delta.token_ids] for stream in streams]
        client.flush_cache()
        assert [tokens(client, question) for question in questions] == early


def test_a_little_text_before_a_picture_waits_for_the_picture(both: Pair) -> None:
    """It would be a step of its own that takes as long as a larger one."""
    with (
        llm_server(both.checkpoint, both.encoder.address, **LLM_FLAGS) as service,
        LlmClient(service.address) as client,
    ):
        until(lambda: usable(client, 1), "the encoder is usable")
        before = client.get_load()
        with no_row_is_computed(both.encoder):
            stream = client.generate(asked(user("What is this?", picture(9_840), "Say it.")), timeout=120)
            until(lambda: client.get_load().waiting == 1, "all but the rows is here")
            assert len(tokens(client, asked(user("hello"), greedy(1)))) == 1
            until(lambda: client.get_load().steps > before.steps, "the step is counted")
            load = client.get_load()
            assert (load.steps - before.steps, load.waiting) == (1, 1)
        assert len([event for event in stream if event.HasField("finished")]) == 1
