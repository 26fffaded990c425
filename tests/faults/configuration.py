"""A checkpoint whose configuration is away for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def taken_away(checkpoint: Path) -> Iterator[None]:
    """For the length of the block no engine can follow one that has ended, however fast they start. Light ones read
    the configuration and no weights."""
    kept, away = checkpoint / "config.json", checkpoint / "taken"
    kept.rename(away)
    try:
        yield
    finally:
        away.rename(kept)
