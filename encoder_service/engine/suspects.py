"""Items that were with a worker when it died: they run alone, and a second death makes one poison.

An innocent neighbour of a poisonous item is cleared by its next run, which it has for itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

_REMEMBERED = 1024


class Suspects:
    """Deaths by content key; the longest known are forgotten first."""

    def __init__(self) -> None:
        self._deaths: OrderedDict[bytes, int] = OrderedDict()

    def blame(self, keys: Iterable[bytes]) -> None:
        """A worker died over these items."""
        for key in set(keys):
            self._deaths[key] = self._deaths.get(key, 0) + 1
            self._deaths.move_to_end(key)
        while len(self._deaths) > _REMEMBERED:
            self._deaths.popitem(last=False)

    def clear(self, key: bytes) -> None:
        """An item was computed."""
        self._deaths.pop(key, None)

    def has(self, key: bytes) -> bool:
        """A worker died over this item, perhaps by chance."""
        return key in self._deaths

    def is_poison(self, key: bytes) -> bool:
        """Workers died over this item more than once."""
        return self._deaths.get(key, 0) > 1
