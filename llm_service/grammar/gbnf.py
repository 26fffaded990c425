"""Grammars in llama.cpp's form (GBNF: `root ::= "a" | "b"`), as vLLM's and SGLang's callers write them, in Lark's."""

from __future__ import annotations

import re

from llguidance.gbnf_to_lark import gbnf_to_lark

_LARK = re.compile(r"^\s*(?:%llguidance\b|start\s*:(?!:=))", re.MULTILINE)
_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
_PIECE = re.compile(r'"(?:\\.|[^"\\])*"?|\[(?:\\.|[^]\\])*]?|\{[^}]*}?|#[^\n]*|(?P<name>[\w-]+)', re.DOTALL)
"""What is no name of a rule, though it may have words, and such a name."""
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)
_QUOTED = frozenset('\\"[]')


def as_lark(text: str) -> str:
    """A grammar of either form in Lark's. Takes as long as it is long, and runs Python: not for the event loop. Raises
    ValueError where it cannot be read.

    >>> as_lark('root ::= "a" [b-d]*').split()[-3:]
    ['start:', '"a"', '/[b-d]/*']
    >>> as_lark('start: "a"')
    'start: "a"'
    """
    if _LARK.search(text) or not _RULE.search(text):
        return text
    try:
        return gbnf_to_lark(_with_plain_names(_ESCAPE.sub(_written, text)))
    except Exception as error:  # the library has no kind of its own for rules that are missing, or nested too deeply
        raise ValueError(str(error)) from error


def _with_plain_names(text: str) -> str:
    """The same with other names of rules, which stay apart in the library's letters: it calls the root `start`, and
    tells no `-` from `_`, nor `A` from `a`.

    >>> _with_plain_names('root ::= start "start"  # start')
    'root ::= r1 "start"  # start'
    """
    names = {"root": "root"}

    def plain(found: re.Match[str]) -> str:
        name = found["name"]
        return found[0] if name is None else names.setdefault(name, f"r{len(names)}")

    return _PIECE.sub(plain, text)


def _written(found: re.Match[str]) -> str:
    """A sign in the place of its number, which the library cuts short."""
    number = found[1] or found[2]
    if number is None:
        return found[0]
    sign = chr(int(number, 16))
    if not sign.isprintable() and ord(sign) < 0x80:
        return f"\\x{ord(sign):02x}"
    return f"\\{sign}" if sign in _QUOTED else sign
