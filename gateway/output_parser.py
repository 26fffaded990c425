"""Parses a model's output: reasoning, text and calls.

Output comes in pieces of any length, and the result does not depend on where it is cut. A malformed call is text, as
the model wrote it; a stream may have reported its beginning before.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Final

from gateway.tool_parsers.arguments import parsed
from gateway.tool_parsers.begun import BegunCall
from gateway.tool_parsers.registry import TOOL_PARSERS
from gateway.tool_parsers.tool_format import ToolFormat
from gateway.tool_parsers.tool_parser import Call, Functions, Reader, Stretch
from twinlens.v1 import llm_pb2

THINK: Final = ("<think>", "</think>")
"""The marks around a model's reasoning, if its service does not tell them."""
_PIECE: Final = 1024
"""Characters parsed at a time: a buffer with a mark is copied, and searched again, no more often."""
_TRIES: Final = 8
"""Calls without an end that are looked for to the end of an answer: each reads all that follows once more."""


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text of the model."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """Reasoning of the model."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins."""

    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of the last call's arguments, which are JSON."""

    text: str


@dataclass(frozen=True, slots=True)
class CallLeftOpen:
    """The last call was begun and is malformed, so its words follow as text; or the call was required and is cut
    off."""


Piece = TextDelta | ReasoningDelta | CallStart | ArgumentsDelta | CallLeftOpen


class OutputParser:
    """Parses one choice. `functions` are the schemas of the callable functions, by name; `single` allows one call only;
    `constrained`: the answer has a form, which leaves no room for reasoning except that which the prompt has begun, or
    for which the form has its mark in `form_text`; `calls_or_form`: it has its form, or is calls; `streams`: calls are
    reported before they are complete, or only those of functions that it names."""

    def __init__(
        self,
        tools: ToolFormat,
        functions: Functions,
        *,
        single: bool = False,
        constrained: bool = False,
        form_text: str = "",
        calls_or_form: bool = False,
        streams: bool | Container[str] = False,
    ) -> None:
        self._parser = TOOL_PARSERS.get(tools)
        self._functions = functions
        self._single = single
        self._streamed = _named(functions, streams)
        self._mark = "" if self._parser is None else (self._parser.section or (self._parser.begin,))[0]
        words = self._call if self._parser and not self._mark else self._words
        if calls_or_form and self._mark:
            words = self._calls_or_form
        self._answer = {ToolFormat.LIST: self._list, ToolFormat.ARGUMENTS: self._arguments}.get(tools, words)
        self._behind_call = self._list if tools is ToolFormat.LIST else self._words
        self._step = self._answer if constrained else self._beginning
        self._form_text = form_text
        self._marks = THINK
        self._waiting: list[str] = []  # to be parsed after what is held; the last is the first
        self._gap: list[str] = []  # white space before what is held
        self._held = ""
        self._tries = 0
        self._before = ""  # the mark of a call that is read, and white space before it
        self._reader: Reader | None = None
        self._begun: BegunCall | None = None  # the same call, as reported to streams
        self._sectioned = 0  # calls before the section that is read
        self._cut = False
        self._told: list[str] = []  # of arguments that are the answer
        self.calls = 0

    def begin(self, started: llm_pb2.GenerateStarted) -> None:
        """Called before the first text, with the marks around reasoning, and whether the text begins inside it."""
        if started.reasoning_unread:
            self._step = self._answer
            return
        self._marks = (started.reasoning_begin or THINK[0], started.reasoning_end or THINK[1])
        if started.thinking:
            self._step = self._before_reasoning
        elif self._marks[0] in self._form_text:
            self._step = self._answer

    def feed(self, text: str) -> list[Piece]:
        """What this text completes."""
        self._waiting.append(text)
        return self._go_on(last=False)

    def end(self, *, cut: bool = False) -> list[Piece]:
        """What is left at the end; `cut`: the answer has reached its maximum length."""
        self._cut = cut
        return self._go_on(last=True)

    def _go_on(self, *, last: bool) -> list[Piece]:
        out: list[Piece] = []
        while True:
            if self._waiting:
                self._hold_more()
            elif not last or not self._step(out, last=True):
                return out
            while self._step(out, last=False):
                pass

    def _hold_more(self) -> None:
        text = self._waiting.pop()
        if len(text) > _PIECE:
            self._waiting.append(text[_PIECE:])
            text = text[:_PIECE]
        held, self._held = self._held, ""  # a string that has one name grows in place
        held += text
        self._held = held

    def _drop(self, size: int) -> None:
        """Drops this much of what is held."""
        if rest := self._held[size + _PIECE :]:
            self._waiting.append(rest)
        self._held = self._held[size : size + _PIECE]

    def _hold_blanks(self) -> None:
        """Counts white space at the beginning of what is held."""
        said = self._held.lstrip()
        if blanks := self._held[: len(self._held) - len(said)]:
            self._gap.append(blanks)
        self._held = said

    def _behind_gap(self, text: str) -> str:
        """It, with the white space before it."""
        whole = "".join((*self._gap, text))
        self._gap.clear()
        return whole

    def _gave_up(self) -> None:
        """An answer that has no more came to its end within a call. After some, the rest is no call."""
        self._tries += 1
        if self._tries == _TRIES:
            self._parser = None

    def _beginning(self, out: list[Piece], *, last: bool) -> bool:  # noqa: ARG002
        """Whether the model thinks first."""
        self._hold_blanks()
        if self._held.startswith(self._marks[0]):
            self._gap.clear()
            self._held = self._held[len(self._marks[0]) :]
            self._step = self._before_reasoning
            return True
        if self._marks[0].startswith(self._held) and not last:
            return False
        self._held = self._behind_gap(self._held)
        self._step = self._answer
        return True

    def _before_reasoning(self, out: list[Piece], *, last: bool) -> bool:  # noqa: ARG002
        self._held = self._held.lstrip("\n")
        if not self._held:
            return False
        self._step = self._reasoning
        return True

    def _reasoning(self, out: list[Piece], *, last: bool) -> bool:
        """Reasoning up to its end mark, or in some forms to a call; newlines beside the marks belong to these."""
        places = [(place, mark) for mark in self._ends if (place := self._held.find(mark)) >= 0]
        if places:
            place, mark = min(places)
            thought = self._held[:place].rstrip()
            if thought:
                out.append(ReasoningDelta(self._behind_gap(thought)))
            is_end = mark == self._marks[1]
            if not is_end and self._parser and self._parser.ends_reasoning == "call":
                self._before = self._behind_gap(self._held[len(thought) : place + len(mark)])
                self._held = self._held[place + len(mark) :]
                self._step = self._call_while_thinking
                return True
            self._gap.clear()
            self._held = self._held[place + (len(mark) if is_end else 0) :]
            self._step = self._after_reasoning
            return True
        start = len(self._held) if last else _may_begin(self._held, self._ends)
        if thought := self._held[:start].rstrip():
            out.append(ReasoningDelta(self._behind_gap(thought)))
        self._gap.append(self._held[len(thought) : start])
        self._held = self._held[start:]
        return False

    @property
    def _ends(self) -> tuple[str, ...]:
        """The texts that end reasoning."""
        calls = self._parser is not None and self._parser.ends_reasoning is not None
        return (self._marks[1], self._mark) if calls else (self._marks[1],)

    def _call_while_thinking(self, out: list[Piece], *, last: bool) -> bool:
        """After the mark of a call inside reasoning: a call, which ends it, or more reasoning, maybe up to its end
        mark."""
        assert self._parser is not None
        self._reader = self._reader or self._parser.reader(self._functions)
        read = self._reader.read(self._held, last=last)
        if read is None:
            return False
        if last and not read.calls:
            self._gave_up()
        if read.calls and all(name in self._functions for name, _ in read.calls):
            for call in read.calls:
                self._made(out, call)
            self._step = self._words
        else:
            thought, mark, behind = (self._before + self._held[: read.size]).partition(self._marks[1])
            _add(out, ReasoningDelta(thought.rstrip()))
            if mark:
                self._waiting.append(self._held[read.size :])
                self._held = mark + behind
                read = Stretch(0, [])
            self._step = self._reasoning
        self._drop(read.size)
        self._reader, self._before = None, ""
        return True

    def _after_reasoning(self, out: list[Piece], *, last: bool) -> bool:  # noqa: ARG002
        self._held = self._held.lstrip()
        if not self._held:
            return False
        self._step = self._answer
        return True

    def _calls_or_form(self, out: list[Piece], *, last: bool) -> bool:  # noqa: ARG002
        """An answer with a form, whose texts may contain marks of calls, or calls from its first character on."""
        self._hold_blanks()
        if self._mark.startswith(self._held) and self._held != self._mark and not last:
            return False
        self._step = self._words if self._held.startswith(self._mark) else self._form
        self._held = self._behind_gap(self._held)
        return True

    def _form(self, out: list[Piece], *, last: bool) -> bool:  # noqa: ARG002
        _add(out, TextDelta(self._held))
        self._held = ""
        return False

    def _words(self, out: list[Piece], *, last: bool) -> bool:
        """Up to a call; white space before calls and between them belongs to them."""
        if self._parser is None or not self._mark:
            _add(out, TextDelta(self._behind_gap(self._held)))
            self._held = ""
            return False
        bare = self._parser.bare
        marks = (self._mark, bare[0]) if bare else (self._mark,)
        words = self._held
        if places := [(place, mark) for mark in marks if (place := words.find(mark)) >= 0]:
            place, mark = min(places)
            if said := words[:place].rstrip():
                out.append(TextDelta(self._behind_gap(said)))
            self._before = self._behind_gap(words[len(said) : place + len(mark)])
            self._held = words[place + len(mark) :]
            self._sectioned = self.calls
            self._reader = bare[1](self._functions) if bare and mark == bare[0] else None
            self._step = self._section if self._parser.section else self._call
            return True
        start = len(words) if last else _may_begin(words, marks)
        said = words[:start].rstrip()
        if said or (last and not self.calls):
            _add(out, TextDelta(self._behind_gap(words if last else said)))
        if not last:
            self._gap.append(words[len(said) : start])
        self._held = words[start:]
        return False

    def _section(self, out: list[Piece], *, last: bool) -> bool:
        """Before a call, or the end of a section of calls; anything else is text."""
        assert self._parser is not None
        assert self._parser.section is not None
        self._hold_blanks()
        said, begin, end = self._held, self._parser.begin, self._parser.section[1]
        if not last and (begin.startswith(said) or end.startswith(said)) and said not in (begin, end):
            return False
        self._step = self._words
        if said.startswith(begin):
            self._before += self._behind_gap(begin)
            self._held = said[len(begin) :]
            self._step = self._call
        elif said.startswith(end) and not self._before:
            self._gap.clear()
            self._held = said[len(end) :]
        else:
            _add(out, TextDelta(self._before))
        return True

    def _call(self, out: list[Piece], *, last: bool) -> bool:
        """After the mark of a call, or an answer that is a call as a whole."""
        assert self._parser is not None
        self._reader = self._reader or self._parser.reader(self._functions)
        if self._streamed and not (self._single and self.calls):
            self._begun = self._begun or BegunCall(self._parser.heads, self._streamed)
            self._tell(out, self._begun)
        read = self._reader.read(self._held, last=last)
        if read is None:
            return False
        if not read.calls:
            self._no_call(out, self._before + self._held[: read.size])
        for call in read.calls:
            self._made(out, call)
        self._drop(read.size)
        self._reader, self._begun, self._before = None, None, ""
        if last and not read.calls:
            self._gave_up()
        in_section = self._parser and self._parser.section and self.calls > self._sectioned
        self._step = self._section if in_section else self._behind_call
        return True

    def _no_call(self, out: list[Piece], text: str) -> None:
        """What was read is text, or a required call that is cut off."""
        had_to_be = self._cut and self._behind_call == self._list
        if had_to_be and self._begun is None:
            assert self._parser is not None
            self._begun = BegunCall(self._parser.heads, self._functions)
            self._tell(out, self._begun)
        is_begun = self._begun is not None and bool(self._begun.name)
        if is_begun:
            out.append(CallLeftOpen())
        if not (is_begun and had_to_be):
            _add(out, TextDelta(text))

    def _tell(self, out: list[Piece], begun: BegunCall) -> None:
        """Reports what is certain of an incomplete call."""
        was_named = bool(begun.name)
        more = begun.more(self._held)
        if begun.name and not was_named:
            out.append(CallStart(begun.name))
        if more:
            out.append(ArgumentsDelta(more))

    def _made(self, out: list[Piece], call: Call) -> None:
        begun, self._begun = self._begun, None
        self.calls += 1
        if begun and begun.name:
            out.append(ArgumentsDelta(call[1][begun.num_sent :]))
        elif not (self._single and self.calls > 1):
            out += [CallStart(call[0]), ArgumentsDelta(call[1])]

    def _list(self, out: list[Piece], *, last: bool) -> bool:
        """The answer is a list of calls, or the rest of one."""
        if last and self.calls and self._held.strip() in ("", "]"):
            self._held = ""
        return bool(self._held) and self._call(out, last=last)

    def _arguments(self, out: list[Piece], *, last: bool) -> bool:
        """The answer is a call's arguments; arguments ended by a stop text are text."""
        if not last and not self._streamed:
            return False
        self._told.append(self._held)
        is_whole = last and isinstance(parsed("".join(self._told)), dict)
        is_call = not last or self._cut or is_whole
        if self._held and not self.calls and is_call:
            self.calls = 1
            out.append(CallStart(next(iter(self._functions))))
        if self._held and self.calls:
            out.append(ArgumentsDelta(self._held))
        if last and not is_whole:
            out += [CallLeftOpen()] * self.calls
        if not is_call:
            _add(out, TextDelta("".join(self._told)))
            self.calls = 0
        self._held = ""
        return False


def _named(functions: Functions, streams: bool | Container[str]) -> Functions:
    """The functions whose calls are reported before they are complete."""
    if isinstance(streams, bool):
        return functions if streams else {}
    return {name: schema for name, schema in functions.items() if name in streams}


def _add(out: list[Piece], piece: TextDelta | ReasoningDelta) -> None:
    if piece.text:
        out.append(piece)


def _may_begin(text: str, marks: tuple[str, ...]) -> int:
    """Where a mark may begin that the text does not hold yet: at its end at the latest.

    >>> _may_begin("so be it \\n<too", ("<tool_call>",)), _may_begin("a <b", ("<tool_call>", "</"))
    (10, 4)
    """
    for at in range(max(0, len(text) - max(map(len, marks)) + 1), len(text)):
        for mark in marks:
            if mark.startswith(text[at:]):
                return at
    return len(text)
