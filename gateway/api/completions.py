"""`POST /v1/completions`: what it takes and how it answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from gateway import convert
from gateway.api.fields import VLLM_DEFAULTS, Int, Prompt, SamplingFields, StreamOptions
from gateway.generation import Generations
from gateway.request_context import context_of
from gateway.services import LlmServices
from gateway.stream import DONE, Chunks, EventStream, Last, json_answer
from twinlens.v1 import llm_pb2

Event = llm_pb2.GenerateResponse
Numbered = tuple[int, Event]


class CompletionRequest(SamplingFields):
    """The body of a request."""

    without_effect: ClassVar[dict[str, tuple[Any, ...]]] = {
        **VLLM_DEFAULTS,
        "echo": (False,),
        "suffix": ("",),
        "best_of": (1,),
    }

    prompt: Prompt
    logprobs: Int | None = None


@dataclass(slots=True)
class _Choice:
    """What one choice has said so far, of which `length` characters were given with scores."""

    text: list[str] = field(default_factory=list)
    logprobs: dict[str, list[Any]] = field(default_factory=dict)
    length: int = 0
    finished: llm_pb2.GenerateFinished = field(default_factory=llm_pb2.GenerateFinished)

    def scores(self, given: Sequence[llm_pb2.TokenLogprobs]) -> dict[str, list[Any]]:
        """How likely new tokens were, as completions say it."""
        offsets = []
        for each in given:
            offsets.append(self.length)
            self.length += len(each.text)
        return {
            "tokens": [each.text for each in given],
            "token_logprobs": [each.logprob for each in given],
            "top_logprobs": [{top.text: top.logprob for top in each.top} | {each.text: each.logprob} for each in given],
            "text_offset": offsets,
        }


class Completions:
    """Answers requests for completions of texts and of token ids."""

    def __init__(self, services: LlmServices, generations: Generations, max_prompts: int, max_bytes: int) -> None:
        self._services = services
        self._generations = generations
        self._max_prompts = max_prompts
        self._max_bytes = max_bytes

    async def answer(self, request: Request) -> Response:
        """One request, streamed or whole. The choices of the second prompt are numbered from `n` on, and so forth."""
        context = context_of(request, "completions")
        asked = await context.read(CompletionRequest)
        prompts = await context.made(convert.prompts, asked.prompt, self._max_prompts, "prompt")
        params = await context.made(convert.sampling, asked)
        if asked.logprobs is not None:
            params.logprobs = asked.logprobs
        messages = (
            convert.generate_request(asked, params, convert.name_of(context.id, number, len(prompts)), **prompt)
            for number, prompt in enumerate(prompts)
        )
        on_start = context.body_lease.release if len(prompts) == 1 else lambda: None
        sources = [
            self._generations.events(message, context.metadata, on_start)
            for message in convert.within(self._max_bytes, messages)
        ]
        model = self._services.name(asked.model)
        head = {"id": f"cmpl-{context.id}", "object": "text_completion", "created": int(time.time()), "model": model}
        scored, n = asked.logprobs is not None, asked.n or 1
        if asked.stream:
            return EventStream(
                _chunks(_merged(sources), head, n, asked.stream_options or StreamOptions(), scored=scored)
            )
        return json_answer(await _whole(_merged(sources), head, n, scored=scored))


async def _merged(sources: Sequence[AsyncGenerator[Event]]) -> AsyncGenerator[Numbered]:
    """The events of several generations, each with its number, as they come. The first error ends all."""
    if len(sources) == 1:
        async with aclosing(sources[0]) as events:
            async for each in events:
                yield 0, each
        return
    queue: asyncio.Queue[Numbered | Exception | None] = asyncio.Queue(1)

    async def pump(number: int, source: AsyncGenerator[Event]) -> None:
        try:
            async with aclosing(source) as events:
                async for each in events:
                    await queue.put((number, each))
        except Exception as error:  # noqa: BLE001 - it is raised where the events are read
            await queue.put(error)
        else:
            await queue.put(None)

    pumps = [asyncio.create_task(pump(number, source)) for number, source in enumerate(sources)]
    try:
        running = len(pumps)
        while running:
            match await queue.get():
                case None:
                    running -= 1
                case Exception() as error:
                    raise error
                case said:
                    yield said
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _chunks(
    events: AsyncGenerator[Numbered], head: dict[str, Any], n: int, options: StreamOptions, *, scored: bool
) -> AsyncGenerator[bytes]:
    chunks = Chunks(head)
    more: dict[str, Any] = {"usage": None} if options.include_usage else {}
    choices: dict[int, _Choice] = {}
    prompt, cached, tokens = 0, 0, 0

    def chunk(index: int, text: str, **rest: Any) -> bytes:
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": None, **rest}
        if options.include_usage and options.continuous_usage_stats:
            more["usage"] = convert.usage_of(prompt, cached, tokens)
        return chunks.chunk({"choices": [choice], **more})

    async with aclosing(events) as each:
        async for number, said in each:
            match said.WhichOneof("event"):
                case "started":
                    prompt, cached = prompt + said.started.prompt_tokens, cached + said.started.cached_tokens
                case "delta":
                    delta, index = said.delta, number * n + said.delta.index
                    tokens += len(delta.token_ids)
                    choice = choices.setdefault(index, _Choice())
                    if delta.text or delta.logprobs:
                        logprobs = choice.scores(delta.logprobs) if scored else None
                        yield chunk(index, delta.text, logprobs=logprobs)
                case "finished":
                    index = number * n + said.finished.index
                    choices.setdefault(index, _Choice()).finished = said.finished
                    yield chunk(index, "", **convert.finish(said.finished))
                case _:
                    continue
    last = {"choices": [], "usage": _usage(choices, n)}
    yield Last((chunks.chunk(last) if options.include_usage else b"") + DONE)


async def _whole(events: AsyncGenerator[Numbered], head: dict[str, Any], n: int, *, scored: bool) -> dict[str, Any]:
    choices: dict[int, _Choice] = {}
    async with aclosing(events) as each:
        async for number, said in each:
            match said.WhichOneof("event"):
                case "delta":
                    choice = choices.setdefault(number * n + said.delta.index, _Choice())
                    choice.text.append(said.delta.text)
                    for name, values in choice.scores(said.delta.logprobs).items():
                        choice.logprobs.setdefault(name, []).extend(values)
                case "finished":
                    choices.setdefault(number * n + said.finished.index, _Choice()).finished = said.finished
                case _:
                    continue
    return {
        **head,
        "choices": [
            {
                "index": index,
                "text": "".join(choice.text),
                "logprobs": choice.logprobs if scored else None,
                **convert.finish(choice.finished),
            }
            for index, choice in sorted(choices.items())
        ],
        "usage": _usage(choices, n),
    }


def _usage(choices: dict[int, _Choice], n: int) -> dict[str, Any]:
    """Tokens of all choices; each prompt, which `n` of them have, counts once."""
    by_prompt: dict[int, list[llm_pb2.GenerateFinished]] = {}
    for index, choice in choices.items():
        by_prompt.setdefault(index // n, []).append(choice.finished)
    return convert.usage(by_prompt.values())
