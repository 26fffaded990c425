"""A small model that proposes drafts for a large one: it computes the same tokens, and continues from there.

Its keys and values are in blocks of the same numbers, in a cache of its own: whatever is found, freed or overwritten
there holds for both.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from msgspec import structs
from torch import Tensor

from common.gpu.graphs import Capture
from common.gpu.transfer import to_device
from llm_service.models.draft_head import DraftHead
from llm_service.plan import Chunk, Draw, Proposal, RowSlice, StepPlan
from llm_service.worker.graphs import CaptureBounds, GraphRunner
from llm_service.worker.model_runner import Launched, ModelRunner


@dataclass(frozen=True, slots=True)
class Verified:
    """The valid part of a chunk once its drafts are verified: its first `count` tokens, from batch position `at` on,
    and `token`, which was drawn behind them, -1 for none. `proposal` asks for drafts behind that."""

    chunk: Chunk
    at: int
    count: int
    token: int
    proposal: Proposal

    def own_chunk(self, more: int = 0) -> Chunk:
        """The chunk of the same sequence for what proposes, `more` tokens of the answer longer than what counts.

        >>> part = Verified(Chunk(7, 5, 0, True, 5, 6), 0, 3, 9, Proposal(4, 0))
        >>> part.own_chunk(1)
        Chunk(context=7, count=4, row=0, decodes=True, answers=4, answered=5)
        """
        count = self.count + more
        answered = max(0, self.chunk.answered + count - self.chunk.count)
        return Chunk(self.chunk.context, count, self.chunk.row, self.chunk.decodes, min(count, answered), answered)


def verified(plan: StepPlan, chosen: list[int]) -> Iterator[Verified]:
    """Each chunk of a plan whose draws have `chosen` these tokens, without what follows a wrong draft."""
    token_ids = np.frombuffer(plan.token_ids, np.int32)
    at = draw = 0
    for chunk, proposal in zip(plan.chunks, plan.proposals or [Proposal(0, 0)] * len(plan.chunks), strict=True):
        end, first = at + chunk.count, draw
        while draw < len(plan.draws) and plan.draws[draw].at < end:
            draw += 1
        drafts = max(0, draw - first - 1)
        right = 0
        while right < drafts and chosen[first + right] == token_ids[end - drafts + right]:
            right += 1
        token = chosen[first + right] if draw > first else -1
        yield Verified(chunk, at, chunk.count - drafts + right, token, proposal)
        at = end


def _behind(chunk: Chunk, ahead: int) -> Chunk:
    """The answer's token `ahead` positions behind a chunk's last one."""
    return Chunk(chunk.context + chunk.count - 1 + ahead, 1, chunk.row, answers=1, answered=chunk.answered + ahead)


_First = tuple[StepPlan, dict[int, tuple[int, int]], list[int]]


class DraftModel:
    """Proposes the likeliest tokens, one after the other, for all sequences of a step together. Tokens from
    `vocab_size` on are unknown to the model that verifies. It `takes_rows` of media if its own are as wide and mean the
    same; otherwise it sees their placeholders."""

    def __init__(self, runner: ModelRunner, own_vocab_size: int, vocab_size: int, *, takes_rows: bool) -> None:
        self._runner = runner
        self._own_vocab_size = own_vocab_size
        self._vocab_size = vocab_size
        self._takes_rows = takes_rows
        self.caches = runner.caches
        self.warm_up = runner.warm_up
        self.kernels = runner.kernels

    def capture(self, bounds: CaptureBounds, capture: Capture, *, max_bytes: int) -> None:
        """See `Proposer`. It computes a token more of each sequence than the step has right ones of."""
        if not self._runner.not_capturable():
            rows = min(bounds.tokens, 2 * bounds.draft_rows)
            own = replace(bounds, drafts=bounds.drafts + 1, draft_rows=rows)
            self._runner.capture(own, capture, max_bytes=max_bytes, agree=int)

    @property
    def graphs(self) -> GraphRunner | None:
        """Its own."""
        return self._runner.graphs

    def propose(self, plan: StepPlan, chosen: list[int], hidden: Tensor, /) -> Callable[[], list[list[int]]]:
        """As `Proposer` has it. One pass takes in the step and the tokens that it chose, and gives the first draft of
        each sequence; each further pass gives the next ones."""
        asked = [proposal.count for proposal in plan.proposals] or [0] * len(plan.chunks)
        first, places, own = self._first(plan, chosen)
        launched = [self._runner.launch(first, previous=self._entered(hidden, own))]
        followed: list[list[int]] = [[n for n, count in enumerate(asked) if count]]
        draws = {number: draw for draw, number in enumerate(followed[0])}
        for ahead in range(1, max(asked, default=0)):
            numbers = [number for number in followed[-1] if asked[number] > ahead]
            positions = array("i", [places[number][1] + ahead for number in numbers])
            behind = self._behind(launched[-1].hidden, [draws[number] for number in numbers])
            launched.append(
                self._runner.launch(
                    StepPlan(
                        bytes(4 * len(numbers)),
                        positions.tobytes() * 3,
                        [_behind(first.chunks[number], ahead) for number in numbers],
                        [],
                        [Draw(at=place) for place in range(len(numbers))],
                        carried=[(place, draws[number]) for place, number in enumerate(numbers)],
                    ),
                    previous=behind,
                )
            )
            draws = {number: draw for draw, number in enumerate(numbers)}
            followed.append(numbers)
        return lambda: self._read(len(asked), launched, followed)

    def _entered(self, _hidden: Tensor, _places: Sequence[int]) -> Tensor | None:
        """What it takes of the model's hidden states at these positions; None if nothing."""
        return None

    def _behind(self, _hidden: Tensor | None, _places: Sequence[int]) -> Tensor | None:
        """What it takes of its own hidden states, if it continues from them."""
        return None

    def _first(self, plan: StepPlan, chosen: list[int]) -> _First:
        """The same step without wrong drafts, with the chosen tokens behind which drafts are wanted; for each of these,
        by chunk number, the number of tokens before it and its position; and no hidden states."""
        token_ids, positions = np.frombuffer(plan.token_ids, np.int32), np.frombuffer(plan.positions, np.int32)
        positions = positions.reshape(3, -1)
        ids: list[np.ndarray] = []
        where: list[np.ndarray] = []
        chunks: list[Chunk] = []
        draws: list[Draw] = []
        rows: list[RowSlice] = []
        places: dict[int, tuple[int, int]] = {}
        at, unread = 0, list(plan.rows[::-1]) if self._takes_rows else []
        for number, part in enumerate(verified(plan, chosen)):
            end, count, context = part.at + part.count, part.count, part.chunk.context
            ids.append(token_ids[part.at : end])
            where.append(positions[:, part.at : end])
            while unread and unread[-1].at < end:
                row = unread.pop()
                rows.append(structs.replace(row, at=row.at + at - part.at))
            if part.proposal.count:
                position = context + count + part.proposal.mrope_delta
                places[number] = context + count, position
                ids.append(np.array([part.token], np.int32))
                where.append(np.full((3, 1), position, np.int32))
                draws.append(Draw(at=at + count))
                count += 1
            chunks.append(part.own_chunk(count - part.count))
            at += count
        known = np.concatenate(ids)
        known = np.where(known < self._own_vocab_size, known, 0).astype(np.int32)
        packed = known.tobytes(), np.concatenate(where, axis=1).tobytes()
        return StepPlan(*packed, chunks, rows, draws, appended=plan.appended), places, []

    def _read(self, chunks: int, launched: list[Launched], followed: list[list[int]]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in range(chunks)]
        for step, numbers in zip(launched, followed, strict=True):
            for number, token in zip(numbers, step.result().tokens, strict=True):
                drafts[number].append(token)
        return [self._known(each) for each in drafts]

    def _known(self, drafts: list[int]) -> list[int]:
        return drafts[: next((n for n, token in enumerate(drafts) if token >= self._vocab_size), len(drafts))]


class HeadProposer(DraftModel):
    """Proposes by a draft head: the model's own MTP layer or an EAGLE-3 head, whose keys and values at a position
    depend on the next token as well. So the last ones of a cached block are another sequence's, and those before a
    chunk that begins with a media row lack that row: drafts may be worse for it, tokens are not."""

    def __init__(
        self, runner: ModelRunner, head: DraftHead, own_vocab_size: int, vocab_size: int, *, takes_rows: bool
    ) -> None:
        super().__init__(runner, own_vocab_size, vocab_size, takes_rows=takes_rows)
        self._head = head

    def _entered(self, hidden: Tensor, places: Sequence[int]) -> Tensor | None:
        (there,) = to_device([np.array(places, np.int64)], hidden.device)
        return self._head.enter(hidden[there])

    def _behind(self, hidden: Tensor | None, places: Sequence[int]) -> Tensor | None:
        assert hidden is not None, "its steps continue from hidden states"
        (there,) = to_device([np.array(places, np.int64)], hidden.device)
        return hidden[there]

    def _first(self, plan: StepPlan, chosen: list[int]) -> _First:
        """The same step without wrong drafts, each token at the position before it; where its first drafts are, less
        one; and the batch positions whose hidden states it gets."""
        token_ids = np.frombuffer(plan.token_ids, np.int32)
        ids = array("i")
        own: list[int] = []
        chunks: list[Chunk] = []
        draws: list[Draw] = []
        rows: list[RowSlice] = []
        places: dict[int, tuple[int, int]] = {}
        unread = list(plan.rows[::-1]) if self._takes_rows else []
        for number, part in enumerate(verified(plan, chosen)):
            end, last = part.at + part.count, part.chunk.context + part.count - 1
            while unread and unread[-1].at < end:
                row = unread.pop()
                first = int(row.at == part.at)  # of a row in the first place, the chunk before should have known
                if row.count > first:
                    size = self._runner.row_bytes
                    at = row.at + first - part.at + len(own) - 1
                    rows.append(RowSlice(at, row.offset + first * size, row.count - first))
            own.extend(range(part.at, end))
            ids.extend(token_ids[part.at + 1 : end].tolist())
            ids.append(part.proposal.following if part.token < 0 else part.token)
            if part.proposal.count:
                places[number] = last, last + part.proposal.mrope_delta
                draws.append(Draw(at=len(own) - 1))
            chunks.append(part.own_chunk())
        positions = np.frombuffer(plan.positions, np.int32).reshape(3, -1)[:, own]
        known = np.frombuffer(ids, np.int32)
        known = np.where(known < self._own_vocab_size, known, 0).astype(np.int32)
        made = StepPlan(known.tobytes(), positions.tobytes(), chunks, rows, draws, appended=plan.appended)
        return made, places, own
