"""Maps fields in the LLM service's errors to the names that clients know."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from common.errors import InvalidInput
from gateway.api.chat_request import ChatRequest
from gateway.api.fields import SamplingFields
from gateway.errors import called
from gateway.tools import places_of
from twinlens.v1 import llm_pb2

_FORMS = "guided_json", "guided_regex", "regex", "guided_choice", "guided_grammar", "ebnf", "structured_outputs"
_STRUCTURES = "json_schema", "regex", "choice", "grammar", "structural_tag"
"""The fields for an answer's form, which the contract names differently."""


def names_of(asked: SamplingFields) -> dict[str, str]:
    """The fields of a chat or completion that have another name in the contract."""
    form = _form_of(asked)
    names = dict.fromkeys(_STRUCTURES, form) if form else {}
    if not isinstance(asked, ChatRequest):
        return names | {"input": "prompt"}
    names |= {"input": "messages", "media": "messages", "logprobs": "top_logprobs", **places_of(asked)}
    if asked.documents and not asked.chat_template_kwargs:
        names["chat_template_kwargs"] = "documents"
    if asked.thinking is not None:
        if not asked.chat_template_kwargs or asked.chat_template_kwargs.thinks is None:
            names["chat_template_kwargs.enable_thinking"] = "thinking"
        if asked.thinking_token_budget is None:
            names |= {"thinking_token_budget": "thinking.budget_tokens"}
    if asked.session_id is not None:
        names["prompt_cache_key"] = "session_id"
    return names if asked.max_completion_tokens is None else names | {"max_tokens": "max_completion_tokens"}


def _form_of(asked: SamplingFields) -> str:
    """The field with the answer's form; empty if there is none."""
    given = next((name for name in _FORMS if getattr(asked, name) is not None), "")
    if given:
        return given
    if isinstance(asked, ChatRequest) and asked.must_call:
        return "tools"
    return "response_format" if asked.response_format is not None else ""


async def named_by(
    names: Mapping[str, str], events: AsyncGenerator[llm_pb2.GenerateResponse]
) -> AsyncGenerator[llm_pb2.GenerateResponse]:
    """The same events; errors name the fields that the caller knows, by `names_of`."""
    async with aclosing(events) as each:
        try:
            async for said in each:
                yield said
        except InvalidInput as error:
            raise called(error, names) from None
