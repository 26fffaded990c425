"""Patterns of module names, as peft reads `rank_pattern` and `alpha_pattern`: regular expressions that match a name, or
its end behind a dot. They come with an adapter's files, so Python's engine is not used: all positions that a pattern
may have reached are followed at once, without backtracking, and a `Budget` bounds the work."""

from __future__ import annotations

import re
from collections.abc import Callable

_Places = set[int]
_Step = Callable[[str, _Places, "Budget"], _Places]
"""Maps the positions where a part may begin to those where it may end."""

_LONGEST = 1024
"""Characters of a pattern."""
_DEEPEST = 16
"""Groups within groups."""
_NAME = re.compile(r"\^?[\w.]+")
_ONE = re.compile(r"\\[dDwWsS]|\\[^\w\s]|\[\^?(?:\\[dDwWsS.-]|\w(?:-\w)?|\.)+-?\]|[^\\\[\](){}|*+?^$]", re.ASCII)
"""One character of a pattern."""
_COUNT = re.compile(r"\{(\d{1,4})(,?)(\d{0,4})\}", re.ASCII)


class PatternError(ValueError):
    """A pattern is not supported, or takes too long; the message says which part and why."""


class Budget:
    """Steps that all patterns of an adapter may take together."""

    def __init__(self, steps: int = 2_000_000) -> None:
        self._left = steps

    def take(self, steps: int) -> None:
        """Spends steps; raises PatternError if there are none left."""
        self._left -= steps
        if self._left < 0:
            raise PatternError("takes too long, with those before it")


class NamePattern:
    """One pattern. Raises PatternError for what is not read here: looking ahead and back, references to groups, flags,
    possessive repeats, words' boundaries, and what is no regular expression.

    >>> NamePattern(r"layers\\.[02]\\..*(q|k)_proj").fits("model.layers.2.self_attn.k_proj", Budget())
    True
    """

    def __init__(self, text: str) -> None:
        if len(text) > _LONGEST:
            raise PatternError(f"has more than {_LONGEST} characters")
        # Most are names. Without repeats Python's own have nothing to go back to.
        self._plain = re.compile(rf"(?:.*\.)?(?:{text})") if _NAME.fullmatch(text) else None
        self._step = None if self._plain else _Reader(text).read()

    def fits(self, name: str, budget: Budget) -> bool:
        """Whether a name matches, or its end behind a dot. Raises PatternError if the budget is used up."""
        if self._step is None:
            assert self._plain is not None
            budget.take(1)
            return self._plain.fullmatch(name) is not None
        begins = {0, *(place for place, before in enumerate(name, 1) if before == ".")}
        return len(name) in self._step(name, begins, budget)


class _Reader:
    """Reads a pattern from left to right."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def read(self) -> _Step:
        """The whole pattern."""
        step = self._either(_DEEPEST)
        if self._at < len(self._text):
            raise self._refusal()
        return step

    def _either(self, depth: int) -> _Step:
        """Sequences with bars between them."""
        ways = [self._sequence(depth)]
        while self._skip("|"):
            ways.append(self._sequence(depth))
        return ways[0] if len(ways) == 1 else _either(ways)

    def _sequence(self, depth: int) -> _Step:
        steps: list[_Step] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            steps.append(self._repeated(depth))
        return _sequence(steps)

    def _repeated(self, depth: int) -> _Step:
        """One part with its repetition. Greedy and lazy ones are the same, since whole names are matched."""
        step = self._one(depth)
        least, most = 1, 1
        if self._skip("*"):
            least, most = 0, -1
        elif self._skip("+"):
            least, most = 1, -1
        elif self._skip("?"):
            least, most = 0, 1
        elif found := _COUNT.match(self._text, self._at):
            self._at = found.end()
            least = int(found[1])
            most = int(found[3]) if found[3] else -1 if found[2] else least
            if found[3] and (not found[2] or most < least):
                raise self._refusal()
        else:
            return step
        self._skip("?")
        if self._text[self._at : self._at + 1] in tuple("*+?{"):
            raise self._refusal()
        return _repeated(step, least, most)

    def _one(self, depth: int) -> _Step:
        if self._skip("^"):
            return lambda _, places, __: places & {0}
        if self._skip("$"):
            return lambda name, places, _: places & {len(name)}
        if self._skip("("):
            if not depth or (self._skip("?") and not self._skip(":")):
                raise self._refusal()
            step = self._either(depth - 1)
            if not self._skip(")"):
                raise self._refusal()
            return step
        if not (found := _ONE.match(self._text, self._at)):
            raise self._refusal()
        self._at = found.end()
        try:
            return _character(re.compile(found[0]))
        except re.error as error:  # a range that ends before it begins
            raise self._refusal() from error

    def _skip(self, mark: str) -> bool:
        found = self._text.startswith(mark, self._at)
        self._at += len(mark) * found
        return found

    def _refusal(self) -> PatternError:
        return PatternError(f"has what is not read here, at character {self._at + 1}")


def _character(kind: re.Pattern[str]) -> _Step:
    def step(name: str, places: _Places, budget: Budget) -> _Places:
        budget.take(1 + len(places))
        return {place + 1 for place in places if kind.match(name, place)}

    return step


def _sequence(steps: list[_Step]) -> _Step:
    def step(name: str, places: _Places, budget: Budget) -> _Places:
        for each in steps:
            if not places:
                break
            places = each(name, places, budget)
        return places

    return step


def _either(ways: list[_Step]) -> _Step:
    def step(name: str, places: _Places, budget: Budget) -> _Places:
        budget.take(len(ways))
        return set().union(*(way(name, places, budget) for way in ways))

    return step


def _repeated(once: _Step, least: int, most: int) -> _Step:
    """`most` below 0 means no bound. Beyond `least`, each position is continued once, with the fewest repeats."""

    def step(name: str, places: _Places, budget: Budget) -> _Places:
        for _ in range(least):
            budget.take(1)
            places = once(name, places, budget)
        reached, new, done = set(places), places, least
        while new and done != most:
            budget.take(1)
            new = once(name, new, budget) - reached
            reached |= new
            done += 1
        return reached

    return step
