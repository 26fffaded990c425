"""The plan through the two running services, over gRPC, as a client sees it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from benchmarks import hits
from benchmarks.services import both
from benchmarks.sides import Measured, Timed, measure
from benchmarks.workload import Plan, Question
from twinlens.v1 import llm_pb2, media_pb2
from twinlens.v1.encoder_pb2_grpc import EncoderServiceStub
from twinlens.v1.llm_pb2_grpc import LlmServiceStub

if TYPE_CHECKING:
    from twinlens.v1.llm_pb2_grpc import LlmServiceAsyncStub

_TIMEOUT = 300.0


class Twinlens:
    """Both services, by their addresses."""

    name = "Twinlens"

    def __init__(self, encoder: grpc.aio.Channel, llm: grpc.aio.Channel) -> None:
        self._encoder = EncoderServiceStub(encoder)
        self._llm = LlmServiceStub(llm)

    async def ask(self, question: Question, tokens: int) -> Timed:
        """One answer."""
        return await ask(self._llm, question.file(), question.text, tokens)

    async def together(self, questions: Sequence[Question], tokens: int) -> float:
        """Seconds for all."""
        asked = [(question.file(), question.text) for question in questions]
        started = time.perf_counter()
        await asyncio.gather(*(ask(self._llm, picture, text, tokens) for picture, text in asked))
        return time.perf_counter() - started

    async def hits(self) -> hits.Hits:
        """Of both services."""
        return await hits.of_services(self._llm, self._encoder)


def request_for(picture: bytes, text: str, tokens: int) -> llm_pb2.GenerateRequest:
    """Greedy, `tokens` tokens, whatever they are."""
    media = media_pb2.Media(modality=media_pb2.MODALITY_IMAGE, data=picture)
    parts = [llm_pb2.ChatPart(media=media), llm_pb2.ChatPart(text=text)]
    return llm_pb2.GenerateRequest(
        chat=llm_pb2.ChatInput(messages=[llm_pb2.ChatMessage(role="user", parts=parts)]),
        sampling=llm_pb2.SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True),
    )


async def ask(stub: LlmServiceAsyncStub, picture: bytes, text: str, tokens: int) -> Timed:
    """Greedy, exactly `tokens` tokens."""
    request = request_for(picture, text, tokens)
    started, first, count = time.perf_counter(), 0.0, 0
    stages: dict[str, float] = {}
    async for response in stub.Generate(request, timeout=_TIMEOUT):
        match response.WhichOneof("event"):
            case "delta":
                first = first or time.perf_counter() - started
                count += len(response.delta.token_ids)
            case "finished":
                stages = {timing.stage: timing.seconds for timing in response.finished.timings}
    if count != tokens:
        raise RuntimeError(f"Twinlens gave {count} tokens instead of {tokens}")
    return Timed(first, time.perf_counter() - started, count, stages)


def main(folder: Path, plan: Plan, tokens: int) -> Measured:
    """Starts both services, measures all rows, and stops them."""
    with both(folder) as (encoder, llm):
        return asyncio.run(_measure(encoder, llm, plan, tokens))


async def _measure(encoder: str, llm: str, plan: Plan, tokens: int) -> Measured:
    async with grpc.aio.insecure_channel(encoder) as one, grpc.aio.insecure_channel(llm) as other:
        return await measure(Twinlens(one, other), plan, tokens)
