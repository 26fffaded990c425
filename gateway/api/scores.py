"""`POST /v1/rerank` and `POST /score`: similarity of documents to a query, or a reranker's judgement."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from operator import mul
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from common.aio import tasks
from common.errors import InvalidInput, TwinlensError
from gateway.api import chat_request
from gateway.api.score_request import (
    ContentDocument,
    Document,
    RerankRequest,
    ScoreRequest,
    ScoringFields,
    TextDocument,
)
from gateway.convert import answers, conversation, prompt_inputs
from gateway.embedding_calls import EmbeddingCalls
from gateway.generation import Generations
from gateway.prompt_turns import PromptBatches
from gateway.request_context import RequestContext, context_of
from gateway.reranker import Judgement, Question, judged, question
from gateway.services import LlmServices
from gateway.stream import json_answer
from twinlens.v1 import llm_pb2

Sides = tuple[dict[str, Document], dict[str, Document]]
"""What is scored, on both sides, by its place in the body."""


class Scores:
    """Answers requests to score documents: of a reranker by its judgement, of other models by the cosine of their
    embeddings and the query's."""

    def __init__(
        self,
        services: LlmServices,
        generations: Generations,
        embeddings: EmbeddingCalls,
        batches: PromptBatches,
    ) -> None:
        self._services = services
        self._generations = generations
        self._embeddings = embeddings
        self._batches = batches

    async def rerank(self, request: Request) -> Response:
        """The documents, nearest first."""
        context = context_of(request, "rerank")
        asked = await context.read(RerankRequest)
        sides = {"query": asked.query}, _places("documents", asked.documents, self._batches.max_prompts)
        scores, usage = await self._scored(asked, context, sides)
        ranked = sorted(enumerate(scores), key=lambda each: -each[1])[: asked.top_n or None]
        results: list[dict[str, Any]] = [{"index": index, "relevance_score": score} for index, score in ranked]
        if asked.return_documents is not False:
            for each in results:
                each["document"] = _told(asked.documents[each["index"]])
        head = {"id": f"rerank-{context.id}", "model": self._services.name(asked.model)}
        return json_answer({**head, "results": results, "usage": usage})

    async def score(self, request: Request) -> Response:
        """The score of each pair, in order."""
        context = context_of(request, "score")
        asked = await context.read(ScoreRequest)
        names = ("queries", "documents") if asked.text_1 is None else ("text_1", "text_2")
        one, other = (_places(name, getattr(asked, name), self._batches.max_prompts) for name in names)
        if len(one) not in (1, len(other)):
            why = "give one text on the first side, or as many as on the second"
            raise InvalidInput(why, reason="BAD_FIELD", field=names[0])
        scores, usage = await self._scored(asked, context, (one, other))
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
        head = {"id": f"score-{context.id}", "object": "list", "created": int(time.time())}
        return json_answer({**head, "model": self._services.name(asked.model), "data": data, "usage": usage})

    async def _scored(
        self, asked: ScoringFields, context: RequestContext, sides: Sides
    ) -> tuple[list[float], dict[str, Any]]:
        """A score for each of the second side, and the tokens of all of them. Raises TwinlensError."""
        info = self._services.about(self._services.name(asked.model))
        if info is not None and info.HasField("reranker"):
            if asked.truncate_prompt_tokens is not None:
                why = "a reranker's prompt cannot be truncated: it ends with the question"
                raise InvalidInput(why, reason="FIELD_NOT_SERVED", field="truncate_prompt_tokens")
            return await self._judged(asked, context, sides, info.reranker)
        if asked.instruction is not None:
            why = "that name is not a reranker's, and embeddings take no instruction"
            raise InvalidInput(why, reason="FIELD_NOT_SERVED", field="instruction")
        documents = [*sides[0].items(), *sides[1].items()]
        messages = await context.made(self._messages, asked, context.id, documents)

        async def embed(number: int) -> llm_pb2.EmbedResponse:
            return await self._embed(messages[number], documents[number][0], context)

        found = await self._batches.turns.batch(context, len(messages)).each(embed, range(len(messages)))
        prompt = sum(each.usage.prompt_tokens for each in found)
        usage = answers.usage_of(prompt, sum(each.usage.cached_tokens for each in found), 0)
        vectors = [each.values for each in found]
        return await tasks.to_thread(_cosines, vectors[: len(sides[0])], vectors[len(sides[0]) :]), usage

    async def _judged(
        self, asked: ScoringFields, context: RequestContext, sides: Sides, reranker: llm_pb2.Reranker
    ) -> tuple[list[float], dict[str, Any]]:
        """The same of a reranker: each pair is a conversation of its own."""
        questions = await context.made(self._questions, asked, context.id, reranker, sides)

        async def judge(asking: Question) -> Judgement:
            return await judged(self._generations, reranker, asking, context)

        found = await self._batches.turns.batch(context, len(questions)).each(judge, questions)
        prompt = sum(each.usage.prompt_tokens for each in found)
        usage = answers.usage_of(prompt, sum(each.usage.cached_tokens for each in found), 0)
        return [each.score for each in found], usage

    def _questions(self, asked: ScoringFields, name: str, reranker: llm_pb2.Reranker, sides: Sides) -> list[Question]:
        queries, documents = (list(side.items()) for side in sides)
        if len(queries) == 1:
            queries *= len(documents)
        asking: list[Question] = []

        def requests() -> Iterator[llm_pb2.GenerateRequest]:
            for number, pair in enumerate(zip(queries, documents, strict=True)):
                asking.append(question(asked, f"{name[:120]}-{number}", reranker, *pair))
                yield asking[-1].request

        list(prompt_inputs.within(self._batches.max_bytes, requests()))
        return asking

    def _messages(
        self, asked: ScoringFields, name: str, documents: Sequence[tuple[str, Document]]
    ) -> list[llm_pb2.EmbedRequest]:
        """The LLM services' requests for documents, given with their places."""
        each = (_embed_request(asked, f"{name[:120]}-{number}", *document) for number, document in enumerate(documents))
        return list(prompt_inputs.within(self._batches.max_bytes, each))

    async def _embed(self, message: llm_pb2.EmbedRequest, at: str, context: RequestContext) -> llm_pb2.EmbedResponse:
        try:
            return await self._embeddings.embed(message, context)
        except TwinlensError as error:
            raise error.at(_param(error.field, at)) from None


def _places(field: str, given: Any, most: int) -> dict[str, Document]:
    """Each document by its place. Raises InvalidInput for more than `most`, or none."""
    if not isinstance(given, list):
        return {field: given}
    prompt_inputs.check_prompts(len(given), most, field)
    return {f"{field}[{number}]": each for number, each in enumerate(given)}


def _embed_request(asked: ScoringFields, name: str, at: str, document: Document) -> llm_pb2.EmbedRequest:
    """A text as it is, without a chat template; parts as the message of a user. Raises InvalidInput."""
    request = llm_pb2.EmbedRequest(
        request_id=name,
        model=asked.model or "",
        cache_salt=asked.cache_salt or "",
        priority=asked.priority or 0,
        max_handovers=asked.max_handovers,
        **asked.truncation("right"),
    )
    if isinstance(document, ContentDocument):
        message = chat_request.Message(role="user", content=document.content)
        try:
            conversation.fill_chat(request.chat, [message], asked.mm_processor_kwargs, None, "messages")
        except InvalidInput as error:
            raise error.at(_param(error.field, at)) from None
    else:
        request.text.prompt = document.text if isinstance(document, TextDocument) else document
    return request


def _param(field: str, at: str) -> str:
    """What the caller calls a field of a document, which stands at this place of his body.

    >>> _param("prompt", "query"), _param("messages[0].content[1]", "documents[2]"), _param("model", "query")
    ('query', 'documents[2].content[1]', 'model')
    """
    if field in ("prompt", "input"):
        return at
    return at + field.removeprefix("messages[0]") if field.startswith("messages[0]") else field


def _told(document: Document) -> dict[str, Any]:
    """A document as an answer has it."""
    return {"text": document} if isinstance(document, str) else document.model_dump(exclude_none=True)


def _cosines(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> list[float]:
    """Cosine similarity of each vector of the second list with its counterpart, or the only one, of the first; 0 for a
    zero vector."""
    lengths = [[math.sqrt(sum(map(mul, vector, vector))) for vector in side] for side in (one, other)]
    fellows = [0] * len(other) if len(one) == 1 else range(len(other))
    return [
        sum(map(mul, one[fellow], vector)) / ((lengths[0][fellow] * length) or 1.0)
        for fellow, vector, length in zip(fellows, other, lengths[1], strict=True)
    ]
