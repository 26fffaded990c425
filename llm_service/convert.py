"""Between the contract's messages and the nouns; the first place where a request is checked."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable
from typing import Any

from common.errors import InvalidInput, NotFound, Unsupported
from llm_service.config import LlmConfig
from llm_service.encoders.convert import DTYPES
from llm_service.request import (
    ChatPrompt,
    Encoded,
    Key,
    MediaItem,
    MediaOptions,
    Message,
    Modality,
    Pixels,
    Request,
    Rows,
    Sampling,
    Source,
    Structure,
    TextPrompt,
    TokenPrompt,
    Url,
)
from twinlens.v1 import llm_pb2, media_pb2

_MODALITIES: dict[int, Modality] = {media_pb2.MODALITY_IMAGE: "image", media_pb2.MODALITY_VIDEO: "video"}
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


class Requests:
    """Reads GenerateRequest messages under one service's limits; `defaults` are the checkpoint's own settings."""

    def __init__(self, config: LlmConfig, model: str, vocab_size: int, defaults: dict[str, Any]) -> None:
        self._config = config
        self._model = model
        self._vocab_size = vocab_size
        self._defaults = {name: defaults[name] for name in _RANGES if isinstance(defaults.get(name), int | float)}
        if defaults.get("do_sample") is False:
            self._defaults["temperature"] = 0.0
        self._defaults.pop("max_tokens", None)
        self._defaults.pop("min_tokens", None)

    def read(self, message: llm_pb2.GenerateRequest, remaining: float | None, context: int) -> Request:
        """The request; `remaining` seconds until its deadline, `context` tokens at most. Raises the error that says
        what is wrong and where."""
        if message.model and message.model != self._model:
            raise NotFound("this service does not serve that model", reason="UNKNOWN_MODEL", field="model")
        media: list[MediaItem] = []
        prompt: ChatPrompt | TextPrompt | TokenPrompt
        match message.WhichOneof("input"):
            case "chat":
                prompt = self.chat(message.chat, media)
            case "text":
                self._check_text([message.text.prompt], "text.prompt")
                prompt = TextPrompt(message.text.prompt)
                media.extend(self._media(item, n, f"text.media[{n}]") for n, item in enumerate(message.text.media))
            case "tokens":
                prompt = TokenPrompt(tuple(message.tokens.ids))
                media.extend(self._media(item, n, f"tokens.media[{n}]") for n, item in enumerate(message.tokens.media))
            case _:
                raise InvalidInput("the request has no input", reason="EMPTY_PROMPT", field="input")
        self._check_media(media)
        return Request(
            id=message.request_id,
            prompt=prompt,
            media=tuple(media),
            sampling=self._sampling(message.sampling, context),
            stop=tuple(message.sampling.stop),
            structure=self._structure(message.sampling),
            salt=message.cache_salt,
            priority=message.priority,
            deadline=None if remaining is None else time.monotonic() + remaining,
            session=message.session_id,
        )

    def chat(self, chat: llm_pb2.ChatInput, media: list[MediaItem]) -> ChatPrompt:
        """Reads messages; their items are appended to `media` in prompt order."""
        self._check_text((part.text for m in chat.messages for part in m.parts), "chat.messages")
        messages = []
        for number, message in enumerate(chat.messages):
            parts: list[str | MediaItem] = []
            for place, part in enumerate(message.parts):
                field = f"chat.messages[{number}].parts[{place}]"
                kind = part.WhichOneof("part")
                if kind is None:
                    raise InvalidInput("a part of a message is empty", reason="EMPTY_PART", field=field)
                if kind == "text":
                    parts.append(part.text)
                else:
                    media.append(self._media(part.media, len(media), f"{field}.media"))
                    parts.append(media[-1])
            messages.append(Message(message.role, tuple(parts)))
        return ChatPrompt(tuple(messages))

    def _media(self, message: media_pb2.Media, index: int, field: str) -> MediaItem:
        modality = _MODALITIES.get(message.modality)
        if message.modality == media_pb2.MODALITY_AUDIO:
            raise Unsupported("audio is not served in this release", field=f"{field}.modality")
        if modality is None:
            raise InvalidInput("a media item has no modality", reason="UNKNOWN_MODALITY", field=f"{field}.modality")
        source = _source(message, field)
        if message.known_key and not isinstance(source, Url):
            raise InvalidInput("a known key goes with a url alone", reason="BAD_OPTION", field=f"{field}.known_key")
        given = {name.name: value for name, value in message.options.ListFields()}
        return MediaItem(index, modality, source, MediaOptions(**given), message.mime_type, field)

    def _check_media(self, media: list[MediaItem]) -> None:
        for kind, most in (("image", self._config.max_images), ("video", self._config.max_videos)):
            if sum(item.modality == kind for item in media) > most:
                raise InvalidInput(f"a request may hold {most} {kind}s", reason="TOO_MANY_MEDIA", field="media")

    def _check_text(self, texts: Iterable[str], field: str) -> None:
        if sum(len(text.encode()) for text in texts) > self._config.max_prompt_bytes:
            raise InvalidInput(
                f"the prompt's text is longer than {self._config.max_prompt_bytes} bytes",
                reason="PROMPT_TOO_LONG",
                field=field,
            )

    def _sampling(self, message: llm_pb2.SamplingParams, context: int) -> Sampling:
        values: dict[str, Any] = dict(self._defaults)
        for name in (*_RANGES, "seed", "ignore_eos", "n", "logprobs", "prompt_logprobs"):
            if message.HasField(name):
                values[name] = getattr(message, name)
        for name, (low, high) in _RANGES.items():
            if name in values:
                self._check_range(name, values[name], low, high)
        self._check_range("n", values.get("n", 1), 1, self._config.max_choices)
        for name in ("logprobs", "prompt_logprobs"):
            self._check_range(name, values.get(name, 0), 0, self._config.max_logprobs)
        self._check_stop(message)
        for field, tokens in (("stop_token_ids", message.stop_token_ids), ("logit_bias", message.logit_bias)):
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

    def _structure(self, message: llm_pb2.SamplingParams) -> Structure | None:
        kind = message.WhichOneof("structured")
        if kind is None:
            return None
        options = list(message.choice.options)
        text = json.dumps(options) if kind == "choice" else str(getattr(message, kind))
        field = f"sampling.{kind}"
        if len(text.encode()) > self._config.max_structure_bytes:
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


def _source(message: media_pb2.Media, field: str) -> Source:
    match message.WhichOneof("source"):
        case "data":
            return Encoded(message.data)
        case "url":
            return Url(message.url, message.known_key)
        case "key":
            return Key(message.key)
        case "pixels":
            block = message.pixels
            return Pixels(block.data, block.frames, block.height, block.width, tuple(block.timestamps))
        case "embedding":
            rows, grid = message.embedding, message.embedding.grid
            return Rows(
                rows.data,
                str(DTYPES.get(rows.dtype, "")),
                (rows.count, rows.levels, rows.width),
                (grid.t, grid.h, grid.w),
                tuple(rows.timestamps),
                rows.seconds_per_grid,
            )
        case _:
            raise InvalidInput("a media item has no content", reason="EMPTY_MEDIA", field=field)


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
