"""Judges documents with a reranker: its prompt, and the score of its answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Final

from common.errors import Internal, TwinlensError
from gateway.api.chat_request import Message, Part, TextPart
from gateway.api.score_request import Document, ScoringFields, TextDocument
from gateway.convert import conversation
from gateway.generation import Generations
from gateway.request_context import RequestContext
from twinlens.v1 import llm_pb2

_SYSTEM: Final = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
_INSTRUCTION: Final = "Given a search query, retrieve relevant candidates that answer the query."
"""Qwen3-VL-Reranker's default instruction from training."""
_NOTHING: Final = "NULL"
"""Stands for an empty query or document."""
_RANK: Final = {"video_url": 0, "video": 0, "image_url": 1, "image": 1}
"""Kinds of parts that stand before all others, in this order."""
_CERTAIN: Final = 100.0
"""Makes a token the answer, so that it is told how likely it was: scores are of the model's own distribution."""
_LIKELIEST: Final = 20


@dataclass(frozen=True, slots=True)
class Question:
    """The question about one document: the log-probability of the token for yes. `places` are the paths of the parts of
    the user's message in the body; `at` is the document's. `again` makes the same request for another token."""

    request: llm_pb2.GenerateRequest
    places: Sequence[str]
    at: str
    again: Callable[[int], llm_pb2.GenerateRequest]


@dataclass(frozen=True, slots=True)
class Judgement:
    """A score between 0 and 1, and the usage of its prompt."""

    score: float
    usage: llm_pb2.Usage


def question(
    asked: ScoringFields,
    name: str,
    reranker: llm_pb2.Reranker,
    query: tuple[str, Document],
    document: tuple[str, Document],
) -> Question:
    """The conversation about a query and a document, each given with its path. Raises InvalidInput."""
    parts: list[tuple[Part, str]] = [(_text(f"<Instruct>: {asked.instruction or _INSTRUCTION}"), "instruction")]
    for mark, (at, given) in (("<Query>:", query), ("\n<Document>:", document)):
        parts += [(_text(mark), at), *_parts(given, at)]
    messages = [Message(role="system", content=_SYSTEM), Message(role="user", content=[part for part, _ in parts])]
    again = partial(_request, asked, name, messages)
    places, at = [at for _, at in parts], document[0]
    try:
        return Question(again(reranker.true_token_id), places, at, again)
    except TwinlensError as error:
        raise error.at(_param(error.field, places, at)) from None


def _request(asked: ScoringFields, name: str, messages: Sequence[Message], token: int) -> llm_pb2.GenerateRequest:
    """Forces this token as the answer, which returns its log-probability."""
    sampling = llm_pb2.SamplingParams(
        max_tokens=1, temperature=0.0, repetition_penalty=1.0, logprobs=_LIKELIEST, logit_bias={token: _CERTAIN}
    )
    request = llm_pb2.GenerateRequest(
        request_id=name,
        model=asked.model or "",
        sampling=sampling,
        cache_salt=asked.cache_salt or "",
        priority=asked.priority or 0,
        max_handovers=asked.max_handovers,
    )
    conversation.fill_chat(request.chat, messages, asked.mm_processor_kwargs, None, "messages")
    return request


async def judged(
    generations: Generations, reranker: llm_pb2.Reranker, asked: Question, context: RequestContext
) -> Judgement:
    """A reranker's answer: one token, forced to be yes. The token for no is nearly always among the likeliest ones, and
    is asked for separately if it is not. Raises TwinlensError, with field names of the caller's body."""
    yes, no = reranker.true_token_id, reranker.false_token_id
    try:
        known, usage = await _told(generations, asked.request, context)
        if no not in known:
            others, _ = await _told(generations, await context.made(asked.again, no), context)
            known = others | known
    except TwinlensError as error:
        raise error.at(_param(error.field, asked.places, asked.at)) from None
    if yes not in known or no not in known:
        raise Internal("the reranker's tokens for scores are not known")
    return Judgement(_logistic(known[yes] - known[no]), usage)


async def _told(
    generations: Generations, request: llm_pb2.GenerateRequest, context: RequestContext
) -> tuple[dict[int, float], llm_pb2.Usage]:
    """The log-probabilities of the answer's token and of the likeliest ones; and the usage."""
    known: dict[int, float] = {}
    usage = llm_pb2.Usage()
    async with aclosing(generations.events(request, context)) as events:
        async for said in events:
            for chosen, scored in zip(said.delta.token_ids, said.delta.logprobs, strict=False):
                known |= {top.token_id: top.logprob for top in scored.top} | {chosen: scored.logprob}
            if said.HasField("finished"):
                usage = said.finished.usage
    return known, usage


def _parts(document: Document, at: str) -> Iterable[tuple[Part, str]]:
    """A document's parts as the model was taught: videos, pictures, texts."""
    if isinstance(document, str):
        return [(_text(document), at)]
    if isinstance(document, TextDocument):
        return [(_text(document.text), at)]
    if isinstance(document.content, str):
        return [(_text(document.content), f"{at}.content")]
    parts = [(part, f"{at}.content[{number}]") for number, part in enumerate(document.content)]
    return sorted(parts, key=lambda each: _RANK.get(each[0].type, len(_RANK))) or [(_text(_NOTHING), at)]


def _text(words: str) -> TextPart:
    return TextPart(type="text", text=words)


def _param(field: str, places: Sequence[str], at: str) -> str:
    """The caller's name of a field of the conversation, given the paths of its parts and of the document."""
    begin = "messages[1].content["
    if field.startswith(begin):
        return places[int(field.removeprefix(begin).partition("]")[0])]
    return at if field in ("prompt", "input") or field.startswith("messages") else field


def _logistic(x: float) -> float:
    """Between 0 and 1, without an overflow.

    >>> _logistic(0.0), _logistic(1000.0), _logistic(-1000.0)
    (0.5, 1.0, 0.0)
    """
    tail = math.exp(-abs(x))
    return (1 if x >= 0 else tail) / (1 + tail)
