"""Texts that an answer must not contain, as runs of tokens: the last token of a run is banned where the output ends
with the others."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BadWords:
    """`alone` are runs of one token; `longer` has the other runs by their last token but one. Lookups take the last
    `reach` tokens of an output, or more, or all if there are fewer."""

    alone: Tokens
    longer: dict[int, list[Tokens]]
    reach: int

    @classmethod
    def of(cls, runs: Iterable[Tokens]) -> BadWords | None:
        """None if there are no runs."""
        each = list(dict.fromkeys(runs))
        longer: dict[int, list[Tokens]] = {}
        for run in each:
            if len(run) > 1:
                longer.setdefault(run[-2], []).append(run)
        alone = tuple(run[0] for run in each if len(run) == 1)
        return cls(alone, longer, max(map(len, each)) - 1) if each else None

    def banned(self, output: array[int]) -> Tokens:
        """The tokens that may not follow an answer.

        >>> words = BadWords.of([(5,), (1, 2), (3, 1, 7)])
        >>> words.banned(array("i", [3, 1])), words.banned(array("i", [1, 3])), words.banned(array("i"))
        ((5, 2, 7), (5,), (5,))
        """
        runs = self.longer.get(output[-1], ()) if output else ()
        return (*self.alone, *(run[-1] for run in runs if _ends_with(output, run[:-1])))

    def banned_behind(self, output: array[int]) -> tuple[tuple[int, int], ...]:
        """For an answer whose next token is not known yet: (that token, a token that may not follow it), without
        `alone`.

        >>> words = BadWords.of([(5,), (1, 2), (3, 1, 7)])
        >>> words.banned_behind(array("i", [3])), words.banned_behind(array("i", [4]))
        (((1, 2), (1, 7)), ((1, 2),))
        """
        return tuple(
            (run[-2], run[-1]) for runs in self.longer.values() for run in runs if _ends_with(output, run[:-2])
        )


def _ends_with(output: array[int], run: Tokens) -> bool:
    return not run or (len(output) >= len(run) and tuple(output[-len(run) :]) == run)
