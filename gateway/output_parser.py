"""Takes apart what a model says: its reasoning, its words, and the calls that it makes.

Text comes in pieces of any length, and what is made of it is the same wherever it is cut. A call that is not well
formed is the model's words, as it wrote them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

THINK: Final = ("<think>", "</think>")
CALL: Final = ("<tool_call>", "</tool_call>")

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
_OBJECT = re.compile(r"\s*\{")
_QUOTE_OR_END = re.compile('"|' + CALL[1])
_IN_TEXT = re.compile(r'(?:[^"\\]++|\\.)*+', re.DOTALL)


class ToolFormat(Enum):
    """How a model writes its calls."""

    NONE = "none"
    """It may not call, and nothing is looked for."""
    JSON = "json"
    """`<tool_call>{"name": …, "arguments": …}</tool_call>`, as Qwen and Hermes do."""
    XML = "xml"
    """`<tool_call><function=…><parameter=…>…</parameter></function></tool_call>`, as Qwen3-Coder and Qwen3.5 do."""
    LIST = "list"
    """The whole answer is a list of calls: it had to be."""
    ARGUMENTS = "arguments"
    """The whole answer is the arguments of the only function in question."""


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What the model says."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """What it thinks."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins."""

    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of the last call's arguments, which are JSON."""

    text: str


Piece = TextDelta | ReasoningDelta | CallStart | ArgumentsDelta


class OutputParser:
    """Takes one choice's text apart. `functions` are the schemas of what may be called, by name; `single` lets the
    first call stand alone; `thinking`: the text begins inside of the model's reasoning; `constrained`: the answer must
    have a form, which leaves no room for reasoning but for that which the prompt has begun."""

    def __init__(
        self,
        tools: ToolFormat,
        functions: Mapping[str, dict[str, Any]],
        *,
        single: bool = False,
        thinking: bool = False,
        constrained: bool = False,
    ) -> None:
        self._tools = tools
        self._functions = functions
        self._single = single
        self._answer = {ToolFormat.LIST: self._list, ToolFormat.ARGUMENTS: self._arguments}.get(tools, self._words)
        self._step = self._answer if constrained else self._beginning
        self.begin(thinking=thinking)
        self._held = ""
        self._gap = ""
        self._read = 0
        """How far a call has been looked through for its end mark, which may stand in a text: what it has begun in."""
        self._in_text = False
        self.calls = 0

    def begin(self, *, thinking: bool) -> None:
        """Before the first text: whether it begins inside of the model's reasoning."""
        if thinking:
            self._step = self._before_reasoning

    def feed(self, text: str) -> list[Piece]:
        """What is certain with this text."""
        return self._go_on(text, last=False)

    def end(self) -> list[Piece]:
        """What is left when there is no more."""
        return self._go_on("", last=True)

    def _go_on(self, text: str, *, last: bool) -> list[Piece]:
        self._held += text
        out: list[Piece] = []
        while self._step(out, last=last):
            pass
        return out

    def _beginning(self, out: list[Piece], *, last: bool) -> bool:  # noqa: ARG002
        """Whether the model thinks first."""
        said = self._held.lstrip()
        if said.startswith(THINK[0]):
            self._held = said[len(THINK[0]) :]
            self._step = self._before_reasoning
            return True
        if THINK[0].startswith(said) and not last:
            return False
        self._step = self._answer
        return True

    def _before_reasoning(self, out: list[Piece], *, last: bool) -> bool:  # noqa: ARG002
        self._held = self._held.lstrip("\n")
        if not self._held:
            return False
        self._step = self._reasoning
        return True

    def _reasoning(self, out: list[Piece], *, last: bool) -> bool:
        """Up to its end mark; line ends beside the marks belong to them."""
        thought, mark, rest = self._held.partition(THINK[1])
        if mark:
            _add(out, ReasoningDelta(thought.rstrip()))
            self._held = rest
            self._step = self._after_reasoning
            return True
        keep = len(thought) if last else _certain(thought, THINK[1])
        _add(out, ReasoningDelta(thought[:keep].rstrip() if last else thought[:keep]))
        self._held = thought[keep:]
        return False

    def _after_reasoning(self, out: list[Piece], *, last: bool) -> bool:  # noqa: ARG002
        self._held = self._held.lstrip()
        if not self._held:
            return False
        self._step = self._answer
        return True

    def _words(self, out: list[Piece], *, last: bool) -> bool:
        """Up to a call; white space before calls and between them belongs to them."""
        if self._tools is ToolFormat.NONE:
            _add(out, TextDelta(self._held))
            self._held = ""
            return False
        words, mark, rest = self._held.partition(CALL[0])
        if mark:
            said = words.rstrip()
            self._gap = words[len(said) :]
            _add(out, TextDelta(said))
            self._held, self._read, self._in_text = rest, 0, False
            self._step = self._call
            return True
        keep = len(words) if last else _certain(words, CALL[0])
        if not (last and self.calls and not words.strip()):
            _add(out, TextDelta(words[:keep]))
        self._held = words[keep:]
        return False

    def _call(self, out: list[Piece], *, last: bool) -> bool:
        """Up to its end mark, or, where that never comes, the whole rest."""
        end = self._end_of_call()
        if end < 0 and not last:
            return False
        body = self._held if end < 0 else self._held[:end]
        rest = "" if end < 0 else self._held[end + len(CALL[1]) :]
        call = _json_call(body) if self._is_json() else self._xml_call(body)
        if call is None:
            _add(out, TextDelta(self._gap + CALL[0] + self._held[: len(self._held) - len(rest)]))
        else:
            self._made(out, *call)
        self._held = rest
        self._step = self._words
        return True

    def _is_json(self) -> bool:
        """Strict functions are called by JSON, whichever form the model was taught."""
        return self._tools is ToolFormat.JSON or _OBJECT.match(self._held) is not None

    def _end_of_call(self) -> int:
        """Where the mark stands, -1 as long as there is none; one inside of a JSON text is none. It goes on where it
        stopped the last time."""
        if not self._is_json():
            return self._held.find(CALL[1])
        while True:
            if self._in_text:
                self._read = _IN_TEXT.match(self._held, self._read).end()  # type: ignore[union-attr] # "" matches
                if not self._held.startswith('"', self._read):
                    return -1
            elif found := _QUOTE_OR_END.search(self._held, self._read):
                if found[0] == CALL[1]:
                    return found.start()
                self._read = found.start()
            else:
                self._read = max(self._read, len(self._held) - len(CALL[1]) + 1)
                return -1
            self._read += 1
            self._in_text = not self._in_text

    def _made(self, out: list[Piece], name: str, arguments: str) -> None:
        self.calls += 1
        if not (self._single and self.calls > 1):
            out += [CallStart(name), ArgumentsDelta(arguments)]

    def _xml_call(self, body: str) -> tuple[str, str] | None:
        if (function := _FUNCTION.fullmatch(body)) is None:
            return None
        name, inner = function[1].strip(), function[2]
        kinds = self._functions.get(name, {}).get("properties", {})
        arguments: dict[str, Any] = {}
        at = 0
        while parameter := _PARAMETER.match(inner, at):
            key = parameter[1].strip()
            arguments[key] = _value(parameter[2], kinds.get(key) if isinstance(kinds, dict) else None)
            at = parameter.end()
        return None if inner[at:].strip() else (name, json.dumps(arguments, ensure_ascii=False))

    def _list(self, out: list[Piece], *, last: bool) -> bool:
        """The answer is a list of calls, once it is whole."""
        if not last:
            return False
        calls = _parsed(self._held)
        if isinstance(calls, list) and calls and all(_is_call(call, "parameters") for call in calls):
            for call in calls:
                self._made(out, call["name"], json.dumps(call["parameters"], ensure_ascii=False))
        else:
            _add(out, TextDelta(self._held))
        self._held = ""
        return False

    def _arguments(self, out: list[Piece], *, last: bool) -> bool:  # noqa: ARG002
        if self._held and not self.calls:
            self.calls = 1
            out.append(CallStart(next(iter(self._functions))))
        if self._held:
            out.append(ArgumentsDelta(self._held))
        self._held = ""
        return False


def _add(out: list[Piece], piece: TextDelta | ReasoningDelta) -> None:
    if piece.text:
        out.append(piece)


def _certain(text: str, mark: str) -> int:
    """How much of a text can neither be the beginning of the mark nor white space before it.

    >>> _certain("so be it \\n<too", "<tool_call>"), _certain("a <b", "<tool_call>")
    (8, 4)
    """
    start = next((at for at in range(max(0, len(text) - len(mark) + 1), len(text)) if mark.startswith(text[at:])), None)
    return len(text[:start].rstrip())


def _json_call(body: str) -> tuple[str, str] | None:
    call = _parsed(body)
    for key in ("arguments", "parameters"):
        if _is_call(call, key):
            return call["name"], json.dumps(call[key], ensure_ascii=False)
    return None


def _is_call(call: Any, key: str) -> bool:
    return isinstance(call, dict) and isinstance(call.get("name"), str) and isinstance(call.get(key), dict)


def _parsed(text: str) -> Any:
    """The value of a JSON text; None where it is none, or no answer could hold it: NaN, half of a surrogate pair."""
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return None
    return value


def _value(text: str, schema: Any) -> Any:
    """A parameter's value: a text, unless its schema says otherwise and it is what that says."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind in (None, "string"):
        return text
    value = _parsed(text)
    return text if value is None and text.strip() != "null" else value
