"""Which rules of a llama.cpp grammar can be read as lexemes, the fastest way, in which each takes as much as it can.
The grammar itself has no lexemes: in `num "\\n"` with `num ::= [0-9]+ [ \\n]*`, the longest number includes the
newline, and another one would be required behind it, forever."""

from __future__ import annotations

import functools
import operator
import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from llguidance.gbnf_to_lark import (
    AlternativeNode,
    ASTNode,
    LiteralNode,
    RegexNode,
    RepetitionNode,
    RuleRefNode,
    SequenceNode,
)

_SIGN = re.compile(r"\\x([0-9a-fA-F]{2})|\\(.)|(.)", re.DOTALL)
_NAMED = {"n": "\n", "r": "\r", "t": "\t"}
_LAST = 0x10FFFF


class _Words(NamedTuple):
    """The words of a part of a grammar, with sets of characters as bits of a number: whether a word is `empty`, the
    characters that words begin with, those at later positions, and those with which a complete word may continue."""

    empty: bool = False
    first: int = 0
    later: int = 0
    beyond: int = 0

    def then(self, other: _Words) -> _Words:
        """The words of this part followed by those of another."""
        first = self.first | (other.first if self.empty else 0)
        later = self.later | other.later | (other.first if self.first else 0)
        beyond = other.beyond | (self.beyond | other.first if other.empty else 0)
        if self.beyond & other.first:  # it is ambiguous where the first ends
            beyond |= later
        return _Words(self.empty and other.empty, first, later, beyond)

    def or_else(self, other: _Words) -> _Words:
        """Of either."""
        empty, first, later, beyond = map(operator.or_, self, other)
        if self.first & other.first:  # one may be the beginning of another
            beyond |= later
        return _Words(bool(empty), first, later, beyond)

    def repeated(self, least: int, most: int | None) -> _Words:
        """The words of a repetition."""
        if most == 0:
            return _Words(empty=True)
        several = most is None or most > 1
        later, beyond = self.later | (self.first if several else 0), self.beyond
        if several and most != least:
            beyond |= self.first
        if several and self.beyond & self.first:
            beyond |= later
        return _Words(self.empty or least == 0, self.first, later, beyond)


class _Grammar:
    """The rules as the library has them, and the words of each."""

    def __init__(self, rules: Mapping[str, ASTNode]) -> None:
        self.rules = rules
        self._signs = _told_apart(rules.values())
        self._known: dict[tuple[type[ASTNode], str], _Words] = {}
        self.words = dict.fromkeys(rules, _Words())
        before: dict[str, _Words] = {}
        while before != self.words:
            before = dict(self.words)
            for name, node in reversed(list(rules.items())):  # rules mostly refer to later ones
                self.words[name] = self.words_of(node)

    def words_of(self, node: ASTNode) -> _Words:
        """The words of a part, as far as those of rules are known. Raises KeyError for a missing rule."""
        match node:
            case LiteralNode(value=text) | RegexNode(rx=text):
                if (known := self._known.get((type(node), text))) is None:
                    known = self._known[type(node), text] = self._of_signs(node)
                return known
            case RuleRefNode():
                return self.words[node.name]
            case RepetitionNode():
                return self.words_of(node.node).repeated(node.min_times, node.max_times)
            case SequenceNode() if not node.nodes:
                return _Words(empty=True)
            case SequenceNode():
                return functools.reduce(_Words.then, map(self.words_of, node.nodes))
        return functools.reduce(_Words.or_else, map(self.words_of, node.children()))

    def _of_signs(self, node: LiteralNode | RegexNode) -> _Words:
        if isinstance(node, RegexNode):
            return _Words(first=self._bits(_ranges(node.rx)))
        each = [self._bits([(sign, sign)]) for sign in _signs_of(node.value)]
        later = functools.reduce(operator.or_, each[1:], 0)
        return _Words(first=each[0], later=later) if each else _Words(empty=True)

    def _bits(self, ranges: Iterable[tuple[int, int]]) -> int:
        found = 0
        for low, high in ranges:
            found |= (1 << bisect_right(self._signs, high)) - (1 << bisect_left(self._signs, low))
        return found

    def lexemes(self, among: Collection[str]) -> set[str]:
        """The rules among these that refer only to lexemes."""
        found, before = set[str](), -1
        while before != (before := len(found)):
            for name in reversed(list(among)):
                if found.issuperset(_referred(self.rules[name])):
                    found.add(name)
        return found

    def behind(self, lexemes: set[str]) -> dict[str, int]:
        """The characters that may follow each lexeme where rules that are not lexemes refer to it."""
        found = dict.fromkeys(self.rules, 0)
        before: dict[str, int] = {}
        while before != found:
            before = dict(found)
            for name, node in self.rules.items():
                if name not in lexemes:
                    self._follow(node, found[name], found)
        return found

    def texts_like_classes(self, lexemes: set[str]) -> set[str]:
        """The texts in rules that are not lexemes which begin like a class there, and are not classes themselves."""
        parts = list(_parts(node for name, node in self.rules.items() if name not in lexemes))
        alike = functools.reduce(
            operator.or_, (self.words_of(each).first for each in parts if isinstance(each, RegexNode)), 0
        )
        alike &= ~functools.reduce(operator.or_, (self.words[name].first for name in lexemes), 0)
        return {each.value for each in parts if isinstance(each, LiteralNode) and self.words_of(each).first & alike}

    def _follow(self, node: ASTNode, behind: int, found: dict[str, int]) -> None:
        match node:
            case RuleRefNode():
                found[node.name] |= behind
            case RepetitionNode():
                again = node.max_times is None or node.max_times > 1
                self._follow(node.node, behind | (self.words_of(node.node).first if again else 0), found)
            case SequenceNode():
                for each in reversed(node.nodes):
                    self._follow(each, behind, found)
                    words = self.words_of(each)
                    behind = words.first | (behind if words.empty else 0)
            case AlternativeNode():
                for each in node.alternatives:
                    self._follow(each, behind, found)


class Lexemes(NamedTuple):
    """The `rules` that may be read as lexemes; those that could be one if none of their words continued with a
    character that may follow, whose texts are read `apart`, character by character; and further such `texts` that a
    class might begin."""

    rules: set[str]
    apart: set[str]
    texts: set[str]


def lexemes_of(rules: Mapping[str, ASTNode]) -> Lexemes:
    """The lexemes of rules whose root is read by its parts. Raises KeyError for a missing rule."""
    grammar = _Grammar(rules)
    lexemes = every = grammar.lexemes([name for name in rules if name != "root"])
    while True:
        behind = grammar.behind(lexemes)
        fine = {name for name in lexemes if not grammar.words[name].beyond & behind[name]}
        if fine == lexemes:
            return Lexemes(lexemes, every - lexemes, grammar.texts_like_classes(lexemes))
        lexemes = grammar.lexemes([name for name in rules if name in fine])


def _referred(node: ASTNode) -> set[str]:
    if isinstance(node, RuleRefNode):
        return {node.name}
    return set[str]().union(*map(_referred, node.children()))


def _parts(nodes: Iterable[ASTNode]) -> Iterator[ASTNode]:
    """These, and all that is in them."""
    waiting = list(nodes)
    while waiting:
        yield (node := waiting.pop())
        waiting += node.children()


def _told_apart(nodes: Iterable[ASTNode]) -> list[int]:
    """Signs in order, one at least of all that the grammar does not tell from one another."""
    ends = {0}
    for node in _parts(nodes):
        if isinstance(node, LiteralNode):
            ends.update(each for sign in _signs_of(node.value) for each in (sign, sign + 1))
        elif isinstance(node, RegexNode):
            ends.update(each for low, high in _ranges(node.rx) for each in (low, high + 1))
    return sorted(ends)


def _signs_of(text: str) -> list[int]:
    return [_number(found) for found in _SIGN.finditer(text)]


def _number(found: re.Match[str]) -> int:
    code, escaped, plain = found.groups()
    return int(code, 16) if code else ord(plain or _NAMED.get(escaped, escaped))


def _ranges(rx: str) -> list[tuple[int, int]]:
    """What a class allows, from the first to the last sign each.

    >>> _ranges("[a-c\\\\]-]"), _ranges("[^b]")
    ([(97, 99), (93, 93), (45, 45)], [(0, 97), (99, 1114111)])
    """
    if rx == ".":
        return [(0, _LAST)]
    negated = rx.startswith("[^")
    signs = list(_SIGN.finditer(rx[1 + negated : -1]))
    found: list[tuple[int, int]] = []
    while signs:
        low = _number(signs.pop(0))
        if len(signs) > 1 and signs[0][0] == "-":
            signs.pop(0)
            found.append((low, _number(signs.pop(0))))
        else:
            found.append((low, low))
    if not negated:
        return found
    others, begin = list[tuple[int, int]](), 0
    for low, high in sorted(found):
        others += [(begin, low - 1)] if low > begin else []
        begin = max(begin, high + 1)
    return [*others, (begin, _LAST)]
