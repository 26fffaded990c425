"""The prompts of a body as requests of the contract, one for each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from common.errors import InvalidInput
from gateway.api.fields import Prompt, RequestFields, shape_of
from gateway.errors import TooLarge
from twinlens.v1 import llm_pb2

Request = TypeVar("Request", llm_pb2.GenerateRequest, llm_pb2.EmbedRequest)


def generate_request(
    asked: RequestFields, params: llm_pb2.SamplingParams, request_id: str, **prompt: Any
) -> llm_pb2.GenerateRequest:
    """The whole request; `prompt` is one of its inputs, with fields that only one surface has."""
    return llm_pb2.GenerateRequest(
        request_id=request_id,
        model=asked.model or "",
        sampling=params,
        cache_salt=asked.cache_salt or "",
        priority=asked.priority or 0,
        max_handovers=asked.max_handovers,
        **prompt,
    )


def prompts(given: Prompt, most: int, field: str, *, bare: bool) -> list[dict[str, Any]]:
    """Each prompt of a field with one or several, as an input; `bare` texts get no special tokens from the tokenizer.
    Raises InvalidInput for more than `most`, or none."""
    each: Any = [given] if shape_of(given) in ("$text", "$tokens") else given
    check_prompts(len(each), most, field)
    return [
        {"text": llm_pb2.TextInput(prompt=prompt, bare=bare)}
        if isinstance(prompt, str)
        else {"tokens": llm_pb2.TokensInput(ids=prompt)}
        for prompt in each
    ]


def check_prompts(count: int, most: int, field: str) -> None:
    """Raises InvalidInput for more prompts than allowed in one request, or none."""
    if not 0 < count <= most:
        raise InvalidInput(f"a request may have 1 to {most} prompts", reason="TOO_MANY_PROMPTS", field=field)


def within(limit: int, requests: Iterable[Request]) -> Iterator[Request]:
    """The requests for a body's prompts, each of which repeats the shared fields. Raises TooLarge if several have more
    than `limit` bytes together."""
    size, unmeasured = 0, list[Request]()
    for number, request in enumerate(requests):
        unmeasured.append(request)
        if number:  # one alone may have any size, and to measure it is to serialise it
            size += sum(each.ByteSize() for each in unmeasured)
            unmeasured.clear()
        if size > limit:
            said = f"prompts, each with what all of them share, may have {limit} bytes together"
            raise TooLarge(said, reason="BODY_TOO_LARGE")
        yield request


def name_of(request_id: str, number: int, prompts: int) -> str:
    """The name of one prompt's call; of several, each has its own."""
    return request_id if prompts == 1 else f"{request_id[:120]}-{number}"
