"""`python -m benchmarks.early_prefill`: time to the first token of a request with several new pictures, if prefill
starts with the first rows and if it waits for all.

One encoder that packs one picture into a pass, and two LLM services that take turns. Each process has one thread, so
encoding and prefill do not compete on two cores. Every request has new pictures and a new text, in each service and
repetition; the run fails if a cache had one. No peer has this with a separate encoder, so the two ways are compared
with each other.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from benchmarks.checkpoint import add_model_options, chosen_model
from benchmarks.first_token import first_token
from benchmarks.hits import Hits, added, check_new, no_wrong_figures, of_encoders, of_llm, since, told
from benchmarks.services import process
from benchmarks.workload import new_picture, new_text
from twinlens.v1 import media_pb2
from twinlens.v1.encoder_pb2_grpc import EncoderServiceStub
from twinlens.v1.llm_pb2_grpc import LlmServiceStub

if TYPE_CHECKING:
    from twinlens.v1.llm_pb2_grpc import LlmServiceAsyncStub


@dataclass(frozen=True, slots=True)
class Answered:
    """Seconds to the first token, to the last row, and from there to the first token, as the service measured them."""

    first: float
    rows: float
    prefill: float


async def _ask(stub: LlmServiceAsyncStub, pictures: list[bytes]) -> Answered:
    media = [media_pb2.Media(modality=media_pb2.MODALITY_IMAGE, data=data) for data in pictures]
    first, finished = await first_token(stub, media, new_text())
    stages = {timing.stage: timing.seconds for timing in finished.timings}
    return Answered(first, stages["rows"], stages["first_token"])


def least(count: int, rows: float, prefill: float) -> float:
    """The least share of the time that is left when encoding and prefill of `count` equal pictures overlap as far as
    they can, from the seconds that each takes when it goes alone.

    Prefill cannot begin before the first picture is encoded, nor end before the last one's prefill. Four pictures that
    take 1 s each to encode and 1 s each to prefill: 5 s in place of 8 s.

    >>> least(4, 4.0, 4.0)
    0.625
    """
    return max(rows / count + prefill, rows + prefill / count) / (rows + prefill)


async def _measure(encoder: str, early: str, late: str, runs: int) -> None:
    async with AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(grpc.aio.insecure_channel(each)) for each in (encoder, early, late)]
        encoders = EncoderServiceStub(channels[0])
        stubs = {"early": LlmServiceStub(channels[1]), "late": LlmServiceStub(channels[2])}

        async def hits() -> Hits:
            return added([await of_encoders(encoders), *[await of_llm(stub) for stub in stubs.values()]])

        print("| pictures | waits for all | early | ratio | least that there can be | in caches |")
        print("|---:|---:|---:|---:|---:|---:|")
        for count in (1, 2, 4, 8):
            before = await hits()
            answers = await _in_turns(stubs, count, runs)
            found = since(before, await hits())
            check_new(f"{count} pictures", found)
            begins = statistics.median(each.first for each in answers["early"])
            waits = statistics.median(each.first for each in answers["late"])
            rows = statistics.median(each.rows for each in answers["late"])
            prefill = statistics.median(each.prefill for each in answers["late"])
            shares = f"{begins / waits:.2f} | {least(count, rows, prefill):.2f} | {told(found)}"
            print(f"| {count} | {waits * 1e3:.0f} ms | {begins * 1e3:.0f} ms | {shares} |", flush=True)


async def _in_turns(stubs: dict[str, LlmServiceAsyncStub], count: int, runs: int) -> dict[str, list[Answered]]:
    """`runs` answers of each service; one more goes first, to warm up."""
    answers: dict[str, list[Answered]] = {name: [] for name in stubs}
    for run in range(runs + 1):
        for name, stub in stubs.items():
            answered = await _ask(stub, [new_picture() for _ in range(count)])
            if run:
                answers[name].append(answered)
    return answers


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.early_prefill", description=__doc__)
    add_model_options(parser)
    parser.add_argument("--runs", type=int, default=5, help="repetitions; the median is shown")
    given = parser.parse_args()
    model = ("--model", str(chosen_model(given)), "--threads", "1")
    with no_wrong_figures(), ExitStack() as stack:
        encoder = stack.enter_context(process("encoder_service", *model, "--batch-items", "1"))
        llm = ("llm_service", *model, "--encoders", encoder, "--kv-cache-bytes", "1GiB")
        early = stack.enter_context(process(*llm))
        late = stack.enter_context(process(*llm, "--early-prefill-tokens", "0"))
        asyncio.run(_measure(encoder, early, late, given.runs))


if __name__ == "__main__":
    main()
