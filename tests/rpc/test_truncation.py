"""Prompts that are cut: to what their callers could have sent in their place."""

from __future__ import annotations

import pytest

from tests import pictures
from tests.rpc.pairs import Pair, answer, asked, greedy, refusal
from twinlens import TwinlensError, embed_request, image, user, v1

PICTURE = pictures.encoded(pictures.noise(96, 64, 7_371))
WORDS = "one two three four five six seven eight nine ten"


@pytest.mark.parametrize("end", [False, True])
def test_an_answer_to_a_prompt_that_is_cut_is_one_to_what_is_left(qwen3: Pair, end: bool) -> None:
    ids = list(qwen3.text.tokenize(user(WORDS)))
    left = ids[:9] if end else ids[-9:]
    for prompt in (user(WORDS), v1.TokensInput(ids=ids)):
        request = asked(prompt, greedy(8), truncate_prompt_tokens=9, truncate_end=end)
        found, expected = answer(qwen3.text, request), answer(qwen3.text, asked(v1.TokensInput(ids=left), greedy(8)))
        assert found.choices[0].token_ids == expected.choices[0].token_ids
        assert found.usage.prompt_tokens == 9


def test_a_prompt_longer_than_the_context_is_cut_to_it(qwen3: Pair) -> None:
    context = qwen3.text.get_info().context_tokens
    ids = [*qwen3.text.tokenize(WORDS)] * context
    whole = v1.TokensInput(ids=ids[-context - 99 :])
    assert refusal(qwen3.text, asked(whole, greedy(8))).reason == "PROMPT_TOO_LONG"
    found = answer(qwen3.text, asked(whole, greedy(8), truncate_prompt_tokens=-1))
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (context - 8, 8)
    sampling = v1.SamplingParams(temperature=0, ignore_eos=True)
    found = answer(qwen3.text, asked(whole, sampling, truncate_prompt_tokens=-1))
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (context - 1, 1)


def test_words_before_a_picture_are_cut_off_and_a_picture_is_not(qwen3: Pair) -> None:
    message = user(f"{WORDS} ", image(PICTURE), "What is it?")
    whole = answer(qwen3.text, asked(message, greedy(1))).usage.prompt_tokens
    found = answer(qwen3.text, asked(message, greedy(8), truncate_prompt_tokens=whole - 5))
    assert found.usage.prompt_tokens == whole - 5
    assert found.usage.completion_tokens == 8
    for tokens, end in ((9, False), (9, True)):
        request = asked(message, greedy(8), truncate_prompt_tokens=tokens, truncate_end=end)
        assert refusal(qwen3.text, request).reason == "CUTS_MEDIA"


@pytest.mark.parametrize("tokens", [0, -2])
def test_a_prompt_is_cut_to_some_tokens(qwen3: Pair, tokens: int) -> None:
    error = refusal(qwen3.text, asked(user("x"), truncate_prompt_tokens=tokens))
    assert (error.reason, error.field) == ("OUT_OF_RANGE", "truncate_prompt_tokens")


def test_an_embedding_of_a_prompt_that_is_cut_is_that_of_what_is_left(qwen3: Pair) -> None:
    ids = list(qwen3.text.tokenize(WORDS))
    context = qwen3.text.get_info().context_tokens
    given = embed_request(v1.TextInput(prompt=WORDS), truncate_prompt_tokens=5, truncate_end=True)
    found = qwen3.text.embed(given)
    expected = qwen3.text.embed(v1.TokensInput(ids=ids[:5]))
    assert list(found.values) == pytest.approx(list(expected.values))
    long = embed_request(v1.TokensInput(ids=ids * context), truncate_prompt_tokens=-1)
    assert qwen3.text.embed(long).usage.prompt_tokens == context
    with pytest.raises(TwinlensError, match="truncate_prompt_tokens"):
        qwen3.text.embed(embed_request(v1.TextInput(prompt=WORDS), truncate_prompt_tokens=0))
