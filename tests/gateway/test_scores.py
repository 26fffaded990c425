"""`POST /v1/rerank` and `POST /score`, as vLLM's, Jina's and Cohere's callers send them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest

from tests.gateway.scripted import Scripted, scripted
from tests.gateway.trio import PICTURE, Reply, Trio, image, text
from tests.waiting import until
from twinlens import image as picture
from twinlens import user, v1

RERANK, SCORE = "/v1/rerank", "/score"
QUERY = "A red circle."
DOCUMENTS: list[Any] = ["A circle that is red.", {"text": "The sea."}, {"content": [image(), text("A picture.")]}]


@pytest.fixture(scope="module")
def script() -> Iterator[Scripted]:
    with scripted(max_prompts=4) as running:
        yield running


def cosine(one: v1.EmbedResponse, other: v1.EmbedResponse) -> float:
    product = math.fsum(a * b for a, b in zip(one.values, other.values, strict=True))
    return product / math.sqrt(math.fsum(a * a for a in one.values) * math.fsum(b * b for b in other.values))


def answered(reply: Reply) -> Any:
    assert reply.status == 200, reply.body
    return json.loads(reply.body)


@pytest.fixture(scope="module")
def expected(door: Trio) -> tuple[list[float], int]:
    """The cosine of each document, and the tokens of all."""
    embed = door.services.text.embed
    query = embed(v1.TextInput(prompt=QUERY))
    found = [
        embed(v1.TextInput(prompt="A circle that is red.")),
        embed(v1.TextInput(prompt="The sea.")),
        embed(user(picture(PICTURE), "A picture.")),
    ]
    return [cosine(query, each) for each in found], sum(each.usage.prompt_tokens for each in (query, *found))


def test_documents_are_ranked_by_the_cosine_of_their_embeddings(door: Trio, expected: tuple[list[float], int]) -> None:
    cosines, tokens = expected
    told = answered(door.post(RERANK, {"model": door.model, "query": QUERY, "documents": DOCUMENTS}))
    order = sorted(range(3), key=lambda index: -cosines[index])
    assert [each["index"] for each in told["results"]] == order
    scores = [each["relevance_score"] for each in told["results"]]
    assert scores == pytest.approx([cosines[index] for index in order], abs=1e-6)
    assert len(set(scores)) == 3
    assert (told["model"], told["usage"]["prompt_tokens"]) == (door.model, tokens)
    documents = {each["index"]: each["document"] for each in told["results"]}
    assert [documents[index] for index in range(3)] == [{"text": DOCUMENTS[0]}, DOCUMENTS[1], DOCUMENTS[2]]
    brief = {"top_n": 1, "return_documents": False}
    best = answered(door.post("/rerank", {"query": QUERY, "documents": DOCUMENTS, **brief}))
    theirs = answered(door.post("/v2/rerank", {"query": QUERY, "documents": DOCUMENTS, **brief}))
    assert theirs["results"] == best["results"], "where Cohere's callers ask"
    assert best["results"] == [{"index": order[0], "relevance_score": pytest.approx(scores[0])}]
    until(door.idle, "nothing is held")


@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents")])
def test_pairs_are_scored_in_order(door: Trio, expected: tuple[list[float], int], names: tuple[str, str]) -> None:
    one, other = names
    told = answered(door.post(SCORE, {one: QUERY, other: DOCUMENTS}))
    assert [each["score"] for each in told["data"]] == pytest.approx(expected[0], abs=1e-6)
    assert [each["index"] for each in told["data"]] == [0, 1, 2]
    pairs = answered(door.post("/v1/score", {one: ["The sea.", QUERY], other: ["The sea.", DOCUMENTS[0]]}))
    assert [each["score"] for each in pairs["data"]] == pytest.approx([1.0, expected[0][0]], abs=1e-6)
    single = answered(door.post(SCORE, {one: QUERY, other: DOCUMENTS[0]}))
    assert [each["score"] for each in single["data"]] == pytest.approx(expected[0][:1], abs=1e-6)


def test_settings_of_media_and_tenants_reach_the_llm_service(script: Scripted) -> None:
    script.llm.to_embed.clear()
    fields = {"cache_salt": "mine", "priority": 3, "max_handovers": 0, "mm_processor_kwargs": {"max_pixels": 4096}}
    fields["truncate_prompt_tokens"] = 5
    told = answered(script.post(RERANK, {"query": {"content": [image()]}, "documents": ["x"], **fields}))
    assert [each["relevance_score"] for each in told["results"]] == pytest.approx([1.0])
    one, other = sorted(script.llm.to_embed, key=lambda each: each.WhichOneof("input") or "")
    assert (one.WhichOneof("input"), other.text.prompt) == ("chat", "x")
    assert one.chat.messages[0].parts[0].media.options.max_pixels == 4096
    for each in (one, other):
        assert (each.cache_salt, each.priority, each.max_handovers) == ("mine", 3, 0)
        assert (each.truncate_prompt_tokens, each.truncate_end) == (5, True)


WRONG: dict[str, tuple[str, dict[str, Any], str, str | None]] = {
    "no documents": (RERANK, {"query": "x", "documents": []}, "TOO_MANY_PROMPTS", "documents"),
    "many documents": (RERANK, {"query": "x", "documents": ["y"] * 5}, "TOO_MANY_PROMPTS", "documents"),
    "no query": (RERANK, {"documents": ["y"]}, "BAD_FIELD", "query"),
    "a number": (RERANK, {"query": "x", "documents": [5]}, "BAD_FIELD", "documents[0]"),
    "no part": (
        RERANK,
        {"query": "x", "documents": ["y", {"content": [{"type": "file"}]}]},
        "FIELD_NOT_SERVED",
        "documents[1].content[0].type",
    ),
    "cut": (
        RERANK,
        {"query": "x", "documents": ["y"], "max_tokens_per_doc": 9},
        "FIELD_NOT_SERVED",
        "max_tokens_per_doc",
    ),
    "one side": (SCORE, {"text_1": "x"}, "BAD_FIELD", None),
    "crossed": (SCORE, {"text_1": "x", "documents": ["y"]}, "BAD_FIELD", None),
    "uneven": (SCORE, {"text_1": ["x", "y"], "text_2": ["a", "b", "c"]}, "BAD_FIELD", "text_1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_scored_is_refused_where_it_stands(script: Scripted, name: str) -> None:
    path, body, code, param = WRONG[name]
    reply = script.post(path, body)
    assert (reply.status, reply.error["code"], reply.error["param"]) == (400, code, param)


def test_what_the_services_refuse_is_named_as_the_caller_knows_it(door: Trio) -> None:
    bad = {"content": [text("x"), image(b"no picture")]}
    reply = door.post(RERANK, {"query": QUERY, "documents": ["y", bad]})
    assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "MEDIA_FORMAT", "documents[1].content[1]")
    reply = door.post(SCORE, {"text_1": "", "text_2": ["y"]})
    assert (reply.error["code"], reply.error["param"]) == ("EMPTY_PROMPT", "text_1")
    reply = door.post(SCORE, {"model": "none", "text_1": "x", "text_2": ["y"]})
    assert (reply.status, reply.error["code"]) == (404, "UNKNOWN_MODEL")
