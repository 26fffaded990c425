"""Counts the tokens of a chat's prompt."""

from __future__ import annotations

from contextlib import aclosing

from common.errors import Internal
from gateway.generation import Generations
from gateway.request_context import RequestContext
from gateway.services import LlmServices
from twinlens.v1 import llm_pb2


class PromptCounts:
    """Asks LLM services for the number of tokens that a prompt would have."""

    def __init__(self, services: LlmServices, generations: Generations) -> None:
        self._services = services
        self._generations = generations

    async def count(self, request: llm_pb2.GenerateRequest, context: RequestContext) -> int:
        """The tokens of this request's prompt. Raises TwinlensError."""
        if any(part.HasField("media") for each in request.chat.messages for part in each.parts):
            return await self._laid_out(request, context)
        told = llm_pb2.TokenizeRequest(chat=request.chat)
        reply, _ = await self._services.tokenize(request.model, told, context.metadata)
        return len(reply.ids)

    async def _laid_out(self, request: llm_pb2.GenerateRequest, context: RequestContext) -> int:
        """Number of tokens of a prompt with media, which encoders must inspect: it is laid out as for an answer, which
        is cancelled before it begins."""
        request.sampling.CopyFrom(llm_pb2.SamplingParams(max_tokens=1))
        request.max_handovers = 0
        async with aclosing(self._generations.events(request, context)) as events:
            async for said in events:
                if said.HasField("started"):
                    return said.started.prompt_tokens
        raise Internal("the LLM service has laid out nothing")
