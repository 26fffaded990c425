"""A group of ranks answers as one rank does, and reads each embedding row once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from testkit import reference
from testkit.checkpoints import Family
from tests import pictures
from tests.launch import encoder_server, llm_server
from tests.rpc.pairs import ENCODER_FLAGS, LLM_FLAGS, Pair, about, asked, greedy, pair, tokens, usable
from tests.waiting import until
from twinlens import EncoderClient, LlmClient, image, user, v1

PICTURE = pictures.encoded(pictures.photograph("coffee").resize((160, 120)))
PROMPTS = [
    about(PICTURE),
    user("Tell me about two red circles."),
]

WAYS = [
    greedy(48),
    greedy(24, bad_words=[*"abcdefghijklmnopqrstuvwxyz", "th", "in the"]),
    v1.SamplingParams(seed=5, temperature=1.1, top_p=0.9, repetition_penalty=1.2, max_tokens=24, ignore_eos=True),
    v1.SamplingParams(seed=6, temperature=1.5, max_tokens=24, regex="[a-c]{5}-[0-9]{3}"),
]


@pytest.mark.soak
@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen2_5_vl"])
def test_two_ranks_give_the_tokens_of_one(family: Family, checkpoints: Callable[..., Path]) -> None:
    with pair(checkpoints(family), light=False) as one:
        check_two_ranks(one)


def test_two_ranks_give_the_tokens_of_one_with_deepstack(qwen3: Pair) -> None:
    check_two_ranks(qwen3)


def test_two_ranks_with_whole_experts_give_the_tokens_of_transformers(checkpoints: Callable[..., Path]) -> None:
    folder, picture = checkpoints("qwen3_vl_moe"), pictures.photograph("coffee").resize((160, 120))
    prompts = {"Tell me about two red circles.": [], "What is it?": [picture]}
    with (
        encoder_server(folder, light=False, **ENCODER_FLAGS) as encoder,
        llm_server(folder, encoder.address, light=False, **LLM_FLAGS, tp=2, enable_expert_parallel="yes") as service,
        LlmClient(service.address) as two,
    ):
        until(lambda: usable(two, 1), "the encoder is usable")
        for text, stills in prompts.items():
            content = [*({"type": "image"} for _ in stills), {"type": "text", "text": text}]
            inputs = reference.reference_inputs(folder, [{"role": "user", "content": content}], stills, [])
            wanted = reference.reference_generate(folder, inputs, 16)
            said = tokens(two, asked(user(*(image(pictures.encoded(each)) for each in stills), text), greedy(16)))
            assert said == wanted


@pytest.mark.soak
def test_experts_that_ranks_cannot_have_whole_are_refused_at_once(checkpoints: Callable[..., Path]) -> None:
    flags = {**LLM_FLAGS, "tp": 4, "enable_expert_parallel": "yes"}
    with (
        pytest.raises(RuntimeError, match="llm_service: 6 experts cannot be given whole to 4 ranks"),
        llm_server(checkpoints("qwen3_vl_moe"), light=False, **flags),
    ):
        pass


@pytest.mark.soak
def test_two_ranks_go_on_from_the_same_states_as_one(checkpoints: Callable[..., Path]) -> None:
    """Each keeps the states of its heads, in slots that the first one has chosen for both."""
    opening = "Look at this picture well, and tell me everything about it. " * 8
    asking = [
        asked(user(opening, image(PICTURE), end), greedy(24), session_id=session)
        for end, session in (("Why? " * 30, "talk"), ("How? " * 30, ""), ("Why? " * 30, "talk"), ("Who? " * 30, ""))
    ]
    with (
        pair(checkpoints("qwen3_5"), light=False) as one,
        llm_server(one.checkpoint, one.encoder.address, light=False, **LLM_FLAGS, tp=2) as service,
        LlmClient(service.address) as two,
    ):
        until(lambda: usable(two, 1), "the encoder is usable")
        undisturbed = []
        for each in asking:
            one.text.flush_cache()
            undisturbed.append(tokens(one.text, each))
        one.text.flush_cache()
        before = one.text.get_load().prefix_hit_tokens
        assert [tokens(one.text, each) for each in asking] == undisturbed
        assert [tokens(two, each) for each in asking] == undisturbed
        assert two.get_load().prefix_hit_tokens == one.text.get_load().prefix_hit_tokens - before > 3 * 64
        assert two.get_load().state_snapshots == one.text.get_load().state_snapshots > 0


def check_two_ranks(one: Pair) -> None:
    asking = [asked(prompt, way) for prompt in PROMPTS for way in WAYS]
    one.text.flush_cache()
    before = one.text.get_load().rows_received
    expected = [tokens(one.text, each) for each in asking]
    received = one.text.get_load().rows_received - before
    assert received == rows_of(one.media, PICTURE)
    sent = rows_sent(one.media)
    with (
        llm_server(one.checkpoint, one.encoder.address, light=False, **LLM_FLAGS, tp=2) as service,
        LlmClient(service.address) as two,
    ):
        until(lambda: usable(two, 1), "the encoder is usable")
        assert [tokens(two, each) for each in asking] == expected
        assert list(two.get_info().devices) == ["cpu", "cpu"]
        assert two.get_load().rows_received == rows_sent(one.media) - sent == received > 0
        assert len(service.children("llm_service.worker")) == 1


def rows_of(media: EncoderClient, file: bytes) -> int:
    """Rows of a picture, as its header says."""
    (header,) = media.prefetch(v1.PrefetchRequest(items=[image(file)])).headers
    return header.tokens


def rows_sent(media: EncoderClient) -> int:
    return sum(sent.rows for sent in media.get_load().rows_sent)


@pytest.mark.soak
def test_four_ranks_share_two_kv_heads(qwen3: Pair) -> None:
    prompt = asked(user("Tell me about two red circles."), greedy(16))
    expected = tokens(qwen3.text, prompt)
    with llm_server(qwen3.checkpoint, light=False, **LLM_FLAGS, tp=4) as service, LlmClient(service.address) as four:
        assert tokens(four, prompt) == expected


@pytest.mark.soak
def test_ranks_that_cannot_share_the_model_are_refused_at_once(checkpoints: Callable[..., Path]) -> None:
    with (
        pytest.raises(RuntimeError, match="llm_service: 2 KV heads cannot be shared by 3 ranks"),
        llm_server(checkpoints("qwen3_vl"), light=False, **LLM_FLAGS, tp=3),
    ):
        pass
