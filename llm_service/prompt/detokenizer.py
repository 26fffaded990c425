"""Turns tokens into text as they arrive: whole characters only, and nothing that could still become a stop text. Also
texts of single tokens, for logprobs."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache

from tokenizers import Tokenizer

_WINDOW = 8
"""Tokens that are decoded again with each further one, and as many more before older ones are dropped. Six would do:
the last three bytes may begin a character, the first three may end one whose beginning was dropped, and a token with
any text has at least one byte."""

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
"""How a tokenizer of pieces spells a byte that is no piece (sentencepiece's `byte_fallback`)."""


class _FallbackBytes:
    """Collects bytes that a SentencePiece-like tokenizer has as tokens, until they are a character. Such a tokenizer
    decodes a run of byte tokens as a whole: all of it counts as damaged if it is cut inside a character."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._tokens: list[int] = []
        self._bytes = b""

    def push(self, token: int) -> tuple[str, list[int]]:
        """Takes a token: a � for each byte that can be part of no character any more, and the tokens that are whole
        with this one, none while a character is not. A special token that is skipped is no text, and parts none."""
        found = _BYTE.fullmatch(self._tokenizer.id_to_token(token) or "")
        if found is None:
            skipped = self._bytes and self._skip_special and self._is_special(token)
            return ("", []) if skipped else (self.give_up(), [token])
        byte = bytes.fromhex(found[1])
        damaged = self.give_up() if _is_character(self._bytes + byte) is False else ""
        self._tokens.append(token)
        self._bytes += byte
        whole = _is_character(self._bytes)
        if whole is None:
            return damaged, []
        tokens = self._tokens
        given_up = self.give_up()
        return (damaged, tokens) if whole else (damaged + given_up, [])

    def _is_special(self, token: int) -> bool:
        return not self._tokenizer.decode([token]) and bool(self._tokenizer.decode([token], skip_special_tokens=False))

    def give_up(self) -> str:
        """A � for each byte of a character that is not whole, and will not be."""
        damaged, self._tokens, self._bytes = "�" * len(self._bytes), [], b""
        return damaged


def _is_character(data: bytes) -> bool | None:
    """Whether these bytes are one; None: they may become one.

    >>> snowman = bytes.fromhex("e29883")
    >>> _is_character(snowman), _is_character(snowman[:2]), _is_character(snowman[1:])
    (True, None, False)
    """
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return None if error.reason == "unexpected end of data" else False
    return True


def _falls_back_to_bytes(tokenizer: Tokenizer) -> bool:
    token = tokenizer.token_to_id("<0x41>")
    return token is not None and tokenizer.decode([token]) == "A"


class Detokenizer:
    """The text of one choice. After `stopped` is set no more text comes. Before `min_tokens` tokens it is never set,
    and a stop text that is complete by then is ordinary text. The text ends before the stop text, or behind it with
    `shows_stop`. Special tokens are written by name unless they are skipped."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        *,
        shows_stop: bool = False,
        skip_special: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._shows_stop = shows_stop
        self._skip_special = skip_special
        self._tokens = 0
        falls_back = _falls_back_to_bytes(tokenizer)
        self._bytes = _FallbackBytes(tokenizer, skip_special=skip_special) if falls_back else None
        self._window: list[list[int]] = []  # lists of tokens that share one character's bytes
        self._told = 0  # characters of the window's text that are known already, released or held back
        self._held = ""  # may begin a stop text; released already if the text shows that
        self.stopped: str | None = None

    def push(self, token: int) -> str:
        """Takes a token; the text that is now certain, often empty."""
        self._tokens += 1
        damaged, whole = ("", [token]) if self._bytes is None else self._bytes.push(token)
        return self._release(damaged + self._push(whole) if whole else damaged)

    def _push(self, tokens: list[int]) -> str:
        """Takes tokens that are not to be parted; the text that is certain with them."""
        self._window.append(tokens)
        certain = self._certain()
        new, self._told = certain[self._told :], len(certain)
        if len(self._window) == 2 * _WINDOW:
            self._window = [each for each in self._window if self._decode([each])][-_WINDOW:]
            self._told = len(self._certain())
        return new

    def finish(self) -> str:
        """The rest of the text when a choice ends by itself: text held back, and an unfinished character as �."""
        if self.stopped is not None:
            return ""
        rest = self._decode(self._window)[self._told :]
        return self._release(rest if self._bytes is None else rest + self._bytes.give_up(), last=True)

    def _certain(self) -> str:
        """The window's text, without a � at its end that may still become a character."""
        return self._decode(self._window).removesuffix("�")

    def _decode(self, window: Sequence[list[int]]) -> str:
        tokens = [token for together in window for token in together]
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=self._skip_special)
        return text

    def _release(self, new: str, *, last: bool = False) -> str:
        text, known = self._held + new, len(self._held)
        released = known if self._shows_stop else 0
        self._held = ""
        ends = self._stop if self._tokens >= self._min_tokens else ()
        # A stop text that ends within the held text was complete before `min_tokens`.
        places = ((text.find(stop, max(0, known - len(stop) + 1)), stop) for stop in ends)
        at, found = min((place for place in places if place[0] >= 0), default=(-1, ""))
        if found:
            self.stopped = found
            return text[released : at + len(found)] if self._shows_stop else text[:at]
        keep = 0 if last else _possible_start(text, self._stop)
        self._held = text[len(text) - keep :]
        return text[released:] if self._shows_stop else text[: len(text) - keep]


def _possible_start(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of `text` that begin one of the stop texts: the longest such end.

    >>> _possible_start("the en", ["end", "."])
    2
    """
    longest = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return longest


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
    """Bytes of the tokens of a byte-level tokenizer, or of a SentencePiece-like one, which writes a space as ▁ and
    bytes without a piece as <0x0A>."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._is_byte_level = '"ByteLevel"' in json.dumps(json.loads(tokenizer.to_str()).get("decoder"))
        self._added = tokenizer.get_added_tokens_decoder()
        self.bytes_of = lru_cache(_REMEMBERED)(self._bytes_of)

    def _bytes_of(self, token: int) -> bytes:
        """The bytes that a token adds to a text; a special token's name; nothing for an unknown id."""
        added = self._added.get(token)
        if added is not None and (added.special or self._is_byte_level):
            return added.content.encode()
        spelled = self._tokenizer.id_to_token(token) or ""
        if not self._is_byte_level:
            byte = _BYTE.fullmatch(spelled)
            return bytes.fromhex(byte[1]) if byte else spelled.replace("▁", " ").encode()
        return bytes(_BYTES[sign] for sign in spelled if sign in _BYTES)

    def text_of(self, token: int) -> str:
        """The same as text, with � for a part of a character."""
        return self.bytes_of(token).decode(errors="replace")
