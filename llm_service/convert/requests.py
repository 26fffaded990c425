"""Converts the contract's messages into nouns; the first place where a request is checked."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from common.errors import InvalidInput, NotFound
from common.media.convert import read_media
from common.media.item import Embedding, Key, Media, Modality, Options
from llm_service.config import LlmConfig
from llm_service.convert.sampling import SamplingReader
from llm_service.convert.tools import parsed_json, read_tool, read_tool_call
from llm_service.embedder import Embedder
from llm_service.generation_config import SamplingDefaults
from llm_service.prompt_length import check_bytes, check_length
from llm_service.request import (
    ChatPrompt,
    LoadedAdapter,
    MediaItem,
    MediaSlot,
    Message,
    Piece,
    PiecesPrompt,
    Prompt,
    Request,
    ResumedChoice,
    SamplingParams,
    SoundLength,
    TextPrompt,
    TokenPrompt,
    Truncation,
)
from llm_service.token_ids import check_token_ids
from llm_service.transcriber import Transcriber
from twinlens.v1 import llm_pb2, media_pb2

VISION = frozenset((Modality.IMAGE, Modality.VIDEO))
"""The modalities that most models take."""
_EFFORTS = ("", "none", "minimal", "low", "medium", "high", "xhigh", "max")
_NOTHING_SAID = SamplingParams(max_tokens=1, temperature=0.0)
"""For embeddings, which count as one token, and for prompts of other services."""


class RequestReader:
    """Reads GenerateRequest and EmbedRequest messages under one service's limits, for the model with these `names`.
    `defaults` are those of `generation_config`, and `modalities` those that the model takes. `adapter` finds an adapter
    by name, None if there is none; `own_adapter` is the checkpoint's own adapter for prompts with items of these
    modalities, if any. `transcriber` asks the model for the words of a sound, and `embedder` describes its
    embeddings."""

    def __init__(
        self,
        config: LlmConfig,
        names: tuple[str, ...],
        vocab_size: int,
        defaults: SamplingDefaults,
        modalities: Collection[Modality] = VISION,
        adapter: Callable[[str], LoadedAdapter | None] = lambda _: None,
        own_adapter: Callable[[Collection[Modality]], LoadedAdapter | None] = lambda _: None,
        transcriber: Transcriber | None = None,
        embedder: Embedder | None = None,
    ) -> None:
        self._config = config
        self.max_items = {kind: limit for kind, limit in config.max_items.items() if kind in modalities}
        """How many items of each modality one request may hold."""
        self._names = names
        self._adapter, self._own_adapter = adapter, own_adapter
        self._vocab_size = vocab_size
        self._sampling = SamplingReader(config, vocab_size, defaults)
        self._transcriber = transcriber or Transcriber()
        self._embedder = embedder or Embedder(0, why_not="nothing is known of them")

    def read(self, message: llm_pb2.GenerateRequest, remaining: float | None, context: int, peer: str = "") -> Request:
        """The request; `remaining` is the time to its deadline in seconds, `context` the most tokens, and `peer` its
        connection. Raises an error that names the field at fault."""
        named = self._named(message.model)
        prompt, media = self._input(message, context)
        transcribes = message.WhichOneof("input") == "transcription"
        sampling = self._sampling.read(message.sampling, context)
        limited = message.sampling.HasField("max_tokens")
        return replace(
            self._request(message, named, prompt, media, sampling, remaining, peer),
            stop=tuple(message.sampling.stop),
            include_stop_str_in_output=message.sampling.include_stop_str_in_output,
            skip_special_tokens=not message.sampling.HasField("skip_special_tokens")
            or message.sampling.skip_special_tokens,
            bad_words=self._sampling.bad_words(message.sampling),
            structure=self._sampling.structure(message.sampling),
            thinking_token_budget=self._sampling.thinking_token_budget(message.sampling),
            return_prompt_token_ids=message.return_prompt_token_ids,
            session=message.session_id,
            resume=tuple(_resumed(message.resume, sampling, self._vocab_size)),
            max_handovers=self._max_handovers(message),
            transcription=self._transcriber.asked if transcribes else None,
            truncation=_truncation(message, context - (sampling.max_tokens if limited else 1)),
        )

    def read_embed(
        self, message: llm_pb2.EmbedRequest, remaining: float | None, context: int, peer: str = ""
    ) -> Request:
        """The same for an embedding, whose prompt may fill the context. Also raises if the model has no embeddings, or
        none of so many dimensions."""
        named = self._named(message.model)
        pooling = self._embedder.check(message.dimensions if message.HasField("dimensions") else None)
        prompt, media = self._input(message, context, answered=False)
        return replace(
            self._request(message, named, prompt, media, _NOTHING_SAID, remaining, peer),
            max_handovers=self._max_handovers(message),
            pooling=pooling,
            truncation=_truncation(message, context),
        )

    def read_prefill(
        self, message: llm_pb2.PrefillRequest, remaining: float | None, context: int, peer: str = ""
    ) -> Request:
        """The same for a prompt that another service has cut into pieces; one token is generated and dropped."""
        if message.first_block < 0:
            raise InvalidInput("first_block is below 0", reason="OUT_OF_RANGE", field="first_block")
        media = self._media_list(message.media, "media")
        for item in media:
            if not isinstance(item.source, Key):
                raise InvalidInput("a known item is named only by its key", reason="NO_SOURCE", field=item.field)
        self._check_media(media)
        prompt = PiecesPrompt(tuple(self._pieces(message, media, context)))
        return self._request(message, self._named(message.model), prompt, media, _NOTHING_SAID, remaining, peer)

    def _request(
        self,
        message: llm_pb2.GenerateRequest | llm_pb2.EmbedRequest | llm_pb2.PrefillRequest,
        named: LoadedAdapter | None,
        prompt: Prompt,
        media: Sequence[MediaItem],
        sampling: SamplingParams,
        remaining: float | None,
        peer: str,
    ) -> Request:
        """The part that all calls have in common; `named` is the adapter that the call asks for."""
        return Request(
            id=message.request_id,
            prompt=prompt,
            media=tuple(media),
            sampling=sampling,
            salt=message.cache_salt,
            priority=message.priority,
            deadline=None if remaining is None else time.monotonic() + remaining,
            peer=peer,
            adapter=named or self._own_adapter({item.modality for item in media}),
        )

    def _pieces(self, message: llm_pb2.PrefillRequest, media: list[MediaItem], context: int) -> Iterator[Piece]:
        self._check_text((piece.text for piece in message.pieces), "pieces")
        check_length(sum(len(piece.ids.ids) or 1 for piece in message.pieces), context, "pieces")
        slots = 0
        for number, piece in enumerate(message.pieces):
            field = f"pieces[{number}]"
            match piece.WhichOneof("piece"):
                case "text":
                    yield piece.text
                case "token":
                    yield self._token(piece.token, field)
                case "ids":
                    yield [self._token(token, field) for token in piece.ids.ids]
                case "slot" if slots < len(media):
                    yield MediaSlot(slots, media[slots].modality, self._token(piece.slot.token, field))
                    slots += 1
                case "length_of" if piece.length_of < len(media):
                    yield SoundLength(piece.length_of)
                case _:
                    raise InvalidInput("a piece of the prompt is empty", reason="EMPTY_PART", field=field)
        if slots != len(media):
            why = f"the prompt has {slots} places for {len(media)} items"
            raise InvalidInput(why, reason="PLACEHOLDER_MISMATCH", field="pieces")

    def _token(self, token: int, field: str) -> int:
        check_token_ids([token], self._vocab_size, field)
        return token

    def _named(self, model: str) -> LoadedAdapter | None:
        """The adapter of this name, None for the model. Raises NotFound."""
        adapter = self._adapter(model)
        if model and model not in self._names and adapter is None:
            raise NotFound("this service does not serve that model", reason="UNKNOWN_MODEL", field="model")
        return adapter

    def _input(
        self, message: llm_pb2.GenerateRequest | llm_pb2.EmbedRequest, context: int, *, answered: bool = True
    ) -> tuple[Prompt, list[MediaItem]]:
        """The prompt, and its items in order."""
        media: list[MediaItem] = []
        prompt: Prompt
        match message.WhichOneof("input"):
            case "chat":
                prompt = self.chat(message.chat, media)
            case "text":
                self._check_text([message.text.prompt], "text.prompt")
                prompt = TextPrompt(message.text.prompt, message.text.bare)
                media = self._media_list(message.text.media, "text.media")
            case "tokens":
                if not message.HasField("truncate_prompt_tokens"):
                    check_length(len(message.tokens.ids), context, "tokens.ids", answered=answered)
                prompt = TokenPrompt(tuple(message.tokens.ids))
                media = self._media_list(message.tokens.media, "tokens.media")
            case "transcription":
                assert isinstance(message, llm_pb2.GenerateRequest)
                asked = message.transcription
                self._check_text([asked.prompt], "transcription.prompt")
                media = [self._media(asked.audio, 0, "transcription.audio")]
                prompt = self._transcriber.prompt(
                    media[0], language=asked.language, prompt=asked.prompt, turns=asked.turns
                )
            case _:
                raise InvalidInput("the request has no input", reason="EMPTY_PROMPT", field="input")
        self._check_media(media)
        return prompt, media

    def _max_handovers(self, message: llm_pb2.GenerateRequest | llm_pb2.EmbedRequest) -> int:
        if message.max_handovers < 0:
            raise InvalidInput("max_handovers is below 0", reason="OUT_OF_RANGE", field="max_handovers")
        limit = self._config.max_handovers
        return min(message.max_handovers, limit) if message.HasField("max_handovers") else limit

    def chat(self, chat: llm_pb2.ChatInput, media: list[MediaItem]) -> ChatPrompt:
        """Reads messages; their items are appended to `media` in prompt order."""
        self._check_parts(chat)
        texts = (
            text for m in chat.messages for text in (m.reasoning, m.tool_call_id, *(part.text for part in m.parts))
        )
        said = (text for m in chat.messages for call in m.tool_calls for text in (call.id, call.name, call.arguments))
        known = (text for tool in chat.tools for text in (tool.name, tool.description, tool.parameters))
        self._check_text((*texts, *said, *known, chat.template_variables), "chat.messages")
        depth = self._config.max_schema_depth
        tools = [read_tool(tool, depth, f"chat.tools[{number}]") for number, tool in enumerate(chat.tools)]
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
            calls = [
                read_tool_call(call, depth, f"chat.messages[{number}].tool_calls[{place}]")
                for place, call in enumerate(message.tool_calls)
            ]
            messages.append(Message(message.role, tuple(parts), tuple(calls), message.tool_call_id, message.reasoning))
        thinking = chat.thinking if chat.HasField("thinking") else None
        effort = _effort(chat.reasoning_effort, thinking=thinking)
        return ChatPrompt(
            tuple(messages),
            tuple(tools),
            thinking,
            effort,
            continues=chat.continue_final_message,
            calls_or_form=chat.calls_or_form,
            thinks_before_form=chat.thinks_before_form,
            variables=_variables(chat.template_variables, depth),
        )

    def _media_list(self, given: Sequence[media_pb2.Media], field: str) -> list[MediaItem]:
        if len(given) > (limit := sum(self.max_items.values())):
            raise _too_many_items(limit, "media item", len(given))
        return [self._media(message, index, f"{field}[{index}]") for index, message in enumerate(given)]

    def _media(self, message: media_pb2.Media, index: int, field: str) -> MediaItem:
        media = read_media(message, field, self.max_items)
        return MediaItem(media.modality, media.source, self._options(media), media.mime_type, field, index)

    def _options(self, media: Media) -> Options:
        """Options of an item. This service's pruning applies to videos to be encoded whose caller states neither
        pruning nor sound, since videos with sound are not pruned."""
        given, rate = media.options, self._config.video_pruning_rate
        is_made = media.modality is Modality.VIDEO and not isinstance(media.source, Key | Embedding)
        said = given.video_pruning_rate is not None or given.kept_rows is not None or given.with_sound
        if not (rate and is_made) or said:
            return given
        return replace(given, video_pruning_rate=rate)

    def _check_media(self, media: list[MediaItem]) -> None:
        for kind, limit in self.max_items.items():
            if (count := sum(item.modality == kind for item in media)) > limit:
                raise _too_many_items(limit, kind, count)

    def _check_parts(self, chat: llm_pb2.ChatInput) -> None:
        """A flood of messages or parts is only counted: each costs microseconds of the event loop."""
        limit = self._config.max_parts
        if (
            len(chat.messages) > limit
            or len(chat.tools) > limit
            or sum(len(message.parts) + len(message.tool_calls) for message in chat.messages) > limit
        ):
            raise InvalidInput(
                f"a conversation may have {limit} messages, {limit} parts and calls, and {limit} tools",
                reason="TOO_MANY_PARTS",
                field="chat.messages",
            )

    def _check_text(self, texts: Iterable[str], field: str) -> None:
        check_bytes(texts, self._config.max_prompt_bytes, field)


def _truncation(message: llm_pb2.GenerateRequest | llm_pb2.EmbedRequest, most: int) -> Truncation | None:
    """How the prompt is truncated, if the context leaves room for at most `most` tokens."""
    if not message.HasField("truncate_prompt_tokens"):
        return None
    if (tokens := message.truncate_prompt_tokens) < 1 and tokens != -1:
        why = "truncate_prompt_tokens must be at least 1, or -1"
        raise InvalidInput(why, reason="OUT_OF_RANGE", field="truncate_prompt_tokens")
    return Truncation(max(1, most) if tokens == -1 else tokens, message.truncate_end)


def _resumed(
    given: Iterable[llm_pb2.ResumedChoice], sampling: SamplingParams, vocab_size: int
) -> Iterator[ResumedChoice]:
    known: set[int] = set()
    for number, message in enumerate(given):
        field = f"resume[{number}]"
        if not 0 <= message.index < sampling.n or message.index in known:
            why = "a resumed choice has an index that the request does not have, or has it twice"
            raise InvalidInput(why, reason="BAD_RESUME", field=f"{field}.index")
        known.add(message.index)
        if len(message.token_ids) > sampling.max_tokens:
            raise InvalidInput(
                "a resumed choice has more tokens than it may have", reason="BAD_RESUME", field=f"{field}.token_ids"
            )
        check_token_ids(message.token_ids, vocab_size, f"{field}.token_ids")
        yield ResumedChoice(message.index, tuple(message.token_ids), message.finished)


def _effort(given: str, *, thinking: bool | None) -> str:
    """The reasoning effort; a template never gets a caller's own word."""
    if given not in _EFFORTS or (given == "none" and thinking):
        why = f"the effort must be one of {', '.join(_EFFORTS[1:])}, and none is not to think"
        raise InvalidInput(why, reason="BAD_EFFORT", field="chat.reasoning_effort")
    return given


def _variables(text: str, max_depth: int) -> dict[str, Any]:
    value = parsed_json(text, max_depth) if text else {}
    if value is None:
        why = "this is not a JSON object, or is nested too deeply"
        raise InvalidInput(why, reason="BAD_VARIABLE", field="chat.template_variables")
    return value


def _too_many_items(limit: int, kind: str, count: int) -> InvalidInput:
    said = f"a request may hold at most {limit} {kind}{'' if limit == 1 else 's'}, and this one has {count}"
    return InvalidInput(said, reason="TOO_MANY_ITEMS", field="media")
