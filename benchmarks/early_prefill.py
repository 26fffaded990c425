"""`python -m benchmarks.early_prefill [MODEL]`: time to the first token of a request with several new pictures, when
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
from dataclasses import dataclass

import grpc

from benchmarks.checkpoint import add_model_options, chosen_model
from benchmarks.services import process
from benchmarks.workload import QUESTION, jpeg, photograph
from twinlens.v1 import llm_pb2, media_pb2
from twinlens.v1.llm_pb2_grpc import LlmServiceStub

_TIMEOUT = 300.0


@dataclass(frozen=True, slots=True)
class Answered:
    """Seconds to the first token, to the last row, and from there to the first token, as the service measured them."""

    first: float
    rows: float
    prefill: float


async def _ask(stub: LlmServiceStub, pictures: list[bytes]) -> Answered:
    parts = [llm_pb2.ChatPart(media=media_pb2.Media(modality=media_pb2.MODALITY_IMAGE, data=data)) for data in pictures]
    message = llm_pb2.ChatMessage(role="user", parts=[*parts, llm_pb2.ChatPart(text=QUESTION)])
    request = llm_pb2.GenerateRequest(
        chat=llm_pb2.ChatInput(messages=[message]),
        sampling=llm_pb2.SamplingParams(max_tokens=1, temperature=0, ignore_eos=True),
    )
    first, begun = 0.0, time.perf_counter()
    async for response in stub.Generate(request, timeout=_TIMEOUT):
        if response.HasField("delta"):
            first = first or time.perf_counter() - begun
        elif response.HasField("finished"):
            stages = {timing.stage: timing.seconds for timing in response.finished.timings}
            return Answered(first, stages["rows"], stages["first_token"])
    raise RuntimeError("no token came")


def least(count: int, rows: float, prefill: float) -> float:
    """The least share of the time that is left when encoding and prefill of `count` equal pictures overlap as far as
    they can, from the seconds that each takes when it goes alone.

    Prefill cannot begin before the first picture is encoded, nor end before the last one's prefill. Four pictures that
    take 1 s each to encode and 1 s each to prefill: 5 s in place of 8 s.

    >>> least(4, 4.0, 4.0)
    0.625
    """
    return max(rows / count + prefill, rows + prefill / count) / (rows + prefill)


async def _measure(early: str, late: str, runs: int) -> None:
    numbers = itertools.count(5000)
    async with grpc.aio.insecure_channel(early) as one, grpc.aio.insecure_channel(late) as other:
        print("| pictures | waits for all | early | ratio | least that there can be |\n|---:|---:|---:|---:|---:|")
        for count in (1, 2, 4, 8):
            answers: dict[str, list[Answered]] = {"early": [], "late": []}
            for run in range(runs + 1):
                for name, channel in (("early", one), ("late", other)):
                    pictures = [jpeg(photograph(next(numbers))) for _ in range(count)]
                    answered = await _ask(LlmServiceStub(channel), pictures)
                    if run:  # the first one warms up
                        answers[name].append(answered)
            begins = statistics.median(each.first for each in answers["early"])
            waits = statistics.median(each.first for each in answers["late"])
            rows = statistics.median(each.rows for each in answers["late"])
            prefill = statistics.median(each.prefill for each in answers["late"])
            shares = f"{begins / waits:.2f} | {least(count, rows, prefill):.2f}"
            print(f"| {count} | {waits * 1e3:.0f} ms | {begins * 1e3:.0f} ms | {shares} |", flush=True)


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.early_prefill", description=__doc__)
    add_model_options(parser)
    parser.add_argument("--runs", type=int, default=5, help="repetitions; the median is shown")
    given = parser.parse_args()
    model = ("--model", str(chosen_model(given)), "--threads", "1")
    with ExitStack() as stack:
        encoder = stack.enter_context(process("encoder_service", *model, "--batch-items", "1"))
        llm = ("llm_service", *model, "--encoders", encoder, "--kv-cache-bytes", "1GiB")
        early = stack.enter_context(process(*llm))
        late = stack.enter_context(process(*llm, "--early-prefill-tokens", "0"))
        asyncio.run(_measure(early, late, given.runs))


if __name__ == "__main__":
    main()
