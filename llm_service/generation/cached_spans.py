"""Which media spans are probably in the engine's prefix cache.

It is a cheap guess that decides whether rows are fetched at once or only when the engine asks for them. A wrong guess
costs a round trip to the engine, and never a token.
"""

from __future__ import annotations

from collections import OrderedDict

from llm_service.request import PromptLayout, Span

_REMEMBERED = 16_384


class CachedSpans:
    """Remembers the last block of each span that was computed, by its identity, which depends on all before it; the
    least recently used is forgotten first."""

    def __init__(self, block_size: int, max_entries: int = _REMEMBERED) -> None:
        self._block_size = block_size
        self._max_entries = max_entries
        self._known: OrderedDict[bytes, None] = OrderedDict()

    def find(self, layout: PromptLayout) -> set[int]:
        """The items whose spans the engine has probably computed: all before the first that it has not."""
        identities, found = layout.reusable(self._block_size), set[int]()
        for span in layout.spans:
            last = self._last_block(span)
            if last >= len(identities) or identities[last] not in self._known:
                break
            self._known.move_to_end(identities[last])
            found.add(span.item)
        return found

    def remember(self, layout: PromptLayout) -> None:
        """The engine has computed this prompt."""
        for span in layout.spans:
            if (last := self._last_block(span)) < len(layout.identities):
                self._known[layout.identities[last]] = None
                self._known.move_to_end(layout.identities[last])
        while len(self._known) > self._max_entries:
            self._known.popitem(last=False)

    def _last_block(self, span: Span) -> int:
        return (span.end - 1) // self._block_size
