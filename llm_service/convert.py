"""Between the contract's messages and the nouns; the first place where a request is checked."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from common.errors import InvalidInput, NotFound
from common.media.convert import read_media
from common.media.item import Modality
from llm_service.config import LlmConfig
from llm_service.convert_sampling import SamplingReader
from llm_service.request import ChatPrompt, MediaItem, Message, Request, TextPrompt, TokenPrompt
from twinlens.v1 import encoder_pb2, llm_pb2, media_pb2

SERVED = (Modality.IMAGE, Modality.VIDEO)


class RequestReader:
    """Reads GenerateRequest messages under one service's limits; `defaults` are the checkpoint's own settings."""

    def __init__(self, config: LlmConfig, model: str, vocab_size: int, defaults: dict[str, Any]) -> None:
        self._config = config
        self._model = model
        self._sampling = SamplingReader(config, vocab_size, defaults)

    def read(self, message: llm_pb2.GenerateRequest, remaining: float | None, context: int, peer: str = "") -> Request:
        """The request; `remaining` seconds until its deadline, `context` tokens at most, by the connection from `peer`.
        Raises the error that says what is wrong and where."""
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
                media = self._media_list(message.text.media, "text.media")
            case "tokens":
                self._check_ids(len(message.tokens.ids), context)
                prompt = TokenPrompt(tuple(message.tokens.ids))
                media = self._media_list(message.tokens.media, "tokens.media")
            case _:
                raise InvalidInput("the request has no input", reason="EMPTY_PROMPT", field="input")
        self._check_media(media)
        return Request(
            id=message.request_id,
            prompt=prompt,
            media=tuple(media),
            sampling=self._sampling.read(message.sampling, context),
            stop=tuple(message.sampling.stop),
            structure=self._sampling.structure(message.sampling),
            salt=message.cache_salt,
            priority=message.priority,
            deadline=None if remaining is None else time.monotonic() + remaining,
            session=message.session_id,
            peer=peer,
        )

    def chat(self, chat: llm_pb2.ChatInput, media: list[MediaItem]) -> ChatPrompt:
        """Reads messages; their items are appended to `media` in prompt order."""
        self._check_parts(chat)
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

    def _media_list(self, given: Sequence[media_pb2.Media], field: str) -> list[MediaItem]:
        if len(given) > self._config.max_images + self._config.max_videos:
            raise _too_many_items(self._config.max_images + self._config.max_videos, "media item")
        return [self._media(message, index, f"{field}[{index}]") for index, message in enumerate(given)]

    def _media(self, message: media_pb2.Media, index: int, field: str) -> MediaItem:
        media = read_media(message, field, SERVED)
        return MediaItem(media.modality, media.source, media.options, media.mime_type, field, index)

    def _check_media(self, media: list[MediaItem]) -> None:
        for kind, limit in (("image", self._config.max_images), ("video", self._config.max_videos)):
            if sum(item.modality == kind for item in media) > limit:
                raise _too_many_items(limit, kind)

    def _check_parts(self, chat: llm_pb2.ChatInput) -> None:
        """A flood of messages or parts is only counted: each costs microseconds of the event loop."""
        limit = self._config.max_parts
        if len(chat.messages) > limit or sum(len(message.parts) for message in chat.messages) > limit:
            raise InvalidInput(
                f"a conversation may have {limit} messages, and {limit} parts",
                reason="TOO_MANY_PARTS",
                field="chat.messages",
            )

    def _check_ids(self, count: int, context: int) -> None:
        if count >= context:
            raise InvalidInput(
                f"the prompt has {count} tokens; the context holds {context}, output included",
                reason="PROMPT_TOO_LONG",
                field="tokens.ids",
            )

    def _check_text(self, texts: Iterable[str], field: str) -> None:
        if sum(len(text.encode()) for text in texts) > self._config.max_prompt_bytes:
            raise InvalidInput(
                f"the prompt's text is longer than {self._config.max_prompt_bytes} bytes",
                reason="PROMPT_TOO_LONG",
                field=field,
            )


def by_transport(counts: Mapping[int, int]) -> dict[tuple[str, ...], float]:
    """Counts by the transport's name, such as `shared_memory`, those that count nothing among them."""
    names = {number: name.removeprefix("TRANSPORT_").lower() for name, number in encoder_pb2.Transport.items()}
    return {(name,): counts.get(number, 0) for number, name in names.items() if number}


def _too_many_items(limit: int, kind: str) -> InvalidInput:
    return InvalidInput(f"a request may hold {limit} {kind}s", reason="TOO_MANY_ITEMS", field="media")
