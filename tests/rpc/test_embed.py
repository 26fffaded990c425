"""Embeddings from outside: what is answered, refused, given up and counted, by light services and by real ones."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from PIL import Image

from testkit import reference
from tests import pictures
from tests.adapters import make_adapter
from tests.launch import llm_server, stopped
from tests.rpc.pairs import LLM_FLAGS, Pair, about, answer, asked, greedy, holds_nothing, idle, lasting, pair, usable
from tests.scrape import scrape
from tests.waiting import until
from twinlens import AsyncLlmClient, LlmClient, TwinlensError, embed_request, image, system, user, v1

PICTURE = pictures.encoded(pictures.noise(96, 64, 5_151))
LONG = "word " * 900
SHOWN = Image.fromarray(np.random.default_rng(43).integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize((120, 90))
OUTCOMES = "twinlens_llm_requests_total"


@pytest.fixture(scope="module")
def both(checkpoint: Path) -> Iterator[Pair]:
    with pair(checkpoint, metrics_listen="127.0.0.1:0", max_step_tokens=64) as running:
        yield running


def failure(client: LlmClient, prompt: Any, **given: Any) -> TwinlensError:
    with pytest.raises(TwinlensError) as error:
        client.embed(prompt, **given)
    return error.value


def length(vector: v1.EmbedResponse) -> float:
    return math.hypot(*vector.values)


def test_one_vector_of_the_length_1_is_answered_for_all_of_a_prompt(both: Pair) -> None:
    about_both = both.text.get_info().embeddings
    assert (about_both.pooling, about_both.normalized) == (v1.POOLING_LAST, True)
    found = both.text.embed(about(PICTURE))
    assert len(found.values) == about_both.dimensions > 0
    assert length(found) == pytest.approx(1.0, abs=1e-6)
    assert found.usage.prompt_tokens > found.usage.cached_tokens == found.usage.completion_tokens == 0
    assert {"prompt", "encode_header", "queue", "prefill", "embed"} <= {each.stage for each in found.timings}
    assert found.request_id
    other = both.text.embed(about(PICTURE, "What else?"))
    assert list(other.values) != list(found.values)


def test_the_same_prompt_has_the_same_vector_when_it_is_cached(both: Pair) -> None:
    asking = [system("Represent it."), user(image(PICTURE), "the same, " * 40)]
    first, again = both.text.embed(asking), both.text.embed(asking)
    assert list(again.values) == list(first.values)
    assert (first.usage.cached_tokens, again.usage.cached_tokens > 0) == (0, True)
    apart = both.text.embed(asking, cache_salt="mine")
    assert (list(apart.values), apart.usage.cached_tokens) == (list(first.values), 0)


def test_the_leading_numbers_are_normalised_anew(both: Pair) -> None:
    whole, few = both.text.embed("Hello"), both.text.embed("Hello", dimensions=8)
    scale = math.hypot(*whole.values[:8])
    assert list(few.values) == pytest.approx([value / scale for value in whole.values[:8]], abs=1e-6)
    for wrong in (0, -1, len(whole.values) + 1):
        error = failure(both.text, "Hello", dimensions=wrong)
        assert (error.code, error.reason, error.field) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "OUT_OF_RANGE",
            "dimensions",
        )


def test_a_prompt_may_come_in_each_form_that_has_no_answer(both: Pair) -> None:
    ids = both.text.tokenize([user("Hello there")])
    by_ids, by_chat = both.text.embed(v1.TokensInput(ids=ids)), both.text.embed("Hello there")
    assert list(by_ids.values) == list(by_chat.values)
    text = both.text.embed(v1.TextInput(prompt=both.text.detokenize(*ids)))
    assert list(text.values) == list(by_chat.values)
    with pytest.raises(ValueError, match="put it in a message"):
        both.text.embed(v1.TranscriptionInput())
    for prompt, reason in (
        (v1.EmbedRequest(), "EMPTY_PROMPT"),
        (v1.TextInput(), "EMPTY_PROMPT"),
        (v1.TokensInput(ids=[1 << 30]), "TOKEN_OUT_OF_RANGE"),
        (embed_request("x", model="another"), "UNKNOWN_MODEL"),
        (embed_request("x", max_handovers=-1), "OUT_OF_RANGE"),
        (user(image(b"no picture")), "MEDIA_FORMAT"),
        (user(v1.Media(modality=v1.MODALITY_AUDIO, data=b"RIFF")), "NO_AUDIO"),
    ):
        assert failure(both.text, prompt).reason == reason


def test_a_prompt_may_fill_the_context(both: Pair) -> None:
    context = both.text.get_info().context_tokens
    assert both.text.embed(v1.TokensInput(ids=[5] * context)).usage.prompt_tokens == context
    error = failure(both.text, v1.TokensInput(ids=[5] * (context + 1)))
    assert (error.reason, error.field) == ("PROMPT_TOO_LONG", "tokens.ids")
    spoken = failure(both.text, v1.TextInput(prompt="<|im_end|>" * (context + 1)))
    assert (spoken.reason, spoken.field) == ("PROMPT_TOO_LONG", "input")
    length = f"this model's maximum context length is {context} tokens"
    said = f"prompt is too long: {context + 1} tokens > {context} maximum; {length}"
    assert error.message == spoken.message == said, "nothing of an output"


async def test_an_event_loop_embeds_as_well(both: Pair) -> None:
    async with AsyncLlmClient(both.llm.address) as client:
        found = await client.embed(embed_request("Hello", dimensions=4, request_id="mine"))
    assert (len(found.values), found.request_id) == (4, "mine")
    with pytest.raises(ValueError, match="inside the EmbedRequest"):
        both.text.embed(embed_request("Hello"), dimensions=4)


def counted(both: Pair) -> dict[str, float]:
    metrics = scrape(both.llm.metrics)
    return {name: metrics[f'{OUTCOMES}{{outcome="{name}"}}'] for name in ("finished", "failed", "cancelled")}


def ended(both: Pair) -> float:
    return sum(counted(both).values())


def test_each_end_is_counted_once_and_no_token_is_generated(both: Pair) -> None:
    before, load = counted(both), both.text.get_load()
    both.text.embed("Hello")
    failure(both.text, "Hello", timeout=0.0001)
    failure(both.text, v1.EmbedRequest())  # never was a request
    until(lambda: idle(both.text), "nothing is held")
    now, loaded = counted(both), both.text.get_load()
    assert now["finished"] - before["finished"] == 1
    assert loaded.finished_requests - load.finished_requests == 1
    assert loaded.generated_tokens == load.generated_tokens
    assert loaded.prompt_tokens > load.prompt_tokens


def test_one_that_is_given_up_frees_what_it_held(both: Pair) -> None:
    """One by its caller, one by its deadline and one by name, behind an answer that takes all steps."""
    with both.text.generate(asked(user("on and on"), lasting())) as stream:
        assert next(iter(stream)).HasField("started")
        before, numbers = ended(both), itertools.count()

        def is_given_up() -> bool:
            prompt = f"{next(numbers)} {LONG * 4}"  # of which a slow step computes 64 tokens
            late = failure(both.text, prompt, timeout=2.0)
            assert late.code == grpc.StatusCode.DEADLINE_EXCEEDED
            return ended(both) > before

        until(is_given_up, "one has begun by the time that its caller gives it up")
        before = ended(both)
        with ThreadPoolExecutor(1) as threads:
            named = threads.submit(failure, both.text, embed_request(f"named {LONG * 4}", request_id="named"))
            until(lambda: both.text.abort("named") == 1, "it is ended by its name")
            assert named.result().reason == "ABORTED"
        until(lambda: ended(both) > before, "it is counted")
    until(both.idle, "nothing is held")


def test_one_whose_encoder_dies_is_answered_by_the_next_or_told_to_come_again(both: Pair) -> None:
    fresh = about(pictures.encoded(pictures.noise(96, 64, 5_152)))
    workers = both.encoder.children("encoder_service.worker")
    with stopped(*workers), ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(both.text.embed, fresh)
        until(lambda: (load := both.media.get_load()).running_items + load.queued_items > 0, "it is there")
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        error = waiting.exception()
        assert error is None or (isinstance(error, TwinlensError) and error.code is grpc.StatusCode.UNAVAILABLE)
    until(both.idle, "nothing is held")

    def embeds() -> bool:
        try:
            return length(both.text.embed(fresh)) == pytest.approx(1.0, abs=1e-6)
        except TwinlensError as error:
            if error.code is not grpc.StatusCode.UNAVAILABLE:
                raise
            return False

    until(embeds, "another worker encodes it")


def test_one_without_an_encoder_is_unavailable(checkpoint: Path) -> None:
    with llm_server(checkpoint, **LLM_FLAGS) as service, LlmClient(service.address) as client:
        assert failure(client, about(PICTURE)).reason == "NO_ENCODER"
        assert length(client.embed("but a text is none of its business")) == pytest.approx(1.0, abs=1e-6)


def test_the_engine_may_die_under_it(checkpoint: Path) -> None:
    with (
        llm_server(checkpoint, **{**LLM_FLAGS, "max_step_tokens": 64}) as service,
        LlmClient(service.address) as client,
        ThreadPoolExecutor(4) as threads,
    ):
        undisturbed = [list(client.embed(f"{LONG} {n}").values) for n in range(4)]
        client.flush_cache()
        with client.generate(asked(user("slowly"), lasting())) as stream:
            assert next(iter(stream)).HasField("started")
            under_way = [threads.submit(client.embed, f"{LONG} {n}") for n in range(4)]
            until(lambda: client.get_load().running > 1, "it computes")
            (pid,) = service.children("llm_service.engine")
            os.kill(pid, signal.SIGKILL)
        assert [list(each.result().values) for each in under_way] == undisturbed
        until(lambda: holds_nothing(client), "nothing is held")


def test_an_adapter_embeds_in_its_own_way(checkpoint: Path, tmp_path: Path) -> None:
    make_adapter(checkpoint, tmp_path / "own", seed=1)
    flags = {**LLM_FLAGS, "lora_dir": tmp_path, "lora_modules": "own=own"}
    with llm_server(checkpoint, **flags) as service, LlmClient(service.address) as client:
        plain = [list(client.embed("Hello " * 30).values) for _ in range(2)]
        own = [client.embed(embed_request("Hello " * 30, model="own")) for _ in range(2)]
        assert list(own[0].values) == list(own[1].values) != plain[0] == plain[1]
        assert (own[0].usage.cached_tokens, own[1].usage.cached_tokens > 0) == (0, True)
        assert [each.in_flight for each in client.get_info().adapters] == [0]


FILES: dict[str, tuple[list[str], dict[str, Any], tuple[int, bool] | None]] = {
    "last": (["Transformer", "Pooling", "Normalize"], {"pooling_mode_lasttoken": True}, (v1.POOLING_LAST, True)),
    "mean": (["Transformer", "Pooling"], {"pooling_mode": "mean"}, (v1.POOLING_MEAN, False)),
    "cls": (["Transformer", "Pooling"], {"pooling_mode_cls_token": True}, (v1.POOLING_CLS, False)),
    "dense": (["Transformer", "Pooling", "Dense"], {"pooling_mode_lasttoken": True}, None),
    "max": (["Transformer", "Pooling"], {"pooling_mode_max_tokens": True}, None),
}


def stating(checkpoint: Path, folder: Path, kinds: list[str], pooling: dict[str, Any]) -> Path:
    """A copy of a checkpoint, with the files of sentence-transformers."""
    shutil.copytree(checkpoint, folder)
    modules = [
        {
            "idx": n,
            "path": "" if kind == "Transformer" else f"{n}_{kind}",
            "type": f"sentence_transformers.models.{kind}",
        }
        for n, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


@pytest.mark.parametrize("name", FILES)
def test_a_checkpoint_says_how_it_embeds_or_is_refused(checkpoint: Path, tmp_path: Path, name: str) -> None:
    kinds, pooling, told = FILES[name]
    folder = stating(checkpoint, tmp_path / "own", kinds, pooling)
    with llm_server(folder, **LLM_FLAGS) as service, LlmClient(service.address) as client:
        info = client.get_info()
        if told is None:
            assert (info.HasField("embeddings"), list(info.unimplemented)) == (False, ["Embed"])
            error = failure(client, "Hello")
            assert (error.code, error.reason) == (grpc.StatusCode.UNIMPLEMENTED, "NO_POOLING")
            assert len(answer(client, asked(user("Hello"), greedy(4))).choices[0].token_ids) == 4
            return
        assert (info.embeddings.pooling, info.embeddings.normalized) == told
        found = [client.embed("Hello " * 30) for _ in range(2)]
        assert list(found[0].values) == list(found[1].values)
        assert (found[1].usage.cached_tokens > 0) == (told[0] == v1.POOLING_LAST)
        assert (abs(length(found[0]) - 1) < 1e-6) == told[1]


@torch.no_grad()
def hidden(directory: Path, content: list[dict[str, str]], shown: list[Image.Image]) -> torch.Tensor:
    """transformers', of the last token, of the length 1."""
    inputs = reference.reference_inputs(directory, [{"role": "user", "content": content}], shown)
    given = {name: value for name, value in inputs.items() if name not in ("position_ids", "rope_deltas")}
    last = reference.model(directory).model(**given).last_hidden_state[0, -1]
    return torch.nn.functional.normalize(last, dim=-1)


def test_real_services_give_transformers_vectors_on_one_rank_and_on_two(qwen3: Pair) -> None:
    text = "What is in the picture?"
    asking = [user(image(pictures.encoded(SHOWN)), text), user(text)]
    contents = [[{"type": "image"}, {"type": "text", "text": text}], [{"type": "text", "text": text}]]
    wanted = [hidden(qwen3.checkpoint, *each) for each in zip(contents, ([SHOWN], []), strict=True)]
    with (
        llm_server(qwen3.checkpoint, qwen3.encoder.address, light=False, **LLM_FLAGS, tp=2) as service,
        LlmClient(service.address) as two,
    ):
        until(lambda: usable(two, 1), "the encoder is usable")
        for client in (qwen3.text, two, qwen3.text, two):  # computed, and from the cache
            for prompt, vector in zip(asking, wanted, strict=True):
                assert list(client.embed(prompt).values) == pytest.approx(vector.tolist(), abs=1e-4)


def test_real_services_embed_while_they_answer(qwen3: Pair) -> None:
    alone = list(qwen3.text.embed("a text " * 50).values)
    said = answer(qwen3.text, asked(about(PICTURE), greedy(24))).choices[0].token_ids
    qwen3.text.flush_cache()
    with ThreadPoolExecutor(8) as threads:
        answers = [threads.submit(answer, qwen3.text, asked(about(PICTURE), greedy(24))) for _ in range(3)]
        vectors = [threads.submit(qwen3.text.embed, "a text " * 50) for _ in range(5)]
        assert all(list(each.result().values) == pytest.approx(alone, abs=1e-5) for each in vectors)
        assert [each.result().choices[0].token_ids for each in answers] == [said] * 3


def test_what_a_tokenizer_puts_behind_a_text_is_what_is_pooled(checkpoint: Path, tmp_path: Path) -> None:
    """As that of Qwen3-Embedding does."""
    folder = shutil.copytree(checkpoint, tmp_path / "own")
    settings = json.loads((folder / "tokenizer.json").read_text())
    end = next(each["id"] for each in settings["added_tokens"] if each["content"] == "<|endoftext|>")
    settings["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [end], "tokens": ["<|endoftext|>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(settings))
    with llm_server(folder, **LLM_FLAGS) as service, LlmClient(service.address) as client:
        for prompt, given in ((v1.TextInput(prompt="Hello"), "Hello"), ([user("Hello")], [user("Hello")])):
            ids = client.tokenize(given)
            assert end not in ids, "it is no part of a text that an answer follows on"
            found, wanted = client.embed(prompt), client.embed(v1.TokensInput(ids=[*ids, end]))
            assert list(found.values) == list(wanted.values)
