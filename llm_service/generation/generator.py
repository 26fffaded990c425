"""Conducts a request from its media to its last token, and gives back everything it has taken on every way out."""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import msgspec

from common.aio import tasks
from common.errors import Cancelled, Exhausted, InvalidInput, Precondition
from common.media.item import Header
from common.telemetry import tracing
from common.telemetry.stages import Stage, seconds_of
from llm_service.encoders.fetch import Fetch
from llm_service.encoders.receiver import RowReceiver, headers_of
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
from llm_service.engine.prompt_identities import block_identities, keyed_runs
from llm_service.engine_client.client import EngineClient
from llm_service.engine_client.engine_request import EngineRequest
from llm_service.generation.adapters import Adapters
from llm_service.generation.admission import Admission, AdmissionTicket
from llm_service.generation.cached_spans import CachedSpans
from llm_service.generation.choices import Choice, merge_tokens, open_choices, resumed_for_engine
from llm_service.generation.constraints import Constraints
from llm_service.generation.events import Begun, Computed, Embedded, Ended, Event, PromptLogprobsDelta
from llm_service.generation.job import Job, aborted
from llm_service.generation.media_rows import MediaRows
from llm_service.generation.request_stages import Stages
from llm_service.generation.sessions import Sessions
from llm_service.grammar.compiler import Compiler
from llm_service.meters import Meters
from llm_service.prefill.lend import BlockPart, Lending
from llm_service.prefill.services import PrefillServices
from llm_service.prompt.builder import PromptBuilder
from llm_service.prompt_length import check_length
from llm_service.request import (
    ChatPrompt,
    Piece,
    PiecesPrompt,
    Prompt,
    PromptLayout,
    Request,
    TextPrompt,
    TokenPrompt,
)

_SHORT, _FEW_MESSAGES, _FEW_ROWS = 2048, 16, 4096
"""A prompt of at most so many characters or token ids, messages and media rows is laid out on the event loop, in less
than a millisecond."""

T = TypeVar("T")


class Generator:
    """Serves requests of one model; `admission` bounds how many there are at once."""

    def __init__(
        self,
        prompts: PromptBuilder,
        compiler: Compiler,
        receiver: RowReceiver,
        engine: EngineClient,
        cached_spans: CachedSpans,
        admission: Admission,
        sessions: Sessions,
        meters: Meters,
        adapters: Adapters,
        prefills: PrefillServices | None = None,
    ) -> None:
        self._prompts = prompts
        self._receiver = receiver
        self._engine = engine
        self._cached_spans = cached_spans
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
        modalities = [item.modality for item in request.media]
        short = _is_short(request.prompt)
        lay_out = partial(self._prompts.pieces, closed=request.pooling is not None)
        pieces = await _computed(lay_out, request.prompt, modalities, at_once=short)
        request = await self._constraints.apply(request)
        choices = await self._choices(request)
        stages.mark("prompt")
        if any(choice.text.stopped is None for choice in choices.values()):
            self._engine.check(request.max_handovers)  # before encoders work in vain
        fetches = await self._receiver.fetch_headers(request, job.admission.wait_for_media)
        async with MediaRows(self._receiver, fetches) as media:
            stages.mark("encode_header")
            layout = await self._layout(pieces, headers_of(fetches), short=short)
            if request.truncation is not None and len(layout.ids) > request.truncation.tokens:
                layout = await _computed(self._prompts.truncated, layout, request.truncation, at_once=short)
                # As if the caller had truncated it; beside media, pieces cannot express the rest.
                pieces = [] if layout.spans else [layout.ids]
            self._check_length(request, layout)
            counting = request, layout, choices
            thinking = await _computed(self._constraints.count_reasoning, *counting, at_once=not request.resume)
            if all(choice.text.stopped is not None for choice in choices.values()):
                yield Begun(layout, 0, thinking)
                for choice in choices.values():  # nothing is left to compute
                    yield _ended(choice, "stop", stages, media)
                return
            job.admission.measure(len(layout.ids))
            identities = await self._identities(request, layout)
            here = await self._bring_blocks(request, pieces, fetches, layout, identities)
            covered = self._covered(request, layout, identities, here)
            if self.prefills is not None:
                stages.mark("prefill_elsewhere")
            items = await media.take(layout, covered, job.admission.wait_for_media)
            if media.all_here:
                job.admission.media_came()
            self._check_length(request, layout)  # once more: the engine may be another one by now, with less room
            resume = resumed_for_engine(request, choices)
            request = self._constraints.behind_reasoning(request, layout, thinking=thinking)
            session = self._retain_for_session(request, layout)
            id, known = self._engine.next_id(), b"".join(identities)
            add = self._add(id, request, layout, items, resume, session, known)
            engine_request = job.engine_request = media.submit(self._engine, add, job.rows_came, request.max_handovers)
            try:
                begin = Begun(layout, 0, thinking, identities)
                following = self._follow(begin, choices, media, engine_request, stages)
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
        lending = Lending(blocks, first_block)
        async with aclosing(self.generate(request)) as events:
            async for event in events:
                computed = 0
                match event:
                    case Begun():
                        lending.identities = _reusable(event.identities, event.layout, size)
                        computed = event.cached
                    case Computed():
                        computed = event.tokens
                async with aclosing(lending.up_to(computed // size)) as parts:
                    async for part in parts:
                        yield part
        async with aclosing(lending.up_to(len(lending.identities))) as parts:  # blocks that found no room before
            async for part in parts:
                yield part

    async def _bring_blocks(
        self,
        request: Request,
        pieces: Sequence[Piece],
        fetches: Sequence[Fetch],
        layout: PromptLayout,
        identities: Sequence[bytes],
    ) -> int:
        """Has another service compute the prompt, if that is worth it. Returns how many of its first tokens have their
        blocks here afterwards."""
        size = self._engine.reusable_block_size
        asked_to = isinstance(request.prompt, PiecesPrompt)  # another service asks, perhaps one of the prefill services
        answers = request.pooling is None and not asked_to
        if self.prefills is None or size is None or not pieces or not answers or _is_computed_whole(request):
            return 0
        keys = [header.key for header in headers_of(fetches)]
        return await self.prefills.bring(request, pieces, keys, _reusable(identities, layout, size))

    def _covered(self, request: Request, layout: PromptLayout, identities: Sequence[bytes], here: int) -> set[int]:
        """The items whose spans are probably in the prefix cache, given that the blocks of the first `here` tokens
        are."""
        if _is_computed_whole(request):
            return set()
        spans = {span.item for span in layout.spans if span.end <= here}
        return self._cached_spans.find(layout, _reusable(identities, layout, self._engine.block_size)) | spans

    async def _identities(self, request: Request, layout: PromptLayout) -> Sequence[bytes]:
        """The identities of a prompt's full blocks, if an engine may find some of them."""
        if (size := self._engine.reusable_block_size) is None:
            return ()
        return await _computed(self._work_out, request, layout, size, at_once=len(layout.ids) <= _SHORT)

    def _work_out(self, request: Request, layout: PromptLayout, size: int) -> list[bytes]:
        runs = keyed_runs((span.header.rows_key, span.runs) for span in layout.spans)
        adapter_digest = request.adapter.digest if request.adapter else b""
        return block_identities(array("i", layout.ids), layout.positions, runs, request.salt, adapter_digest, size)

    async def _layout(self, pieces: Sequence[Piece], headers: Sequence[Header], *, short: bool) -> PromptLayout:
        few = sum(header.tokens for header in headers) <= _FEW_ROWS
        return await _computed(self._prompts.layout, pieces, headers, at_once=short and few)

    async def _choices(self, request: Request) -> dict[int, Choice]:
        """The choices that are not finished, each after its earlier output."""
        if not request.resume:
            return open_choices(request, self._prompts.tokenizer)
        return await tasks.to_thread(open_choices, request, self._prompts.tokenizer)

    def _check_length(self, request: Request, layout: PromptLayout) -> None:
        if not layout.ids:
            raise InvalidInput("the prompt has no tokens", reason="EMPTY_PROMPT", field="input")
        if (ready := self._engine.ready) is not None:
            check_length(len(layout.ids), ready.max_context, "input", answered=request.pooling is None)

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
        self,
        id: int,
        request: Request,
        layout: PromptLayout,
        items: list[ItemRows],
        resume: list[Resumed],
        session: int,
        identities: bytes,
    ) -> Add:
        return Add(
            id=id,
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
            identities=identities,
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
                        self._cached_spans.remember(layout, begin.identities)
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
            self._cached_spans.remember(begin.layout, begin.identities)


def _is_computed_whole(request: Request) -> bool:
    """Whether something is computed for every prompt token, cached ones included."""
    return request.sampling.prompt_logprobs is not None or (request.pooling is not None and request.pooling.of_all)


def _reusable(identities: Sequence[bytes], layout: PromptLayout, size: int) -> Sequence[bytes]:
    """Drops the last block if the prompt ends with it: at least one token must be computed."""
    return identities[: (len(layout.ids) - 1) // size]


def _is_short(prompt: Prompt) -> bool:
    """Whether laying a prompt out is faster than handing it to a thread."""
    match prompt:
        case TextPrompt(text):
            return len(text) <= _SHORT
        case TokenPrompt(ids):
            return len(ids) <= _SHORT
        case PiecesPrompt():
            return False
        case ChatPrompt(messages, tools):
            few = len(messages) <= _FEW_MESSAGES and not any(message.tool_calls for message in messages)
            if tools or prompt.variables or not few:
                return False
            parts = [part for message in messages for part in (*message.parts, message.reasoning)]
            return sum(len(part) for part in parts if isinstance(part, str)) <= _SHORT


async def _computed(work: Callable[..., T], *given: Any, at_once: bool) -> T:
    """Calls `work` and returns its result; in a thread unless `at_once`, since it may take long."""
    return work(*given) if at_once else await tasks.to_thread(work, *given)


def _since_arrival(stages: Stages, media: MediaRows) -> dict[str, Stage]:
    return {name: stage.since(stages.begun) for name, stage in (stages.all | media.stages()).items()}


def _ended(choice: Choice, reason: str, stages: Stages, media: MediaRows) -> Ended:
    seconds = _since_arrival(stages, media)
    thought, stopped = choice.reasoning.tokens if choice.reasoning else 0, choice.text.stopped or ""
    counts = choice.drafts, choice.accepted
    return Ended(choice.index, reason, stopped, choice.tokens, thought, seconds, *counts, choice.stop_token)
