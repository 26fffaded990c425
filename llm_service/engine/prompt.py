"""The prompt of a request as the scheduler sees it: all of its choices share it. Numbers only, no torch."""

from __future__ import annotations

from array import array
from copy import copy
from dataclasses import dataclass

import numpy as np

from llm_service.engine.block_identity import KeyedRun, block_identity, root_identity
from llm_service.engine.messages import NOWHERE, Add, ItemRows
from llm_service.engine.prompt_identities import keyed_runs, prompt_root, with_texts_apart
from llm_service.engine.state_slots import SnapshotPlace
from llm_service.families.chunk_rule import ANYWHERE, ChunkRule
from llm_service.request import MediaRun

_FIRST_BRANCHES, _LAST_BRANCHES = 2, 4
"""Branches kept of a prompt with many turns and media: the system prompt and what follows it, and the last turns, which
may be asked again."""


@dataclass(slots=True, eq=False)
class Prompt:
    """The tokens that all choices of a request begin with."""

    tokens: array[int]
    """int32."""
    positions: np.ndarray
    """int32 [3, tokens]: time, height and width."""
    mrope_delta: int
    """A token at index i past the prompt is at i + mrope_delta in all three."""
    items: list[ItemRows]
    runs: list[MediaRun]
    """The runs of all items, in order."""
    keyed_runs: list[KeyedRun]
    """These, and texts whose positions do not count on, for the identities of blocks."""
    media_end: int
    """One past the last place of a media row, 0 without any."""
    whole_end: int
    """One past the last token of the part that is computed at once because its tokens see each other; 0 if there is
    none."""
    root: bytes
    """The parent of the first block's identity."""
    plain_root: bytes
    """The root that this prompt would have if it were shared with everybody."""
    tenant: bytes
    """The same for all that a tenant asks."""
    distinct: bytes
    """int32: its distinct tokens, if repeating them is penalised."""
    _ends: list[int] | None = None

    @classmethod
    def of(cls, add: Add, rule: ChunkRule = ANYWHERE) -> Prompt:
        """The prompt of a request, cut according to `rule`."""
        tokens = array("i", add.token_ids)
        items = list(map(copy, add.items))
        runs = keyed_runs((item.key, item.runs) for item in items)
        whole_end = rule.whole_end(tokens)
        positions = np.frombuffer(add.positions, np.int32).reshape(3, len(tokens))
        root = prompt_root(positions, add.salt, add.adapter_digest)
        if whole_end:  # each token depends on all tokens
            root = block_identity(root, tokens[:whole_end].tobytes(), runs)
        penalises = add.sampling.repetition_penalty != 1.0
        return cls(
            tokens=tokens,
            positions=positions,
            mrope_delta=add.mrope_delta,
            items=items,
            runs=[run for run, _ in runs],
            keyed_runs=with_texts_apart(positions, runs),
            media_end=max((run.end for run, _ in runs), default=0),
            whole_end=whole_end,
            root=root,
            plain_root=root_identity("", add.adapter_digest),
            tenant=root_identity(add.salt),
            distinct=np.unique(tokens).tobytes() if penalises else b"",
        )

    @property
    def is_placed(self) -> bool:
        """Whether an item has a place in the arena."""
        return any(item.offset != NOWHERE for item in self.items)

    @property
    def longest_run(self) -> int:
        """Rows of its longest run."""
        return max((run.count for run in self.runs), default=0)

    def place(self, places: list[tuple[int, int]]) -> None:
        """Gives every item a place in the arena: (offset, rows that have arrived there)."""
        for item, (offset, rows) in zip(self.items, places, strict=True):
            item.place(offset, rows)

    def displace(self) -> None:
        """No item has a place any more."""
        for item in self.items:
            item.displace()

    def lacks_rows(self, begin: int) -> bool:
        """Whether an item has no place in the arena though some of its rows stand at `begin` or after it."""
        return any(item.offset == NOWHERE and any(run.end > begin for run in item.runs) for item in self.items)

    def computable_end(self, begin: int, end: int) -> int:
        """`end`, or before it the place of the first media row behind `begin` that has not landed.

        With 4 tokens of text, then a picture of 6 rows of which 2 have landed: from 0 to 10, it is 6.
        """
        if begin >= self.media_end:
            return end
        for item in self.items:
            for run in item.runs:
                if run.end > begin and item.landed < run.first_row + run.count:
                    end = min(end, run.begin + max(0, item.landed - run.first_row))
        return end

    def without_partial_media(self, begin: int, count: int, longest: int) -> int:
        """`count`, or fewer, so that a chunk from `begin` on does not end inside a media run, unless what is left of
        the run is longer than `longest`; nor before all are computed that are computed at once.

        With a run at 4 … 9, a chunk of 8 tokens from 0 on becomes one of 4.
        """
        end = begin + count
        if end < self.whole_end:
            return 0
        for run in self.runs:
            first = max(run.begin, begin)
            if run.begin < end < run.end and run.end - first <= longest:
                return first - begin
        return count

    def next_whole(self, begin: int) -> tuple[int, int]:
        """The first and last position (exclusive) of the part computed at once, or the media run, that ends behind
        `begin`; (0, 0) if there is none."""
        if begin < self.whole_end:
            return 0, self.whole_end
        return next(((run.begin, run.end) for run in self.runs if run.end > begin), (0, 0))

    def before_run(self, place: int) -> int:
        """`place`, or the beginning of the run of media rows that it is inside of."""
        return next((run.begin for run in self.runs if run.begin < place < run.end), place)

    def branches(self, multiple: int, turn_ends: tuple[int, ...]) -> dict[int, SnapshotPlace]:
        """Positions where other prompts may branch off, each the last multiple before a branch: the ends of media and
        of turns, the system prompt's included. Of many turns only the first and the last count, since each takes a
        slot."""
        if self._ends is None:
            turns = (np.flatnonzero(np.isin(self.tokens, turn_ends)) + 1).tolist()
            media = [max(run.end for run in item.runs) for item in self.items if item.runs]
            self._ends = sorted({end // multiple * multiple for end in (*turns, *media)})
        found = dict.fromkeys(self._ends[-_LAST_BRANCHES:], SnapshotPlace.TURN)
        return found | dict.fromkeys(self._ends[:_FIRST_BRANCHES], SnapshotPlace.OPENING)
