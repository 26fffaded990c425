"""An engine without a model: the real scheduler over `hashed`'s executor, and a record of what every request said."""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import cache, partial

import msgspec
import numpy as np

from llm_service.engine.batch import Step
from llm_service.engine.block_exchange import BlockExchange
from llm_service.engine.block_manager import BlockManager
from llm_service.engine.drafts import look_up
from llm_service.engine.limits import SchedulerLimits
from llm_service.engine.messages import (
    NOWHERE,
    Add,
    AwaitBlocks,
    BlocksAnswer,
    BlocksArrived,
    BlocksRead,
    Failed,
    FindBlocks,
    ItemRows,
    LendBlocks,
    Resumed,
    Token,
)
from llm_service.engine.prompt_identities import block_identities, keyed_runs
from llm_service.engine.scheduler import Scheduler
from llm_service.engine.sequence import Sequence
from llm_service.families.chunk_rule import ANYWHERE, ChunkRule
from llm_service.plan import StepResult, TokenLogprobs
from llm_service.request import Pooling, SamplingParams
from llm_service.worker.draft_model import verified
from llm_service.worker.messages import OffloadBlocks, Pulled
from testkit.in_turn import filled
from tests.unit.llm_service.hashed import (
    EOS,
    PAD,
    ROW_BYTES,
    HashExecutor,
    Order,
    Picture,
    alternating,
    expected,
    expected_scores,
    expected_slots,
    expected_vector,
)


@cache
def text(length: int, seed: int = 0) -> tuple[int, ...]:
    """A prompt without media; prompts of one seed begin alike."""
    return tuple(random.Random(seed).randrange(1, PAD) for _ in range(length))


def order(
    prompt: Seq[int],
    pictures: Seq[Picture] = (),
    *,
    salt: str = "",
    priority: int = 0,
    session: int = 0,
    adapter: int = 0,
    pooling: Pooling | None = None,
    **sampling: object,
) -> Order:
    """A greedy request for 4 tokens, unless said otherwise; media places become placeholders."""
    ids = list(prompt)
    for picture in pictures:
        for run in picture.placed():
            ids[run.begin : run.end] = [PAD] * run.count
    chosen = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True, **sampling}
    more = {"session": session, "adapter": adapter, "pooling": pooling}
    return Order(tuple(ids), SamplingParams(**chosen), tuple(pictures), salt, priority, **more)


def simulation(
    *, blocks: int = 64, block_size: int = 4, max_running: int = 8, step_tokens: int = 32, **more: int
) -> Simulation:
    return Simulation(blocks=blocks, block_size=block_size, max_running=max_running, step_tokens=step_tokens, **more)


def run_until_over(engine: Simulation, id: int, most: int = 1000) -> None:
    for _ in range(most):
        if engine.outcomes[id].over:
            return
        assert engine.step() is not None, "the engine rests while a request waits"
    raise AssertionError("a request does not end")


@dataclass(slots=True)
class Outcome:
    """What a request has said so far: tokens and the reason of each choice, and how it failed."""

    order: Order
    tokens: list[list[int]]
    ended: list[str]
    failed: str = ""
    aborted: bool = False
    released: int = 0
    started: int = 0
    cached: int = 0
    scored: list[TokenLogprobs] = field(default_factory=list)
    taken: int = 0
    nowhere: int = 0
    resumed: bool = False
    pooled: bytes = b""

    @property
    def over(self) -> bool:
        return bool(self.failed) or self.aborted or bool(self.pooled) or all(self.ended)


@dataclass(slots=True)
class Exchange:
    """Blocks of a prompt on their way to another service, or hither: their identities, what is computed in them, and
    their places on the host, none before the engine has named these. Of those on their way hither, `written` are
    complete."""

    identities: list[bytes]
    contents: list[list[int]]
    hither: bool
    places: list[int] = field(default_factory=list)
    written: int = 0

    @property
    def awaits_more(self) -> bool:
        return self.hither and self.written < len(self.places)


@dataclass(frozen=True, slots=True)
class _Ordered:
    """Copies to the host between two steps, and what to call then."""

    copies: list[tuple[int, int]]
    done: Callable[[Pulled], None]


def front_identities(add: Add, block_size: int) -> list[bytes]:
    """What a front sends with it."""
    runs = keyed_runs((item.key, item.runs) for item in add.items)
    return block_identities(array("i", add.token_ids), add.positions, runs, add.salt, add.adapter_digest, block_size)


class Simulation:
    """A scheduler, its executor, and a record of every request. `step` checks what a step may never do. A step `takes`
    so many seconds, of decodes and of prompt tokens, which pass on the clock `now` alone."""

    def __init__(
        self,
        *,
        blocks: int,
        block_size: int,
        max_running: int,
        step_tokens: int,
        prefix_cache: bool = True,
        keep_media_whole: bool = False,
        chunk_rule: ChunkRule = ANYWHERE,
        forgets_answers: bool = False,
        overlap: bool = False,
        early_tokens: int = 1,
        state_slots: int = 0,
        state_chunk: int = 1,
        host_blocks: int = 0,
        speculative_tokens: int = 0,
        draft_rows: int = 16,
        decode_slowdown: float = 0.0,
        max_loras: int = 2,
        proposes: bool = False,
        takes: Callable[[int, int], float] = lambda decodes, tokens: 0.01,
    ) -> None:
        self.limits = SchedulerLimits(
            max_running,
            step_tokens,
            blocks * block_size,
            keep_media_whole,
            early_tokens,
            chunk_rule=chunk_rule,
            forgets_answers=forgets_answers,
            speculative_tokens=speculative_tokens,
            draft_rows=draft_rows,
            decode_slowdown=decode_slowdown,
            max_loras=max_loras,
            proposes=proposes,
        )
        self._takes = takes
        self.now = 0.0
        caching = {
            "prefix_cache": prefix_cache,
            "state_slots": state_slots,
            "state_chunk": state_chunk,
            "host_blocks": host_blocks,
        }
        self._new_blocks = partial(BlockManager, blocks, block_size, **caching)
        self.executor = HashExecutor(block_size, forgets_answers)
        self._under_way: deque[Step | _Ordered] = deque()
        self.exchanges: dict[int, Exchange] = {}
        self._num_exchanges = self._found = 0
        self._begin()
        self.outcomes: dict[int, Outcome] = {}
        self.steps = 0
        self.computed = 0
        self._depth = 2 if overlap else 1
        self.rows_needed: list[int] = []
        self.rows_read: list[int] = []
        self.slow: set[int] = set()
        self.fails = False
        """Memory does not suffice for the next step that is computed."""
        self._held_back: set[int] = set()
        self._chosen: list[int] = []
        self._masks: list[bytes] = []
        self._foreseen: dict[tuple[int, int], list[int]] = {}

    def submit(self, order: Order, nowhere: int = 0, said: Seq[Seq[int]] = ()) -> int:
        """A new request, the first `nowhere` of whose pictures have no place in the arena; with what its choices have
        `said` already, where it is resumed."""
        id = len(self.outcomes) + 1
        n = order.sampling.n
        tokens = [*map(list, said), *([] for _ in range(n - len(said)))]
        self.outcomes[id] = Outcome(order, tokens, [""] * n, nowhere=nowhere, resumed=bool(said and said[0]))
        self._hand_over(id, landed=False)
        return id

    def _begin(self) -> None:
        """A new engine, which has nothing yet."""
        draft, blocks = None if self.limits.proposes else self._draft, self._new_blocks()
        self.scheduler = Scheduler(blocks, self.limits, frozenset({EOS}), ROW_BYTES, alternating, draft)
        self._exchange = BlockExchange(blocks, self._order, self._take_answer)
        self.exchanges.clear()

    def _draft(self, sequence: Sequence, count: int, generated: int | None = None) -> array[int]:
        """What the sequence is going to say, as far as that can be foreseen; every third draft or so has one token that
        it will not say. It has `generated` tokens then, by default as many as now."""
        sampling = sequence.sampling
        generated = sequence.generated if generated is None else generated
        if not sampling.greedy and sampling.seed is None:
            return look_up(sequence.tokens, count)
        name = (sequence.id, sequence.choice)
        if name not in self._foreseen:
            self._foreseen[name] = expected(self.outcomes[sequence.id].order, sequence.choice, self.limits)[0]
        drafts = array("i", self._foreseen[name][generated:][:count])
        wrong = random.Random(f"{name} {generated}").randrange(3 * count)
        if wrong < len(drafts):
            drafts[wrong] = (drafts[wrong] + 1) % PAD
        return drafts

    def die(self) -> None:
        """The engine is gone with all that it held; the next one gets what has not ended, as far as it has come. What
        waits for places goes there when it has them."""
        self._begin()
        self._forget_computed()
        self._under_way.clear()
        self.executor.host.clear()
        for id, outcome in self.outcomes.items():
            outcome.started = 0
            outcome.taken = len(outcome.scored)
            if outcome.over:
                outcome.released = 1
            elif id in self.rows_needed:
                self._held_back.add(id)
            else:
                self._hand_over(id, landed=True)

    def _forget_computed(self) -> None:
        self.executor.slots.clear()
        self.executor.states.clear()
        self.executor.tables.clear()
        self.executor.adapters.clear()
        self._chosen = []

    def _hand_over(self, id: int, *, landed: bool) -> None:
        """To the engine; `landed`: with the rows that are in the arena by now, as far as it has places."""
        self.scheduler.add(self._message(id, landed=landed))

    def _message(self, id: int, *, landed: bool) -> Add:
        outcome = self.outcomes[id]
        order, nowhere = outcome.order, outcome.nowhere
        add = Add(
            id=id,
            token_ids=array("i", order.prompt).tobytes(),
            positions=np.tile(np.arange(len(order.prompt), dtype=np.int32), (3, 1)).tobytes(),
            mrope_delta=0,
            items=[
                ItemRows(p.key, NOWHERE, p.placed(), 0)
                if number < nowhere
                else ItemRows(p.key, p.offset, p.placed(), self.executor.landed.get(p.name, 0) if landed else 0)
                for number, p in enumerate(order.pictures)
            ],
            sampling=order.sampling,
            salt=order.salt,
            priority=order.priority,
            deadline=order.deadline,
            session=order.session,
            adapter=order.adapter,
            adapter_digest=b"adapter %d" % order.adapter if order.adapter else b"",
            resume=[
                Resumed(choice, array("i", tokens).tobytes(), bool(outcome.ended[choice]))
                for choice, tokens in enumerate(outcome.tokens)
                if tokens or outcome.ended[choice]
            ],
            with_logprobs=len(outcome.scored) + 1 if outcome.scored else 0,
            pooling=order.pooling,
        )
        if id % 2 and not self.limits.chunk_rule.of_prompts:  # as a front does
            names = front_identities(add, self.scheduler.blocks.block_size)
            add = msgspec.structs.replace(add, identities=b"".join(names))
        return add

    # --- blocks from and for other services ----------------------------------------------------------------------

    def lend(self, id: int, first: int = 0) -> None:
        """Another service wants the blocks of a request's prompt from this number on."""
        number, exchange = self._new_exchange(id, first, hither=False)
        self._exchange.take(LendBlocks(number, exchange.identities))

    def await_blocks(self, id: int) -> None:
        """Another service is to compute the prompt of a request, as far as it is not cached."""
        self._exchange.take(FindBlocks(0, self._prompt_blocks(id)[0]))
        number, exchange = self._new_exchange(id, self._found, hither=True)
        self._exchange.take(AwaitBlocks(number, exchange.identities))

    def _prompt_blocks(self, id: int) -> tuple[list[bytes], list[list[int]]]:
        """The identities of a prompt's blocks, and what is computed in them."""
        size = self.scheduler.blocks.block_size
        assert not self.limits.chunk_rule.of_prompts, "blocks depend on later tokens"
        names, slots = front_identities(self._message(id, landed=False), size), expected_slots(self.outcomes[id].order)
        return names, [slots[at : at + size] for at in range(0, len(names) * size, size)]

    def _new_exchange(self, id: int, first: int, *, hither: bool) -> tuple[int, Exchange]:
        names, contents = self._prompt_blocks(id)
        self._num_exchanges += 1
        made = self.exchanges[self._num_exchanges] = Exchange(names[first:], contents[first:], hither)
        return self._num_exchanges, made

    def _order(self, order: OffloadBlocks, done: Callable[[Pulled], None]) -> None:
        self._under_way.append(_Ordered(list(order.pairs), done))

    def _carry_out(self) -> None:
        """Carries out what was ordered before the oldest step under way."""
        while self._under_way and isinstance(ordered := self._under_way[0], _Ordered):
            self._under_way.popleft()
            self.executor.offload(ordered.copies)
            ordered.done(Pulled.LANDED)

    def _take_answer(self, answer: BlocksAnswer) -> None:
        if not answer.id:
            self._found = answer.found
        elif (exchange := self.exchanges.get(answer.id)) is not None:  # else it was given up meanwhile
            exchange.places = list(answer.places)

    def write_block(self, number: int) -> None:
        """Another block arrives, first in part."""
        exchange = self.exchanges[number]
        if exchange.awaits_more:
            place = exchange.places[exchange.written]
            torn = [-number for _ in exchange.contents[exchange.written]]
            whole = self.executor.host.get(place) == torn
            self.executor.host[place] = exchange.contents[exchange.written] if whole else torn
            exchange.written += whole

    def end_exchange(self, number: int) -> None:
        """All is read, or as much was written as will be."""
        exchange = self.exchanges.pop(number)
        self._exchange.take(BlocksArrived(number, exchange.written) if exchange.hither else BlocksRead(number))
        found = self.scheduler.blocks.host._places
        for name, place, content in zip(exchange.identities, exchange.places, exchange.contents, strict=False):
            torn = exchange.hither and self.executor.host.get(place) != content
            assert not torn or found.get(name) != place, "a block can be found that has not arrived"

    def exchange(self, rng: random.Random) -> None:
        """Begins, continues or ends any exchange, of prompts that came lately; now and then caches are flushed."""
        lately = list(self.outcomes)[-12:]
        if rng.randrange(40) == 0:
            self.scheduler.blocks.flush()
        match rng.choice(["lend", "await", "write", "write", "end"]):
            case "lend":
                self.lend(rng.choice(lately), rng.randrange(3))
            case "await":
                self.await_blocks(rng.choice(lately))
            case "write" if writable := [number for number, each in self.exchanges.items() if each.awaits_more]:
                number = rng.choice(writable)
                for _ in range(rng.randrange(12)):
                    self.write_block(number)
            case "end" if self.exchanges:
                self.end_exchange(rng.choice(list(self.exchanges)))
        self.check_exchanges()

    def check_exchanges(self) -> None:
        """What may be read now is what was asked for, and nobody writes where others do."""
        written: list[int] = []
        for exchange in self.exchanges.values():
            written += exchange.places if exchange.hither else []
            readable = exchange.places[: exchange.written] if exchange.hither else exchange.places
            for place, content in zip(readable, exchange.contents, strict=False):
                assert self.executor.host[place] == content, "a place has other content than was named"
        assert len({*written}) == len(written), "a place is written to twice"

    def place(self, id: int, *landed: int) -> None:
        """Gives a request that wants them places for all its pictures, with so many rows of each there, or all."""
        self.rows_needed.remove(id)
        self.outcomes[id].nowhere = 0
        pictures = self.outcomes[id].order.pictures
        here = [min(rows, picture.rows) for rows, picture in zip(landed, pictures, strict=False)]
        here += [picture.rows for picture in pictures[len(here) :]]
        for picture, rows in zip(pictures, here, strict=True):
            self.executor.landed[picture.name] = max(rows, self.executor.landed.get(picture.name, 0))
        if id in self._held_back:
            self._held_back.remove(id)
            if not self.outcomes[id].over:
                self._hand_over(id, landed=True)
            return
        self.scheduler.placed(id, [(p.offset, rows) for p, rows in zip(pictures, here, strict=True)])

    def _give_back(self, id: int) -> None:
        """The request has none of its places any more: what no other one has may be overwritten."""
        self.outcomes[id].nowhere = len(self.outcomes[id].order.pictures)
        others = [o for other, o in self.outcomes.items() if other != id and not (o.over and o.released)]
        kept = {picture.name for outcome in others for picture in outcome.order.pictures}
        for picture in self.outcomes[id].order.pictures:
            if picture.name not in kept:
                self.executor.landed[picture.name] = 0

    def land(self, id: int, item: int, rows: int) -> None:
        """Rows up to `rows` of an item are in the arena, and the request is told; unless it waits for places."""
        if id in self.rows_needed:
            return
        picture = self.outcomes[id].order.pictures[item]
        here = max(rows, self.executor.landed.get(picture.name, 0))
        self.executor.landed[picture.name] = here
        self.scheduler.landed(id, item, rows)

    def land_all(self, id: int) -> None:
        for item, picture in enumerate(self.outcomes[id].order.pictures):
            self.land(id, item, picture.rows)

    def take_prompt_logprobs(self, id: int) -> None:
        """The caller of a request takes its prompt's logprobs that are there; one of the `slow` does so here alone."""
        self.outcomes[id].taken = len(self.outcomes[id].scored)
        self.scheduler.prompt_logprobs_taken(id, self.outcomes[id].taken + 1)

    def abort(self, id: int) -> None:
        self.outcomes[id].aborted = True
        self.scheduler.abort(id)
        self._end_held_back(id)

    def _end_held_back(self, id: int) -> None:
        """No engine has it: when it is over, it is let go at once."""
        if id in self._held_back and self.outcomes[id].over:
            self.outcomes[id].released = 1

    def abort_choice(self, id: int, choice: int) -> None:
        self.outcomes[id].ended[choice] = self.outcomes[id].ended[choice] or "aborted"
        self.scheduler.abort(id, choice)
        self._end_held_back(id)

    def end_session(self, number: int) -> None:
        """Requests under way go on without it, in the next engine too."""
        self.scheduler.end_session(number)
        for outcome in self.outcomes.values():
            if outcome.order.session == number:
                outcome.order = replace(outcome.order, session=0)

    def expire(self, now: float) -> None:
        self.scheduler.expire(now)
        self._hear()
        for id in self._held_back:
            outcome = self.outcomes[id]
            if not outcome.over and outcome.order.deadline is not None and outcome.order.deadline <= now:
                outcome.failed = "DEADLINE_EXCEEDED"
                self._end_held_back(id)

    def _fail(self, event: Failed) -> None:
        outcome = self.outcomes[event.id]
        assert not outcome.over, "a request failed after its end"
        outcome.failed = event.reason

    def step(self, *, check: bool = True) -> Step | None:
        """One turn of the engine's loop; None where there was nothing to compute."""
        drafted = self.scheduler.counters.draft_tokens
        step, started = self.scheduler.schedule()
        assert self.scheduler.counters.draft_tokens == drafted, "drafts count once they are verified"
        for event in started:
            outcome = self.outcomes[event.id]
            outcome.started += 1
            outcome.cached = event.cached
        if step is not None:
            self._check_plan(step)
            self._under_way.append(step)
        steps = sum(isinstance(each, Step) for each in self._under_way)
        if steps == self._depth or (step is None and steps):
            self._carry_out()
            step = self._abandon() if self.fails else self._compute()
            self.fails = False
        if step is None:
            self._carry_out()
        self._hear()
        if check:
            self.scheduler.check_integrity()
        return step

    def _hear(self) -> None:
        notices = self.scheduler.take_notices()
        for id in notices.rows_read:
            assert id not in self.rows_needed, "rows are read that have no place"
            self.rows_read.append(id)
            self._give_back(id)
        for complete in notices.complete:
            assert not self.outcomes[complete.id].ended[complete.choice]
            self.outcomes[complete.id].ended[complete.choice] = complete.ended
        for event in notices.failed:
            self._fail(event)
        for wanted in notices.rows_needed:
            self.rows_needed.append(wanted.id)
            self._give_back(wanted.id)
        for id in notices.released:
            self.outcomes[id].released += 1

    def _compute(self) -> Step:
        """Computes the oldest step under way, as late as a real engine may: after later ones were planned."""
        step = self._steps_under_way()[0]
        self._under_way.popleft()
        assert not any(self.outcomes[sequence.id].released for sequence, _ in step.work), (
            "a step for a released request"
        )
        result = self.executor.run(filled(step.plan, self._chosen, lambda: self._masks))
        began, prompts = self.now, sum(count for _, _, count in step.prefill)
        self.now += self._takes(len(step.work) - len(step.prefill), prompts)
        result = msgspec.structs.replace(result, began=began, ended=self.now, proposed=self._propose(step, result))
        self._chosen = result.tokens
        counters = self.scheduler.counters
        drafted, accepted = counters.draft_tokens, counters.accepted_draft_tokens
        output = self.scheduler.finish(step, result)
        later = self._steps_under_way()
        self._masks = self.scheduler.masks(later[0]) if later else []
        assert counters.draft_tokens - drafted == sum(token.drafts for token in output.tokens), (
            "the totals are what was told"
        )
        assert counters.accepted_draft_tokens - accepted == sum(token.accepted for token in output.tokens)
        for scored in output.prompt_logprobs:
            outcome = self.outcomes[scored.id]
            assert not outcome.over
            assert not outcome.tokens[0], "a score after the first token"
            assert scored.first == len(outcome.scored) + 1, "scores come in order, each once"
            outcome.scored.extend(scored.logprobs)
            assert len(outcome.scored) - outcome.taken <= self.limits.max_waiting_prompt_logprobs
            if scored.id not in self.slow:
                self.take_prompt_logprobs(scored.id)
        for pooled in output.pooled:
            outcome = self.outcomes[pooled.id]
            assert not outcome.over, "an embedding after the end of its request"
            outcome.pooled = pooled.values
        for token in output.tokens:
            self._take(token)
        self.steps += 1
        self.computed += step.plan.tokens
        return step

    def _abandon(self) -> Step:
        """The oldest step under way has too little memory, and nothing that the cache holds counts any more."""
        abandoned = self._steps_under_way()
        if len(abandoned) < len(self._under_way):  # copies of blocks that are not computed
            self.die()
            return abandoned[0]
        self._forget_computed()
        self._under_way.clear()
        if not self.scheduler.abandon(abandoned):
            assert (
                abandoned[0].plan.tokens == 1
                or not self.limits.chunk_rule.may_end_in_run
                or self.limits.chunk_rule.of_prompts
            )
            self.die()
        return abandoned[0]

    def _steps_under_way(self) -> list[Step]:
        return [each for each in self._under_way if isinstance(each, Step)]

    def _propose(self, step: Step, result: StepResult) -> list[list[int]]:
        """What a draft model would: it computes its drafts but for the last, in the sequence's blocks."""
        if not self.limits.proposes:
            return []
        drafts: list[list[int]] = []
        assert step.plan.proposals
        for (sequence, _), part in zip(step.work, verified(step.plan, result.tokens), strict=True):
            end, count = part.chunk.context + part.count, part.proposal.count
            drafts.append([])
            if count and not sequence.finished:
                assert end + count <= len(self.executor.tables[part.chunk.row]) * self.executor.block_size
                drafts[-1] = self._draft(sequence, count, end + 1 - sequence.prompt_tokens).tolist()
        return drafts

    def _check_plan(self, step: Step) -> None:
        assert step.work, "a step that computes nothing"
        now = self.scheduler.step_cap.limits
        assert step.plan.tokens == sum(count for _, count in step.work) <= now.max_step_tokens
        assert len(step.work) <= now.max_running
        assert len({(s.id, s.choice) for s, _ in step.work}) == len(step.work), "a sequence stands twice in a step"
        assert self.scheduler.state().running <= self.limits.max_running
        rule = self.limits.chunk_rule
        if not rule.may_end_in_run:
            for sequence, begin, count in step.prefill:
                runs = [(run.begin, run.end) for run in sequence.prompt.runs]
                assert not any(first < begin + count < last for first, last in runs), "a chunk ends within a run"
                within = any(first < begin < last for first, last in runs)
                assert rule.may_begin_in_run or not within, "a chunk begins within a run"
        adapters = [sequence.adapter for sequence, _ in step.work]
        assert len({*adapters} - {0}) <= self.limits.max_loras
        assert bool(step.plan.adapters.slots) == any(adapters), "who has no adapter hears of none"
        assert [slot >= 0 for slot in step.plan.adapters.slots] == [each > 0 for each in adapters if any(adapters)]
        self.scheduler.adapter_slots.check_integrity()

    def _take(self, token: Token) -> None:
        outcome = self.outcomes[token.id]
        assert outcome.order.pooling is None, "a token in place of an embedding"
        assert not outcome.failed, "a token after the end of its request"
        assert not outcome.aborted, "a token after the end of its request"
        assert not outcome.ended[token.choice], "a token after the end of its choice"
        outcome.tokens[token.choice].append(token.token)
        outcome.ended[token.choice] = token.ended

    def drain(self, *, check: bool = True) -> None:
        """Lands everything and runs until all requests have ended; fails where that takes impossibly long."""
        while self.exchanges:
            self.end_exchange(next(iter(self.exchanges)))
        while self.slow:
            self.take_prompt_logprobs(self.slow.pop())
        for id, outcome in self.outcomes.items():
            if not outcome.over:
                self.land_all(id)
        work = sum((len(o.order.prompt) + o.order.sampling.max_tokens) * len(o.tokens) for o in self.outcomes.values())
        for _ in range(10 * work + 10):
            for id in tuple(self.rows_needed):
                self.place(id)
            if self.step(check=check) is None and not self.rows_needed:
                break
        self.check_over()

    def check_over(self) -> None:
        """Every request has ended once and said what its prompt makes it say; nothing is held."""
        for outcome in self.outcomes.values():
            assert outcome.over, "a request never ended"
            assert outcome.released == 1, "a request was let go more than once, or never"
            assert outcome.started <= 1, "a request started twice"
            self._check_words(outcome)
        assert self.scheduler.blocks.used == 0
        assert (self.scheduler.state().waiting, self.scheduler.state().running) == (0, 0)
        self.scheduler.check_integrity()

    def _check_words(self, outcome: Outcome) -> None:
        if outcome.order.pooling is not None:
            assert not outcome.pooled or outcome.pooled == expected_vector(outcome.order, self.limits)
            return
        if outcome.order.sampling.prompt_logprobs is not None:
            wanted_scores = expected_scores(outcome.order, self.limits)
            assert outcome.scored == wanted_scores[: len(outcome.scored)]
            assert outcome.resumed or not outcome.tokens[0] or len(outcome.scored) == len(wanted_scores)
        if not outcome.order.sampling.greedy and outcome.order.sampling.seed is None:
            return
        for choice, said in enumerate(outcome.tokens):
            wanted, reason = expected(outcome.order, choice, self.limits)
            assert said == wanted[: len(said)]
            if outcome.ended[choice] in ("stop", "length", "structure"):
                assert (said, outcome.ended[choice]) == (wanted, reason)
