"""Conducts a request from its media to its last token, and gives back everything it has taken on every way out."""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

import msgspec

from common.aio import tasks
from common.errors import Cancelled, Exhausted, Precondition
from common.telemetry import tracing
from common.telemetry.stages import Stage, seconds_of
from llm_service.encoders.receiver import RowReceiver
from llm_service.engine.messages import (
    Add,
    Complete,
    ItemRows,
    Pooled,
    Prefilled,
    PromptLogprobs,
    Resumed,
    Started,
    State,
)
from llm_service.engine_client.client import EngineClient
from llm_service.engine_client.engine_request import EngineRequest
from llm_service.generation.adapters import Adapters
from llm_service.generation.admission import Admission, AdmissionTicket
from llm_service.generation.cached_spans import CachedSpans
from llm_service.generation.choices import Choice, merge_tokens, open_choices, resumed_for_engine
from llm_service.generation.constraints import Constraints
from llm_service.generation.events import Begun, Computed, Embedded, Ended, Event, PromptLogprobsDelta
from llm_service.generation.input_processor import InputProcessor
from llm_service.generation.job import Job, aborted
from llm_service.generation.media_rows import MediaRows
from llm_service.generation.request_stages import Stages
from llm_service.generation.sessions import Sessions
from llm_service.grammar.compiler import Compiler
from llm_service.meters import Meters
from llm_service.prefill.lend import BlockPart, Lending
from llm_service.prefill.services import PrefillServices
from llm_service.prompt.builder import PromptBuilder
from llm_service.request import (
    Piece,
    PiecesPrompt,
    PromptLayout,
    Request,
)


class Generator:
    """Serves requests of one model; `admission` bounds how many there are at once."""

    def __init__(
        self,
        prompts: PromptBuilder,
        compiler: Compiler,
        receiver: RowReceiver,
        engine: EngineClient,
        admission: Admission,
        sessions: Sessions,
        meters: Meters,
        adapters: Adapters,
        prefills: PrefillServices | None = None,
    ) -> None:
        self._prompts = prompts
        self._receiver = receiver
        self._engine = engine
        self._input = InputProcessor(prompts, engine)
        self._cached_spans = CachedSpans(engine.block_size)
        self._constraints = Constraints(prompts, compiler)
        self._meters = meters
        self._adapters = adapters
        self.prefills = prefills
        self.admission = admission
        self.sessions = sessions
        self._open: dict[str, list[Job]] = {}
        self.outcomes: Counter[str] = Counter()
        self.stage_totals: Counter[str] = Counter()

    @property
    def open_requests(self) -> int:
        """Requests under way, from arrival to end."""
        return sum(map(len, self._open.values()))

    async def state(self) -> State:
        """The engine's current queues and counters; requests that the engine has not been given yet count as waiting.
        Raises Unavailable while it is down."""
        # Counted before the engine is asked: a request submitted while it answers is not counted at all.
        on_their_way = max(0, self.open_requests - self._engine.requests)
        state = await self._engine.state()
        return msgspec.structs.replace(state, waiting=state.waiting + on_their_way)

    def abort(self, request_id: str, salt: str = "") -> int:
        """Ends all requests with this id under this salt; returns how many there were."""
        jobs = [job for job in self._open.get(request_id, ()) if job.salt == salt]
        for job in jobs:
            job.abort()
            if job.engine_request is not None:  # at once, not when the caller reads next
                self._engine.abort(job.engine_request.id)
        return len(jobs)

    async def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        """Begun, deltas, then Ended once for each choice, or Begun and Embedded; or an error. Leaving early ends the
        work on both sides."""
        admission = self._enter()
        if request.adapter is not None:
            self._adapters.begin(request.adapter)
        meter = self._meters.request()
        job = Job(asyncio.current_task(), admission, request.salt)
        self._open.setdefault(request.id, []).append(job)
        outcome = "failed"
        try:
            async with aclosing(self._serve(request, job)) as events:
                async for event in events:
                    job.see(event, meter)
                    yield event
            outcome = "finished"
        except Cancelled:
            outcome = "cancelled"
            raise
        except GeneratorExit:
            outcome = job.outcome_of_leaving(request.deadline)
            raise
        except asyncio.CancelledError:
            outcome = job.outcome_of_leaving(request.deadline)
            if job.task is None or not job.aborted or job.engine_request is not None:
                raise
            job.task.uncancel()
            raise aborted() from None
        finally:
            admission.leave()
            if request.adapter is not None:
                self._adapters.end(request.adapter)
            meter.end(outcome, job.stages.seconds)
            job.log()
            self.outcomes[outcome] += 1
            self.stage_totals.update(job.stages.seconds)
            tracing.in_turn(seconds_of(job.stages.in_turn), job.stages.begun)
            self._open[request.id].remove(job)
            if not self._open[request.id]:
                del self._open[request.id]

    def _enter(self) -> AdmissionTicket:
        try:
            return self.admission.enter()
        except Exhausted:
            self.outcomes["failed"] += 1
            raise

    async def _serve(self, request: Request, job: Job) -> AsyncGenerator[Event, None]:
        stages = job.stages
        pieces = await self._input.pieces(request)
        request = await self._constraints.apply(request)
        opening = request, self._prompts.tokenizer
        choices = await tasks.compute(open_choices, *opening, at_once=not request.resume)
        stages.mark("prompt")
        if any(choice.text.stopped is None for choice in choices.values()):
            self._engine.check(request.max_handovers)  # before encoders work in vain
        fetches = await self._receiver.fetch_headers(request, job.admission.wait_for_media)
        async with MediaRows(self._receiver, fetches) as media:
            stages.mark("encode_header")
            layout, pieces = await self._input.layout(request, pieces, media.headers)
            counting = request, layout, choices
            thinking = await tasks.compute(self._constraints.count_reasoning, *counting, at_once=not request.resume)
            if all(choice.text.stopped is not None for choice in choices.values()):
                yield Begun(layout, 0, thinking)
                for choice in choices.values():  # nothing is left to compute
                    yield _ended(choice, "stop", stages, media)
                return
            job.admission.measure(len(layout.ids))
            layout = await self._input.identified(request, layout)
            here = await self._bring_blocks(request, pieces, media, layout)
            covered = self._covered(request, layout, here)
            if self.prefills is not None:
                stages.mark("prefill_elsewhere")
            items = await media.take(layout, covered, job.admission.wait_for_media)
            if media.all_here:
                job.admission.media_came()
            self._input.check_length(request, layout)  # once more: the engine may be another one by now, with less room
            resume = resumed_for_engine(request, choices)
            request = self._constraints.behind_reasoning(request, layout, thinking=thinking)
            session = self._retain_for_session(request, layout)
            add = self._add(request, layout, items, resume, session)
            engine_request = job.engine_request = media.submit(self._engine, add, job.rows_came, request.max_handovers)
            try:
                following = self._follow(Begun(layout, 0, thinking), choices, media, engine_request, stages)
                async with aclosing(following) as events:
                    async for event in events:
                        yield event
            finally:
                self._engine.abort(engine_request.id)  # ignored by the engine if the request has ended

    async def prefill(self, request: Request, first_block: int) -> AsyncGenerator[BlockPart]:
        """Computes a prompt for another service, and yields its KV blocks from `first_block` on, each when a step has
        computed it. Raises Precondition if blocks are not lent or there are none, and Unavailable if no engine
        serves."""
        blocks = self._engine.blocks
        if blocks is not None:
            self._engine.check(0)  # each engine states its own block layout
        if blocks is None or (size := self._engine.reusable_block_size) is None:
            raise Precondition("this service computes no prompts for others", reason="NOT_LENT")
        lending = Lending(blocks, size, first_block)
        async with aclosing(self.generate(request)) as events, aclosing(lending.follow(events)) as parts:
            async for part in parts:
                yield part

    async def _bring_blocks(
        self, request: Request, pieces: Sequence[Piece], media: MediaRows, layout: PromptLayout
    ) -> int:
        """Has another service compute the prompt, if that is worth it. Returns how many of its first tokens have their
        blocks here afterwards."""
        size = self._engine.reusable_block_size
        asked_to = isinstance(request.prompt, PiecesPrompt)  # another service asks, perhaps one of the prefill services
        answers = request.pooling is None and not asked_to
        if self.prefills is None or size is None or not pieces or not answers or _is_computed_whole(request):
            return 0
        keys = [header.key for header in media.headers]
        async with media.at_encoders():
            return await self.prefills.bring(request, pieces, keys, layout.reusable(size))

    def _covered(self, request: Request, layout: PromptLayout, here: int) -> set[int]:
        """The items whose spans are probably in the prefix cache, given that the blocks of the first `here` tokens
        are."""
        if _is_computed_whole(request):
            return set()
        return self._cached_spans.find(layout) | {span.item for span in layout.spans if span.end <= here}

    def _retain_for_session(self, request: Request, layout: PromptLayout) -> int:
        """Records what a session's turn uses. Ends sessions that have expired, this one too if they last no time.
        Returns the session's number; 0 if there is none or it has ended."""
        session = self.sessions.use(request.salt, request.session) if request.session else None
        if session is not None:
            for span in layout.spans:
                self.sessions.retain(session, span.header.rows_key, self._receiver.cache.item_bytes(span.header))
        ended = self.sessions.take_ended()
        self._engine.end_sessions(ended)
        return session.number if session is not None and session.number not in ended else 0

    def _add(
        self, request: Request, layout: PromptLayout, items: list[ItemRows], resume: list[Resumed], session: int
    ) -> Add:
        return Add(
            id=self._engine.next_id(),
            token_ids=array("i", layout.ids).tobytes(),
            positions=layout.positions,
            mrope_delta=layout.mrope_delta,
            items=items,
            sampling=request.sampling,
            salt=request.salt,
            priority=request.priority,
            deadline=request.deadline,
            session=session,
            resume=resume,
            adapter=request.adapter.number if request.adapter else 0,
            adapter_digest=request.adapter.digest if request.adapter else b"",
            max_length=layout.max_length,
            pooling=request.pooling,
            identities=b"".join(layout.identities),
        )

    async def _follow(
        self,
        begin: Begun,
        choices: dict[int, Choice],
        media: MediaRows,
        engine_request: EngineRequest,
        stages: Stages,
    ) -> AsyncGenerator[Event, None]:
        """Turns the engine's events into the caller's."""
        ends = {index: "stop" for index, choice in choices.items() if choice.text.stopped is not None}
        layout, begun = begin.layout, False
        while len(ends) < len(choices):
            for event in merge_tokens(await engine_request.next()):
                match event:
                    case Started():
                        stages.mark("queue")
                        begun = True
                        yield replace(begin, cached=event.cached)
                    case Prefilled():
                        stages.prefilled(event)
                        yield Computed(event.first + event.count)
                    case PromptLogprobs():
                        end = event.first + len(event.logprobs)
                        yield PromptLogprobsDelta(event.first, layout.ids[event.first : end], event.logprobs)
                    case Pooled():
                        stages.mark("embed")
                        self._cached_spans.remember(layout)
                        yield Embedded(event.values, _since_arrival(stages, media))
                        return
                    case Complete() if choice := choices.get(event.choice):
                        rest, ends[choice.index] = choice.complete(event.ended)
                        if rest.text or rest.turns:
                            yield rest
                    case list() as tokens if choice := choices.get(tokens[0].choice):
                        self._note_first_token(choice, begin, stages)
                        delta, ended = choice.add(tokens)
                        yield delta
                        if ended and not tokens[-1].ended:
                            self._engine.abort(engine_request.id, choice.index)
                        if ended:
                            ends[choice.index] = ended
                while begun and ends:  # choices end one after the other
                    index, ended = ends.popitem()
                    stages.extend("decode_tokens")
                    yield _ended(choices.pop(index), ended, stages, media)
        if not begun:  # all choices were complete on arrival
            yield begin
        for index, ended in ends.items():
            yield _ended(choices[index], ended, stages, media)

    def _note_first_token(self, choice: Choice, begin: Begun, stages: Stages) -> None:
        """New tokens of a choice are here; if they are its first, its prompt has been computed."""
        if choice.tokens == len(choice.resumed):
            stages.mark("first_token")
            self._cached_spans.remember(begin.layout)


def _is_computed_whole(request: Request) -> bool:
    """Whether something is computed for every prompt token, cached ones included."""
    return request.sampling.prompt_logprobs is not None or (request.pooling is not None and request.pooling.of_all)


def _since_arrival(stages: Stages, media: MediaRows) -> dict[str, Stage]:
    return {name: stage.since(stages.begun) for name, stage in (stages.all | media.stages()).items()}


def _ended(choice: Choice, reason: str, stages: Stages, media: MediaRows) -> Ended:
    seconds = _since_arrival(stages, media)
    thought, stopped = choice.reasoning.tokens if choice.reasoning else 0, choice.text.stopped or ""
    counts = choice.drafts, choice.accepted
    return Ended(choice.index, reason, stopped, choice.tokens, thought, seconds, *counts, choice.stop_token)
