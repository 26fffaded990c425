"""Builds a response: its items, and the events of a stream."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from common.errors import TwinlensError
from gateway.api.fields import Model
from gateway.api.responses_request import ResponsesRequest
from gateway.chat_answers import ChatEvent, ChoiceDelta, ChoiceEnd
from gateway.convert import answers
from gateway.errors import code_of, message_of, param_in, status_of
from gateway.output_parser import ArgumentsDelta, CallLeftOpen, CallStart, Piece, ReasoningDelta, TextDelta
from gateway.sealed_reasoning import sealed
from gateway.stream import event
from gateway.tool_parsers.json_end import broken_end
from twinlens.v1 import llm_pb2


@dataclass(frozen=True, slots=True)
class _Told:
    """How an item's text is told: the field that has it, the type of its part, and the names of its events."""

    field: str
    type: str
    part: str
    text: str

    def empty(self) -> dict[str, Any]:
        """A part without text."""
        return {"type": self.type, "text": ""}

    @property
    def place(self) -> dict[str, int]:
        """The place of an item's only part."""
        return {f"{self.field}_index": 0}


_WORDS: Final = _Told("content", "output_text", "response.content_part", "response.output_text")
_THOUGHTS: Final = _Told("content", "reasoning_text", "response.content_part", "response.reasoning_text")
_SUMMARY: Final = _Told("summary", "summary_text", "response.reasoning_summary_part", "response.reasoning_summary_text")


class Output:
    """The output so far, as the items of a response, and the events of a stream."""

    def __init__(self, asked: ResponsesRequest, request_id: str, model: str) -> None:
        self._items: list[dict[str, Any]] = []
        self._open = ""
        self._finished = llm_pb2.GenerateFinished()
        self._done = False
        self._error: TwinlensError | None = None
        self._told = 0
        self._texts = {"message": _WORDS, "reasoning": _SUMMARY if asked.summary else _THOUGHTS}
        self._groups = {each.function.name: each.group.name for each in asked.functions if each.group}
        self._seals = asked.with_sealed_reasoning
        self._with_logprobs = asked.with_logprobs
        self._likely: list[dict[str, Any]] = []  # how likely the tokens were whose text is still to come
        form = asked.text.format if asked.text else None
        self._head = {
            "id": f"resp_{request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "model": model,
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": asked.reasoning and asked.reasoning.effort, "summary": asked.summary},
            "store": False,
            "temperature": asked.temperature,
            "text": {"format": form.model_dump(by_alias=True, exclude_none=True) if form else {"type": "text"}},
            "tool_choice": asked.tool_choice.model_dump() if isinstance(asked.tool_choice, Model) else "auto",
            "tools": [tool.model_dump() for tool in asked.tools or ()],
            "top_p": asked.top_p,
            "top_logprobs": asked.top_logprobs or 0,
            "truncation": asked.truncation or "disabled",
            "user": asked.user,
        }
        if isinstance(asked.tool_choice, str):
            self._head["tool_choice"] = asked.tool_choice

    def response(self) -> dict[str, Any]:
        """The response as it is now."""
        cut = self._finished.reason == llm_pb2.FINISH_REASON_LENGTH
        status = ("incomplete" if cut else "completed") if self._done else "in_progress"
        if self._error is not None:
            status = "failed"
        counted = answers.usage([[self._finished]])
        usage = {
            "input_tokens": counted["prompt_tokens"],
            "input_tokens_details": counted["prompt_tokens_details"],
            "output_tokens": counted["completion_tokens"],
            "output_tokens_details": counted["completion_tokens_details"],
            "total_tokens": counted["total_tokens"],
        }
        return {
            **self._head,
            "error": None if self._error is None else _as_error(self._error),
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if self._done and cut else None,
            "output": [dict(item) for item in self._items],
            "usage": usage if self._done else None,
        }

    def add(self, said: ChatEvent) -> Iterator[dict[str, Any]]:
        """Takes more output; returns the events of a stream."""
        match said:
            case llm_pb2.GenerateStarted():
                yield {"type": "response.created", "response": self.response()}
                yield {"type": "response.in_progress", "response": self.response()}
            case ChoiceDelta(pieces, new):
                if self._with_logprobs:
                    self._likely += answers.chat_logprobs(new.logprobs)
                yield from self._add(pieces)
                if pieces and self._open != "message":
                    self._likely.clear()  # of reasoning and calls nothing is told
            case ChoiceEnd():
                yield from self._finish(said)

    def _add(self, pieces: Iterable[Piece]) -> Iterator[dict[str, Any]]:
        for piece in pieces:
            match piece:
                case TextDelta(text):
                    yield from self._enter("message")
                    new, self._likely = self._likely, []
                    if self._with_logprobs:
                        self._part["logprobs"] += new
                    yield self._more(text, logprobs=new)
                case ReasoningDelta(text):
                    yield from self._enter("reasoning")
                    yield self._more(text)
                case CallStart(name):
                    yield from self._enter("function_call", name)
                case ArgumentsDelta(text):
                    self._items[-1]["arguments"] += text
                    yield self._about("response.function_call_arguments.delta", delta=text)
                case CallLeftOpen():
                    end = broken_end(self._items[-1]["arguments"])
                    self._items[-1]["arguments"] += end
                    yield self._about("response.function_call_arguments.delta", delta=end)
                    yield from self._leave("incomplete")

    def _finish(self, ended: ChoiceEnd) -> Iterator[dict[str, Any]]:
        """It is complete."""
        cut = ended.finished.reason == llm_pb2.FINISH_REASON_LENGTH
        yield from self._add(ended.pieces)
        if self._open == "message" and self._with_logprobs:
            self._part["logprobs"] += self._likely
        self._finished = ended.finished
        yield from self._leave("incomplete" if cut and self._open != "function_call" else "completed")
        self._done = True
        kind = "response.incomplete" if cut else "response.completed"
        yield {"type": kind, "response": self.response()}

    def event(self, told: dict[str, Any]) -> bytes:
        """An event of the stream, with its number."""
        self._told += 1
        return event({**told, "sequence_number": self._told - 1}, told["type"])

    def failed(self, error: TwinlensError) -> bytes:
        """The last event of a stream that fails after it has begun."""
        self._error = error
        if self._open:
            self._items[-1]["status"] = "incomplete"
        said = {"code": code_of(error), "message": message_of(error), "param": param_in(error)}
        response = {"type": "response.failed", "response": self.response()}
        return self.event({"type": "error", **said}) + self.event(response)

    @property
    def _part(self) -> dict[str, Any]:
        """The part with the open item's text."""
        part: dict[str, Any] = self._items[-1][self._texts[self._open].field][0]
        return part

    def _more(self, text: str, **fields: Any) -> dict[str, Any]:
        """More of the open item's text."""
        told = self._texts[self._open]
        self._part["text"] += text
        return self._about(f"{told.text}.delta", **told.place, delta=text, **fields)

    def _about(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "item_id": self._items[-1]["id"], "output_index": len(self._items) - 1, **fields}

    def _enter(self, kind: str, name: str = "") -> Iterator[dict[str, Any]]:
        """Begins an item of this kind; words and thoughts go on in the one that is open."""
        if self._open == kind and kind != "function_call":
            return
        yield from self._leave("completed")
        self._open = kind
        item: dict[str, Any] = {"type": kind, "status": "in_progress"}
        match kind:
            case "message":
                part = {**_WORDS.empty(), "annotations": [], **({"logprobs": []} if self._with_logprobs else {})}
                item |= {"id": f"msg_{uuid.uuid4().hex}", "role": "assistant", "content": [part]}
            case "reasoning":
                told = self._texts[kind]
                item |= {"id": f"rs_{uuid.uuid4().hex}", "summary": [], told.field: [told.empty()]}
            case _:
                item |= {"id": f"fc_{uuid.uuid4().hex}", "call_id": f"call_{uuid.uuid4().hex[:24]}"}
                item |= {"name": name, "arguments": ""}
                item |= {"namespace": self._groups[name]} if name in self._groups else {}
        self._items.append(item)
        texts = self._texts.get(kind)
        empty = {**item, texts.field: []} if texts else dict(item)
        yield {"type": "response.output_item.added", "output_index": len(self._items) - 1, "item": empty}
        if texts:
            yield self._about(f"{texts.part}.added", **texts.place, part=dict(self._part))

    def _leave(self, status: str) -> Iterator[dict[str, Any]]:
        """Ends the item that is open."""
        if not self._open:
            return
        item, kind = self._items[-1], self._open
        item["status"] = status
        if texts := self._texts.get(kind):
            part = dict(self._part)
            logprobs = {"logprobs": part.get("logprobs", [])} if kind == "message" else {}
            yield self._about(f"{texts.text}.done", **texts.place, text=part["text"], **logprobs)
            yield self._about(f"{texts.part}.done", **texts.place, part=part)
            if kind == "reasoning" and self._seals:
                item["encrypted_content"] = sealed(part["text"])
        else:
            yield self._about("response.function_call_arguments.done", name=item["name"], arguments=item["arguments"])
        self._open = ""
        yield {
            "type": "response.output_item.done",
            "output_index": len(self._items) - 1,
            "item": json.loads(json.dumps(item)),
        }


def _as_error(error: TwinlensError) -> dict[str, str]:
    """Why a response has failed, in the words that the API has for it."""
    status = status_of(error)
    code = "rate_limit_exceeded" if status == 429 else "server_error" if status >= 500 else "invalid_prompt"
    return {"code": code, "message": message_of(error)}
