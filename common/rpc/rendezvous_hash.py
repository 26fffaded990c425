"""Rendezvous hashing (Thaler and Ravishankar 1998): repeats of a key meet the same place, and one that comes or goes
moves few keys."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import TypeVar

Place = TypeVar("Place")


def ranked(key: bytes, places: Iterable[Place], address: Callable[[Place], str]) -> list[Place]:
    """All places in the order of preference for this key: its own first, then where it goes without that one, and so
    on."""
    return sorted(places, key=lambda place: hashlib.sha256(key + address(place).encode()).digest())
