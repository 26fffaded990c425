"""Chooses the sequences of a step and how many tokens of each it computes: decodes first, one token each, then prefill
chunks."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice

from llm_service.engine.adapter_slots import AdapterSlots
from llm_service.engine.block_manager import BlockManager
from llm_service.engine.drafts import look_up
from llm_service.engine.limits import SchedulerLimits
from llm_service.engine.queues import Queues, order_of
from llm_service.engine.sequence import Sequence
from llm_service.engine.step_pace import StepPace

Drafter = Callable[[Sequence, int], "array[int]"]
"""Returns at most so many draft tokens for a sequence, all of whose tokens are known."""

_LOOK_AHEAD = 64
"""How many waiting sequences one step searches for short prompts."""


def by_look_up(sequence: Sequence, count: int) -> array[int]:
    """Drafts without a model: tokens that the answer's grammar forces, otherwise what followed an earlier occurrence of
    the sequence's last tokens."""
    if forced := _forced(sequence):
        return forced[:count]
    return look_up(sequence.tokens, count)


def by_proposal(sequence: Sequence, count: int) -> array[int]:
    """Drafts of a model: tokens that the answer's grammar forces, otherwise those that the model proposed with the last
    step."""
    return (_forced(sequence) or sequence.proposed)[:count]


def _fewest_first(sequences: Collection[Sequence]) -> Iterator[tuple[int, Sequence]]:
    """Sequences in ascending order of how many drafts they may have, each with the number of sequences after it."""
    in_order = sorted(sequences, key=lambda sequence: sequence.draft_length.now())
    return zip(reversed(range(len(in_order))), in_order, strict=True)


def _forced(sequence: Sequence) -> array[int]:
    return array("i", [] if sequence.matcher is None else sequence.matcher.compute_ff_tokens())


@dataclass(slots=True)
class Schedule:
    """The tokens that a step is to compute, and the events of planning it."""

    num_scheduled_tokens: dict[Sequence, int] = field(default_factory=dict)
    proposals: dict[Sequence, int] = field(default_factory=dict)
    """For each sequence, how many drafts the model proposes at the end of the step."""
    started: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    displaced: list[Sequence] = field(default_factory=list)
    """Sequences that need rows of items which have lost their place in the row arena."""
    closed: bool = False
    """No further sequence may start in this step."""
    closed_to_adapters: bool = False
    """No further sequence with an adapter may start in this step."""


class Planner:
    """Schedules, admits and preempts sequences, and chooses their drafts. It changes queues, block tables and drafts of
    sequences."""

    def __init__(
        self,
        queues: Queues,
        blocks: BlockManager,
        limits: SchedulerLimits,
        pace: StepPace,
        draft: Drafter,
        adapter_slots: AdapterSlots,
    ) -> None:
        self._queues = queues
        self._adapter_slots = adapter_slots
        self._pace = pace
        self._bounded = False
        self._by_length_next = False
        self._blocks = blocks
        self._limits = limits
        self._draft = draft
        self._max_media_tokens = limits.max_media_tokens
        self._keep_media_whole = limits.keep_media_whole or not limits.chunk_rule.may_end_in_run
        self._most_spares = blocks.state_slots - limits.max_running  # every sequence that may run must find a slot

    def bound(self, limits: SchedulerLimits) -> None:
        """Applies new limits from the next step on. They must allow as many sequences as run now, and no more than the
        first limits did."""
        self._limits, self._max_media_tokens = limits, limits.max_media_tokens

    def choose(self) -> Schedule:
        """Schedules the next step; `num_scheduled_tokens` is empty if nothing can be computed now."""
        schedule, self._bounded = Schedule(), False
        prefills = self._decodes(schedule)
        budget = self._limits.max_step_tokens - sum(schedule.num_scheduled_tokens.values())
        if budget and (prefills or self._queues.waiting):
            budget, in_order = self._prompt_budget(len(schedule.num_scheduled_tokens), budget)
            if budget:
                budget = self._by_priority(schedule, prefills, budget, in_order)
                self._by_length(schedule, prefills, budget)
        if self._limits.proposes:
            self._ask_for_proposals(schedule)
        return schedule

    def _prompt_budget(self, decodes: int, budget: int) -> tuple[int, int]:
        """The tokens that prompts may take of `budget` beside so many decodes, and how many of these go by priority:
        half. If the pace leaves only a few tokens they are not divided; steps alternate between priority and length."""
        bearable = self._pace.prompt_tokens(decodes)
        self._bounded = bearable is not None and bearable < budget
        if bearable is None or not self._bounded:
            return budget, budget - budget // 2
        if self._keep_media_whole and bearable:  # less may be useless; the following steps make up for it
            return budget, budget
        if bearable:
            self._by_length_next = not self._by_length_next
        return bearable, 0 if self._by_length_next else bearable

    def _decodes(self, schedule: Schedule) -> list[Sequence]:
        """Gives every decode its token. Returns the running sequences with more to compute."""
        prefills: list[Sequence] = []
        for sequence in tuple(self._queues.running):
            if not sequence.running or sequence.at_max_length or sequence.drafts:
                continue  # preempted or ended meanwhile, or its length is unknown until drafts are verified
            count = sequence.pending
            if count > 1 and not sequence.rolled_back:
                prefills.append(sequence)
            elif sequence.num_computable(sequence.num_computed_tokens) and self._make_room(sequence, count, schedule):
                schedule.num_scheduled_tokens[sequence] = count
        if self._limits.speculative_tokens:
            self._speculate(schedule, self._largest_whole(prefills))
        return prefills

    def _largest_whole(self, prefills: list[Sequence]) -> int:
        """The most tokens that a prompt that can be computed now needs in one step to make progress."""
        if not self._keep_media_whole:
            return 0
        waiting = () if self._is_crowded() else islice(self._queues.waiting, _LOOK_AHEAD)
        return max(map(self._whole, chain(prefills, waiting)), default=0)

    def _whole(self, sequence: Sequence) -> int:
        begin = sequence.num_computed_tokens
        first, end = sequence.prompt.next_whole(begin)
        length = end - max(first, begin)
        if not 0 < length <= self._max_media_tokens or sequence.wait_reason is not None:  # a longer run is split
            return 0
        return length if end <= begin + sequence.num_computable(begin) else 0

    def _speculate(self, schedule: Schedule, kept: int) -> None:
        """Gives drafts to decodes if the step has room for them and blocks are free; nobody is preempted for a draft.
        The room is shared equally, and what sequences with few drafts leave goes to the others. `kept` tokens of the
        step stay free for prompts: otherwise drafts in every step could keep a run of media rows from ever fitting."""
        decodes = schedule.num_scheduled_tokens
        limits = self._limits
        room = min(limits.draft_rows, limits.max_step_tokens - kept) - sum(decodes.values())
        if self._blocks.state_slots:  # room to recompute tokens after wrong drafts
            room = min(room, limits.max_step_tokens - limits.max_running)
        for others, sequence in _fewest_first(decodes):
            share = -(-room // (others + 1))
            most = min(share, sequence.draft_length.now(), sequence.max_length - len(sequence.tokens) - 1)
            if self._blocks.keeps_snapshots:  # a step of one token would end at each multiple, where the state is kept
                begin, multiple = sequence.num_computed_tokens, self._blocks.snapshot_multiple
                most = min(most, multiple - begin % multiple - 2)
            if most > 0 and sequence.takes_drafts:
                sequence.propose(self._draft(sequence, most))
            count = len(sequence.drafts)
            if not count:
                sequence.draft_length.verified(0, 0)
            elif self._blocks.grow(
                sequence.table, sequence.num_computed_tokens + 1 + count
            ) and self._blocks.take_spare(sequence.table, self._most_spares):
                decodes[sequence] += count
                room -= count
            else:
                sequence.propose(array("i"))

    def _ask_for_proposals(self, schedule: Schedule) -> None:
        """Asks a draft model for as many drafts as the next step may have room for, if blocks for its own keys and
        values are free. It assumes that all drafts which this step verifies are right."""
        work, limits = schedule.num_scheduled_tokens, self._limits
        ends = {each: each.num_computed_tokens + count for each, count in work.items()}
        drawing = [
            each for each, end in ends.items() if each.pooling is None and end == len(each.tokens) + len(each.drafts)
        ]
        room = min(limits.draft_rows, limits.max_step_tokens) - len(drawing)
        for others, sequence in _fewest_first(drawing):
            share = -(-room // (others + 1))
            most = min(share, sequence.draft_length.now(), sequence.max_length - ends[sequence] - 2)
            if most > 0 and self._blocks.grow(sequence.table, ends[sequence] + most):
                schedule.proposals[sequence] = most
                room -= most

    def _by_priority(self, schedule: Schedule, prefills: list[Sequence], budget: int, in_order: int) -> int:
        """Spends `in_order` tokens of the budget by priority and arrival, so that nobody waits forever. Returns what is
        left of the whole budget."""
        schedule.closed = self._is_crowded() and not self._idle(schedule)
        waiting = () if schedule.closed else tuple(self._queues.waiting)
        if in_order <= 0:  # this step goes by length only
            schedule.closed |= self._first_lacks_room(waiting)
        for sequence in heapq.merge(prefills, waiting, key=order_of):
            if in_order <= 0:
                break
            count = self._extend(sequence, schedule, in_order)
            if not count and self._keep_media_whole and not schedule.num_scheduled_tokens.get(sequence):
                count = self._extend(sequence, schedule, budget)
            in_order -= count
            budget -= count
        return budget

    def _first_lacks_room(self, waiting: Iterable[Sequence]) -> bool:
        """Whether the first sequence in order with all of its rows has no room now: it must not be overtaken."""
        first = next((each for each in waiting if each.wait_reason is None), None)
        if first is None:
            return False
        identities = first.block_identities(self._blocks.block_size)
        hits = self._hits(first, identities)
        begin = hits * self._blocks.block_size
        complete = begin + first.num_computable(begin) == len(first.tokens)
        return complete and not self._blocks.can_hold(identities[:hits], len(first.tokens))

    def _by_length(self, schedule: Schedule, prefills: list[Sequence], budget: int) -> None:
        """Spends the rest of the budget on the sequences with the fewest tokens left, so that short prompts do not wait
        behind long ones."""
        waiting = () if schedule.closed else islice(self._queues.waiting, _LOOK_AHEAD)
        candidates = [*prefills, *schedule.started, *waiting]
        for sequence in sorted(
            candidates, key=lambda s: (s.pending - schedule.num_scheduled_tokens.get(s, 0), s.order)
        ):
            if budget <= 0:
                break
            budget -= self._extend(sequence, schedule, budget)

    def _extend(self, sequence: Sequence, schedule: Schedule, max_tokens: int) -> int:
        """Gives a sequence up to `max_tokens` more tokens in this step, and starts it if it is waiting. Returns how
        many it got."""
        if sequence.at_max_length:
            return 0
        if not sequence.running:
            return self._admit(sequence, schedule, max_tokens)
        given = schedule.num_scheduled_tokens.get(sequence, 0)
        count = self._chunk(sequence, sequence.num_computed_tokens, given + max_tokens)
        if count <= given:
            return 0
        if not self._make_room(sequence, count, schedule):
            # Freed blocks are for this sequence: another that started now would take them, step after step.
            schedule.closed |= self._has_all_rows(sequence)
            return 0
        schedule.num_scheduled_tokens[sequence] = count
        return count - given

    def _admit(self, sequence: Sequence, schedule: Schedule, max_tokens: int) -> int:
        """Starts a waiting sequence, on its cached blocks, if all its tokens could be held now. While the first
        sequence in order that has all its rows cannot start, nobody does."""
        if schedule.closed or sequence.wait_reason is not None or (schedule.closed_to_adapters and sequence.adapter):
            return 0
        identities = sequence.block_identities(self._blocks.block_size)
        hits = self._hits(sequence, identities)
        begin = hits * self._blocks.block_size
        if self._blocks.keeps_snapshots:
            shared = self._blocks.match_blocks(identities) * self._blocks.block_size
            sequence.find_branches(self._blocks.snapshot_multiple, shared)
        if sequence.prompt.lacks_rows(begin):
            # It holds no block while it waits, so that no two sequences can deadlock.
            if self._queues.displace(sequence):
                schedule.displaced.append(sequence)
            return 0
        ready, count = self._ready(sequence, begin), self._chunk(sequence, begin, max_tokens)
        complete = begin + ready == len(sequence.tokens)
        idle = self._idle(schedule) if complete and count else []
        if sequence.adapter and count and not self._find_slot(sequence, idle):
            schedule.closed_to_adapters |= complete  # it starts when other adapters' sequences end
            return 0
        if not ready or not self._find_room(sequence, identities[:hits], idle):
            schedule.closed = complete
            if not complete:
                sequence.wait_for_rows()  # others may go first
            return 0
        if not count:
            return 0
        describe = partial(sequence.block_content, block_size=self._blocks.block_size)
        self._blocks.adopt(sequence.table, identities[:hits], describe)
        self._blocks.grow(sequence.table, begin + count)
        self._queues.start(sequence, begin)
        schedule.started.append(sequence)
        schedule.num_scheduled_tokens[sequence] = count
        return count

    def _hits(self, sequence: Sequence, identities: list[bytes]) -> int:
        """How many of the sequence's leading blocks need not be computed: those that are cached, as far as it may skip
        them."""
        size, hits = self._blocks.block_size, self._blocks.match(identities)
        if not self._limits.chunk_rule.may_begin_in_run:
            # Before one run may be the middle of another, or a position without a snapshot.
            while (before := sequence.prompt.before_run(hits * size) // size) < hits:
                hits = self._blocks.match(identities[:before])
        return hits

    def _ready(self, sequence: Sequence, begin: int) -> int:
        """How many tokens from `begin` on are worth computing before the next row lands."""
        ready = sequence.num_computable(begin)
        if begin + ready == len(sequence.tokens):
            return ready
        # A chunk that is too short, or that ends inside a run of media rows which will be complete soon, would read all
        # weights for tokens that the next chunk computes almost for free, and take time from an encoder on the same
        # cores.
        ready = sequence.prompt.without_partial_media(begin, ready, self._max_media_tokens)
        return ready if 0 < self._limits.early_tokens <= ready else 0

    def _chunk(self, sequence: Sequence, begin: int, max_tokens: int) -> int:
        before_wait = sequence.num_before_logprobs_wait(begin, self._limits.max_waiting_prompt_logprobs)
        most = count = min(self._ready(sequence, begin), max_tokens, max(0, before_wait))
        if self._blocks.state_slots:
            count = self._state_chunk(sequence, begin, count, max_tokens)
        if self._keep_media_whole and count:
            whole = (
                sequence.prompt.without_partial_media(begin, each, self._max_media_tokens) for each in (count, most)
            )
            return next(filter(None, whole), 0)  # a run of rows may cover every position for a cut
        return count

    def _state_chunk(self, sequence: Sequence, begin: int, count: int, max_tokens: int) -> int:
        """Reduces `count` if layers have states: they must compute bit for bit what they would in one chunk, and pass
        the positions where others may continue. A chunk that begins at a multiple passes all of these."""
        end, multiple = begin + count, self._blocks.state_chunk
        if begin % multiple:
            for branch in sequence.branches(begin, end - 1):
                if not self._keep_media_whole or self._is_whole(sequence, begin, branch):
                    return branch - begin
        if end == len(sequence.tokens) or end % multiple == 0:
            return count
        # A budget that does not reach the next multiple is spent anyway, unless the next one may be larger; late rows
        # are waited for.
        cut = end - end % multiple
        return cut - begin if cut > begin else count if count == max_tokens and not self._bounded else 0

    def _is_whole(self, sequence: Sequence, begin: int, end: int) -> bool:
        return sequence.prompt.without_partial_media(begin, end - begin, self._max_media_tokens) == end - begin

    def _make_room(self, sequence: Sequence, count: int, schedule: Schedule) -> bool:
        """Grows a running sequence's table by `count` tokens. If blocks are missing, a sequence with all its rows
        preempts those that can only wait, and then those behind it that are not in this step. No sequence needs more
        blocks than exist, so the first in order always makes progress and there is no deadlock."""
        while not self._blocks.grow(sequence.table, sequence.num_computed_tokens + count):
            idle = self._idle(schedule) if self._has_all_rows(sequence) else []
            if (last := idle[-1] if idle else self._last_behind(sequence, schedule)) is None:
                return False
            self.preempt(last)
            if idle:
                last.wait_for_rows()
            schedule.preempted.append(last)
        return True

    def _has_all_rows(self, sequence: Sequence) -> bool:
        return sequence.num_computable(sequence.num_computed_tokens) == sequence.pending

    def _last_behind(self, sequence: Sequence, schedule: Schedule) -> Sequence | None:
        for last in reversed(self._queues.running):
            if last.order <= sequence.order:
                return None
            if last not in schedule.num_scheduled_tokens:
                return last
        return None

    def preempt(self, sequence: Sequence) -> None:
        """Preempts a sequence: it frees all blocks and waits."""
        self._queues.preempt(sequence)
        self._blocks.free(sequence.table)

    def _find_room(self, sequence: Sequence, hits: list[bytes], idle: list[Sequence]) -> bool:
        """Whether a sequence that adopts these blocks may run; the last of the idle sequences are preempted if that is
        needed."""
        tokens = len(sequence.tokens)
        if self._is_crowded() and not idle:
            return False
        if not self._blocks.can_hold(hits, tokens, without=[each.table for each in idle]):
            return False
        while self._is_crowded() or not self._blocks.can_hold(hits, tokens):
            last = idle.pop()
            self.preempt(last)
            last.wait_for_rows()
        return True

    def _find_slot(self, sequence: Sequence, idle: list[Sequence]) -> bool:
        """Whether a sequence with an adapter may run; idle sequences whose adapters occupy the slots are preempted if
        that is needed."""
        running = {each: each.adapter for each in self._queues.running}
        slots = self._adapter_slots
        if slots.has_room(sequence.adapter, running.values()):
            return True
        busy = [adapter for each, adapter in running.items() if each not in idle]
        if not slots.has_room(sequence.adapter, busy):
            return False
        in_the_way = [each for each in idle if each.adapter and each.adapter not in (*busy, sequence.adapter)]
        while not slots.has_room(sequence.adapter, [each.adapter for each in self._queues.running]):
            last = in_the_way.pop()
            idle.remove(last)
            self.preempt(last)
            last.wait_for_rows()
        return True

    def _is_crowded(self) -> bool:
        return len(self._queues.running) >= self._limits.max_running

    def _idle(self, schedule: Schedule) -> list[Sequence]:
        """Running sequences that can compute nothing until more rows arrive, in order."""
        spared = [
            each
            for each in self._queues.running
            if each not in schedule.num_scheduled_tokens and not each.at_max_length
        ]
        return [
            each for each in spared if not self._chunk(each, each.num_computed_tokens, self._limits.max_step_tokens)
        ]
