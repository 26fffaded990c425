"""The workload through the two running services, over gRPC, as a client sees it."""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import grpc

from benchmarks.services import both
from benchmarks.workload import CONCURRENT, OTHER_QUESTION, QUESTION, jpeg, photograph
from twinlens.v1 import llm_pb2, media_pb2
from twinlens.v1.llm_pb2_grpc import LlmServiceStub

_TIMEOUT = 300.0


@dataclass(frozen=True, slots=True)
class Timed:
    """One generation: seconds to the first token, seconds in all, and what the service says of its stages."""

    first: float
    whole: float
    tokens: int
    stages: dict[str, float]


async def ask(stub: LlmServiceStub, picture: bytes, question: str, tokens: int) -> Timed:
    """Greedy, exactly `tokens` tokens."""
    media = media_pb2.Media(modality=media_pb2.MODALITY_IMAGE, data=picture)
    parts = [llm_pb2.ChatPart(media=media), llm_pb2.ChatPart(text=question)]
    request = llm_pb2.GenerateRequest(
        chat=llm_pb2.ChatInput(messages=[llm_pb2.ChatMessage(role="user", parts=parts)]),
        sampling=llm_pb2.SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True),
    )
    started, first, count = time.perf_counter(), 0.0, 0
    stages: dict[str, float] = {}
    async for response in stub.Generate(request, timeout=_TIMEOUT):
        match response.WhichOneof("event"):
            case "delta":
                first = first or time.perf_counter() - started
                count += len(response.delta.token_ids)
            case "finished":
                stages = {timing.stage: timing.seconds for timing in response.finished.timings}
    return Timed(first, time.perf_counter() - started, count, stages)


async def _measure(address: str, runs: int, tokens: int) -> dict[str, float]:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = LlmServiceStub(channel)
        await ask(stub, jpeg(photograph(900)), QUESTION, 4)
        cold = [await ask(stub, jpeg(photograph(n)), QUESTION, 1) for n in range(runs)]
        same_picture = [await ask(stub, jpeg(photograph(n)), OTHER_QUESTION, 1) for n in range(runs)]
        same_prompt = [await ask(stub, jpeg(photograph(n)), QUESTION, 1) for n in range(runs)]
        long = [await ask(stub, jpeg(photograph(100 + n)), QUESTION, tokens) for n in range(runs)]
        figures = {
            "ttft_cold": statistics.median(t.first for t in cold),
            "ttft_same_picture": statistics.median(t.first for t in same_picture),
            "ttft_same_prompt": statistics.median(t.first for t in same_prompt),
            "per_token": statistics.median((t.whole - t.first) / (t.tokens - 1) for t in long),
        }
        for stage in cold[0].stages:
            figures[f"stage_{stage}"] = statistics.median(t.stages.get(stage, 0.0) for t in cold)
        for many in CONCURRENT:
            rates = []
            for n in range(max(1, runs // 3)):
                pictures = [jpeg(photograph(200 + 20 * n + k)) for k in range(many)]
                started = time.perf_counter()
                done = await asyncio.gather(*(ask(stub, picture, QUESTION, tokens) for picture in pictures))
                rates.append(sum(t.tokens for t in done) / (time.perf_counter() - started))
            figures[f"tokens_per_second_{many}"] = statistics.median(rates)
        return figures


def main(folder: Path, runs: int, tokens: int) -> dict[str, float]:
    """All figures, each the median of `runs`: seconds, except tokens_per_second."""
    with both(folder) as (_, llm):
        return asyncio.run(_measure(llm, runs, tokens))
