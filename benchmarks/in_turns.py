"""`python -m benchmarks.in_turns`: one request at a time, through transformers and through both services, in turns.

For machines whose speed changes from minute to minute, where `python -m benchmarks` compares different minutes.
transformers stays loaded in this process, with as many threads as the services. Each question and its picture are new,
and both get the same file; the run fails if a cache of the services had one.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics

import grpc
import torch

from benchmarks.checkpoint import add_model_options, chosen_model
from benchmarks.hits import check_new, no_wrong_figures, since, told
from benchmarks.services import both
from benchmarks.sides import Timed
from benchmarks.transformers_side import Peer
from benchmarks.twinlens_side import Twinlens
from benchmarks.workload import Question
from common.hardware import usable_cores

_WARM_UP_TOKENS = 4


async def _measure(peer: Peer, encoder: str, llm: str, pictures: int, tokens: int) -> None:
    async with grpc.aio.insecure_channel(encoder) as one, grpc.aio.insecure_channel(llm) as other:
        ours = Twinlens(one, other)
        await ours.ask(Question.new(), _WARM_UP_TOKENS)
        peer.run([Question.new()], _WARM_UP_TOKENS)
        before = await ours.hits()
        pairs: list[tuple[Timed, Timed]] = []
        for _ in range(pictures):
            question = Question.new()
            pairs.append((await ours.ask(question, tokens), peer.run([question], tokens)))
        found = since(before, await ours.hits())
    check_new("in turns", found)
    _print(pairs)
    print(f"\nFound in caches meanwhile: {told(found)}")


def _print(pairs: list[tuple[Timed, Timed]]) -> None:
    print("| | transformers | Twinlens | ratio of each pair | least of both |\n|---|---:|---:|---:|---:|")
    kinds = {
        "TTFT, new picture": [(ours.first, theirs.first) for ours, theirs in pairs],
        "time per output token": [(ours.per_token, theirs.per_token) for ours, theirs in pairs],
    }
    for name, times in kinds.items():
        mine, other = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
        ratio = statistics.median(ours / theirs for ours, theirs in times)
        least, lowest = (1e3 * min(column) for column in zip(*times, strict=True))
        print(f"| {name} | {other:.1f} ms | {mine:.1f} ms | {ratio:.2f} | {lowest:.1f} and {least:.1f} ms |")


def main() -> None:
    """Measures and prints a table of medians."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.in_turns", description=__doc__)
    add_model_options(parser)
    parser.add_argument("--pictures", type=int, default=12, help="new questions; the median is shown")
    parser.add_argument("--tokens", type=int, default=24, help="tokens of each answer")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="type of all; by default the services' default"
    )
    given = parser.parse_args()
    folder = chosen_model(given)
    torch.set_num_threads(usable_cores())
    peer = Peer(folder, given.dtype or "")
    flags = ("--dtype", given.dtype) if given.dtype else ()
    with no_wrong_figures(), both(folder, encoder_flags=flags, llm_flags=flags) as (encoder, llm):
        asyncio.run(_measure(peer, encoder, llm, given.pictures, given.tokens))


if __name__ == "__main__":
    main()
