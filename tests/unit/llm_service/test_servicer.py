"""What the servicer knows of the engine's bounds before the engine has said them."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from common.errors import InvalidInput
from llm_service.config import LlmConfig
from llm_service.convert import answers
from llm_service.convert.requests import RequestReader
from llm_service.generation.events import PromptLogprobsDelta
from llm_service.generation_config import SamplingDefaults
from llm_service.plan import TokenLogprobs
from llm_service.prompt.detokenizer import TokenTexts
from llm_service.servicer import LlmServicer
from twinlens import v1

CONTEXT: Any = SimpleNamespace(time_remaining=lambda: None, peer=lambda: "ipv4:127.0.0.1:1")


@pytest.mark.parametrize("ready", [None, SimpleNamespace(max_context=32)])
async def test_a_prompt_is_bounded_whether_the_engine_is_ready_or_not(ready: Any) -> None:
    parts: Any = SimpleNamespace(
        engine=SimpleNamespace(ready=ready),
        max_context=64,
        requests=RequestReader(LlmConfig(model="m"), ("m",), 600, SamplingDefaults()),
    )
    ids = [1] * (64 if ready is None else 32)
    request = v1.GenerateRequest(tokens=v1.TokensInput(ids=ids), sampling=v1.SamplingParams(max_tokens=1))
    with pytest.raises(InvalidInput) as error:
        _ = [event async for event in LlmServicer(parts).Generate(request, CONTEXT)]
    assert (error.value.reason, error.value.field) == ("PROMPT_TOO_LONG", "tokens.ids")


async def test_an_abort_reaches_the_requests_of_its_own_salt_alone() -> None:
    asked: list[tuple[str, str]] = []

    def abort(name: str, salt: str) -> int:
        asked.append((name, salt))
        return 2

    servicer = LlmServicer(SimpleNamespace(generator=SimpleNamespace(abort=abort)))  # type: ignore[arg-type]
    answer = await servicer.Abort(v1.AbortRequest(request_ids=["a", "a", "b"], cache_salt="mine"), CONTEXT)
    assert (answer.aborted, sorted(asked)) == (4, [("a", "mine"), ("b", "mine")])
    asked.clear()
    await servicer.Abort(v1.AbortRequest(request_ids=["a"]), CONTEXT)
    assert asked == [("a", "")]


@pytest.fixture
def texts() -> TokenTexts:
    """A byte-level tokenizer: one token for each byte, and one of two words."""
    signs = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({sign: n for n, sign in enumerate([*signs, "Ġa"])}, [("Ġ", "a")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<|end ü|>", special=True)])
    return TokenTexts(made)


def test_the_bytes_of_tokens_make_the_text_and_a_special_token_has_its_name(texts: TokenTexts) -> None:
    text = "at a ü\n\x00é"
    ids = texts._tokenizer.encode(text).ids
    assert b"".join(map(texts.bytes_of, ids)).decode() == text
    assert texts._tokenizer.encode(" a").ids == [256]
    assert (texts.text_of(256), texts.text_of(257), texts.text_of(9999)) == (" a", "<|end ü|>", "")
    assert [texts.text_of(token) for token in texts._tokenizer.encode("ü").ids] == ["�", "�"]


async def test_texts_of_tokens_are_made_beside_the_event_loop(
    texts: TokenTexts, monkeypatch: pytest.MonkeyPatch
) -> None:
    makers: list[threading.Thread] = []

    def text_of(token: int) -> str:
        makers.append(threading.current_thread())
        return f"<{token}>"

    monkeypatch.setattr(texts, "text_of", text_of)
    prompts = SimpleNamespace(encode=lambda *_, **__: [7, 9], texts=texts)
    parts: Any = SimpleNamespace(prompts=prompts, config=LlmConfig(model="m"))
    answer = await LlmServicer(parts).Tokenize(v1.TokenizeRequest(text="x", with_texts=True), CONTEXT)
    assert (list(answer.ids), list(answer.texts), len(makers)) == ([7, 9], ["<7>", "<9>"], 2)
    assert threading.current_thread() not in makers
    assert list((await LlmServicer(parts).Tokenize(v1.TokenizeRequest(text="x"), CONTEXT)).texts) == []


def test_scores_come_with_the_texts_of_their_tokens(texts: TokenTexts) -> None:
    umlaut = texts._tokenizer.encode("ü").ids
    scores = [TokenLogprobs.of(-1.0, [(umlaut[1], -0.5)]), TokenLogprobs(0.0)]
    said = answers.prompt_logprobs(PromptLogprobsDelta(1, [256, 257], scores), texts).delta.prompt
    assert [(each.text, each.text_bytes) for each in said.logprobs] == [
        (" a", b" a"),
        ("<|end ü|>", "<|end ü|>".encode()),
    ]
    (top,) = said.logprobs[0].top
    assert (top.token_id, top.text, top.text_bytes) == (umlaut[1], "�", "ü".encode()[1:])
