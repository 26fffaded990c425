"""Masks of the tokens that may be chosen: bit i of a little-endian mask allows token i; an empty mask allows all."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np


def mask_bytes(vocab_size: int) -> int:
    """The length of every mask that is not empty: whole words of 32 bits.

    >>> mask_bytes(600), mask_bytes(608)
    (76, 76)
    """
    return 4 * math.ceil(vocab_size / 32)


def mask_of(tokens: Iterable[int], vocab_size: int) -> bytes:
    """Allows these alone."""
    mask = bytearray(mask_bytes(vocab_size))
    for token in tokens:
        mask[token // 8] |= 1 << token % 8
    return bytes(mask)


def all_but(tokens: Iterable[int], vocab_size: int) -> bytes:
    """Allows every token but these."""
    mask = bytearray(b"\xff" * mask_bytes(vocab_size))
    for token in tokens:
        mask[token // 8] &= ~(1 << token % 8)
    return bytes(mask)


def allows(mask: bytes, token: int) -> bool:
    """Whether a mask that is not empty allows a token."""
    return bool(mask[token // 8] >> token % 8 & 1)


def only_token(mask: bytes) -> int | None:
    """The token that a mask allows, if it is one.

    >>> only_token(b"\\x00\\x04"), only_token(b"\\x00\\x05"), only_token(b"\\x01\\x04")
    (10, None, None)
    """
    if mask.count(0) != len(mask) - 1:
        return None
    at = len(mask) - len(mask.lstrip(b"\0"))
    return None if mask[at] & (mask[at] - 1) else 8 * at + mask[at].bit_length() - 1


def either(mask: bytes, tokens: Iterable[int]) -> bytes:
    """Allows what a mask that is not empty does, and these tokens.

    >>> either(b"\\x01\\x80", [9])
    b'\\x01\\x82'
    """
    more = bytearray(mask)
    for token in tokens:
        more[token // 8] |= 1 << token % 8
    return bytes(more)


def both(one: bytes, other: bytes) -> bytes:
    """Allows what both allow.

    >>> both(b"\\x03", b"\\x06"), both(b"", b"\\x06")
    (b'\\x02', b'\\x06')
    """
    if not one or not other:
        return one or other
    return (np.frombuffer(one, np.uint8) & np.frombuffer(other, np.uint8)).tobytes()


def leaves_any(mask: bytes, banned: Sequence[int]) -> bool:
    """Whether a mask allows a token that is not banned."""
    if not mask:
        return True
    left = bytearray(mask)
    for token in banned:
        left[token // 8] &= ~(1 << token % 8)
    return left.count(0) < len(left)
