"""`python -m benchmarks.prefill_elsewhere`: time to the first token of a prompt that another LLM service computes
(`--prefill-services`), compared with one that the answering service computes.

Two LLM services with one encoder take turns; a third one computes prompts for one of them. Each prompt is a new
picture and a new text, so the computing service must have no hits; the answering service's hits are shown: all blocks
that were brought. On one machine the third service uses the same cores, so the difference is the cost of a handover,
not the gain for running answers.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from contextlib import AsyncExitStack, ExitStack

import grpc

from benchmarks.checkpoint import BLOCK, add_model_options, block_bytes, chosen_model
from benchmarks.first_token import first_token
from benchmarks.hits import check_new, no_wrong_figures, of_llm, since
from benchmarks.services import process
from benchmarks.workload import long_text, new_picture
from twinlens.v1 import llm_pb2, media_pb2
from twinlens.v1.llm_pb2_grpc import LlmServiceStub


async def _measure(here: str, elsewhere: str, lender: str, lengths: list[int], rounds: int, size: int) -> None:
    async with AsyncExitStack() as stack:
        alone, borrower, computes = [
            LlmServiceStub(await stack.enter_async_context(grpc.aio.insecure_channel(address)))
            for address in (here, elsewhere, lender)
        ]

        async def ask(stub: object, words: int) -> tuple[float, llm_pb2.Usage]:
            media = media_pb2.Media(modality=media_pb2.MODALITY_IMAGE, data=new_picture())
            taken, finished = await first_token(stub, [media], long_text(words))  # type: ignore[arg-type]
            return taken, finished.usage

        for stub in (alone, borrower):  # to warm up
            await ask(stub, lengths[0])
        print("| tokens | here | elsewhere | ratio | found, of the prompt | MiB brought |")
        print("|---:|---:|---:|---:|---:|---:|")
        for words in lengths:
            times: dict[str, list[float]] = {"here": [], "elsewhere": []}
            usage = llm_pb2.Usage()
            before = {"here": await of_llm(alone), "elsewhere": await of_llm(computes)}
            for _ in range(rounds):
                times["here"].append((await ask(alone, words))[0])
                taken, usage = await ask(borrower, words)
                times["elsewhere"].append(taken)
            for name, stub in (("here", alone), ("elsewhere", computes)):
                check_new(f"what is computed {name}", since(before[name], await of_llm(stub)))
            load = await borrower.GetLoad(llm_pb2.LlmServiceGetLoadRequest())
            if load.prefills_failed or not usage.cached_tokens:
                raise RuntimeError("what was to be computed elsewhere was computed here")
            near, far = (statistics.median(times[name]) for name in times)
            brought = usage.cached_tokens // BLOCK * size / (1 << 20)
            found = f"{usage.cached_tokens} of {usage.prompt_tokens}"
            times_ = f"{near * 1e3:.0f} ms | {far * 1e3:.0f} ms | {far / near:.2f}"
            print(f"| {usage.prompt_tokens} | {times_} | {found} | {brought:.0f} |", flush=True)


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prefill_elsewhere", description=__doc__)
    add_model_options(parser)
    parser.add_argument("--words", type=int, nargs="+", default=[100, 600, 1400], help="words of the prompts' texts")
    parser.add_argument("--rounds", type=int, default=3, help="prompts of each length")
    given = parser.parse_args()
    folder = chosen_model(given)
    model = ("--model", str(folder))
    with no_wrong_figures(), ExitStack() as stack:
        encoder = stack.enter_context(process("encoder_service", *model))
        llm = ("llm_service", *model, "--encoders", encoder, "--kv-cache-bytes", "1GiB")
        exchanges = (*llm, "--kv-host-bytes", "1GiB")
        here = stack.enter_context(process(*llm))
        lender = stack.enter_context(process(*exchanges, "--lend-prefill"))
        borrows = ("--prefill-services", lender, "--prefill-tokens", "64")
        elsewhere = stack.enter_context(process(*exchanges, *borrows))
        asyncio.run(_measure(here, elsewhere, lender, given.words, given.rounds, block_bytes(folder)))


if __name__ == "__main__":
    main()
