"""What single tokens stand for, so that whoever is told how likely they were can read them."""

from __future__ import annotations

from functools import lru_cache

from tokenizers import Tokenizer

_REMEMBERED = 1 << 14


def _byte_signs() -> dict[str, int]:
    """Byte-level tokenizers spell a token with one sign for each byte: those that can be seen stand for themselves,
    and the others for the code points from 256 on, in order (openai/gpt-2, src/encoder.py).

    >>> _byte_signs()["a"], _byte_signs()["Ġ"]
    (97, 32)
    """
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_signs()


class TokenTexts:
    """Bytes of the tokens of a byte-level tokenizer, as every model here has one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {id: token.content for id, token in tokenizer.get_added_tokens_decoder().items()}
        self.bytes_of = lru_cache(_REMEMBERED)(self._bytes_of)

    def _bytes_of(self, token: int) -> bytes:
        """What a token adds to a text; a special token's name; nothing for a number that is no token's."""
        if token in self._added:
            return self._added[token].encode()
        spelled = self._tokenizer.id_to_token(token) or ""
        return bytes(_BYTES[sign] for sign in spelled if sign in _BYTES)

    def text_of(self, token: int) -> str:
        """The same as text, with � for what is but a part of a character."""
        return self.bytes_of(token).decode(errors="replace")
