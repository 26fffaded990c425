"""Converts the surfaces' fields for sampling, ends and forms of answers into the contract's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic_core import to_json

from common.errors import InvalidInput
from gateway.api.fields import RequestFields, ResponseFormat, SamplingFields
from twinlens.v1 import llm_pb2

_CHOICE = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
_ENDS = (
    *("n", "max_tokens", "min_tokens", "ignore_eos"),
    *("thinking_token_budget", "prompt_logprobs", "skip_special_tokens"),
)
"""Sampling fields with the same name on both sides."""
_ANY_OBJECT = '{"type": "object"}'


def choice(asked: RequestFields, max_tokens: int | None = None) -> llm_pb2.SamplingParams:
    """How tokens are chosen."""
    given = {name: value for name in _CHOICE if (value := getattr(asked, name)) is not None}
    if asked.top_k == -1:  # as vLLM has it: all of them
        given["top_k"] = 0
    seed = None if asked.seed is None else asked.seed % (1 << 64)
    return llm_pb2.SamplingParams(**given, seed=seed, max_tokens=max_tokens)


def sampling(asked: SamplingFields, max_tokens: int | None = None) -> llm_pb2.SamplingParams:
    """The sampling parameters. Raises InvalidInput for several forms at once, or an invalid token."""
    params = llm_pb2.SamplingParams(
        **{name: value for name in _ENDS if (value := getattr(asked, name)) is not None},
        stop=[asked.stop] if isinstance(asked.stop, str) else asked.stop,
        stop_token_ids=asked.stop_token_ids,
        bad_words=asked.bad_words,
        allowed_token_ids=asked.allowed_token_ids,
        logit_bias=_logit_bias(asked.logit_bias or {}),
    )
    if asked.shows_stop is not None:
        params.include_stop_str_in_output = asked.shows_stop
    params.MergeFrom(choice(asked, max_tokens))
    _set_structure(params, asked)
    return params


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    if not all(token.isdecimal() and token.isascii() and len(token) < 10 for token in given):
        raise InvalidInput("a token is named by its number", reason="BAD_FIELD", field="logit_bias")
    return {int(token): bias for token, bias in given.items()}


def _set_structure(params: llm_pb2.SamplingParams, asked: SamplingFields) -> None:
    """The form of the answer, by the fields that vLLM's users send."""
    outputs = asked.structured_outputs
    given = [
        ("json_schema", _schema(asked.guided_json)),
        ("regex", asked.guided_regex),
        ("regex", asked.regex),
        ("choice", asked.guided_choice),
        ("grammar", asked.guided_grammar),
        ("grammar", asked.ebnf),
    ]
    if outputs is not None:
        given += [
            ("json_schema", _schema(outputs.json_)),
            ("regex", outputs.regex),
            ("choice", outputs.choice),
            ("grammar", outputs.grammar),
            ("json_schema", _ANY_OBJECT if outputs.json_object else None),
            ("structural_tag", _schema(outputs.structural_tag)),
        ]
    for kind, form in given:
        if form is not None:
            set_form(params, kind, form)


def set_form(params: llm_pb2.SamplingParams, kind: str, form: str | Sequence[str]) -> None:
    """Sets the answer's form. Raises InvalidInput if it has one already."""
    if params.WhichOneof("structured") is not None:
        raise InvalidInput("an answer can have only one form", reason="BAD_FIELD", field="structured_outputs")
    if kind == "choice":
        params.choice.options.extend(form)
    else:
        setattr(params, kind, form)


def set_response_format(params: llm_pb2.SamplingParams, asked: ResponseFormat) -> None:
    """The form of the answer, OpenAI's way."""
    match asked.type:
        case "json_object":
            set_form(params, "json_schema", _ANY_OBJECT)
        case "json_schema":
            if asked.json_schema is None:
                raise InvalidInput("the schema is missing", reason="BAD_FIELD", field="response_format.json_schema")
            set_form(params, "json_schema", json_of(asked.json_schema.schema_))
        case "structural_tag":
            set_form(params, "structural_tag", json_of(asked.structural_tag))
        case "text":
            return


def json_of(schema: dict[str, Any]) -> str:
    """A schema or other JSON value as text."""
    return to_json(schema).decode()


def _schema(given: dict[str, Any] | str | None) -> str | None:
    return json_of(given) if isinstance(given, dict) else given
