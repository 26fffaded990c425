"""An index that is made of a real service's KV events has what its prefix cache has, as its own answers say."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("zmq")

from tests import pictures
from tests.adapters import make_adapter
from tests.kv_index import Subscriber, replay
from tests.launch import Service, llm_server, send
from tests.rpc.pairs import (
    LLM_FLAGS,
    Pair,
    about,
    answer,
    asked,
    greedy,
    holds_nothing,
    pair,
    usable,
)
from tests.scrape import scrape
from tests.waiting import until
from twinlens import LlmClient, user

SIZE = 16


@dataclass(frozen=True, slots=True)
class Told:
    """A service, a client, and one who knows what it has by its events alone."""

    llm: Service
    text: LlmClient
    subscriber: Subscriber
    questions: str

    def settled(self) -> bool:
        """All that the service had said when it was asked has been taken in. A replay has what waits to be sent as
        well; metrics do not tell of that."""
        said = [number for number, _ in replay(self.questions, self.subscriber.numbers[-1])]
        self.subscriber.read(10)
        return self.subscriber.numbers[-1] >= max(said, default=0)

    def count(self, hashes: str, expected: int) -> None:
        until(lambda: self.settled() and len(self.subscriber.index.on(hashes)) == expected, "the index agrees")


@contextmanager
def told(checkpoint: Path, folder: Path, *encoders: str, **flags: object) -> Iterator[Told]:
    events, questions = f"ipc://{folder}/events", f"ipc://{folder}/replay"
    more = {"kv_events": events, "kv_events_replay": questions, "metrics_listen": "127.0.0.1:0"}
    with (
        llm_server(checkpoint, *encoders, **{**LLM_FLAGS, **more, **flags}) as llm,
        LlmClient(llm.address) as text,
        Subscriber(events) as subscriber,
    ):
        # What was said before the subscriber was there it asks for; then it hears of something new.
        for number, payload in replay(questions, 0):
            subscriber.numbers.append(number)
            subscriber.index.take(payload)
        until(lambda: text.flush_cache() is not None and subscriber.read(50) > 0, "it hears")
        yield Told(llm, text, subscriber, questions)


def test_a_prompt_hits_what_the_index_has_of_it(checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    with told(checkpoints("qwen3_vl"), tmp_path) as service:
        text, index = service.text, service.subscriber.index
        questions = [user(f"Tell me about number {n}, " + "please, " * 40) for n in range(4)]
        for question in questions:
            ids = text.tokenize(question)
            until(service.settled, "all is heard")
            expected = index.match(ids[:-1], SIZE)
            assert answer(text, asked(question, greedy(40))).usage.cached_tokens == expected
        until(service.settled, "all is heard")
        for question in questions:
            ids = text.tokenize(question)
            assert index.match(ids[:-1], SIZE) == (len(ids) - 1) // SIZE * SIZE
            assert answer(text, asked(question, greedy(4))).usage.cached_tokens == index.match(ids[:-1], SIZE)
        service.count("GPU", text.get_load().kv_blocks_cached)
        text.flush_cache()
        service.count("GPU", 0)
        assert answer(text, asked(questions[0], greedy(4))).usage.cached_tokens == 0
        assert scrape(service.llm.metrics)["twinlens_llm_kv_event_batches_dropped_total"] == 0
        numbers = [number for number, _ in replay(service.questions, 0)]
        assert (
            numbers == list(range(service.subscriber.numbers[-1] + 1)) or numbers[-1] > service.subscriber.numbers[-1]
        )


def test_what_has_to_make_way_is_told_of_and_so_is_what_the_host_keeps(
    checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    """Several at once in a cache that holds two of them: some are put back to waiting."""
    flags = {"kv_cache_bytes": "1MiB", "kv_host_bytes": "2MiB"}
    with told(checkpoints("qwen3_vl"), tmp_path, **flags) as service:
        text, index = service.text, service.subscriber.index
        room = text.get_load().kv_blocks_total
        prompts = [user(f"{n}: " + f"word {n} " * (room * 2)) for n in range(6)]
        for _ in range(2):
            streams = [text.generate(asked(prompt, greedy(SIZE * room // 4))) for prompt in prompts]
            for stream in streams:
                for _ in stream:
                    pass
            load = text.get_load()
            service.count("GPU", load.kv_blocks_cached)
            service.count("CPU", load.kv_host_blocks_used)
        load = text.get_load()
        assert load.kv_blocks_offloaded > load.kv_host_blocks_total, "some of what the host had made way as well"
        assert load.kv_blocks_loaded > 0
        assert load.preemptions > 0
        for prompt in prompts:
            until(service.settled, "all is heard")
            expected = index.match(text.tokenize(prompt)[:-1], SIZE)
            assert answer(text, asked(prompt, greedy(2))).usage.cached_tokens == expected


def test_blocks_of_an_engine_that_has_ended_are_told_of_as_gone(
    checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    with told(checkpoints("qwen3_vl"), tmp_path) as service:
        text, subscriber = service.text, service.subscriber
        question = user("Tell me about it, " * 20)
        answer(text, asked(question))
        until(lambda: service.settled() and len(subscriber.index.media) > 0, "there are some")
        cleared, numbers = subscriber.index.cleared, len(subscriber.numbers)
        send(*service.llm.children("llm_service.engine"), signal.SIGKILL)
        until(lambda: subscriber.read(10) > 0 and subscriber.index.cleared > cleared, "it is told")
        assert not subscriber.index.media
        until(lambda: holds_nothing(text), "another engine serves")
        assert answer(text, asked(question)).usage.cached_tokens == 0
        service.count("GPU", text.get_load().kv_blocks_cached)
        assert subscriber.numbers[numbers:] == list(range(subscriber.numbers[numbers], subscriber.numbers[-1] + 1))


def test_two_pictures_with_the_same_tokens_never_look_alike(both: Pair, tmp_path: Path) -> None:
    shown = [about(pictures.encoded(pictures.noise(128, 128, 9_700 + n)), "What is it? " * 8) for n in range(2)]
    with told(both.checkpoint, tmp_path, both.encoder.address) as service:
        text, index = service.text, service.subscriber.index
        until(lambda: usable(text, 1), "the encoder is usable")
        said = [answer(text, asked(each, greedy(1))) for each in shown]
        until(service.settled, "all is heard")
        chains = {tuple((own, keys) for _, own, keys in chain) for chain in index.chains.values()}
        longest = sorted(chains, key=len)[-2:]
        assert [own for own, _ in longest[0]] == [own for own, _ in longest[1]], "the same tokens"
        begin = said[0].started.spans[0].start
        for number, (one, other) in enumerate(zip(*longest, strict=True)):
            assert (one == other) == ((number + 1) * SIZE <= begin or (not one[1] and not other[1]))
        keys = {key for chain in longest for _, keys in chain for key in keys}
        assert keys == {each.started.spans[0].key.hex() for each in said}
        # Nothing has been said of a chain twice: whoever names blocks by tokens and keys has as many as the service.
        assert len(set(index.chains.values())) == len(index.chains)
        assert len(index.chains) == text.get_load().kv_blocks_cached


@pytest.fixture(scope="module")
def both(checkpoints: Callable[..., Path]) -> Iterator[Pair]:
    with pair(checkpoints("qwen3_vl")) as running:
        yield running


def test_tenants_and_adapters_have_blocks_of_their_own(checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    make_adapter(checkpoints("qwen3_vl"), tmp_path / "adapters" / "1", seed=1)
    with told(
        checkpoints("qwen3_vl"), tmp_path, lora_dir=tmp_path / "adapters", lora_modules="one=1", max_loras=1
    ) as service:
        text, index = service.text, service.subscriber.index
        question = user("Tell me about it, " * 20)
        for fields in ({}, {"cache_salt": "tenant"}, {"model": "one"}):
            assert answer(text, asked(question, greedy(1), **fields)).usage.cached_tokens == 0
        until(service.settled, "all is heard")
        ids = text.tokenize(question)[:-1]
        whole = len(ids) // SIZE * SIZE
        assert index.match(ids, SIZE) == index.match(ids, SIZE, name="one") == whole
        assert len(index.chains) == 3 * whole // SIZE
        (root,) = {chain[0][2] for chain in index.chains.values() if chain[0][2]}
        assert index.match(ids, SIZE, [root]) == whole
        assert "tenant" not in str(root)


def test_answers_go_on_beside_a_subscriber_that_stands_still(checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    with told(checkpoints("qwen3_vl"), tmp_path, block_size=1) as service:
        for number in range(20):  # nobody reads
            assert len(answer(service.text, asked(user(f"number {number}"), greedy(100))).choices[0].token_ids) == 100
        until(
            lambda: scrape(service.llm.metrics)["twinlens_llm_kv_event_batches_total"] > 1000, "each token is told of"
        )


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"kv_events": "tcp://*:5557", "prefix_cache": "no"}, "--kv-events needs --prefix-cache"),
        ({"kv_events_replay": "tcp://*:5558"}, "--kv-events-replay needs --kv-events"),
        ({"kv_events": "5557"}, r"--kv-events: 5557 is not tcp://\*:PORT"),
        ({"kv_events": "tcp://*:0"}, r"--kv-events: tcp://\*:0 is not"),
        ({"kv_events": "ipc:///no/such/folder/events"}, r"cannot open ipc:///no/such/folder/events \(--kv-events\)"),
    ],
)
def test_what_cannot_be_ends_the_start_with_a_sentence(
    checkpoints: Callable[..., Path], flags: dict[str, object], why: str
) -> None:
    launch = llm_server(checkpoints("qwen3_vl"), **{**LLM_FLAGS, **flags})
    with pytest.raises(RuntimeError, match=why), launch:
        pass


def test_a_model_whose_layers_keep_states_is_refused(checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    flags = {**LLM_FLAGS, "kv_events": f"ipc://{tmp_path}/events"}
    launch = llm_server(checkpoints("qwen3_5"), light=False, **flags)
    with pytest.raises(RuntimeError, match="--kv-events is not for models whose layers keep states"), launch:
        pass
