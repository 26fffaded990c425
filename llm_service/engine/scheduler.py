"""Continuous batching: plans steps and takes in their results. It knows requests and how they end; `planner` chooses
sequences, `batch` writes the plan, and `block_manager` owns the KV cache."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from copy import copy
from functools import partial

from msgspec import structs

from common.errors import DeadlineExceeded, InvalidInput, TwinlensError, code_number
from llm_service.engine.adapter_slots import AdapterSlots
from llm_service.engine.batch import Step, build
from llm_service.engine.block_manager import BlockManager
from llm_service.engine.finish import dead_end, finish_reason, never_at_once, never_whole, resumed_end
from llm_service.engine.limits import SchedulerLimits
from llm_service.engine.matchers import Form, Matcher
from llm_service.engine.messages import Add, Complete, Counters, Failed, Pooled, PromptLogprobs, Started, State, Token
from llm_service.engine.notices import NoticeQueue, Notices, StepOutput
from llm_service.engine.planner import Drafter, Planner, Schedule, by_look_up, by_proposal
from llm_service.engine.queues import Queues
from llm_service.engine.sequence import Sequence
from llm_service.engine.state_slots import SnapshotPlace
from llm_service.engine.step_cap import StepCap
from llm_service.engine.step_pace import StepPace
from llm_service.plan import StateCopies, StepAdapters, StepResult
from llm_service.request import SamplingParams


class Scheduler:
    """Owns the sequences and, through `blocks`, their KV blocks. `eos` are the model's end tokens and `row_bytes` is
    the size of one row in the arena. `match` compiles a grammar, and returns a matcher that has consumed the output so
    far. Drafts come from `draft`; by default from a model if one proposes them, otherwise from prompt look-up."""

    def __init__(
        self,
        blocks: BlockManager,
        limits: SchedulerLimits,
        eos: frozenset[int],
        row_bytes: int,
        match: Callable[[Form, Seq[int]], Future[Matcher]] | None = None,
        draft: Drafter | None = None,
    ) -> None:
        assert not blocks.state_slots or limits.max_running <= blocks.state_slots, "whoever runs has a state slot"
        self.blocks = blocks
        self.limits = limits
        self.counters = Counters()
        self._eos = tuple(sorted(eos))
        self._row_bytes = row_bytes
        self._match = match
        self._queues = Queues()
        self.adapter_slots = AdapterSlots(limits.max_loras)
        self._pace = StepPace(limits.decode_slowdown, multiple=blocks.state_chunk if blocks.state_slots else 1)
        draft = draft or (by_proposal if limits.proposes else by_look_up)
        self._planner = Planner(self._queues, blocks, limits, self._pace, draft, self.adapter_slots)
        self.step_cap = StepCap(limits)
        self._unchecked: list[Sequence] = []
        self._unstarted: set[int] = set()
        self._notices = NoticeQueue()
        self._arrivals = 0
        self._planned_steps = 0
        self._num_constrained = 0

    # --- what comes in -------------------------------------------------------------------------------------------

    def add(self, add: Add) -> None:
        """Adds a request. The front has checked its length, but perhaps against the context of an earlier engine."""
        self._arrivals += 1
        sequences = Sequence.of(add, self.limits, self._eos, arrival=self._arrivals, seed=secrets.randbits(64))
        if add.sampling.is_matched and self._match is not None:
            asked = add.sampling
            trigger, bound = asked.grammar_trigger, asked.thinking_bound
            form = Form(asked.grammar, asked.grammar_bytes, add.salt, trigger, bound)
            for sequence in sequences:
                sequence.use_grammar(self._match(form, sequence.output))
        self._num_constrained += len(sequences) * self._is_constrained(add.sampling)
        self._queues.add(add.id, sequences, add.deadline)
        self._unstarted.add(add.id)
        prompt, most = sequences[0].prompt, self.limits.max_media_tokens
        if self.limits.chunk_rule.of_prompts and prompt.whole_end > most:
            self._fail(add.id, never_at_once(prompt.whole_end, most))
            return
        if not self.limits.chunk_rule.may_end_in_run and prompt.longest_run > most:
            self._fail(add.id, never_whole(prompt.longest_run))
            return
        self._unchecked.extend(each for each in sequences if each.matcher_future is not None or _may_be_complete(each))
        self.counters.prompt_tokens += len(prompt.tokens)

    def landed(self, id: int, item: int, rows: int) -> None:
        """The first `rows` rows of an item are in the arena."""
        if (sequences := self._queues.requests.get(id)) is None:
            return
        sequences[0].prompt.items[item].land(rows)
        for sequence in sequences:
            sequence.rows_landed()

    def placed(self, id: int, places: list[tuple[int, int]]) -> None:
        """Every item of a request has its place in the row arena: (offset, rows that have arrived there)."""
        if (sequences := self._queues.requests.get(id)) is None:
            return
        sequences[0].prompt.place(places)
        for sequence in sequences:
            sequence.items_placed()

    def prompt_logprobs_taken(self, id: int, before: int) -> None:
        """The client has read the logprobs of the prompt's tokens before this one."""
        for sequence in self._queues.requests.get(id, ()):
            sequence.take_prompt_logprobs(before)

    def abort(self, id: int, choice: int = -1) -> None:
        """Ends a request, or one choice of it; an unknown id is ignored."""
        for sequence in list(self._queues.requests.get(id, ())):
            if choice in (-1, sequence.choice):
                self._end(sequence)

    def end_session(self, session: int) -> None:
        """Ends a session: blocks kept for it, and those that its requests give back later, are evicted like others."""
        for sequence in (*self._queues.waiting, *self._queues.running):
            if sequence.table.session == session:
                sequence.end_session()
        self.blocks.end_session(session)

    def expire(self, now: float) -> None:
        """Fails every request whose deadline has passed by `now`, on the monotonic clock."""
        for id in self._queues.late(now):
            self._fail(id, DeadlineExceeded("the deadline passed while generating"))

    def next_deadline(self) -> float | None:
        """The earliest deadline of all requests."""
        return self._queues.next_deadline()

    # --- what to compute -----------------------------------------------------------------------------------------

    def schedule(self) -> tuple[Step | None, list[Started]]:
        """The next step, or None if nothing can be computed now; and the requests that it starts.

        It may be called again while earlier steps are *under way*. Steps run in the order of their planning, so a step
        may use the KV of the one before and, by its number, that step's token.
        """
        if self._unchecked:
            self._check()
        schedule = self._planner.choose()
        self.counters.preemptions += len(schedule.preempted)
        for sequence in schedule.displaced:
            self._notices.rows_needed(sequence.id, self._planned_steps)
        started = [event for sequence in schedule.started if (event := self._announce(sequence))]
        if not schedule.num_scheduled_tokens:
            return None, started
        copies = self._state_copies(schedule.num_scheduled_tokens) if self.blocks.state_slots else None
        appended = self.blocks.take_appended([sequence.table for sequence in schedule.num_scheduled_tokens])
        proposals = schedule.proposals if self.limits.proposes else None
        adapters = self._adapters(schedule)
        step = build(schedule.num_scheduled_tokens, self._row_bytes, appended, copies, adapters, proposals)
        offloaded, loaded = self.blocks.host.take_copies()
        if offloaded or loaded:
            step.plan = structs.replace(step.plan, offloaded=offloaded, loaded=loaded)
        self._planned_steps += 1
        for draw, sequence in enumerate(step.drawing):
            sequence.append_placeholder(draw)
        for sequence in step.embedded:
            sequence.append_placeholder(0)
        for sequence, count in schedule.num_scheduled_tokens.items():
            sequence.advance(count)
            if count > 1:  # a single token's block is named when the token after it is known
                self._name_blocks(sequence)
            if sequence.prompt.is_placed and self._queues.forget_places(sequence):
                self._notices.rows_read(sequence.id, self._planned_steps)
        if self._num_constrained:
            self._fail_dead_ends(step)
        return step, started

    def _adapters(self, schedule: Schedule) -> StepAdapters | None:
        """The adapter slot of each sequence in a step; None if no sequence has an adapter."""
        adapters = [sequence.adapter for sequence in schedule.num_scheduled_tokens]
        if not any(adapters):
            return None
        running = {sequence.adapter for sequence in self._queues.running}
        filled = self.adapter_slots.assign(adapters, running)
        return StepAdapters(filled, [self.adapter_slots.slot(adapter) for adapter in adapters])

    def _check(self) -> None:
        """Gives matchers to sequences whose grammar is compiled. Ends resumed sequences that are already complete, and
        fails those whose output the grammar does not allow, or that no longer fit."""
        ready = [sequence for sequence in self._unchecked if sequence.finished or sequence.grammar_ready]
        self._unchecked = [sequence for sequence in self._unchecked if sequence not in ready]
        for sequence in ready:
            if sequence.finished:
                continue
            try:
                sequence.take_matcher()
                ended = resumed_end(sequence) if _may_be_complete(sequence) else ""
            except InvalidInput as error:
                self._fail(sequence.id, error)
                continue
            if ended:
                self._notices.complete(Complete(sequence.id, sequence.choice, ended))
                self._end(sequence)

    def _state_copies(self, work: dict[Sequence, int]) -> StateCopies:
        """The copies of states before, within and after a step. All of the step must be chosen already, so that no
        sequence takes the slot of a snapshot that this step has yet to write."""
        size, copies = self.blocks.block_size, StateCopies([], [], [])
        for number, (sequence, count) in enumerate(work.items()):
            begin, end = sequence.num_computed_tokens, sequence.num_computed_tokens + count
            places = sequence.branches(begin, end)
            if (
                not places
                and count == 1
                and begin >= sequence.prompt_tokens
                and end % self.blocks.snapshot_multiple == 0
            ):
                places[end] = SnapshotPlace.ANSWER  # at its end the next turn begins
            for tokens, place in places.items():
                index = tokens // size - 1
                identity = None if place is SnapshotPlace.ANSWER else sequence.block_identity(index, size)
                slot = self.blocks.snapshot(sequence.table, index, identity, place)
                if slot is not None and tokens == end:
                    copies.after.append((sequence.table.slot, slot))
                elif slot is not None:
                    copies.within.append((number, tokens - begin, slot))
        copies.before.extend(self.blocks.take_sources([sequence.table for sequence in work]))
        copies.before.extend((each.table.spare, each.table.slot) for each in work if each.table.spare >= 0)
        return copies

    def _fail_dead_ends(self, step: Step) -> None:
        """Fails sequences that have no token to go on with. They stay in the step, and the tokens drawn for them are
        dropped."""
        for sequence, draw in zip(step.drawing, step.plan.draws, strict=True):
            if draw.mask_follows or sequence.finished or sequence.drafts:
                continue
            if error := dead_end(sequence, draw):
                self._fail(sequence.id, error)

    def _announce(self, sequence: Sequence) -> Started | None:
        if sequence.num_starts > 1:
            return None
        self.counters.prefix_query_tokens += sequence.prompt_tokens if self.blocks.prefix_cache else 0
        cached = min(sequence.num_computed_tokens, sequence.prompt_tokens)
        self.counters.prefix_hit_tokens += cached
        if sequence.id not in self._unstarted:
            return None
        self._unstarted.remove(sequence.id)
        return Started(sequence.id, cached)

    # --- what follows --------------------------------------------------------------------------------------------

    def finish(self, step: Step, result: StepResult) -> StepOutput:
        """Takes in the result of the oldest step under way: tokens are known, ended sequences give everything back."""
        output = StepOutput()
        self.counters.steps += 1
        if self.step_cap.succeeded():
            self._planner.bound(self.step_cap.limits)
        self.counters.graph_steps += result.replayed
        prompt_tokens = sum(count for _, _, count in step.prefill)
        self._pace.learn(len(step.work) - len(step.prefill), prompt_tokens, result.ended - result.began)
        for (sequence, first), logprobs in zip(step.prompt_logprobs, result.prompt_logprobs, strict=True):
            if not sequence.finished:
                output.prompt_logprobs.append(PromptLogprobs(sequence.id, first, logprobs))
        self._take_pooled(step, result, output.pooled)
        if result.proposed:
            for (sequence, _), proposed in zip(step.work, result.proposed, strict=True):
                sequence.take_proposed(proposed)
        for sequence, token, likely in zip(step.drawing, result.tokens, result.logprobs, strict=True):
            if sequence.finished or not sequence.num_placeholders:
                # The sequence ended while the step ran, and nobody has written to its blocks since; or an earlier draft
                # was wrong.
                continue
            drafts = len(sequence.drafts) if sequence.num_placeholders == len(sequence.drafts) + 1 else 0
            accepted = sequence.fill_placeholder(token)
            if sequence.table.spare >= 0 and not sequence.drafts:
                self.blocks.drafts_verified(sequence.table, right=not sequence.rolled_back)
            self.counters.generated_tokens += 1
            self.counters.draft_tokens += drafts  # here, so that a state told while a step runs agrees
            self.counters.accepted_draft_tokens += accepted
            ended = finish_reason(sequence, token)
            if isinstance(ended, TwinlensError):
                self._fail(sequence.id, ended)
                continue
            output.tokens.append(Token(sequence.id, sequence.choice, token, ended, likely, drafts, accepted))
            self._name_blocks(sequence)
            if ended:
                self._end(sequence)
        return output

    def abandon(self, steps: Seq[Step]) -> bool:
        """Takes back all steps under way, none of which was computed, since there was too little memory for the first.
        Running sequences begin again in smaller steps. The prefix cache is flushed, because sequences may have adopted
        blocks that these steps were to compute. Returns False, and changes nothing, if the first step could not be
        smaller."""
        first = steps[0]
        if not self.step_cap.failed(sum(count for _, count in first.work), len(first.work)):
            return False
        self.counters.steps += len(steps)
        for step in steps:
            for sequence, begin in step.prompt_logprobs:
                sequence.forget_logprobs(begin)
        for sequence in (*self._queues.waiting, *self._queues.running):  # one may have been preempted meanwhile
            sequence.forget_placeholders()
        for sequence in tuple(self._queues.running):
            self._planner.preempt(sequence)
            self.counters.preemptions += 1
        self.blocks.flush()
        self.adapter_slots.clear()
        self._planner.bound(self.step_cap.limits)
        return True

    def masks(self, step: Step) -> list[bytes]:
        """The masks that follow a step's plan, one for each draw that waits for one. To be called when the step before
        has finished, so that all earlier tokens are known. Sequences that no token is allowed for fail now."""
        masks: list[bytes] = []
        for sequence, draw in step.unsettled:
            mask = b"" if sequence.finished else sequence.allowed_by(sequence.matcher)
            if draw.mask_follows:
                masks.append(mask)
            if sequence.finished:
                continue  # the token drawn for it will be dropped
            known = draw.with_last(sequence.tokens[sequence.num_known_tokens - 1])
            if error := dead_end(sequence, structs.replace(known, allowed_mask=mask)):
                self._fail(sequence.id, error)
        return masks

    def _take_pooled(self, step: Step, result: StepResult, pooled: list[Pooled]) -> None:
        """Adds hidden states to the sums of their sequences; a sequence whose prompt is complete ends."""
        for (sequence, start), values in zip(step.pooling, result.pooled, strict=True):
            sequence.add_pooled(values, start)
        for sequence in step.embedded:
            if not sequence.finished:
                pooled.append(Pooled(sequence.id, sequence.take_pooled()))
                self._name_blocks(sequence)
                self._end(sequence)

    def _name_blocks(self, sequence: Sequence) -> None:
        """Lets others find the blocks that are full of known tokens and computed by steps up to the last one
        planned."""
        size = self.blocks.block_size
        full = min(sequence.num_computed_tokens, sequence.num_known_tokens) // size
        describe = partial(sequence.block_content, block_size=size)
        for index in range(len(sequence.table.identities), full):
            self.blocks.commit(sequence.table, sequence.block_identity(index, size), describe)

    def take_notices(self) -> Notices:
        """The events of requests since the last call."""
        return self._notices.take(self.counters.steps)

    def _fail(self, id: int, error: TwinlensError) -> None:
        if id in self._queues.requests:
            self.abort(id)
            self._notices.failed(Failed(id, code_number(error), error.reason, error.message, error.field))

    def _is_constrained(self, sampling: SamplingParams) -> bool:
        """Whether a mask restricts the tokens of such a sequence."""
        return bool(sampling.allowed_mask) or (sampling.is_matched and self._match is not None)

    def _end(self, sequence: Sequence) -> None:
        self._num_constrained -= self._is_constrained(sequence.sampling)
        self.blocks.free(sequence.table)
        if self._queues.remove(sequence):
            self._unstarted.discard(sequence.id)
            self._notices.released(sequence.id, self._planned_steps)

    # --- what others may know ------------------------------------------------------------------------------------

    def state(self) -> State:
        """Queues and counters."""
        return State(
            waiting=len(self._queues.waiting),
            running=len(self._queues.running),
            kv_blocks_used=self.blocks.used,
            kv_blocks_total=self.blocks.total,
            kv_blocks_cached=self.blocks.cached,
            kv_host_blocks_total=self.blocks.host.total,
            kv_host_blocks_used=len(self.blocks.host),
            kv_blocks_offloaded=self.blocks.host.offloaded,
            kv_blocks_loaded=self.blocks.host.loaded,
            state_slots=self.blocks.state_slots,
            state_slots_used=self.blocks.state_slots_used,
            state_snapshots=self.blocks.snapshots,
            adapter_fills=self.adapter_slots.filled,
            running_adapters=_adapters(self._queues.running),
            waiting_adapters=_adapters(self._queues.waiting),
            counters=copy(self.counters),
        )

    def check_integrity(self) -> None:
        """Raises AssertionError unless every block is free or held by a sequence that runs, and queues are in order."""
        self._queues.check_integrity()
        self.blocks.check_integrity([sequence.table for sequence in self._queues.running])


def _adapters(queue: list[Sequence]) -> list[int]:
    """Iterates over a copy, since another thread changes the queue."""
    return sorted({sequence.adapter for sequence in queue.copy()} - {0})


def _may_be_complete(sequence: Sequence) -> bool:
    """Whether it came with output that may be complete, or with a prompt that leaves no room for output."""
    return sequence.num_resumed_tokens > 0 or sequence.at_max_length
