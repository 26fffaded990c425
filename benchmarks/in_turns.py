"""`python -m benchmarks.in_turns`: one request at a time, through transformers and through both services, in turns.

For machines whose speed changes from minute to minute, where `python -m benchmarks` compares one engine's minutes with
another's. transformers stays loaded in this process, with as many threads as the services have.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics

import grpc
import torch

from benchmarks.checkpoint import add_model_options, chosen_model
from benchmarks.services import both
from benchmarks.transformers_side import Peer
from benchmarks.twinlens_side import ask
from benchmarks.workload import QUESTION, jpeg, photograph
from common.devices import usable_cores
from twinlens.v1.llm_pb2_grpc import LlmServiceStub


async def _measure(peer: Peer, address: str, pictures: int, tokens: int) -> None:
    first: list[tuple[float, float]] = []
    later: list[tuple[float, float]] = []
    async with grpc.aio.insecure_channel(address) as channel:
        stub = LlmServiceStub(channel)
        await ask(stub, jpeg(photograph(900)), QUESTION, 4)
        peer.run([photograph(900)], 4)
        for n in range(pictures):
            ours = await ask(stub, jpeg(photograph(n)), QUESTION, tokens)
            theirs, all_of_theirs = (peer.run([photograph(n)], count) for count in (1, tokens))
            first.append((ours.first, theirs))
            later.append(((ours.whole - ours.first) / (tokens - 1), (all_of_theirs - theirs) / (tokens - 1)))
    print("| | transformers | Twinlens | ratio of each pair | least of both |\n|---|---:|---:|---:|---:|")
    for name, pairs in (("TTFT, new picture", first), ("time per output token", later)):
        mine, other = (1e3 * statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(ours / theirs for ours, theirs in pairs)
        least, lowest = (1e3 * min(column) for column in zip(*pairs, strict=True))
        print(f"| {name} | {other:.1f} ms | {mine:.1f} ms | {ratio:.2f} | {lowest:.1f} and {least:.1f} ms |")


def main() -> None:
    """Measures and prints a table of medians."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.in_turns", description=__doc__)
    add_model_options(parser)
    parser.add_argument("--pictures", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=24)
    given = parser.parse_args()
    folder = chosen_model(given)
    torch.set_num_threads(usable_cores())
    peer = Peer(folder)
    with both(folder) as (_, llm):
        asyncio.run(_measure(peer, llm, given.pictures, given.tokens))


if __name__ == "__main__":
    main()
