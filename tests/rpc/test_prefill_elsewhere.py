"""Prompts that another LLM service computes: its KV blocks are brought, and the answer is the same whatever fails."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from tests import pictures
from tests.adapters import make_adapter
from tests.launch import Service, encoder_server, llm_server, stopped
from tests.rpc.encoder_client import video
from tests.rpc.pairs import ENCODER_FLAGS, LLM_FLAGS, Pair, about, answer, asked, greedy, idle, pair, tokens, usable
from tests.scrape import scrape
from tests.waiting import until
from twinlens import LlmClient, image, user, v1
from twinlens.v1 import llm_pb2
from twinlens.v1.llm_pb2_grpc import LlmServiceServicer, LlmServiceStub, add_LlmServiceServicer_to_server

EXCHANGES: dict[str, object] = {**LLM_FLAGS, "kv_host_bytes": "8MiB", "metrics_listen": "127.0.0.1:0"}
BORROWS: dict[str, object] = {**EXCHANGES, "prefill_tokens": 32}
ENGINE = "llm_service.engine"
FIRST, SECOND = (pictures.encoded(pictures.noise(192, 128, 9_700 + n)) for n in range(2))
SHOWN = [
    about(pictures.encoded(pictures.noise(192, 128, 9_710 + n)), f"Tell me all about it, number {n}, " * 4)
    for n in range(8)
]


@dataclass(frozen=True, slots=True)
class Services:
    """Two that serve the same: what `lender` computes, `borrower` answers."""

    lender: Service
    borrower: Service
    elsewhere: LlmClient
    text: LlmClient

    def cached(self, request: v1.GenerateRequest) -> int:
        """Prompt tokens that the borrower need not compute."""
        return answer(self.text, request).usage.cached_tokens


@contextmanager
def services(checkpoint: Path, encoder: str, *, light: bool = True, **flags: object) -> Iterator[Services]:
    """Both, for the length of the block; `lends` among the flags are the lender's alone."""
    lends = {"lend_prefill": "yes", **dict(flags.pop("lends", {}))}
    given = {"light": light, **flags}
    with (
        llm_server(checkpoint, encoder, exit_code=None, **{**EXCHANGES, **given, **lends}) as lender,
        llm_server(checkpoint, encoder, prefill_services=lender.address, **{**BORROWS, **given}) as borrower,
        LlmClient(lender.address) as elsewhere,
        LlmClient(borrower.address) as text,
    ):
        until(lambda: usable(text, 1) and usable(elsewhere, 1), "the encoder is usable")
        yield Services(lender, borrower, elsewhere, text)
        until(lambda: idle(text), "nothing is held")


@pytest.fixture(scope="module")
def both(checkpoint: Path) -> Iterator[Pair]:
    """Light services that compute everything themselves."""
    with pair(checkpoint) as running:
        yield running


@pytest.fixture(scope="module")
def apart(both: Pair) -> Iterator[Services]:
    """Light services that share the work."""
    with services(both.checkpoint, both.encoder.address) as running:
        yield running


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_prompts_are_computed_elsewhere_and_answered_alike(qwen3: Pair, tp: int) -> None:
    expected = [tokens(qwen3.text, asked(each)) for each in SHOWN[:4]]
    with services(qwen3.checkpoint, qwen3.encoder.address, light=False, tp=tp) as two:
        there_after: list[float] = []
        for each, said in zip(SHOWN, expected, strict=False):
            there = answer(two.text, asked(each))
            there_after.append(there.timings["prefill_elsewhere"])
            assert there.choices[0].token_ids == said
            assert there.usage.cached_tokens > there.usage.prompt_tokens - 17
        here, lent = two.text.get_load(), two.elsewhere.get_load()
        if max(there_after) < 0.9:
            assert here.rows_received == 0, "rows of what is computed elsewhere are of no use here"
        assert lent.prompt_tokens == here.prompt_tokens
        assert lent.generated_tokens == len(expected)
        assert (here.prefills_elsewhere, here.prefills_failed) == (len(expected), 0)
        assert here.kv_blocks_received == lent.kv_blocks_lent > 0


@pytest.mark.parametrize(
    ("prompt", "fields"),
    [
        (user("Nothing but words, " * 40), {}),
        (user(image(FIRST), "and this ", image(SECOND), "tell me more, " * 9), {}),
        (about(FIRST, "A secret, " * 20), {"cache_salt": "ours"}),
        (about(SECOND, "A conversation, " * 20), {"session_id": "one"}),
    ],
    ids=["words", "pictures", "salt", "session"],
)
def test_whatever_a_prompt_is_made_of_comes_from_elsewhere(
    both: Pair, apart: Services, prompt: v1.ChatMessage, fields: dict[str, str]
) -> None:
    request = asked(prompt, **fields)
    found = answer(apart.text, request)
    assert found.choices[0].token_ids == tokens(both.text, request)
    assert found.usage.cached_tokens > found.usage.prompt_tokens - 17


def test_an_adapter_computes_elsewhere_what_it_would_here(both: Pair, tmp_path: Path) -> None:
    make_adapter(both.checkpoint, tmp_path / "one", seed=1)
    flags = {"lora_dir": tmp_path, "lora_modules": "one=one", "max_loras": 1, "max_loaded_loras": 1}
    request = asked(about(FIRST, "An adapter's own, " * 20), model="one")
    with services(both.checkpoint, both.encoder.address, **flags) as two:
        there = tokens(two.elsewhere, asked(about(FIRST, "An adapter's own, " * 20), model="one"))
        two.elsewhere.flush_cache()
        found = answer(two.text, request)
        assert found.choices[0].token_ids == there
        assert found.usage.cached_tokens > found.usage.prompt_tokens - 17
        plain = answer(two.text, asked(about(FIRST, "An adapter's own, " * 20)))
        assert plain.choices[0].token_ids == tokens(both.text, asked(about(FIRST, "An adapter's own, " * 20))) != there


def test_another_adapter_under_the_same_name_costs_prompts_of_the_model_nothing(both: Pair, tmp_path: Path) -> None:
    for folder, seed in (("here", 1), ("there", 2)):
        make_adapter(both.checkpoint, tmp_path / folder / "one", seed=seed)
    flags = {"lora_modules": "one=one", "max_loras": 1, "max_loaded_loras": 1}
    lends = {"lora_dir": tmp_path / "there"}
    with services(both.checkpoint, both.encoder.address, lends=lends, lora_dir=tmp_path / "here", **flags) as two:
        for number in range(4):
            found = answer(two.text, asked(user(f"With an adapter {number}, " * 20), model="one"))
            assert found.usage.cached_tokens == 0
        assert two.text.get_load().prefills_failed == 4
        assert two.cached(asked(about(FIRST, "Without one, " * 20))) > 16


@pytest.mark.soak
@pytest.mark.parametrize(
    "flags",
    [
        {"kv_cache_dtype": "int8"},
        {"kv_cache_dtype": "fp8"},
        {"speculative_tokens": 3, "overlap": "auto"},
        {"speculative_tokens": 3, "overlap": "auto", "draft_model": "itself"},
        {"speculative_tokens": 3, "overlap": "auto", "draft_model": "itself", "tp": 2},
        {"dtype": "bfloat16"},
    ],
    ids=["int8", "e4m3", "look-up", "draft model", "draft model of the first rank", "16 bits"],
)
def test_blocks_of_each_kind_are_exchanged(checkpoint: Path, flags: dict[str, object]) -> None:
    encoder_flags = {key: value for key, value in flags.items() if key == "dtype"}
    flags = {key: checkpoint if value == "itself" else value for key, value in flags.items()}
    with pair(checkpoint, light=False, encoder_flags=encoder_flags, **flags) as alone:
        expected = [tokens(alone.text, asked(each)) for each in SHOWN[:3]]
        with services(checkpoint, alone.encoder.address, light=False, **flags) as two:
            for each, said in zip(SHOWN, expected, strict=False):
                there = answer(two.text, asked(each))
                assert there.choices[0].token_ids == said
                assert there.usage.cached_tokens > there.usage.prompt_tokens - 17


def test_a_turn_that_follows_brings_what_is_new_alone(both: Pair, apart: Services) -> None:
    first = about(FIRST, "Something long to begin with, " * 8)
    said = answer(apart.text, asked(first)).choices[0].text
    before = apart.text.get_load()
    later = [first, v1.ChatMessage(role="assistant", parts=[v1.ChatPart(text=said)]), user("And what else, " * 12)]
    request = v1.GenerateRequest(chat=v1.ChatInput(messages=later), sampling=greedy())
    found = answer(apart.text, request)
    assert found.choices[0].token_ids == tokens(both.text, request)
    after = apart.text.get_load()
    brought = after.kv_blocks_received - before.kv_blocks_received
    assert 0 < brought < found.usage.prompt_tokens // 16 - 10


def test_prompts_that_lack_little_are_computed_here(both: Pair, apart: Services) -> None:
    before = apart.text.get_load().prefills_elsewhere
    assert tokens(apart.text, asked(user("Hi"))) == tokens(both.text, asked(user("Hi")))
    scored = asked(about(FIRST, "Every token counts, " * 20), greedy(prompt_logprobs=0))
    assert answer(apart.text, scored).usage.cached_tokens == 0
    assert apart.text.get_load().prefills_elsewhere == before


def test_a_prompt_with_a_picture_that_is_cut_is_computed_here(both: Pair, apart: Services) -> None:
    """Its pieces are those of the whole prompt; of a text that is cut the tokens are sent."""
    words, before = "First a good deal of it goes, " * 20, apart.text.get_load()
    shown = asked(user(words, image(FIRST), "and this stays, " * 9), truncate_prompt_tokens=140)
    assert tokens(apart.text, shown) == tokens(both.text, shown)
    assert apart.text.get_load().prefills_elsewhere == before.prefills_elsewhere
    told = asked(user(words), truncate_prompt_tokens=140)
    assert answer(apart.text, told).usage.cached_tokens == 128
    after = apart.text.get_load()
    assert (after.prefills_elsewhere, after.prefills_failed) == (before.prefills_elsewhere + 1, before.prefills_failed)


def test_metrics_and_status_tell_of_it(apart: Services) -> None:
    answer(apart.text, asked(about(FIRST, "Counted, " * 30)))
    here, there = scrape(apart.borrower.metrics), scrape(apart.lender.metrics)
    assert here["twinlens_llm_prefills_elsewhere_total"] >= 1
    assert here["twinlens_llm_prefills_failed_total"] == 0
    assert there["twinlens_llm_kv_blocks_lent_total"] >= here["twinlens_llm_kv_blocks_received_total"] > 0


def test_blocks_come_while_the_rest_is_computed(both: Pair) -> None:
    """In ten steps, and from a service whose host has room for few of them at a time."""
    little = {"max_step_tokens": 32, "max_running": 4, "kv_host_bytes": "256KiB"}
    with services(both.checkpoint, both.encoder.address, lends=little) as two:
        for each in SHOWN[:3]:
            request = asked(about(each.parts[0].media.data, "and so on, " * 40))
            found = answer(two.text, request)
            assert found.choices[0].token_ids == tokens(both.text, request)
            assert found.usage.cached_tokens > found.usage.prompt_tokens - 17
        assert 0 < two.elsewhere.get_load().kv_host_blocks_total < two.text.get_load().kv_blocks_received // 3


def test_two_services_may_compute_prompts_for_each_other(both: Pair, tmp_path: Path) -> None:
    """Neither passes on what it was asked for."""
    later, given = tmp_path / "later", (both.checkpoint, both.encoder.address)
    later.write_text("# nobody yet")
    with (
        llm_server(*given, lend_prefill="yes", prefill_services=f"file://{later}", **BORROWS) as first,
        llm_server(*given, lend_prefill="yes", prefill_services=first.address, **BORROWS) as second,
        LlmClient(first.address) as one,
        LlmClient(second.address) as other,
    ):
        until(lambda: usable(one, 1) and usable(other, 1), "the encoder is usable")
        later.write_text(second.address)
        for text in (one, other):
            for number in range(1000):  # until it knows of the other one
                request = asked(about(FIRST, f"Question {number} of {id(text)}, " * 8))
                assert tokens(text, request) == tokens(both.text, request)
                if text.get_load().prefills_elsewhere:
                    break
            assert text.get_load().prefills_elsewhere == 1
            assert text.get_load().kv_blocks_received > 0
        assert [text.get_load().prefills_failed for text in (one, other)] == [0, 0]


# --- what fails ------------------------------------------------------------------------------------------------------


def test_a_lender_that_is_killed_costs_no_answer(both: Pair) -> None:
    expected = [tokens(both.text, asked(each)) for each in SHOWN]
    with services(both.checkpoint, both.encoder.address) as two:
        assert tokens(two.text, asked(SHOWN[0])) == expected[0]
        os.kill(two.lender.pid, signal.SIGKILL)
        assert [tokens(two.text, asked(each)) for each in SHOWN] == expected
        load = two.text.get_load()
        assert load.prefills_failed == load.prefills_elsewhere - 1 > 0


def test_an_engine_that_dies_while_its_prompt_is_computed_elsewhere_is_replaced(both: Pair) -> None:
    expected = tokens(both.text, asked(SHOWN[0]))
    with services(both.checkpoint, both.encoder.address) as two, ThreadPoolExecutor(1) as pool:
        with stopped(two.lender.pid):
            answering = pool.submit(tokens, two.text, asked(SHOWN[0]))
            until(lambda: two.text.get_load().prefills_elsewhere, "it is asked for")
            (engine,) = two.borrower.children(ENGINE)
            os.kill(engine, signal.SIGKILL)
            until(lambda: engine not in two.borrower.children(ENGINE), "it has ended")
        assert answering.result() == expected
        until(lambda: tokens(two.text, asked(SHOWN[1])) == tokens(both.text, asked(SHOWN[1])), "the next is served")


def test_callers_who_leave_give_the_places_back(both: Pair) -> None:
    """Half of the host's places are for one prompt: were they lost, later ones would find none."""
    with services(both.checkpoint, both.encoder.address) as two:
        asking = [asked(each) for each in SHOWN]
        for request in asking[:4]:
            with stopped(two.lender.pid):
                leaves(two, request)
            until(lambda: idle(two.text), "it is gone")
        for request in asking[4:]:
            assert two.cached(request) > 16


def leaves(two: Services, request: v1.GenerateRequest) -> None:
    """Asks, and goes away while the prompt is to be computed elsewhere."""
    before = two.text.get_load().prefills_elsewhere
    over = threading.Event()

    def ask() -> None:
        with two.text.generate(request, timeout=180):
            until(over.is_set, "told to leave")

    caller = threading.Thread(target=ask)
    caller.start()
    until(lambda: two.text.get_load().prefills_elsewhere > before, "it is asked for")
    over.set()
    caller.join()


@pytest.mark.parametrize(
    "lends",
    [{"block_size": 32}, {"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "fp8"}, {"lend_prefill": "no"}],
    ids=["blocks", "type", "e4m3", "unwilling"],
)
def test_a_service_that_computes_something_else_is_left_alone(both: Pair, lends: dict[str, object]) -> None:
    with services(both.checkpoint, both.encoder.address, lends=lends) as two:
        for each in SHOWN[:3]:
            assert tokens(two.text, asked(each)) == tokens(both.text, asked(each))
        load = two.text.get_load()
        assert load.prefills_failed == load.prefills_elsewhere > 0 == load.kv_blocks_received


class Liar(LlmServiceServicer):
    """Gives what `parts` makes of a request."""

    def __init__(self, parts: Callable[[llm_pb2.PrefillRequest], Iterator[llm_pb2.PrefillResponse]]) -> None:
        self._parts = parts

    def Prefill(
        self, request: llm_pb2.PrefillRequest, context: grpc.ServicerContext
    ) -> Iterator[llm_pb2.PrefillResponse]:
        yield from self._parts(request)


def other_block(request: llm_pb2.PrefillRequest) -> Iterator[llm_pb2.PrefillResponse]:
    yield llm_pb2.PrefillResponse(identity=bytes(32), data=b"x", crc32c=0xA93C5F93)


def damaged(request: llm_pb2.PrefillRequest) -> Iterator[llm_pb2.PrefillResponse]:
    yield llm_pb2.PrefillResponse(identity=bytes(32), data=b"x", crc32c=1)


def nothing(request: llm_pb2.PrefillRequest) -> Iterator[llm_pb2.PrefillResponse]:
    yield from ()


@contextmanager
def lying(parts: Callable[[llm_pb2.PrefillRequest], Iterator[llm_pb2.PrefillResponse]]) -> Iterator[str]:
    """The address of one that gives these parts."""
    liar = grpc.server(ThreadPoolExecutor(2))
    add_LlmServiceServicer_to_server(Liar(parts), liar)
    port = liar.add_insecure_port("127.0.0.1:0")
    liar.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        liar.stop(None).wait()


@pytest.mark.parametrize("parts", [other_block, damaged, nothing])
def test_what_a_service_lies_about_is_computed_here(
    both: Pair, parts: Callable[[llm_pb2.PrefillRequest], Iterator[llm_pb2.PrefillResponse]]
) -> None:
    with (
        lying(parts) as address,
        llm_server(both.checkpoint, both.encoder.address, **{**BORROWS, "prefill_services": address}) as llm,
        LlmClient(llm.address) as text,
    ):
        until(lambda: usable(text, 1), "the encoder is usable")
        assert tokens(text, asked(SHOWN[0])) == tokens(both.text, asked(SHOWN[0]))
        load = text.get_load()
        assert (load.prefills_elsewhere, load.kv_blocks_received) == (1, 0)
        assert load.prefills_failed == (parts is not nothing)


# --- the call itself -------------------------------------------------------------------------------------------------


def refused(address: str, request: llm_pb2.PrefillRequest) -> grpc.StatusCode:
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as error:
        list(LlmServiceStub(channel).Prefill(request, timeout=60))
    code: grpc.StatusCode = error.value.code()
    return code


def test_the_call_is_refused_where_blocks_are_not_lent_or_not_alike(both: Pair, apart: Services) -> None:
    request = llm_pb2.PrefillRequest(pieces=[llm_pb2.PromptPiece(text="Hi")])
    assert refused(both.llm.address, request) is grpc.StatusCode.FAILED_PRECONDITION
    assert refused(apart.lender.address, request) is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"lend_prefill": "yes"}, "--lend-prefill needs --kv-host-bytes"),
        ({"prefill_services": "127.0.0.1:1"}, "--prefill-services needs --kv-host-bytes"),
        ({"prefill_services": "nowhere", "kv_host_bytes": "1MiB"}, "--prefill-services: nowhere is not host:port"),
        ({"prefill_cert": "/nowhere"}, "--prefill-cert and --prefill-key go together"),
    ],
)
def test_what_cannot_be_ends_the_start_with_a_sentence(checkpoint: Path, flags: dict[str, object], why: str) -> None:
    with pytest.raises(RuntimeError, match=why), llm_server(checkpoint, **{**LLM_FLAGS, **flags}):
        pass


def test_who_lays_a_prompt_out_cannot_have_its_blocks_found_as_those_of_another(both: Pair, apart: Services) -> None:
    """With two of a picture's tokens before the picture itself, the first block has the same tokens as that of an
    honest prompt, and of the picture the same row first, at another place."""
    overheard: list[llm_pb2.PrefillRequest] = []

    def listens(request: llm_pb2.PrefillRequest) -> Iterator[llm_pb2.PrefillResponse]:
        overheard.append(request)
        yield from ()

    honest = asked(about(pictures.encoded(pictures.noise(192, 128, 9_730)), "Told as it is, " * 20))
    with (
        lying(listens) as address,
        llm_server(both.checkpoint, both.encoder.address, **{**BORROWS, "prefill_services": address}) as llm,
        LlmClient(llm.address) as text,
    ):
        until(lambda: usable(text, 1), "the encoder is usable")
        expected = tokens(text, honest)
    (lie,) = overheard
    (at,) = (at for at, piece in enumerate(lie.pieces) if piece.HasField("slot"))
    stray = [llm_pb2.PromptPiece(token=lie.pieces[at].slot.token)] * 2
    pieces = [*lie.pieces[:at], *stray, *lie.pieces[at:]]
    del lie.pieces[:]
    lie.pieces.extend(pieces)
    apart.elsewhere.flush_cache()
    with grpc.insecure_channel(apart.lender.address) as channel:
        lent = {part.identity for part in LlmServiceStub(channel).Prefill(lie, timeout=60)}
    assert lent
    assert tokens(apart.elsewhere, honest) == expected


def test_embeddings_are_computed_here(both: Pair, apart: Services) -> None:
    """Nothing else is done for them than what another service would do."""
    before = apart.text.get_load().prefills_elsewhere
    prompt = about(FIRST, "To be embedded, " * 20)
    assert list(apart.text.embed(prompt).values) == pytest.approx(list(both.text.embed(prompt).values), abs=1e-6)
    assert apart.text.get_load().prefills_elsewhere == before


def test_a_video_of_which_rows_are_dropped_comes_from_elsewhere(both: Pair, apart: Services) -> None:
    film = pictures.video(pictures.frames(40, 160, 128, seed=9_750), fps=8)
    request = asked(user(video(film, video_pruning_rate=0.5), "and so on, " * 20))
    found = answer(apart.text, request)
    assert found.choices[0].token_ids == tokens(both.text, request)
    assert found.usage.cached_tokens > found.usage.prompt_tokens - 17


def test_items_of_prompts_that_are_computed_elsewhere_leave_their_places_at_encoders(
    both: Pair, tmp_path: Path
) -> None:
    """The other service needs the only place, which an item keeps whose rows are more than a stream takes unread."""
    wide = tmp_path / "wide"
    shutil.copytree(both.checkpoint, wide)
    config = json.loads((wide / "config.json").read_text())
    config["text_config"]["hidden_size"] = config["vision_config"]["out_hidden_size"] = 1024
    (wide / "config.json").write_text(json.dumps(config))
    encoder_flags = {**ENCODER_FLAGS, "max_queued_items": 1, "shared_memory": "no"}
    flags = {"kv_cache_bytes": "256MiB", "kv_host_bytes": "64MiB", "encoder_wait_seconds": 100}
    shown = image(pictures.encoded(pictures.noise(1024, 768, 9_760)), max_pixels=1 << 20)
    with encoder_server(wide, **encoder_flags) as encoder, services(wide, encoder.address, **flags) as two:
        found = answer(two.text, asked(user(shown, "It is large.")))
        assert found.usage.cached_tokens > 768
        assert two.text.get_load().prefills_failed == 0
        assert two.text.get_load().rows_received == two.elsewhere.get_load().rows_received == 768


def test_prompts_are_computed_here_where_there_is_room_for_little_of_them(both: Pair) -> None:
    """Of a host's places half are for blocks that come: one of three here, which is less than is asked for."""
    with services(both.checkpoint, both.encoder.address) as two:
        load = two.text.get_load()
        block_bytes = (8 << 20) // load.kv_host_blocks_total
    flags = {**BORROWS, "kv_host_bytes": 2 * block_bytes, "prefill_services": two.lender.address}
    with (
        llm_server(both.checkpoint, both.encoder.address, **flags) as llm,
        LlmClient(llm.address) as text,
    ):
        until(lambda: usable(text, 1), "the encoder is usable")
        assert tokens(text, asked(SHOWN[0])) == tokens(both.text, asked(SHOWN[0]))
        load = text.get_load()
        assert (load.kv_host_blocks_total, load.prefills_elsewhere) == (2, 0)
