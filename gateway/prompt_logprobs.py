"""How likely the tokens of a prompt were, as events tell it in pieces."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from twinlens.v1 import llm_pb2


@dataclass(slots=True)
class CollectedLogprobs:
    """The log-probabilities of a prompt's tokens, by position, from the second token on."""

    _told: dict[int, tuple[int, llm_pb2.TokenLogprobs]] = field(default_factory=dict)

    def add(self, told: llm_pb2.PromptLogprobs) -> None:
        """Takes some in, maybe once more."""
        self._told.update(enumerate(zip(told.token_ids, told.logprobs, strict=True), told.first))

    def __len__(self) -> int:
        return len(self._told)

    def in_order(self) -> list[llm_pb2.TokenLogprobs]:
        """Those of all tokens but the first."""
        return [self._told[place][1] for place in sorted(self._told)]

    def as_vllm(self) -> list[dict[str, Any] | None]:
        """Of each token, how likely it and others in its place were, by their ids. The rank of one that is not among
        the likeliest is not known."""
        return [None, *(_by_id(*self._told[place]) for place in sorted(self._told))]


async def collected(
    events: AsyncGenerator[llm_pb2.GenerateResponse], logprobs: CollectedLogprobs
) -> AsyncGenerator[llm_pb2.GenerateResponse]:
    """The other events of an answer, from `started` on, which is held back until all prompt logprobs have arrived."""
    started: llm_pb2.GenerateResponse | None = None
    async with aclosing(events) as each:
        async for said in each:
            if said.HasField("started"):
                started = said
                continue
            of_prompt = said.delta.HasField("prompt")
            if of_prompt:
                logprobs.add(said.delta.prompt)
            if started is not None and not (of_prompt and len(logprobs) < started.started.prompt_tokens - 1):
                yield started
                started = None
            if not of_prompt:
                yield said


def _by_id(token: int, told: llm_pb2.TokenLogprobs) -> dict[str, Any]:
    likeliest = {str(top.token_id): _entry(top.logprob, rank, top.text) for rank, top in enumerate(told.top, 1)}
    return {str(token): _entry(told.logprob, None, told.text), **likeliest}


def _entry(logprob: float, rank: int | None, text: str) -> dict[str, Any]:
    return {"logprob": logprob, "rank": rank, "decoded_token": text}
