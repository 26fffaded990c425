"""Structural tags as in xgrammar and vLLM: forms of parts of an answer, between texts that begin and end them. A text
that is a single special token, such as the mark of a call, becomes that token."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from common.errors import InvalidInput
from common.json_schema.whitespace import with_short_gaps
from llm_service.request import Structure

Pieces = Callable[[str], Sequence[str | int]]
_DEEPEST: Final = 16
"""Formats within each other."""
_TEXT: Final = r"TEXT: /(.|\n)*/"
_BETWEEN_SLASHES: Final = re.compile(r"\\.|/|\n", re.DOTALL)
"""Characters of a regex that must be escaped between slashes, and escapes that it has already."""
_FIELDS: Final[Mapping[str, frozenset[str]]] = {
    "const_string": frozenset({"value"}),
    "json_schema": frozenset({"json_schema"}),
    "regex": frozenset({"pattern"}),
    "any_text": frozenset(),
    "sequence": frozenset({"elements"}),
    "or": frozenset({"elements"}),
    "tag": frozenset({"begin", "content", "end"}),
    "triggered_tags": frozenset({"triggers", "tags", "at_least_one", "stop_after_first"}),
    "tags_with_separator": frozenset({"tags", "separator", "at_least_one", "stop_after_first"}),
}
"""The fields that each type of format may have."""


def as_grammar(text: str, pieces: Pieces) -> Structure:
    """The grammar of a structural tag; `pieces` cuts a text at special tokens. Raises InvalidInput if it cannot be
    read, or its kind is not served."""
    try:
        given = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise _bad("it is no JSON object")
    writer = _Writer(pieces)
    start = writer.format(_format_of(given), last=True)
    return Structure("grammar", "\n".join((f"start: {start}", _TEXT, *writer.lines)))


def _format_of(given: dict[str, Any]) -> Any:
    """The format, given in the newer form, or in the older one of structures with triggers."""
    if (form := given.get("format")) is not None:
        return form
    structures = _list(given, "structures")
    tags = [
        {
            "type": "tag",
            "begin": each.get("begin"),
            "content": {"type": "json_schema", "json_schema": each.get("schema")},
            "end": each.get("end"),
        }
        for each in map(_fields_of, structures)
    ]
    return {"type": "triggered_tags", "triggers": given.get("triggers"), "tags": tags}


class _Writer:
    """Writes a grammar in Lark's form; `lines` are its rules but for the first."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._depth = 0
        self._ends: dict[str, str] = {}
        self.lines: list[str] = []

    def format(self, given: Any, *, last: bool) -> str:
        """An expression for a format. Text without an end stands in the `last` one alone."""
        form = _fields_of(given)
        kind = str(form.get("type"))
        if kind not in _FIELDS:
            raise _bad(f"its type {kind} is not served")
        for name, value in form.items():
            if name not in ("type", *_FIELDS[kind]) and value and (name, value) != ("style", "json"):
                raise _bad(f"{name} of {kind} is not served")
        self._depth += 1
        if self._depth > _DEEPEST:
            raise _bad(f"it has more than {_DEEPEST} formats within each other")
        written = self._written(kind, form, last=last)
        self._depth -= 1
        return written

    def _written(self, kind: str, form: dict[str, Any], *, last: bool) -> str:
        match kind:
            case "const_string":
                return self._literal(_text(form, "value"))
            case "json_schema":
                return self._schema(form.get("json_schema"))
            case "regex":
                return self._rule(f"/{_BETWEEN_SLASHES.sub(_escaped, _text(form, 'pattern'))}/", "T")
            case "any_text":
                return self._any(last=last)
            case "sequence":
                *others, end = _list(form, "elements")
                parts = [self.format(each, last=False) for each in others]
                return " ".join((*parts, self.format(end, last=last)))
            case "or":
                return f"({' | '.join(self.format(each, last=last) for each in _list(form, 'elements'))})"
            case "tag":
                return " ".join((self._literal(_text(form, "begin")), self._within(form)))
            case "triggered_tags":
                return self._triggered(form, last=last)
        return self._separated(form)

    def _any(self, *, last: bool) -> str:
        if not last:
            raise _bad("text of any kind has an end where something follows")
        return "TEXT"

    def _within(self, tag: dict[str, Any]) -> str:
        """What follows a tag's begin: its content, and its end or one of several."""
        content = _fields_of(tag.get("content"))
        ends = _list(tag, "end") if isinstance(tag.get("end"), list) else [tag.get("end")]
        if not all(isinstance(end, str) for end in ends):
            raise _bad("an end is a text, or a list of texts")
        *others, final = _list(content, "elements") if content.get("type") == "sequence" else [content]
        if _fields_of(final).get("type") != "any_text":
            alternatives = " | ".join(map(self._literal, ends))
            return f"{self.format(content, last=False)} ({alternatives})"
        if len(ends) > 1 or not ends[0]:
            raise _bad("text of any kind ends with one text")
        parts = [self.format(each, last=False) for each in others]
        self.format(final, last=True)
        return " ".join((*parts, self._up_to(ends[0])))

    def _triggered(self, form: dict[str, Any], *, last: bool) -> str:
        """Any text, with tags wherever one of their triggers occurs."""
        triggers, tags = _list(form, "triggers"), [_tag(each) for each in _list(form, "tags")]
        once, needed = bool(form.get("stop_after_first")), bool(form.get("at_least_one"))
        bodies = [self._rule(self._within(tag)) for tag in tags]
        begun = [f"{self._begun(_text(tag, 'begin'), triggers)} {body}" for tag, body in zip(tags, bodies, strict=True)]
        bare = [f"{self._literal(_text(tag, 'begin'))} {body}" for tag, body in zip(tags, bodies, strict=True)]
        first, later = self._rule(" | ".join(bare)), self._rule(" | ".join(begun))
        if once and needed:
            return first
        text = self._any(last=last)
        if once:
            return f"({later} | {text})"
        return f"{first} {later}* {text}" if needed else f"{later}* {text}"

    def _separated(self, form: dict[str, Any]) -> str:
        one = self._rule(" | ".join(self.format(_tag(each), last=False) for each in _list(form, "tags")))
        if not form.get("stop_after_first"):
            one = f"{one} ({self._literal(_text(form, 'separator'))} {one})*"
        return one if form.get("at_least_one") else f"({one})?"

    def _begun(self, begin: str, triggers: Sequence[Any]) -> str:
        """Text up to a tag's begin; from the end of its trigger on, only the rest of the begin is allowed."""
        trigger = next((each for each in triggers if isinstance(each, str) and each and begin.startswith(each)), None)
        if trigger is None:
            raise _bad("a tag begins with none of the triggers")
        head, *rest = self._pieces(begin)
        if isinstance(head, int):
            return " ".join((f"TEXT <[{head}]>", *map(_piece, rest)))
        if not head.startswith(trigger):
            raise _bad("a trigger goes on behind a text with a token of its own")
        rest = [head[len(trigger) :], *rest]
        return " ".join((self._lazily(trigger), *map(_piece, filter(lambda each: each != "", rest))))

    def _up_to(self, end: str) -> str:
        """Text of any kind, up to this one."""
        head, *rest = self._pieces(end)
        before = f"TEXT <[{head}]>" if isinstance(head, int) else self._lazily(head)
        return " ".join((before, *map(_piece, rest)))

    def _lazily(self, text: str) -> str:
        if text not in self._ends:
            self._ends[text] = f"l{len(self._ends)}"
            self.lines.append(f"{self._ends[text]}[lazy]: TEXT {_piece(text)}")
        return self._ends[text]

    def _literal(self, text: str) -> str:
        return " ".join(map(_piece, self._pieces(text))) or '""'

    def _schema(self, schema: Any) -> str:
        if not isinstance(schema, dict | bool):
            raise _bad("a schema is an object, true or false")
        return self._rule(f"%json {json.dumps(with_short_gaps(schema) if isinstance(schema, dict) else schema)}")

    def _rule(self, body: str, sign: str = "r") -> str:
        name = f"{sign}{len(self.lines)}"
        self.lines.append(f"{name}: {body}")
        return name


def _escaped(found: re.Match[str]) -> str:
    return {"/": r"\/", "\n": r"\n"}.get(found[0], found[0])


def _piece(piece: str | int) -> str:
    return f"<[{piece}]>" if isinstance(piece, int) else json.dumps(piece, ensure_ascii=False)


def _tag(given: Any) -> dict[str, Any]:
    """A tag, with or without a stated type."""
    tag = {"type": "tag", **_fields_of(given)}
    if tag["type"] != "tag":
        raise _bad("tags are of the type tag")
    return tag


def _fields_of(given: Any) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise _bad("a format is a JSON object")
    return given


def _list(form: Mapping[str, Any], name: str) -> list[Any]:
    if not isinstance(found := form.get(name), list) or not found:
        raise _bad(f"{name} is a list, and not empty")
    return found


def _text(form: Mapping[str, Any], name: str) -> str:
    if not isinstance(found := form.get(name), str):
        raise _bad(f"{name} is a text")
    return found


def _bad(why: str) -> InvalidInput:
    said = f"the structural_tag cannot be read: {why}"
    return InvalidInput(said, reason="BAD_STRUCTURE", field="sampling.structural_tag")
