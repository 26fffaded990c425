"""What a KV block contains, as a hash by which other sequences find it.

A block's identity is a 256-bit hash of its parent's identity, its tokens, and (key, row, position) of every media row
in it. The tenant's salt is hashed into the first.
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
from llm_service.request import MediaRun

_SIZE = hashlib.sha256().digest_size
NEVER = 1 << 62
"""A place that no sequence has."""


class KeyedRun(NamedTuple):
    """A run of media rows, and the key of its item. What is no row, but is computed as if it depended on one, has a key
    that says on what."""

    run: MediaRun
    key: bytes


@dataclass(frozen=True, slots=True)
class BlockContent:
    """A block's content, for comparison outside the service: the parent's identity, None for a first block; the int32
    tokens; the adapter's number; and a hexadecimal digest of everything else that must be equal: each item with rows in
    the block, and the root of a first block whose prompt is not shared with everybody."""

    parent: bytes | None
    token_ids: bytes
    adapter: int
    keys: tuple[str, ...]


def block_identity(parent: bytes, token_ids: bytes, media: Seq[KeyedRun]) -> bytes:
    """The identity of a full block: SHA-256 over its parent's identity, its int32 tokens, and the media runs in it,
    whose positions count from its first token. They do not follow from the tokens, since a client that lays a prompt
    out may use an item's token without a row."""
    parts: list[bytes] = []
    for run, key in media:
        parts += (key, *(each.to_bytes(8, "little") for each in (run.first_row, run.begin, run.count)))
    return hashlib.sha256(framed(parent, token_ids, *parts)).digest()


def root_identity(salt: str, adapter: bytes = b"") -> bytes:
    """The parent of a first block. Prompts with different salts share no blocks, nor do prompts with different
    adapters; `adapter` is an adapter's digest."""
    return hashlib.sha256(framed(b"twinlens kv root", salt.encode(), *([adapter] if adapter else []))).digest()


class BlockIdentities:
    """The identities of a sequence's full blocks, computed on demand. `root` is the parent of the first block, and
    `runs` are the sequence's media in order. From position `other_from` on, the content of blocks depends on the
    sequence, and no other sequence has it. `known` are the identities computed so far, from the first block on."""

    def __init__(self, root: bytes, runs: Seq[KeyedRun], other_from: int = NEVER, known: bytes = b"") -> None:
        self._root, self._other_from = root, other_from
        self._runs = runs
        self._known = [known[at : at + _SIZE] for at in range(0, len(known), _SIZE)]
        self._passed_runs = 0

    def __len__(self) -> int:
        return len(self._known)

    def begin_like(self, other: BlockIdentities, count: int) -> None:
        """Takes over the identities of another sequence for the first `count` blocks, which are equal. None may be
        known yet."""
        self._known = other._known[:count]

    def first(self, count: int, tokens: array[int], block_size: int) -> list[bytes]:
        """The identities of the first `count` blocks of a sequence with these tokens, all of which must be known."""
        if count:
            self.at(count - 1, tokens, block_size)
        return self._known[:count]

    def at(self, index: int, tokens: array[int], block_size: int) -> bytes:
        """The identity of block number `index` of a sequence with these tokens, all of which must be known."""
        while len(self._known) <= index:
            number = len(self._known)
            begin, end = number * block_size, (number + 1) * block_size
            parent = self._known[-1] if number else self._root
            if begin <= self._other_from < end:
                parent = block_identity(parent, self._other_from.to_bytes(8, "little"), ())
            media = [_within(each, begin, end) for each in self._runs_within(begin, end)]
            self._known.append(block_identity(parent, tokens[begin:end].tobytes(), media))
        return self._known[index]

    def content(self, index: int, tokens: array[int], block_size: int, adapter: int, plain_root: bytes) -> BlockContent:
        """The content of block number `index`, whose identity must have been computed. `plain_root` is the root of
        prompts that depend on nothing but tokens, items and adapter."""
        begin, end = index * block_size, (index + 1) * block_size
        keys = [] if index or self._root == plain_root else [self._root.hex()]
        if begin <= self._other_from < end:
            keys.append(hashlib.sha256(framed(b"answer", self._other_from.to_bytes(8, "little"))).hexdigest())
        first = bisect_right(self._runs, begin, key=lambda each: each.run.end)
        for _, key in takewhile(lambda each: each.run.begin < end, islice(self._runs, first, None)):
            named = key.hex() if len(key) == _SIZE else hashlib.sha256(key).hexdigest()
            if named not in keys:
                keys.append(named)
        parent = self._known[index - 1] if index else None
        return BlockContent(parent, tokens[begin:end].tobytes(), adapter, tuple(keys))

    def _runs_within(self, begin: int, end: int) -> Iterator[KeyedRun]:
        """The runs that overlap [begin, end); calls must be in order."""
        while self._passed_runs < len(self._runs) and self._runs[self._passed_runs].run.end <= begin:
            self._passed_runs += 1
        return takewhile(lambda each: each.run.begin < end, islice(self._runs, self._passed_runs, None))


def _within(keyed: KeyedRun, begin: int, end: int) -> KeyedRun:
    """The part of a run that stands in the block at [begin, end), which it reaches, with positions of the block.

    >>> _within(KeyedRun(MediaRun(10, 0, 30), b"key"), 16, 32).run
    MediaRun(begin=0, first_row=6, count=16, grid_rows=0)
    """
    run, key = keyed
    first = max(run.begin, begin)
    return KeyedRun(MediaRun(first - begin, run.first_row + first - run.begin, min(run.end, end) - first), key)
