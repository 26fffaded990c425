"""What a block of KV cache holds, as a name by which others find it.

A block's identity is a 256-bit hash of its parent's, its tokens, and (key, row) of every media row in it, with where it
stands; the tenant's salt is in the first.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import NamedTuple

from common.hash_fields import framed

_SIZE = hashlib.sha256().digest_size
NEVER = 1 << 62
"""A place that no sequence has."""


class MediaRun(NamedTuple):
    """Media rows that stand side by side in a prompt: places [begin, end), from row `row` of the item on."""

    begin: int
    end: int
    row: int
    key: bytes


class BlockRows(NamedTuple):
    """Media rows of a block: so many rows of an item from row `first` on, from place `at` in the block on."""

    key: bytes
    first: int
    at: int
    rows: int


@dataclass(frozen=True, slots=True)
class BlockContent:
    """What a block holds, for others to compare with: its parent's identity, None where it is the first; its int32
    tokens; the number of the adapter; and, in hexadecimal, a digest of whatever else others would have to have in
    common with it: each item with rows in it, and of a first block whose prompt is not for everybody, its root."""

    parent: bytes | None
    token_ids: bytes
    adapter: int
    keys: tuple[str, ...]


def block_identity(parent: bytes, token_ids: bytes, media: Seq[BlockRows]) -> bytes:
    """The identity of a full block: SHA-256 over its parent's, its int32 tokens, and the media runs in it. Where they
    stand does not follow from the tokens: a caller who lays a prompt out may have an item's token stand for no row."""
    parts = [part for key, *numbers in media for part in (key, *(each.to_bytes(8, "little") for each in numbers))]
    return hashlib.sha256(framed(parent, token_ids, *parts)).digest()


def root_identity(salt: str, adapter: bytes = b"") -> bytes:
    """The parent of a first block: tenants with different salts share nothing, nor do those whose keys and values
    different adapters compute; `adapter` is the digest of one."""
    return hashlib.sha256(framed(b"twinlens kv root", salt.encode(), *([adapter] if adapter else []))).digest()


class BlockIdentities:
    """The identities of a sequence's full blocks, each worked out when it is first asked for. `root` is the parent of
    the first block, `runs` are the sequence's media, in order. From place `other_from` on what blocks hold depends on
    that place: nobody else has the same there. `known` are those of the first blocks, one behind the other, as far as
    they have been worked out before."""

    def __init__(self, root: bytes, runs: Seq[MediaRun], other_from: int = NEVER, known: bytes = b"") -> None:
        self._root, self._other_from = root, other_from
        self._runs = runs
        self._known = [known[at : at + _SIZE] for at in range(0, len(known), _SIZE)]
        self._passed_runs = 0

    def __len__(self) -> int:
        return len(self._known)

    def begin_like(self, other: BlockIdentities, count: int) -> None:
        """The first `count` blocks hold what those of another sequence do. Only while none is known."""
        self._known = other._known[:count]

    def first(self, count: int, tokens: array[int], block_size: int) -> list[bytes]:
        """Those of the first `count` blocks of a sequence of these tokens, all of which must be known."""
        if count:
            self.at(count - 1, tokens, block_size)
        return self._known[:count]

    def at(self, index: int, tokens: array[int], block_size: int) -> bytes:
        """That of block number `index` of a sequence of these tokens, all of which must be known."""
        while len(self._known) <= index:
            number = len(self._known)
            begin, end = number * block_size, (number + 1) * block_size
            parent = self._known[-1] if number else self._root
            if begin <= self._other_from < end:
                parent = block_identity(parent, self._other_from.to_bytes(8, "little"), ())
            media = [_within(run, begin, end) for run in self._runs_within(begin, end)]
            self._known.append(block_identity(parent, tokens[begin:end].tobytes(), media))
        return self._known[index]

    def content(self, index: int, tokens: array[int], block_size: int, adapter: int, plain_root: bytes) -> BlockContent:
        """What is in block number `index`, whose identity has been asked for. A prompt that depends on nothing but its
        tokens, its items and the adapter has that root."""
        begin, end = index * block_size, (index + 1) * block_size
        keys = [] if index or self._root == plain_root else [self._root.hex()]
        if begin <= self._other_from < end:
            keys.append(hashlib.sha256(framed(b"answer", self._other_from.to_bytes(8, "little"))).hexdigest())
        first = bisect_right(self._runs, begin, key=lambda run: run.end)
        for run in takewhile(lambda run: run.begin < end, islice(self._runs, first, None)):
            named = run.key.hex() if len(run.key) == _SIZE else hashlib.sha256(run.key).hexdigest()
            if named not in keys:
                keys.append(named)
        parent = self._known[index - 1] if index else None
        return BlockContent(parent, tokens[begin:end].tobytes(), adapter, tuple(keys))

    def _runs_within(self, begin: int, end: int) -> Iterator[MediaRun]:
        """The runs that have a place from `begin` to the one before `end`; asked for in order."""
        while self._passed_runs < len(self._runs) and self._runs[self._passed_runs].end <= begin:
            self._passed_runs += 1
        return takewhile(lambda run: run.begin < end, islice(self._runs, self._passed_runs, None))


def _within(run: MediaRun, begin: int, end: int) -> BlockRows:
    """The part of a run that stands in a block, which it reaches.

    >>> _within(MediaRun(10, 40, 0, b"key"), 16, 32)
    BlockRows(key=b'key', first=6, at=0, rows=16)
    """
    first = max(run.begin, begin)
    return BlockRows(run.key, run.row + first - run.begin, first - begin, min(run.end, end) - first)
