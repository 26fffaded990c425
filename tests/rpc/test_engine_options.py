"""The engine's options reach it and do what they say, as seen from outside: by where a prefill is cut, by what is
cached, by the steps that an answer takes, and by who gives way."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest

from tests import pictures
from tests.launch import Service, llm_server
from tests.rpc.pairs import LLM_FLAGS, Pair, answer, asked, greedy, idle, tokens, usable
from tests.scrape import scrape
from tests.waiting import until
from twinlens import LlmClient, image, user

STEP = 32
OPTIONS: dict[str, object] = {
    "overlap": "no",
    "prefix_cache": "no",
    "keep_media_whole": "yes",
    "max_step_tokens": STEP,
    "max_running": 4,
    "kv_cache_bytes": "320KiB",  # ten blocks
    "metrics_listen": "127.0.0.1:0",
    "stream_interval": 5,
}
SHOWN = user("Look at this closely: ", image(pictures.encoded(pictures.noise(192, 128, 9_950))), "What is it?")


@pytest.fixture(scope="module")
def service(qwen3: Pair) -> Iterator[Service]:
    """An LLM service with options that are all other than usual, beside the usual one."""
    with llm_server(qwen3.checkpoint, qwen3.encoder.address, light=False, **{**LLM_FLAGS, **OPTIONS}) as running:
        yield running


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[LlmClient]:
    with LlmClient(service.address) as calls:
        until(lambda: usable(calls, 1), "the encoder is usable")
        yield calls


def test_a_picture_is_kept_whole_where_a_step_would_have_ended_inside_it(client: LlmClient) -> None:
    with client.generate(asked(SHOWN, greedy(4, prompt_logprobs=0))) as stream:
        events = list(stream)
    (span,) = events[0].started.spans
    assert span.start < STEP < span.start + span.length <= span.start + STEP
    scored = [event.delta.prompt for event in events if event.delta.HasField("prompt")]
    ends = [part.first + len(part.token_ids) - 1 for part in scored]  # each is the token after a chunk, but the last
    assert not any(span.start < end < span.start + span.length for end in ends)
    assert all(after - before <= STEP for before, after in pairwise([0, *ends]))


def test_without_a_prefix_cache_and_without_overlap_the_tokens_are_the_same(client: LlmClient, qwen3: Pair) -> None:
    expected = tokens(qwen3.text, asked(SHOWN, greedy(24)))
    for _ in range(2):
        said = answer(client, asked(SHOWN, greedy(24)))
        assert (said.choices[0].token_ids, said.usage.cached_tokens) == (expected, 0)
    assert answer(qwen3.text, asked(SHOWN, greedy(24))).usage.cached_tokens > 0


def test_tokens_of_an_answer_are_streamed_in_messages_of_as_many_as_asked_for(client: LlmClient) -> None:
    with client.generate(asked(user("Tell me."), greedy(23))) as stream:
        counts = [len(event.delta.token_ids) for event in stream if event.delta.token_ids]
    assert counts[0] == 1
    assert min(counts[1:-1]) >= OPTIONS["stream_interval"]
    assert sum(counts) == 23


@pytest.mark.parametrize("overlaps", [False, True])
def test_an_end_that_cannot_be_foreseen_costs_a_step_more_where_steps_overlap(
    client: LlmClient, qwen3: Pair, overlaps: bool
) -> None:
    asking = qwen3.text if overlaps else client
    stop = tokens(asking, asked(user("Tell me."), greedy(12)))[8]
    until(lambda: idle(asking), "nothing runs")
    before = asking.get_load().steps
    said = answer(asking, asked(user("Tell me."), greedy(40, stop_token_ids=[stop])))
    chunks = 1 if overlaps else -(-said.usage.prompt_tokens // STEP)
    steps = chunks + said.usage.completion_tokens - 1 + overlaps
    until(lambda: asking.get_load().steps - before >= steps, "all steps are through")
    until(lambda: idle(asking), "nothing runs")
    assert asking.get_load().steps - before == steps


def test_who_gives_way_where_blocks_run_out_says_the_same_and_is_counted(
    service: Service, client: LlmClient, qwen3: Pair
) -> None:
    asking = [asked(user(f"Count to {n}."), greedy(110)) for n in (10, 20, 30)]
    expected = [tokens(qwen3.text, each) for each in asking]
    with ThreadPoolExecutor(len(asking)) as threads:
        assert list(threads.map(lambda each: tokens(client, each), asking)) == expected
    load = client.get_load()
    assert load.preemptions > 0
    assert (load.kv_blocks_total, load.kv_blocks_cached) == (10, 0)
    until(lambda: scrape(service.metrics)["twinlens_llm_num_preemptions_total"] == load.preemptions, "a beat has come")
