"""Drafts by prompt look-up through a whole service: the same answers in fewer steps, and how many drafts were right."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import pictures
from tests.eagle_checkpoint import eagle_head
from tests.launch import Service, llm_server
from tests.mtp_checkpoint import with_mtp_layer
from tests.rpc.pairs import LLM_FLAGS, Pair, answer, asked, greedy
from tests.scrape import scrape
from tests.waiting import until
from twinlens import LlmClient, SamplingParams, image, user
from twinlens.cli import sections

FLAGS = {**LLM_FLAGS, "overlap": "auto", "speculative_tokens": 4, "metrics_listen": "127.0.0.1:0"}


@pytest.fixture(scope="module")
def service(qwen3: Pair) -> Iterator[Service]:
    with llm_server(qwen3.checkpoint, qwen3.encoder.address, light=False, **FLAGS) as running:
        yield running


def test_answers_are_the_same_and_usage_load_and_metrics_tell_what_was_drafted(service: Service, qwen3: Pair) -> None:
    questions = [asked(user(f"Say it again: {word} {word} {word}"), greedy(64)) for word in ("red", "blue", "green")]
    with LlmClient(service.address) as client:
        expected = [answer(qwen3.text, each) for each in questions]
        said = [answer(client, each) for each in questions]
        assert [each.choices[0].token_ids for each in said] == [each.choices[0].token_ids for each in expected]
        drafted = sum(each.usage.draft_tokens for each in said)
        accepted = sum(each.usage.accepted_draft_tokens for each in said)
        assert 0 < accepted <= drafted, "a random model goes round in circles"
        assert all(each.usage.draft_tokens == 0 for each in expected), "nothing is drafted unless it is asked for"
        until(lambda: client.get_load().draft_tokens == drafted, "the engine's beat has come")
        load = client.get_load()
        assert load.accepted_draft_tokens == accepted
        assert load.steps + accepted >= load.generated_tokens > load.steps, "a step gave several tokens"
        told = sections.llm("here", client.get_info(), load)
    assert f"{drafted} tokens" in told
    name = 'twinlens_llm_spec_decode_num_%s_tokens_total{method="ngram"}'
    until(lambda: scrape(service.metrics)[name % "draft"] == drafted, "the engine's beat has come")
    assert scrape(service.metrics)[name % "accepted"] == accepted


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_a_draft_model_proposes_them_for_pictures_structures_and_several_choices(qwen3: Pair, ranks: int) -> None:
    picture = image(pictures.encoded(pictures.noise(150, 100, 3)))
    schema = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}
    requests = [
        asked(user(picture, "What is it?"), greedy(24)),
        asked(user("Which colour?"), SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=24)),
        asked(user("Which?"), SamplingParams(temperature=0.0, max_tokens=24, json_schema=json.dumps(schema))),
    ]
    flags = {**FLAGS, "draft_model": qwen3.checkpoint, "tp": ranks}
    with llm_server(qwen3.checkpoint, qwen3.encoder.address, light=False, **flags) as running:
        with LlmClient(running.address) as client:
            for request in requests:
                expected, said = answer(qwen3.text, request), answer(client, request)
                assert [each.token_ids for each in said.choices] == [each.token_ids for each in expected.choices]
                if request is requests[0]:
                    assert said.usage.accepted_draft_tokens == said.usage.draft_tokens > 0
            drafted = client.get_load().draft_tokens
        name = 'twinlens_llm_spec_decode_num_draft_tokens_total{method="draft_model"}'
        until(lambda: scrape(running.metrics)[name] >= drafted > 0, "the engine's beat has come")


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_eagle3_head_proposes_them_and_changes_no_token(qwen3: Pair, tmp_path: Path, ranks: int) -> None:
    head = eagle_head(qwen3.checkpoint, tmp_path / "head")
    picture = image(pictures.encoded(pictures.noise(150, 100, 4)))
    flags = {**FLAGS, "draft_model": head, "speculative_method": "eagle3", "tp": ranks}
    with llm_server(qwen3.checkpoint, qwen3.encoder.address, light=False, **flags) as running:
        with LlmClient(running.address) as client:
            for request in (
                asked(user(picture, "What is it?"), greedy(24)),
                asked(user(picture, "Which colour?"), SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=24)),
            ):
                expected, said = answer(qwen3.text, request), answer(client, request)
                assert [each.token_ids for each in said.choices] == [each.token_ids for each in expected.choices]
                assert said.usage.draft_tokens > 0
            drafted = client.get_load().draft_tokens
        name = 'twinlens_llm_spec_decode_num_draft_tokens_total{method="eagle3"}'
        until(lambda: scrape(running.metrics)[name] >= drafted > 0, "the engine's beat has come")


def test_a_layer_for_multi_token_prediction_proposes_them_for_several_ranks(
    checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    """The first rank has that layer, and what is before and behind it, whole."""
    checkpoint = with_mtp_layer(checkpoints("qwen3_5"), tmp_path / "model")
    requests = [asked(user("Say it again: red red red"), greedy(24)), asked(user("And now?"), greedy(24))]
    with (
        llm_server(checkpoint, "127.0.0.1:1", light=False, **LLM_FLAGS) as plain,
        llm_server(checkpoint, "127.0.0.1:1", light=False, **FLAGS, speculative_method="mtp", tp=2) as running,
        LlmClient(plain.address) as alone,
        LlmClient(running.address) as client,
    ):
        for request in requests:
            expected, said = answer(alone, request), answer(client, request)
            assert said.choices[0].token_ids == expected.choices[0].token_ids
            assert said.usage.draft_tokens > 0


def test_a_draft_model_with_another_tokenizer_is_refused_in_one_line(qwen3: Pair, tmp_path: Path) -> None:
    shutil.copytree(qwen3.checkpoint, tmp_path, dirs_exist_ok=True)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = {text: 585 - n for text, n in tokenizer["model"]["vocab"].items()}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with (
        pytest.raises(RuntimeError, match=r"--draft-model: .* has another tokenizer than"),
        llm_server(qwen3.checkpoint, qwen3.encoder.address, **FLAGS, draft_model=tmp_path),
    ):
        pass


def test_answers_with_a_structure_are_the_same_and_what_it_leaves_no_choice_about_is_drafted(
    service: Service, qwen3: Pair
) -> None:
    schema = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}
    given = {"max_tokens": 64, "json_schema": json.dumps(schema), "ignore_eos": False}
    with LlmClient(service.address) as client:
        for sampling in (
            SamplingParams(temperature=0.0, **given),
            SamplingParams(temperature=1.0, seed=5, n=3, **given),
            SamplingParams(temperature=1.0, seed=6, min_tokens=4, repetition_penalty=1.2, **given),
        ):
            request = asked(user("Which colour?"), sampling)
            expected, said = answer(qwen3.text, request), answer(client, request)
            assert [each.token_ids for each in said.choices] == [each.token_ids for each in expected.choices]
            assert [each.text for each in said.choices] == [each.text for each in expected.choices]
            assert said.usage.accepted_draft_tokens > 0


def test_what_bad_words_forbid_is_not_said_by_a_draft_either(service: Service, qwen3: Pair) -> None:
    """The prompt has it again and again, and the model says nothing but its letters."""
    letters = "XYZW"
    ids = qwen3.text.tokenize(letters * 8)
    assert ids == [token for letter in letters for token in qwen3.text.tokenize(letter)] * 8
    given = {"logit_bias": dict.fromkeys(ids, 100.0), "temperature": 4.0, "seed": 5, "max_tokens": 256}
    bad = ["ZW", "WXY"]
    free, request = (asked(user(letters * 8), SamplingParams(**given, bad_words=words)) for words in ([], bad))
    with LlmClient(service.address) as client:
        expected, said = answer(qwen3.text, request), answer(client, request)
        assert all(word in answer(client, free).text for word in bad)
    assert said.choices[0].token_ids == expected.choices[0].token_ids
    assert said.usage.draft_tokens > said.usage.accepted_draft_tokens > 0
    assert set(said.text) == set(letters)
    assert not any(word in said.text for word in bad)
