"""Grammars in llama.cpp's form (GBNF: `root ::= "a" | "b"`), as vLLM's and SGLang's callers write them, in Lark's."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Literal

from llguidance.gbnf_to_lark import (
    AlternativeNode,
    ASTNode,
    GrammarParser,
    LiteralNode,
    RegexNode,
    RepetitionNode,
    RuleRefNode,
    SequenceNode,
)

from llm_service.grammar.lexemes import lexemes_of

_LARK = re.compile(r"^\s*(?:%llguidance\b|start\s*:(?!:=))", re.MULTILINE)
_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
_SIGN = re.compile(r"\\x..|\\.|.", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)
_BRACKETS = r"\[", r"\]"
_QUOTED = frozenset('\\"[]')
_TEXT = r'"(?:\\.|[^"\\])*+"?|\[(?:\\.|[^]\\])*+]?'
_GAP = re.compile(_TEXT + r"|(?P<gap>(?:\s|#[^\n]*+)++)", re.DOTALL)
_LINE_END = re.compile(_TEXT + r"|(?P<end>\n(?!\s*[\w-]+\s*::=))", re.DOTALL)


def as_lark(text: str) -> str:
    """A grammar of either form in Lark's. Takes as long as it is long, and runs Python: not for the event loop. Raises
    ValueError where it cannot be read.

    >>> as_lark('root ::= "a" [b-d]*')
    '%llguidance {}\\n\\nstart: "a" /[b-d]/*\\n'
    >>> as_lark('start: "a"')
    'start: "a"'
    """
    if _LARK.search(text) or not _RULE.search(text):
        return text
    try:
        parsed = GrammarParser().parse(_in_lines(_ESCAPE.sub(_written, text)))
        return _lark({name: rule.alternatives for name, rule in parsed.items()})
    except Exception as error:  # the library has no error of its own for deep nesting
        raise ValueError(str(error)) from error


def _lark(rules: Mapping[str, ASTNode]) -> str:
    """Rules under names of ours; uppercase ones are lexemes."""
    lexemes = lexemes_of(rules)
    names = {name: f"{'R' if name in lexemes.rules else 'r'}{number}" for number, name in enumerate(rules)}
    names["root"] = "start"
    whole, apart = _Writer(names), _Writer(names, by_signs=True)
    others = _Writer(names, by_signs=lexemes.texts)
    lines = []
    for name, node in rules.items():
        writer = whole if name in lexemes.rules else apart if name in lexemes.apart else others
        lines.append(f"{names[name]}: {writer.choice(node)}\n")
    return "".join(("%llguidance {}\n\n", *lines))


class _Writer:
    """Writes parts of rules with these `names`; texts that are read `by_signs`, or all, have a lexeme for each sign."""

    def __init__(self, names: Mapping[str, str], *, by_signs: Collection[str] | Literal[True] = ()) -> None:
        self._names = names
        self._by_signs = by_signs

    def choice(self, node: ASTNode) -> str:
        """A part that stands alone."""
        if isinstance(node, AlternativeNode):
            return " | ".join(map(self._run, node.alternatives))
        return self._run(node)

    def _run(self, node: ASTNode) -> str:
        if isinstance(node, SequenceNode):
            return " ".join(map(self._one, node.nodes)) or '""'
        return self._one(node)

    def _one(self, node: ASTNode) -> str:
        """A part next to others."""
        match node:
            case LiteralNode(value=text):
                signs = [sign.removeprefix("\\") if sign in _BRACKETS else sign for sign in _SIGN.findall(text)]
                if len(signs) > 1 and (self._by_signs is True or text in self._by_signs):
                    return "(" + " ".join(f'"{sign}"' for sign in signs) + ")"
                return '"' + "".join(signs) + '"'
            case RegexNode(rx="."):
                return "/(?s:.)/"  # an end of a line as well
            case RegexNode(rx=rx):
                return f"/{rx}/"
            case RuleRefNode(name=name):
                return self._names[name]
            case RepetitionNode(node=inner, min_times=least, max_times=most):
                one = self._one(inner)
                one = f"({one})" if isinstance(inner, RepetitionNode) else one
                sign = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((least, most))
                return one + (sign or f"{{{least},{'' if most is None else most}}}")
        return f"({self.choice(node)})"


def _in_lines(text: str) -> str:
    """The same without comments, each rule in a line. llama.cpp has a rule go on in the next line behind `|` and within
    a group, but xgrammar, which vLLM and SGLang have read such grammars, up to the next rule.

    >>> _in_lines('root ::= "a"  # or\\n  | b\\n\\nb ::= "b"')
    'root ::= "a" | b\\nb ::= "b"'
    """
    text = _GAP.sub(lambda found: found[0] if found["gap"] is None else "\n" if "\n" in found[0] else " ", text)
    return _LINE_END.sub(lambda found: found[0] if found["end"] is None else " ", text)


def _written(found: re.Match[str]) -> str:
    """Replaces a character's number, which the library would truncate, by the character, and a character that the
    library does not know by its number."""
    number = found[1] or found[2]
    if number is None:
        return r"\x2d" if found[0] == r"\-" else found[0]
    sign = chr(int(number, 16))
    if not sign.isprintable() and ord(sign) < 0x80:
        return f"\\x{ord(sign):02x}"
    return f"\\{sign}" if sign in _QUOTED else sign
