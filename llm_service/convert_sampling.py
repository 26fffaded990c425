"""How tokens are to be chosen, from the contract's message: every value checked, and named where it is refused."""

from __future__ import annotations

import json
import math
from typing import Any

from common.errors import InvalidInput
from llm_service.config import LlmConfig
from llm_service.request import Sampling, Structure
from twinlens.v1 import llm_pb2

_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.0, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "top_k": (0, 1 << 31),
    "max_tokens": (1, 1 << 31),
    "min_tokens": (0, 1 << 31),
}
_ABOVE_ZERO = ("top_p", "repetition_penalty")


class SamplingReader:
    """Reads SamplingParams under one service's limits; `defaults` are the checkpoint's own settings."""

    def __init__(self, config: LlmConfig, vocab_size: int, defaults: dict[str, Any]) -> None:
        self._config = config
        self._vocab_size = vocab_size
        self._defaults = {name: defaults[name] for name in _RANGES if type(defaults.get(name)) in (int, float)}
        if "top_k" in self._defaults:
            self._defaults["top_k"] = int(self._defaults["top_k"])  # JSON knows no whole numbers
        if defaults.get("do_sample") is False:
            self._defaults["temperature"] = 0.0
        self._defaults.pop("max_tokens", None)
        self._defaults.pop("min_tokens", None)

    def read(self, message: llm_pb2.SamplingParams, context: int) -> Sampling:
        """Every value, the defaults filled in; `context` tokens at most. Raises InvalidInput, which names the value."""
        values: dict[str, Any] = dict(self._defaults)
        for name in (*_RANGES, "seed", "ignore_eos", "n", "logprobs", "prompt_logprobs"):
            if message.HasField(name):
                values[name] = getattr(message, name)
        for name, (low, high) in _RANGES.items():
            if name in values:
                self._check_range(name, values[name], low, high)
        self._check_range("n", values.get("n", 1), 1, self._config.max_choices)
        for name in ("logprobs", "prompt_logprobs"):
            self._check_range(name, values.get(name, 0), 0, min(self._config.max_logprobs, self._vocab_size))
        self._check_stop(message)
        for field, tokens in (("stop_token_ids", message.stop_token_ids), ("logit_bias", message.logit_bias)):
            if len(tokens) > self._config.max_token_ids:
                raise InvalidInput(
                    f"{field} may name {self._config.max_token_ids} tokens",
                    reason="TOO_MANY_TOKEN_IDS",
                    field=f"sampling.{field}",
                )
            if any(token >= self._vocab_size for token in tokens):
                raise InvalidInput(
                    "a token id is outside the vocabulary", reason="TOKEN_OUT_OF_RANGE", field=f"sampling.{field}"
                )
        for bias in message.logit_bias.values():
            self._check_range("logit_bias", bias, -100.0, 100.0)
        values["max_tokens"] = min(int(values.get("max_tokens", context)), context)
        if values.get("min_tokens", 0) > values["max_tokens"]:
            raise InvalidInput("min_tokens is above max_tokens", reason="OUT_OF_RANGE", field="sampling.min_tokens")
        return Sampling(stop_token_ids=tuple(message.stop_token_ids), logit_bias=dict(message.logit_bias), **values)

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
        if kind == "json_schema" and _depth(text) > self._config.max_schema_depth:
            raise InvalidInput("the json_schema is nested too deeply", reason="STRUCTURE_TOO_LARGE", field=field)
        return Structure(kind, text)

    def _check_range(self, name: str, value: float, low: float, high: float) -> None:
        if not math.isfinite(value) or not low <= value <= high or (name in _ABOVE_ZERO and value == 0):
            raise InvalidInput(
                f"{name} must be between {low} and {high}", reason="OUT_OF_RANGE", field=f"sampling.{name}"
            )

    def _check_stop(self, message: llm_pb2.SamplingParams) -> None:
        if len(message.stop) > self._config.max_stop_texts:
            raise InvalidInput(
                f"at most {self._config.max_stop_texts} stop texts", reason="TOO_MANY_STOPS", field="sampling.stop"
            )
        if any(not text or len(text.encode()) > self._config.max_stop_bytes for text in message.stop):
            raise InvalidInput(
                f"a stop text has 1 to {self._config.max_stop_bytes} bytes", reason="BAD_STOP", field="sampling.stop"
            )


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
