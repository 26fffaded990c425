"""Reads the contract's `SamplingParams`: how tokens are chosen, and the form of an answer."""

from __future__ import annotations

import json
from typing import Any

from common.errors import InvalidInput
from llm_service.config import LlmConfig
from llm_service.generation_config import RANGES, SamplingDefaults, is_within, wanted_range
from llm_service.request import (
    SamplingParams,
    Structure,
)
from llm_service.token_ids import check_token_ids
from llm_service.token_masks import mask_of
from twinlens.v1 import llm_pb2


class SamplingReader:
    """Reads SamplingParams under one service's limits; `defaults` are those of `generation_config`."""

    def __init__(self, config: LlmConfig, vocab_size: int, defaults: SamplingDefaults) -> None:
        self._config = config
        self._vocab_size = vocab_size
        self._defaults = defaults

    def read(self, message: llm_pb2.SamplingParams, context: int) -> SamplingParams:
        """All parameters, with defaults filled in; at most `context` tokens. Raises InvalidInput, which names the
        field."""
        values: dict[str, Any] = dict(self._defaults.values)
        for name in (*RANGES, "seed", "ignore_eos", "n", "logprobs", "prompt_logprobs"):
            if message.HasField(name):
                values[name] = getattr(message, name)
        for name in RANGES:
            if name in values and not is_within(name, values[name]):
                raise _out_of_range(name, wanted_range(name))
        self._check_range("n", values.get("n", 1), 1, self._config.max_choices)
        for name in ("logprobs", "prompt_logprobs"):
            self._check_range(name, values.get(name, 0), 0, min(self._config.max_logprobs, self._vocab_size))
        self._check_stop(message)
        for field in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            tokens = getattr(message, field)
            if len(tokens) > self._config.max_token_ids:
                raise InvalidInput(
                    f"{field} may name {self._config.max_token_ids} tokens",
                    reason="TOO_MANY_TOKEN_IDS",
                    field=f"sampling.{field}",
                )
            check_token_ids(tokens, self._vocab_size, f"sampling.{field}")
        for bias in message.logit_bias.values():
            self._check_range("logit_bias", bias, -100.0, 100.0)
        most = context if self._defaults.most_tokens is None else min(context, self._defaults.most_tokens)
        values["max_tokens"] = min(int(values.get("max_tokens", most)), most)
        if values.get("min_tokens", 0) > values["max_tokens"]:
            raise InvalidInput("min_tokens is above max_tokens", reason="OUT_OF_RANGE", field="sampling.min_tokens")
        return SamplingParams(
            stop_token_ids=tuple(message.stop_token_ids),
            logit_bias=dict(message.logit_bias),
            allowed_mask=mask_of(message.allowed_token_ids, self._vocab_size) if message.allowed_token_ids else b"",
            **values,
        )

    def structure(self, message: llm_pb2.SamplingParams) -> Structure | None:
        """The form that the answer must have; None for any. It is not compiled here. Raises InvalidInput."""
        kind = message.WhichOneof("structured")
        if kind is None:
            return None
        field, limit = f"sampling.{kind}", self._config.max_structure_bytes
        flood = message.choice.ByteSize() > limit  # told before a list of millions is made of them
        options = [] if flood else list(message.choice.options)
        text = json.dumps(options) if kind == "choice" else str(getattr(message, kind))
        if flood or len(text.encode()) > limit:
            raise InvalidInput(f"the {kind} is too long", reason="STRUCTURE_TOO_LARGE", field=field)
        if not text or (kind == "choice" and not all(options or [""])):
            raise InvalidInput(f"the {kind} is empty", reason="BAD_STRUCTURE", field=field)
        is_json = kind in ("json_schema", "structural_tag")
        if is_json and _depth(text) > self._config.max_schema_depth:
            raise InvalidInput(f"the {kind} is nested too deeply", reason="STRUCTURE_TOO_LARGE", field=field)
        return Structure(kind, text)

    def thinking_token_budget(self, message: llm_pb2.SamplingParams) -> int | None:
        """The most tokens of reasoning; None for any number. Raises InvalidInput."""
        if not message.HasField("thinking_token_budget"):
            return None
        self._check_range("thinking_token_budget", message.thinking_token_budget, 0, 1 << 31)
        return message.thinking_token_budget

    def bad_words(self, message: llm_pb2.SamplingParams) -> tuple[str, ...]:
        """The texts that an answer cannot have. Raises InvalidInput."""
        field, most = "sampling.bad_words", self._config.max_bad_words
        if len(message.bad_words) > most:
            raise InvalidInput(f"at most {most} bad words", reason="TOO_MANY_BAD_WORDS", field=field)
        longest = self._config.max_bad_word_bytes
        if any(not text or len(text.encode()) > longest for text in message.bad_words):
            raise InvalidInput(f"a bad word has 1 to {longest} bytes", reason="BAD_WORD", field=field)
        return tuple(message.bad_words)

    def _check_range(self, name: str, value: float, low: float, high: float) -> None:
        if not low <= value <= high:
            raise _out_of_range(name, f"between {low} and {high}")

    def _check_stop(self, message: llm_pb2.SamplingParams) -> None:
        if len(message.stop) > self._config.max_stop_texts:
            raise InvalidInput(
                f"at most {self._config.max_stop_texts} stop texts", reason="TOO_MANY_STOPS", field="sampling.stop"
            )
        if any(not text or len(text.encode()) > self._config.max_stop_bytes for text in message.stop):
            raise InvalidInput(
                f"a stop text has 1 to {self._config.max_stop_bytes} bytes", reason="BAD_STOP", field="sampling.stop"
            )


def _out_of_range(name: str, wanted: str) -> InvalidInput:
    return InvalidInput(f"{name} must be {wanted}", reason="OUT_OF_RANGE", field=f"sampling.{name}")


def _depth(text: str) -> int:
    """How deeply brackets nest in a JSON text; those inside strings count as well, which errs on the strict side.

    >>> _depth('{"a": [{}]}')
    3
    """
    deepest = depth = 0
    for sign in text:
        depth += (sign in "{[") - (sign in "}]")
        deepest = max(deepest, depth)
    return deepest
