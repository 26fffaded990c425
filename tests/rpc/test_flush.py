"""FlushCache of both services: what nobody uses is forgotten and counted, and made again when it is asked for."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import pictures
from tests.launch import send, stopped
from tests.rpc.pairs import Pair, about, answer, asked, greedy, lasting, pair, tokens
from tests.waiting import until
from twinlens import image, user, v1

_seed = itertools.count(72_000)
QUESTION = "Tell me at some length what can be seen here, and leave nothing out."


@pytest.fixture(scope="module")
def both(checkpoints: Callable[..., Path]) -> Iterator[Pair]:
    """Services whose caches hold what these tests have put there."""
    with pair(checkpoints("qwen3_vl")) as running:
        yield running


def new_picture() -> bytes:
    return pictures.encoded(pictures.noise(96, 64, next(_seed)))


def test_the_encoder_forgets_every_entry_and_says_how_many(both: Pair) -> None:
    both.media.flush_cache()
    files = [new_picture() for _ in range(3)]
    keys = [next(event.header.key for event in list(both.media.encode(image(file)))) for file in files]
    assert all(both.media.probe(*keys))
    before = both.media.get_load()
    assert before.store_entries == 3
    flushed = both.media.flush_cache()
    assert (flushed.entries, flushed.bytes) == (before.store_entries, before.store_bytes)
    assert both.media.probe(*keys) == [False] * 3
    after = both.media.get_load()
    assert (after.store_entries, after.store_bytes) == (0, 0)
    empty = both.media.flush_cache()
    assert (empty.entries, empty.bytes) == (0, 0)
    list(both.media.encode(image(files[0])))
    assert both.media.get_load().vit_calls == after.vit_calls + 1


def test_the_encoder_keeps_what_is_being_made(both: Pair) -> None:
    both.media.flush_cache()
    (worker,) = both.encoder.children("encoder_service.worker")
    with stopped(worker), both.media.encode(image(new_picture())) as stream:
        header = next(iter(stream)).header
        until(lambda: both.media.get_load().running_items == 1, "it is being computed")
        assert both.media.flush_cache().entries == 0
        send(worker, signal.SIGCONT)
        rows = sum(event.rows.count for event in stream)
    assert rows == header.tokens
    assert both.media.probe(header.key) == [True]


def test_the_llm_service_forgets_rows_and_blocks_and_says_how_many(both: Pair) -> None:
    both.text.flush_cache()
    asking = asked(about(new_picture(), QUESTION))
    right = tokens(both.text, asking)
    until(both.idle, "nothing is held")
    before, encoded = both.text.get_load(), both.media.get_load().encoded_items
    assert before.kv_blocks_cached > 0
    assert before.row_bytes > 0
    flushed = both.text.flush_cache()
    assert (flushed.kv_blocks, flushed.row_bytes) == (before.kv_blocks_cached, before.row_bytes)
    after = both.text.get_load()
    assert (after.kv_blocks_cached, after.row_bytes) == (0, 0)
    again = answer(both.text, asking)
    assert (again.choices[0].token_ids, again.usage.cached_tokens) == (right, 0)
    assert both.text.get_load().rows_received == after.rows_received + again.started.spans[0].rows
    assert both.media.get_load().encoded_items == encoded, "the encoder's store has them still"


def test_the_llm_service_keeps_what_a_request_uses(both: Pair) -> None:
    both.text.flush_cache()
    prompt = user(image(new_picture()), "count")
    right = tokens(both.text, asked(prompt, greedy(16)))
    both.text.flush_cache()
    with both.text.generate(asked(prompt, lasting())) as stream:
        events, said = iter(stream), list[int]()
        while not said:
            said += next(events).delta.token_ids
        held = both.text.get_load()
        assert held.kv_blocks_used > 0
        flushed = both.text.flush_cache()
        assert (flushed.kv_blocks, flushed.row_bytes) == (0, held.row_bytes), "its rows have been read"
        kept = both.text.get_load()
        assert kept.kv_blocks_used >= held.kv_blocks_used
        assert kept.row_bytes == 0
        while len(said) < len(right):
            said += next(events).delta.token_ids
    assert said[: len(right)] == right


def test_a_session_is_flushed_as_well(both: Pair) -> None:
    both.text.flush_cache()
    asking = asked(about(new_picture(), QUESTION), session_id="talk")
    tokens(both.text, asking)
    until(both.idle, "nothing is held")
    assert both.text.flush_cache().kv_blocks > 0
    assert both.text.get_load().kv_blocks_cached == 0
    assert answer(both.text, v1.GenerateRequest.FromString(asking.SerializeToString())).usage.cached_tokens == 0
