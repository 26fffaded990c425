"""The identities of a prompt's blocks, and what these depend on besides tokens."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np

from llm_service.engine.block_identity import BlockIdentities, KeyedRun, block_identity, root_identity
from llm_service.request import MediaRun


def block_identities(
    tokens: array[int], positions: bytes, runs: list[KeyedRun], salt: str, adapter_digest: bytes, block_size: int
) -> list[bytes]:
    """The identities of a prompt's full blocks, if none of its tokens depends on later ones; `positions` is int32 [3,
    tokens], `runs` are in order. Called by the front: a long prompt has thousands, and the deciding thread should not
    compute them."""
    where = np.frombuffer(positions, np.int32).reshape(3, len(tokens))
    names = BlockIdentities(prompt_root(where, salt, adapter_digest), with_texts_apart(where, runs))
    return names.first(len(tokens) // block_size, tokens, block_size)


def prompt_root(positions: np.ndarray, salt: str, adapter_digest: bytes) -> bytes:
    """The parent of a prompt's first block, positions int32 [3, n]."""
    root = root_identity(salt, adapter_digest)
    if begins := int(positions[0, 0]):  # other positions give other rotations
        root = block_identity(root, begins.to_bytes(4, "little"), ())
    return root


def keyed_runs(items: Iterable[tuple[bytes, Iterable[MediaRun]]]) -> list[KeyedRun]:
    """The runs of items, given with the items' keys, in order."""
    return sorted(KeyedRun(run, key) for key, runs in items for run in runs)


def with_texts_apart(positions: np.ndarray, runs: list[KeyedRun]) -> list[KeyedRun]:
    """Media runs, in order, with texts between them whose positions are not consecutive."""
    return sorted([*runs, *_texts_apart(positions, runs)]) if runs else runs


def _texts_apart(positions: np.ndarray, runs: list[KeyedRun]) -> list[KeyedRun]:
    """Tokens that are no rows and whose positions, int32 [3, n], do not count on from the token before them, or differ
    among axes, as those of a mark that a picture's rows begin with: what is computed of them is not what it is of the
    same token elsewhere. Each is as a row of an item that is named by where it is.

    >>> where = np.array([[0, 1, 2, 2, 3], [0, 1, 1, 2, 3], [0, 1, 2, 3, 3]], np.int32)
    >>> [(run.begin, run.end) for run, _ in _texts_apart(where, [KeyedRun(MediaRun(3, 0, 1), b"")])]
    [(2, 3)]
    """
    rows = np.zeros(positions.shape[1], np.bool_)
    for run, _ in runs:
        rows[run.begin : run.end] = True
    behind_rows = np.concatenate([rows[:1], rows[:-1]])
    jumps = np.diff(positions[0], prepend=positions[0, 0] - 1) != 1
    apart = (positions != positions[0]).any(axis=0) | (jumps & ~behind_rows)
    found = np.flatnonzero(apart & ~rows).tolist()
    return [KeyedRun(MediaRun(at, 0, 1), b"positions" + positions[:, at].tobytes()) for at in found]
