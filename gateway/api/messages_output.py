"""Builds a message: its blocks, and the events of a stream."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic_core import from_json

from gateway.chat_answers import ChatEvent, ChoiceDelta, ChoiceEnd
from gateway.output_parser import ArgumentsDelta, CallLeftOpen, CallStart, Piece, ReasoningDelta, TextDelta
from twinlens.v1 import llm_pb2

_SIGNATURE: Final = "unsigned"
"""Signature of reasoning blocks. Clients only send such a block back if it has one; it is not used here."""
_DELTAS: Final = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""Of each kind of block: the kind of its deltas, and their field."""


_BEGIN: Final = re.compile(r"\s*\{\s*")
_KEY: Final = re.compile(r'\s*"(?:[^"\\]|\\.)*"\s*:\s*')
_BEHIND: Final = re.compile(r"\s*([,}])")
_DECODER: Final = json.JSONDecoder(strict=False)


@dataclass(slots=True)
class _Block:
    """A block that has been begun. `head` is how a stream begins it."""

    head: dict[str, Any]
    pieces: list[str] = field(default_factory=list)

    def content(self) -> dict[str, Any]:
        """The whole block."""
        said = "".join(self.pieces)
        match self.head["type"]:
            case "tool_use":
                return {**self.head, "input": _input(said)}
            case "thinking":
                return {**self.head, "thinking": said, "signature": _SIGNATURE}
            case _:
                return {**self.head, "text": said}


class Answer:
    """The output so far, as blocks of a message, and the events of a stream. `fills` says whether so many tokens, of
    prompt and answer, fill a context. Arguments of `eager` tools come in pieces, those of others when they end."""

    def __init__(
        self,
        request_id: str,
        model: str,
        max_tokens: int,
        fills: Callable[[int], bool],
        eager: Container[str] = frozenset(),
    ) -> None:
        self._head = {"id": f"msg_{request_id}", "type": "message", "role": "assistant", "model": model}
        self._max_tokens = max_tokens
        self._fills = fills
        self._eager = eager
        self._blocks: list[_Block] = []
        self._open = ""
        self._calls = 0
        self._finished = llm_pb2.GenerateFinished()

    def add(self, said: ChatEvent) -> Iterator[dict[str, Any]]:
        """Takes more output; returns the events of a stream."""
        match said:
            case llm_pb2.GenerateStarted():
                yield self._start(said)
            case ChoiceDelta(pieces):
                yield from self._add(pieces)
            case ChoiceEnd():
                yield from self._finish(said)

    def _start(self, started: llm_pb2.GenerateStarted) -> dict[str, Any]:
        """The prompt is laid out."""
        usage = _usage(llm_pb2.Usage(prompt_tokens=started.prompt_tokens, cached_tokens=started.cached_tokens))
        empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return {"type": "message_start", "message": {**self._head, **empty}}

    def _add(self, pieces: Iterable[Piece]) -> Iterator[dict[str, Any]]:
        for piece in pieces:
            match piece:
                case TextDelta(text):
                    yield from self._say("text", text)
                case ReasoningDelta(text):
                    yield from self._say("thinking", text)
                case CallStart(name):
                    yield from self._enter("tool_use", id=f"toolu_{uuid.uuid4().hex[:24]}", name=name, input={})
                case ArgumentsDelta(text):
                    is_eager = self._blocks[-1].head["name"] in self._eager
                    yield from self._say("tool_use", text if is_eager else _whole_fields(text))
                case CallLeftOpen():
                    yield from self._leave()

    def _finish(self, ended: ChoiceEnd) -> Iterator[dict[str, Any]]:
        """It is complete."""
        yield from self._add(ended.pieces)
        yield from self._leave()
        self._finished, self._calls = ended.finished, ended.calls
        yield {"type": "message_delta", "delta": self._stop(), "usage": _usage(ended.finished.usage)}
        yield {"type": "message_stop"}

    def message(self) -> dict[str, Any]:
        """The whole message."""
        content = [block.content() for block in self._blocks]
        return {**self._head, "content": content, **self._stop(), "usage": _usage(self._finished.usage)}

    def _stop(self) -> dict[str, Any]:
        """Why it ended."""
        finished, usage = self._finished, self._finished.usage
        if finished.reason == llm_pb2.FINISH_REASON_LENGTH:  # by the caller's bound, the operator's, or the context's
            said = usage.completion_tokens
            full = said < self._max_tokens and self._fills(usage.prompt_tokens + said)
            reason = "model_context_window_exceeded" if full else "max_tokens"
        elif finished.stop_text:
            reason = "stop_sequence"
        else:
            reason = "tool_use" if self._calls else "end_turn"  # a call that was begun and is malformed does not count
        return {"stop_reason": reason, "stop_sequence": finished.stop_text or None}

    def _say(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        """More of a block; words and thoughts go on in the one that is open."""
        if self._open != kind:
            yield from self._enter(kind, **({"text": ""} if kind == "text" else {"thinking": "", "signature": ""}))
        self._blocks[-1].pieces.append(text)
        name, part = _DELTAS[kind]
        yield self._about("content_block_delta", delta={"type": name, part: text})

    def _enter(self, kind: str, **fields: Any) -> Iterator[dict[str, Any]]:
        yield from self._leave()
        self._open = kind
        self._blocks.append(_Block({"type": kind, **fields}))
        yield self._about("content_block_start", content_block=self._blocks[-1].head)

    def _leave(self) -> Iterator[dict[str, Any]]:
        """Ends the block that is open."""
        if self._open == "thinking":
            signature = {"type": "signature_delta", "signature": _SIGNATURE}
            yield self._about("content_block_delta", delta=signature)
        if self._open:
            yield self._about("content_block_stop")
        self._open = ""

    def _about(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "index": len(self._blocks) - 1, **fields}


def _input(arguments: str) -> dict[str, Any]:
    """A call's arguments; where they are cut off, the fields that there are.

    >>> _input('{"city": "Rome"'), _input("{"), _input("")
    ({'city': 'Rome'}, {}, {})
    """
    try:
        given = from_json(arguments, allow_partial=True)
    except ValueError:  # nothing yet, or nested more deeply than an answer can be
        return {}
    return given if isinstance(given, dict) else {}


def _whole_fields(arguments: str) -> str:
    """Arguments as they are, or, where they are cut off, up to the last complete field.

    >>> _whole_fields('{"city": "Rome", "days": [1'), _whole_fields('{"a": {"b": 1}, "c": 1'), _whole_fields('{"a": "')
    ('{"city": "Rome"', '{"a": {"b": 1}', '{')
    >>> _whole_fields('{"a": 1} ')
    '{"a": 1} '
    """
    begin = _BEGIN.match(arguments)
    end = at = begin.end() if begin else 0
    while key := _KEY.match(arguments, at):
        try:
            _, at = _DECODER.raw_decode(arguments, key.end())
        except (ValueError, RecursionError):
            return arguments[:end]
        behind = _BEHIND.match(arguments, at)
        if behind is None:
            return arguments[: end if arguments[at - 1].isdigit() else at]  # a number may go on
        if behind[1] == "}":
            return arguments
        end, at = at, behind.end()
    return arguments if begin and arguments[at:].strip() == "}" else arguments[:end]


def _usage(counted: llm_pb2.Usage) -> dict[str, Any]:
    """Usage as Anthropic counts it: prompt tokens without those from the prefix cache."""
    return {
        "input_tokens": counted.prompt_tokens - counted.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counted.cached_tokens,
        "output_tokens": counted.completion_tokens,
        "output_tokens_details": {"thinking_tokens": counted.reasoning_tokens},
    }
