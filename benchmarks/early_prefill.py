"""`python -m benchmarks.early_prefill MODEL`: time to the first token of a request with several new pictures, when
prefill begins with the first rows that land and when it waits for all.

One encoder that packs one picture into a pass, and two LLM services that take turns; each process has one thread, so
that encoding and prefill do not compete on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import time
from contextlib import ExitStack
from pathlib import Path

import grpc

from benchmarks.services import process
from benchmarks.workload import QUESTION, jpeg, photograph
from twinlens.v1 import llm_pb2, media_pb2
from twinlens.v1.llm_pb2_grpc import LlmServiceStub

_TIMEOUT = 300.0


async def _first_token(stub: LlmServiceStub, pictures: list[bytes]) -> float:
    parts = [llm_pb2.ChatPart(media=media_pb2.Media(modality=media_pb2.MODALITY_IMAGE, data=data)) for data in pictures]
    message = llm_pb2.ChatMessage(role="user", parts=[*parts, llm_pb2.ChatPart(text=QUESTION)])
    request = llm_pb2.GenerateRequest(
        chat=llm_pb2.ChatInput(messages=[message]),
        sampling=llm_pb2.SamplingParams(max_tokens=1, temperature=0, ignore_eos=True),
    )
    begun = time.perf_counter()
    async for response in stub.Generate(request, timeout=_TIMEOUT):
        if response.HasField("delta"):
            return time.perf_counter() - begun
    raise RuntimeError("no token came")


async def _measure(early: str, late: str, runs: int) -> None:
    numbers = itertools.count(5000)
    async with grpc.aio.insecure_channel(early) as one, grpc.aio.insecure_channel(late) as other:
        print("| pictures | waits for all | early | ratio |\n|---:|---:|---:|---:|")
        for count in (1, 2, 4, 8):
            seconds: dict[str, list[float]] = {"early": [], "late": []}
            for run in range(runs + 1):
                for name, channel in (("early", one), ("late", other)):
                    pictures = [jpeg(photograph(next(numbers))) for _ in range(count)]
                    taken = await _first_token(LlmServiceStub(channel), pictures)
                    if run:  # the first one warms up
                        seconds[name].append(taken)
            waits, begins = statistics.median(seconds["late"]), statistics.median(seconds["early"])
            print(f"| {count} | {waits * 1e3:.0f} ms | {begins * 1e3:.0f} ms | {begins / waits:.2f} |", flush=True)


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.early_prefill", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--runs", type=int, default=5, help="repetitions; the median is shown")
    given = parser.parse_args()
    model = ("--model", str(given.model), "--threads", "1")
    with ExitStack() as stack:
        encoder = stack.enter_context(process("encoder_service", *model, "--batch-items", "1"))
        llm = ("llm_service", *model, "--encoders", encoder, "--kv-cache-bytes", "1GiB")
        early = stack.enter_context(process(*llm))
        late = stack.enter_context(process(*llm, "--early-prefill", "no"))
        asyncio.run(_measure(early, late, given.runs))


if __name__ == "__main__":
    main()
