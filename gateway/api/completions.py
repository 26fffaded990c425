"""`POST /v1/completions`: its body and responses."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, TypeAlias

from pydantic import model_validator
from starlette.requests import Request
from starlette.responses import Response

from common.aio import tasks
from common.errors import InvalidInput
from gateway.api.fields import VLLM_DEFAULTS, Int, Prompt, SamplingFields, StreamOptions
from gateway.convert import answers, field_names, prompt_inputs, sampling_params
from gateway.generation import Generations
from gateway.prompt_logprobs import CollectedLogprobs, collected
from gateway.prompt_turns import PromptBatches
from gateway.request_context import context_of
from gateway.services import LlmServices, Metadata
from gateway.stream import DONE, Chunks, EventStream, Last, json_answer
from gateway.text_offsets import TextOffsets
from twinlens.v1 import llm_pb2

_MAX_TOKENS = 16
"""Of a request that does not say, as OpenAI has it."""

Event = llm_pb2.GenerateResponse
Numbered = tuple[int, Event]
TextOf: TypeAlias = Callable[[Sequence[int]], Awaitable[str]]
_Logprobs: TypeAlias = tuple[Sequence[llm_pb2.TokenLogprobs], Sequence[int]]
"""Log-probabilities of tokens, and the tokens."""


class CompletionRequest(SamplingFields):
    """The body of a request."""

    without_effect: ClassVar[dict[str, tuple[Any, ...]]] = {
        **VLLM_DEFAULTS,
        "add_special_tokens": (True,),
        "suffix": ("",),
        "best_of": (1,),
    }

    prompt: Prompt
    logprobs: Int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _repeats_a_whole_prompt(self) -> CompletionRequest:
        if self.echo and self.truncate_prompt_tokens is not None:
            raise ValueError("echo does not go with truncate_prompt_tokens")
        return self

    @model_validator(mode="after")
    def _one_number_for_the_logprobs_of_a_prompt(self) -> CompletionRequest:
        if self.echo and None not in (self.logprobs, self.prompt_logprobs) and self.logprobs != self.prompt_logprobs:
            raise ValueError("with echo, logprobs cover the prompt too, and prompt_logprobs has a different number")
        return self


@dataclass(slots=True)
class _Choice:
    """One choice's output so far. `begun`: its first chunk was sent."""

    text: list[str] = field(default_factory=list)
    given: list[llm_pb2.TokenLogprobs] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    offsets: TextOffsets = field(default_factory=TextOffsets)
    begun: bool = False
    finished: llm_pb2.GenerateFinished = field(default_factory=llm_pb2.GenerateFinished)

    def told_logprobs(
        self, given: Iterable[llm_pb2.TokenLogprobs], ids: Iterable[int] | None = None
    ) -> dict[str, list[Any]]:
        """How likely new tokens were, as completions say it; with `ids` these stand for the tokens' texts."""
        given = list(given)
        offsets = [self.offsets.add(each.text_bytes or each.text.encode()) for each in given]
        if ids is not None and given:
            given = answers.named_by_ids(given, ids)
        return {
            "tokens": [each.text for each in given],
            "token_logprobs": [each.logprob for each in given],
            "top_logprobs": [{top.text: top.logprob for top in each.top} | {each.text: each.logprob} for each in given],
            "text_offset": offsets,
        }


@dataclass(slots=True)
class _Prompt:
    """What the response says about a prompt: its `text`, if it is echoed; its tokens; their log-probabilities; and the
    text of the `first` one."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: CollectedLogprobs = field(default_factory=CollectedLogprobs)
    first: str = ""

    async def begin(self, started: llm_pb2.GenerateStarted, text_of: TextOf | None) -> None:
        """The prompt's tokens are known; asks for the first one's text if needed."""
        self.token_ids = list(started.prompt_token_ids)
        if text_of is not None:
            self.first = await text_of(self.token_ids[:1])

    def before(
        self, choice: _Choice, given: Iterable[llm_pb2.TokenLogprobs], ids: Iterable[int] | None
    ) -> dict[str, list[Any]]:
        """Log-probabilities of the prompt's tokens followed by a choice's first ones; the first prompt token has
        none."""
        first = llm_pb2.TokenLogprobs(text=self.first)
        every = None if ids is None else [*self.token_ids, *ids]
        told = choice.told_logprobs([first, *self.logprobs.in_order(), *given], every)
        told["token_logprobs"][0] = told["top_logprobs"][0] = None
        return told


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """The parts of a request that matter for its response. `prompts` has what is said about each."""

    head: dict[str, Any]
    n: int
    with_logprobs: bool
    as_ids: bool
    echo: bool
    with_ids: bool
    prompt_logprobs: bool
    options: StreamOptions
    prompts: list[_Prompt]

    def prompt_of(self, index: int) -> _Prompt:
        """That of a choice."""
        return self.prompts[index // self.n]

    @property
    def tells_prompt_logprobs(self) -> bool:
        """Whether prompt logprobs are returned, which may take long to serialise."""
        return self.prompt_logprobs or self.repeats_logprobs

    @property
    def repeats_logprobs(self) -> bool:
        """Whether prompt logprobs precede those of choices."""
        return self.echo and self.with_logprobs

    def goes_on(self, choice: _Choice, text: str, given: _Logprobs | None) -> dict[str, Any]:
        """More of a choice: a text, and how likely its tokens were."""
        logprobs = (
            choice.told_logprobs(given[0], given[1] if self.as_ids else None) if self.with_logprobs and given else None
        )
        return {"text": text, "logprobs": logprobs}

    def begun(self, index: int, choice: _Choice, text: str, given: _Logprobs | None) -> dict[str, Any]:
        """The beginning of a choice: the same, preceded by its prompt."""
        prompt = self.prompt_of(index)
        if self.repeats_logprobs:
            logprobs, ids = given or ((), ())
            told: dict[str, Any] = {
                "text": prompt.text + text,
                "logprobs": prompt.before(choice, logprobs, ids if self.as_ids else None),
            }
        else:
            told = self.goes_on(choice, prompt.text + text, given)
        if self.with_ids:
            told["prompt_token_ids"] = prompt.token_ids
        if self.prompt_logprobs:
            told["prompt_logprobs"] = prompt.logprobs.as_vllm()
        return told

    def whole(self, index: int, choice: _Choice) -> dict[str, Any]:
        """A choice."""
        return {
            "index": index,
            **self.begun(index, choice, "".join(choice.text), (choice.given, choice.token_ids)),
            **answers.finish(choice.finished),
            **({"token_ids": choice.token_ids} if self.with_ids else {}),
        }


class Completions:
    """Answers requests for completions of texts and of token ids."""

    def __init__(self, services: LlmServices, generations: Generations, batches: PromptBatches) -> None:
        self._services = services
        self._batches = batches
        self._generations = generations

    async def answer(self, request: Request) -> Response:
        """One request, streamed or whole. The choices of the second prompt are numbered from `n` on, and so forth."""
        context = context_of(request, "completions")
        asked = await context.read(CompletionRequest)
        bare = asked.add_special_tokens is False
        prompts = await context.made(
            partial(prompt_inputs.prompts, bare=bare), asked.prompt, self._batches.max_prompts, "prompt"
        )
        params = await context.made(sampling_params.sampling, asked)
        if asked.response_format is not None:
            sampling_params.set_response_format(params, asked.response_format)
        if asked.max_tokens is None:
            params.max_tokens = _MAX_TOKENS
        if asked.logprobs is not None:
            params.logprobs = asked.logprobs
        if asked.echo and asked.logprobs is not None:
            params.prompt_logprobs = asked.logprobs
        nothing_new = bool(asked.echo) and asked.max_tokens == 0
        if nothing_new:
            params.max_tokens = 1  # dropped again
        with_ids = bool(asked.return_token_ids or (asked.echo and asked.logprobs is not None))
        messages = (
            prompt_inputs.generate_request(
                asked,
                params,
                prompt_inputs.name_of(context.id, number, len(prompts)),
                return_prompt_token_ids=with_ids,
                **asked.truncation("left"),
                **prompt,
            )
            for number, prompt in enumerate(prompts)
        )
        on_start = context.body_lease.release if len(prompts) == 1 else lambda: None
        sources = [
            field_names.named_by(field_names.names_of(asked), self._generations.events(message, context, on_start))
            for message in prompt_inputs.within(self._batches.max_bytes, messages)
        ]
        model = self._services.name(asked.model)
        text_of = partial(self._text_of, asked.model or "", context.metadata)
        told = _Asked(
            head={"id": f"cmpl-{context.id}", "object": "text_completion", "created": int(time.time()), "model": model},
            n=asked.n or 1,
            with_logprobs=asked.logprobs is not None,
            as_ids=bool(asked.return_tokens_as_token_ids),
            echo=bool(asked.echo),
            with_ids=bool(asked.return_token_ids),
            prompt_logprobs=asked.prompt_logprobs is not None,
            options=asked.stream_options or StreamOptions(),
            prompts=[_Prompt(await _said(prompt, text_of) if asked.echo else "") for prompt in prompts],
        )
        if nothing_new:
            sources = [_nothing_new(source) for source in sources]
        if told.tells_prompt_logprobs:
            sources = [collected(*each) for each in zip(sources, (each.logprobs for each in told.prompts), strict=True)]
        events = self._batches.turns.batch(context, len(prompts)).merged(sources)
        if asked.stream:
            return EventStream(_chunks(events, told, text_of))
        return await _whole(events, told, text_of)

    async def _text_of(self, model: str, metadata: Metadata, ids: Sequence[int]) -> str:
        reply = await self._services.detokenize(model, llm_pb2.DetokenizeRequest(ids=ids), metadata)
        return reply.text


async def _said(prompt: dict[str, Any], text_of: TextOf) -> str:
    """A prompt's text."""
    if "text" in prompt:
        return str(prompt["text"].prompt)
    try:
        return await text_of(prompt["tokens"].ids)
    except InvalidInput as error:
        raise error.at("prompt") from None


async def _nothing_new(events: AsyncGenerator[Event]) -> AsyncGenerator[Event]:
    """The events of a prompt without any completion."""
    async with aclosing(events) as each:
        async for said in each:
            if said.HasField("finished"):
                index, counted = said.finished.index, said.finished.usage
                usage = llm_pb2.Usage(prompt_tokens=counted.prompt_tokens, cached_tokens=counted.cached_tokens)
                reason = llm_pb2.FINISH_REASON_LENGTH
                yield Event(finished=llm_pb2.GenerateFinished(index=index, reason=reason, usage=usage))
            elif not said.HasField("delta") or said.delta.HasField("prompt"):
                yield said


async def _chunks(events: AsyncGenerator[Numbered], asked: _Asked, text_of: TextOf) -> AsyncGenerator[bytes]:
    chunks, options = Chunks(asked.head), asked.options
    more: dict[str, Any] = {"usage": None} if options.include_usage else {}
    choices: dict[int, _Choice] = {}
    prompt, cached, tokens = 0, 0, 0

    def chunk(index: int, text: str, given: _Logprobs | None = None, **rest: Any) -> bytes:
        choice = choices[index]
        if choice.begun:
            told = asked.goes_on(choice, text, given)
        else:
            choice.begun, told = True, asked.begun(index, choice, text, given)
        if options.include_usage and options.continuous_usage_stats:
            more["usage"] = answers.usage_of(prompt, cached, tokens)
        return chunks.chunk({"choices": [{"index": index, "finish_reason": None, **told, **rest}], **more})

    async def written(index: int, *given: Any, **rest: Any) -> bytes:
        """A chunk; one with prompt logprobs is serialised off the event loop."""
        if asked.tells_prompt_logprobs and not choices[index].begun:
            return await tasks.to_thread(chunk, index, *given, **rest)
        return chunk(index, *given, **rest)

    async with aclosing(events) as each:
        async for number, said in each:
            match said.WhichOneof("event"):
                case "started":
                    prompt, cached = prompt + said.started.prompt_tokens, cached + said.started.cached_tokens
                    await asked.prompts[number].begin(said.started, text_of if asked.repeats_logprobs else None)
                case "delta":
                    delta, index = said.delta, number * asked.n + said.delta.index
                    tokens += len(delta.token_ids)
                    choices.setdefault(index, _Choice())
                    beside: dict[str, Any] = {"token_ids": list(delta.token_ids)} if asked.with_ids else {}
                    if delta.text or delta.logprobs or beside:
                        yield await written(index, delta.text, (delta.logprobs, delta.token_ids), **beside)
                case "finished":
                    index = number * asked.n + said.finished.index
                    choices.setdefault(index, _Choice()).finished = said.finished
                    yield await written(index, "", **answers.finish(said.finished))
                case _:
                    continue
    last = {"choices": [], "usage": _usage(choices, asked.n)}
    yield Last((chunks.chunk(last) if options.include_usage else b"") + DONE)


async def _whole(events: AsyncGenerator[Numbered], asked: _Asked, text_of: TextOf) -> Response:
    choices: dict[int, _Choice] = {}
    async with aclosing(events) as each:
        async for number, said in each:
            match said.WhichOneof("event"):
                case "started":
                    await asked.prompts[number].begin(said.started, text_of if asked.repeats_logprobs else None)
                case "delta":
                    choice = choices.setdefault(number * asked.n + said.delta.index, _Choice())
                    choice.text.append(said.delta.text)
                    choice.given += said.delta.logprobs
                    choice.token_ids += said.delta.token_ids
                case "finished":
                    choices.setdefault(number * asked.n + said.finished.index, _Choice()).finished = said.finished
                case _:
                    continue
    return await tasks.to_thread(_answer, asked, choices) if asked.tells_prompt_logprobs else _answer(asked, choices)


def _answer(asked: _Asked, choices: dict[int, _Choice]) -> Response:
    told = [asked.whole(index, choice) for index, choice in sorted(choices.items())]
    return json_answer({**asked.head, "choices": told, "usage": _usage(choices, asked.n)})


def _usage(choices: dict[int, _Choice], n: int) -> dict[str, Any]:
    """Tokens of all choices; a prompt, which `n` of them share, counts once."""
    by_prompt: dict[int, list[llm_pb2.GenerateFinished]] = {}
    for index, choice in choices.items():
        by_prompt.setdefault(index // n, []).append(choice.finished)
    return answers.usage(by_prompt.values())
