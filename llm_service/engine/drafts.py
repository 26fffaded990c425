"""Speculative decoding by prompt look-up (Saxena, 2023; `ngram` in vLLM and SGLang): drafts are the tokens that
followed an earlier occurrence of the sequence's last tokens."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np

SHORTEST, LONGEST = 3, 8
"""Fewest tokens that must match, and most that are compared; the occurrence with the longest match counts."""

WINDOW = 1 << 15
"""Tokens searched, from the end: 32 k take about 20 microseconds."""

_BEGINS = 5
"""Drafts of a sequence before any was verified: six rows of a product are as fast as five."""

_FIRST_REST, _LONGEST_REST = 8, 128
"""Tokens without drafts after all drafts were wrong several times."""


def look_up(tokens: array[int], count: int) -> array[int]:
    """The `count` tokens after an earlier occurrence of the last tokens, or none. If fewer follow, they are repeated
    cyclically.

    >>> look_up(array("i", [5, 6, 7, 8, 9, 5, 6, 7]), 3), look_up(array("i", [1, 2, 1, 2, 1, 2]), 4)
    (array('i', [8, 9, 5]), array('i', [1, 2, 1, 2]))
    >>> look_up(array("i", [5, 6, 7, 8, 9, 4, 6, 7]), 3)
    array('i')
    """
    words = np.frombuffer(tokens, np.int32)[-WINDOW:]
    ends = np.flatnonzero(words[:-1] == words[-1])
    for back in range(1, LONGEST):
        further = ends[ends >= back]
        further = further[words[further - back] == words[-1 - back]]
        if not len(further):
            if back < SHORTEST:
                return array("i")
            break
        ends = further
    if not len(ends):
        return array("i")
    return array("i", np.resize(words[ends[-1] + 1 :], count).tobytes())


@dataclass(slots=True)
class DraftLength:
    """How many drafts a sequence gets, `most` at most: about twice as many as were recently right, so that an answer
    that copies soon takes long steps; few after wrong ones, and none for a while after repeated wrong ones.

    >>> length = DraftLength(11)
    >>> [(length.now(), length.verified(length.now(), right))[0] for right in (5, 11, 2, 0, 1)]
    [5, 11, 11, 5, 2]
    """

    most: int
    _length: int = 0
    _rest: int = 0
    _next_rest: int = _FIRST_REST

    def __post_init__(self) -> None:
        self._length = min(self.most, _BEGINS)

    def now(self) -> int:
        """How many the next step may verify."""
        return 0 if self._rest else self._length

    def verified(self, drafts: int, right: int) -> None:
        """A step has verified so many drafts, maybe none, and the first `right` of them were right."""
        if not drafts:
            self._rest = max(0, self._rest - 1)
        elif right:
            self._length, self._next_rest = min(self.most, 2 * right + 1), _FIRST_REST
        elif self._length > 1:
            self._length = min(self._length, _BEGINS) // 2
        else:
            self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, _LONGEST_REST)
