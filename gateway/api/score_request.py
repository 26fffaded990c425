"""The bodies of `POST /v1/rerank` and `POST /score`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Discriminator, Field, Tag, model_validator

from gateway.api import chat_request
from gateway.api.fields import Count, IdFields, Int, MediaSettings, Model, TruncationFields


class TextDocument(Model):
    """A text in an object, as Cohere's and Jina's callers send it."""

    text: str


class ContentDocument(Model):
    """A text, or parts as of a chat's message."""

    content: chat_request.Content


def _form(value: Any) -> str:
    """The kind of what is scored."""
    if isinstance(value, dict):
        return "$object" if "text" in value else "$content"
    return "$text"


Document = Annotated[
    Annotated[str, Tag("$text")]
    | Annotated[TextDocument, Tag("$object")]
    | Annotated[ContentDocument, Tag("$content")],
    Discriminator(_form),
]
Documents = Annotated[list[Document], Field(max_length=4096, fail_fast=True)]


def _count(value: Any) -> str:
    """The alternative of a field that has one document or several."""
    return "$several" if isinstance(value, list) else "$one"


OneOrMore = Annotated[
    Annotated[Document, Tag("$one")] | Annotated[Documents, Tag("$several")],
    Discriminator(_count),
]


class ScoringFields(IdFields, TruncationFields):
    """Fields of both."""

    without_effect: ClassVar[dict[str, tuple[Any, ...]]] = {"max_tokens_per_doc": (0,)}

    model: str | None = None
    user: str | None = None
    cache_salt: str | None = None
    priority: Int | None = None
    max_handovers: Count | None = None
    mm_processor_kwargs: MediaSettings | None = None
    instruction: str | None = None


class RerankRequest(ScoringFields):
    """The body of a request to rank documents."""

    query: Document
    documents: Documents
    top_n: Count | None = None
    return_documents: bool | None = None


class ScoreRequest(ScoringFields):
    """The body of a request to score pairs: one with each of several, or as many on both sides."""

    text_1: OneOrMore | None = None
    text_2: OneOrMore | None = None
    queries: OneOrMore | None = None
    documents: OneOrMore | None = None

    @model_validator(mode="after")
    def _has_two_sides(self) -> ScoreRequest:
        given = tuple(each is not None for each in (self.text_1, self.text_2, self.queries, self.documents))
        if given not in ((True, True, False, False), (False, False, True, True)):
            raise ValueError("give text_1 and text_2, or queries and documents")
        return self
