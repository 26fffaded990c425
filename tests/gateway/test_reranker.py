"""A reranker's scores: as its authors' formula gives them, and by the conversation that they ask it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from testkit import reference
from tests import pictures
from tests.gateway.scripted import Scripted, scripted
from tests.gateway.trio import Reply, Trio, fronted, image, text, video
from tests.rpc.pairs import pair
from tests.waiting import until
from twinlens import v1

RERANK, SCORE = "/v1/rerank", "/score"
SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
INSTRUCTION = "Given a search query, retrieve relevant candidates that answer the query."
TRUE, FALSE = 7, 9
SHOWN = pictures.noise(64, 48, 5)


@pytest.fixture(scope="module")
def judge(checkpoints: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    """Real services of a checkpoint that says that it is a reranker, and a gateway."""
    folder = Path(shutil.copytree(checkpoints("qwen3_vl"), tmp_path_factory.mktemp("own") / "judge"))
    kinds = ("", "Transformer"), ("1_LogitScore", "LogitScore")
    (folder / "modules.json").write_text(json.dumps([{"path": path, "type": f"x.{kind}"} for path, kind in kinds]))
    (folder / "1_LogitScore").mkdir()
    score = {"true_token_id": TRUE, "false_token_id": FALSE}
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps(score))
    with pair(folder, light=False) as services, fronted(services) as door:
        yield door


def answered(reply: Reply) -> Any:
    assert reply.status == 200, reply.body
    return json.loads(reply.body)


def expected(folder: Path, query: str, *document: Any, instruction: str = INSTRUCTION) -> tuple[float, int]:
    """The authors' formula over transformers' logits, and the tokens of the prompt."""
    words = [f"<Instruct>: {instruction}", "<Query>:", query, "\n<Document>:"]
    content = [text(each) for each in words] + [text(each) if isinstance(each, str) else each for each in document]
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": content}]
    shown = [SHOWN for each in document if not isinstance(each, str)]
    inputs = reference.reference_inputs(folder, messages, shown)
    last = reference.reference_logits(folder, inputs)[-1]
    return float(torch.sigmoid(last[TRUE] - last[FALSE])), inputs["input_ids"].shape[1]


def test_scores_are_those_of_the_authors_formula_over_transformers_logits(judge: Trio) -> None:
    folder = judge.services.checkpoint
    seen = {"content": [text("The sea."), image(pictures.encoded(SHOWN))]}
    documents: list[Any] = ["A circle.", seen, {"text": "No."}]
    wanted = [
        expected(folder, "A red one.", "A circle."),
        expected(folder, "A red one.", {"type": "image"}, "The sea."),
        expected(folder, "A red one.", "No."),
    ]
    for _ in range(2):  # computed, and from the cache
        told = answered(judge.post(RERANK, {"model": judge.model, "query": "A red one.", "documents": documents}))
        scores = {each["index"]: each["relevance_score"] for each in told["results"]}
        assert [scores[index] for index in range(3)] == pytest.approx([score for score, _ in wanted], abs=1e-5)
        assert len({round(score, 5) for score in scores.values()}) == 3
        assert told["usage"]["prompt_tokens"] == sum(tokens for _, tokens in wanted)
        ranked = [each["relevance_score"] for each in told["results"]]
        assert ranked == sorted(ranked, reverse=True)
    asked: Any = {"queries": ["A red one.", "No."], "documents": ["A circle.", "No."], "instruction": "Compare."}
    pairs = zip(asked["queries"], asked["documents"], strict=True)
    wanted = [expected(folder, *each, instruction="Compare.") for each in pairs]
    told = answered(judge.post(SCORE, asked))
    assert [each["score"] for each in told["data"]] == pytest.approx([score for score, _ in wanted], abs=1e-5)
    (model,) = answered(judge.get("/v1/models"))["data"]
    assert (model["reranker"], model["embeddings"]) == (True, None)
    bad = {"content": [text("x"), image(b"no picture")]}
    no_base64 = {"content": [text("x"), {"type": "image_url", "image_url": {"url": "data:;base64,@"}}]}
    for given, code in ((bad, "MEDIA_FORMAT"), (no_base64, "BAD_BASE64")):
        for body, param in (
            ({"query": "x", "documents": ["y", given]}, "documents[1].content[1]"),
            ({"query": given, "documents": ["y"]}, "query.content[1]"),
        ):
            error = judge.post(RERANK, body).error
            assert (error["code"], error["param"]) == (code, param)
    until(judge.idle, "nothing is held")


@pytest.fixture(scope="module")
def script() -> Iterator[Scripted]:
    with scripted() as running:
        running.llm.reranker = v1.Reranker(true_token_id=TRUE, false_token_id=FALSE)
        running.llm.instance += 1
        until(lambda: b'"reranker":true' in running.get("/v1/models").body, "it is known")
        yield running


def says(script: Scripted, likely: dict[int, float], top: int = 20) -> None:
    """Has the LLM service answer with the token that is forced, and the likeliest."""

    def play(request: v1.GenerateRequest) -> Iterator[v1.GenerateResponse]:
        yield v1.GenerateResponse(started=v1.GenerateStarted(prompt_tokens=9))
        (token,) = request.sampling.logit_bias
        likeliest = sorted(likely, key=lambda each: -likely[each])[:top]
        scored = v1.TokenLogprobs(
            logprob=likely[token], top=[v1.TopLogprob(token_id=each, logprob=likely[each]) for each in likeliest]
        )
        yield v1.GenerateResponse(delta=v1.GenerateDelta(text="x", token_ids=[token], logprobs=[scored]))
        usage = v1.Usage(prompt_tokens=9, cached_tokens=4, completion_tokens=1)
        yield v1.GenerateResponse(finished=v1.GenerateFinished(reason=v1.FINISH_REASON_LENGTH, usage=usage))

    script.llm.requests.clear()
    script.llm.play = play


@pytest.mark.parametrize(("top", "calls"), [(20, 1), (1, 2)])
def test_a_token_that_is_not_among_the_likeliest_is_asked_for_by_itself(script: Scripted, top: int, calls: int) -> None:
    says(script, {TRUE: -0.1, FALSE: -2.3}, top)
    told = answered(script.post(RERANK, {"query": "x", "documents": ["y"]}))
    assert told["results"][0]["relevance_score"] == pytest.approx(1 / (1 + 2.718281828459045 ** (-2.2)))
    assert (len(script.llm.requests), told["usage"]["prompt_tokens"]) == (calls, 9)
    assert [dict(each.sampling.logit_bias) for each in script.llm.requests] == [{TRUE: 100}, {FALSE: 100}][:calls]
    assert {(each.sampling.max_tokens, each.sampling.temperature) for each in script.llm.requests} == {(1, 0.0)}


def test_media_stand_before_texts_and_nothing_has_a_name(script: Scripted) -> None:
    says(script, {TRUE: -1.0, FALSE: -1.0})
    document = {"content": [text("a"), image(), text("b"), video()]}
    fields = {"cache_salt": "mine", "priority": 3, "max_handovers": 0, "mm_processor_kwargs": {"max_pixels": 4096}}
    answered(script.post(RERANK, {"query": {"content": []}, "documents": [document], **fields}))
    (request,) = script.llm.requests
    system, asking = request.chat.messages
    assert (system.role, system.parts[0].text, asking.role) == ("system", SYSTEM, "user")
    told = [part.text if part.HasField("text") else part.media.modality for part in asking.parts]
    assert told == [
        f"<Instruct>: {INSTRUCTION}",
        "<Query>:",
        "NULL",
        "\n<Document>:",
        v1.MODALITY_VIDEO,
        v1.MODALITY_IMAGE,
        "a",
        "b",
    ]
    assert asking.parts[5].media.options.max_pixels == 4096
    assert (request.cache_salt, request.priority, request.max_handovers) == ("mine", 3, 0)


def test_a_reranker_s_prompt_is_not_cut(script: Scripted) -> None:
    error = script.post(RERANK, {"query": "x", "documents": ["y"], "truncate_prompt_tokens": 5}).error
    assert (error["code"], error["param"]) == ("FIELD_NOT_SERVED", "truncate_prompt_tokens")


def test_another_model_is_told_no_instruction() -> None:
    with scripted() as door:
        reply = door.post(RERANK, {"query": "x", "documents": ["y"], "instruction": "z"})
        assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "FIELD_NOT_SERVED", "instruction")
