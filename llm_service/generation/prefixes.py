"""Which prompts, up to the end of one of their media spans, were computed before: the engine may still have their KV.

It is a cheap guess that decides whether rows are fetched at once or only when the engine asks for them. A wrong guess
costs a round trip to the engine, and never a token.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator

from common.hash_fields import framed
from llm_service.request import PromptLayout, Span

_REMEMBERED = 16_384


class Prefixes:
    """Prefixes by a hash over tokens, media and tenant; the least recently used is forgotten first. `block_size`
    returns the tokens of the engine's blocks, since only whole blocks are reused; None if none are."""

    def __init__(self, block_size: Callable[[], int | None], max_entries: int = _REMEMBERED) -> None:
        self._block_size = block_size
        self._max_entries = max_entries
        self._known: OrderedDict[bytes, None] = OrderedDict()

    def covered(self, layout: PromptLayout, salt: str) -> set[int]:
        """The items whose spans the engine has probably computed: all before the first that it has not."""
        found: set[int] = set()
        if (size := self._block_size()) is None:
            return found
        reach = (len(layout.ids) - 1) // size * size
        for span, prefix in _prefixes(layout, salt):
            if span.end > reach or prefix not in self._known:
                break
            self._known.move_to_end(prefix)
            found.add(span.item)
        return found

    def remember(self, layout: PromptLayout, salt: str) -> None:
        """The engine has computed this prompt."""
        if self._block_size() is None:
            return
        for _, prefix in _prefixes(layout, salt):
            self._known[prefix] = None
            self._known.move_to_end(prefix)
        while len(self._known) > self._max_entries:
            self._known.popitem(last=False)


def _prefixes(layout: PromptLayout, salt: str) -> Iterator[tuple[Span, bytes]]:
    """Each span with the hash of everything up to its end."""
    digest, begin = hashlib.sha256(framed(salt.encode())), 0
    for span in layout.spans:
        tokens = array("i", layout.ids[begin : span.end]).tobytes()
        digest.update(framed(tokens, span.header.rows_key))
        begin = span.end
        yield span, digest.digest()
