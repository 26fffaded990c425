"""Items that were with a worker when it died: they run alone, and a second death makes one poison.

An innocent neighbour of a poisonous item is cleared by its next run, which it has for itself. A video comes in parts,
one of which may be to blame while the others do well: each part clears itself alone, and a death counts until all parts
that were there at it have been cleared.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

_REMEMBERED = 1024


class Suspects:
    """Deaths by content key, the longest known forgotten first: of each, the parts (by their first frame group) that
    were there and have not been computed since."""

    def __init__(self) -> None:
        self._deaths: OrderedDict[bytes, list[set[int]]] = OrderedDict()

    def blame(self, parts: Iterable[tuple[bytes, int]]) -> None:
        """A worker died over these parts of items."""
        there: dict[bytes, set[int]] = {}
        for key, first_group in parts:
            there.setdefault(key, set()).add(first_group)
        for key, groups in there.items():
            self._deaths.setdefault(key, []).append(groups)
            self._deaths.move_to_end(key)
        while len(self._deaths) > _REMEMBERED:
            self._deaths.popitem(last=False)

    def clear(self, key: bytes, groups: range) -> None:
        """These frame groups of an item were computed."""
        left = [rest for death in self._deaths.pop(key, ()) if (rest := death.difference(groups))]
        if left:
            self._deaths[key] = left

    def has(self, key: bytes) -> bool:
        """A worker died over this item, perhaps by chance."""
        return key in self._deaths

    def is_poison(self, key: bytes) -> bool:
        """Workers died over this item more than once."""
        return len(self._deaths.get(key, ())) > 1
