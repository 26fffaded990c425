"""Offsets of tokens in a text, whose characters may consist of several tokens."""

from __future__ import annotations

import codecs

_UTF_8 = codecs.getincrementaldecoder("utf-8")


class TextOffsets:
    """Counts the characters before each token; of one that begins within a character, those before that.

    >>> offsets = TextOffsets()
    >>> [offsets.add(token) for token in ("aä".encode(), b"\\xe5", b"\\x9b", b"\\xb3", b"\\xe5", b"b")]
    [0, 2, 2, 2, 3, 4]
    """

    def __init__(self) -> None:
        self._characters = _UTF_8("replace")
        self._length = 0

    def add(self, token: bytes) -> int:
        """The offset of the next token, given its bytes."""
        begun, _ = self._characters.getstate()
        first = self._characters.decode(token[:1])
        goes_on = 0x80 <= token[0] < 0xC0 and len(first) < 2 if token else True
        offset = self._length if goes_on else self._length + len(begun.decode(errors="replace"))
        self._length += len(first) + len(self._characters.decode(token[1:]))
        return offset
