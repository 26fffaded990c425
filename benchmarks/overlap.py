"""`python -m benchmarks.overlap MODEL`: tokens per second with and without planning a step during another.

Two LLM services with the same checkpoint, without an encoder, take turns; each figure is the median of several
answers. Every prompt is new and begins with new words; the run fails if the prefix cache had any of it. Both ways are
compared with each other: no peer has both.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from benchmarks.hits import added, check_new, no_wrong_figures, of_llm, since, told
from benchmarks.services import process
from benchmarks.workload import new_text
from twinlens.v1 import llm_pb2
from twinlens.v1.llm_pb2_grpc import LlmServiceStub

if TYPE_CHECKING:
    from twinlens.v1.llm_pb2_grpc import LlmServiceAsyncStub

_TIMEOUT = 300.0


async def _rate(stub: LlmServiceAsyncStub, concurrent: int, tokens: int) -> float:
    """Tokens per second of so many answers at once."""

    async def ask(prompt: str) -> int:
        request = llm_pb2.GenerateRequest(
            text=llm_pb2.TextInput(prompt=prompt),
            sampling=llm_pb2.SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True),
        )
        count = 0
        async for response in stub.Generate(request, timeout=_TIMEOUT):
            count += len(response.delta.token_ids)
        return count

    prompts = [new_text("is the number of this question. What comes after it?") for _ in range(concurrent)]
    begun = time.perf_counter()
    counts = await asyncio.gather(*map(ask, prompts))
    return sum(counts) / (time.perf_counter() - begun)


async def _measure(addresses: dict[str, str], runs: int, tokens: int) -> None:
    async with grpc.aio.insecure_channel(addresses["yes"]) as one, grpc.aio.insecure_channel(addresses["no"]) as other:
        stubs = {"yes": LlmServiceStub(one), "no": LlmServiceStub(other)}
        print(
            "| concurrent | tokens/s, in turn | tokens/s, overlapped | ratio | in caches |\n|---:|---:|---:|---:|---|"
        )
        for concurrent in (1, 4, 16, 64):
            before = added([await of_llm(stub) for stub in stubs.values()])
            rates: dict[str, list[float]] = {"yes": [], "no": []}
            for run in range(runs + 1):
                for kind, stub in stubs.items():
                    rate = await _rate(stub, concurrent, tokens)
                    if run:  # the first one warms up
                        rates[kind].append(rate)
            found = since(before, added([await of_llm(stub) for stub in stubs.values()]))
            check_new(f"{concurrent} at once", found)
            off, on = statistics.median(rates["no"]), statistics.median(rates["yes"])
            print(f"| {concurrent} | {off:.1f} | {on:.1f} | {on / off:.2f} | {told(found)} |", flush=True)


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overlap", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--runs", type=int, default=5, help="repetitions; the median is shown")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each answer")
    given = parser.parse_args()
    with no_wrong_figures(), ExitStack() as stack:
        addresses = {
            kind: stack.enter_context(process("llm_service", "--model", str(given.model), f"--overlap={kind}"))
            for kind in ("yes", "no")
        }
        asyncio.run(_measure(addresses, given.runs, given.tokens))


if __name__ == "__main__":
    main()
