"""`python -m benchmarks.encoder`: pictures through the encoder service, by size and number of workers.

transformers' image processor and vision tower, and the bare forward pass of our tower, take turns with the service,
with the same checkpoint, pictures and threads; transformers gets each group of pictures as one batch. All pictures are
new, including those for warm-up, except the *repeated* ones: the line's new ones, once more. The service's cache hits
are shown; if a new picture was one, the run fails. A ratio below 1 favours Twinlens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from benchmarks.checkpoint import add_model_options, chosen_model
from benchmarks.hits import STORE, check_new, no_wrong_figures, of_encoders, since
from benchmarks.services import partner, process
from benchmarks.workload import Mark, new_picture, picture
from twinlens.v1 import encoder_pb2, media_pb2
from twinlens.v1.encoder_pb2_grpc import EncoderServiceStub

if TYPE_CHECKING:
    from twinlens.v1.encoder_pb2_grpc import EncoderServiceAsyncStub

SIZES = (224, 448, 896, 1344)
STAGES = ("decode", "preprocess", "vit", "transfer")
Peer = Callable[[str, int, Sequence[Mark]], dict[str, float]]
"""Seconds by stage, of a peer's name, the side of pictures, and these."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """One picture that came back: seconds until its last row was here, rows, their bytes, seconds by stage."""

    seconds: float
    rows: int
    size: int
    stages: dict[str, float]


async def encode(stub: EncoderServiceAsyncStub, data: bytes) -> Encoded:
    """One picture, rows inline."""
    media = media_pb2.Media(modality=media_pb2.MODALITY_IMAGE, data=data)
    started, rows, size = time.perf_counter(), 0, 0
    stages: dict[str, float] = {}
    async for response in stub.Encode(encoder_pb2.EncodeRequest(items=[media])):
        match response.WhichOneof("event"):
            case "rows":
                rows, size = rows + response.rows.count, size + len(response.rows.data)
            case "done":
                stages = {timing.stage: timing.seconds for timing in response.done.timings}
            case "error":
                raise RuntimeError(response.error.status.message)
    return Encoded(time.perf_counter() - started, rows, size, stages)


async def worker_seconds(stub: EncoderServiceAsyncStub) -> dict[str, float]:
    """What the workers have spent since the start, without waiting."""
    load = await stub.GetLoad(encoder_pb2.EncoderServiceGetLoadRequest())
    totals = {timing.stage: timing.seconds for timing in load.stage_totals}
    return {stage: totals.get(f"worker_{stage}", 0.0) for stage in ("preprocess", "vit")}


async def alone(address: str, peer: Peer, side: int, runs: int) -> dict[str, float]:
    """Medians of one picture at a time, each followed by the same picture through the peers."""
    found: list[dict[str, float]] = []
    async with grpc.aio.insecure_channel(address, [("grpc.max_receive_message_length", -1)]) as channel:
        stub = EncoderServiceStub(channel)
        hits = await of_encoders(stub)
        for _ in range(runs + 1):
            mark = Mark.new()
            before = await worker_seconds(stub)
            one = await encode(stub, picture(mark, side))
            worker = {stage: seconds - before[stage] for stage, seconds in (await worker_seconds(stub)).items()}
            theirs, bare = peer("transformers", side, [mark]), peer("bare", side, [mark])
            stages = {**one.stages, **worker}
            shares = {f"share_{stage}": stages.get(stage, 0.0) / one.seconds for stage in STAGES}
            found.append(
                {
                    "rows": one.rows,
                    "ours": one.seconds,
                    "theirs": theirs["all"],
                    "ratio": one.seconds / theirs["all"],
                    "vit_to_bare": worker["vit"] / bare["vit"],
                    "vit_to_theirs": worker["vit"] / theirs["vit"],
                    **shares,
                }
            )
        hits = since(hits, await of_encoders(stub))
    check_new(f"{side} pixels, one at a time", hits)
    return {**{name: statistics.median(each[name] for each in found[1:]) for name in found[0]}, "hits": hits[STORE]}


async def together(address: str, peer: Peer, side: int, count: int, many: int) -> dict[str, float]:
    """Rates of `count` new pictures, `many` at a time, of the same ones repeated, and of transformers with them."""
    marks = [Mark.new() for _ in range(count)]
    pictures = [picture(mark, side) for mark in marks]
    async with grpc.aio.insecure_channel(address, [("grpc.max_receive_message_length", -1)]) as channel:
        stub, slots = EncoderServiceStub(channel), asyncio.Semaphore(many)

        async def one(data: bytes) -> Encoded:
            async with slots:
                return await encode(stub, data)

        await asyncio.gather(*(one(new_picture(side)) for _ in range(many)))  # to warm up
        figures: dict[str, float] = {}
        for name in ("new", "repeated"):
            before, started = await of_encoders(stub), time.perf_counter()
            done = await asyncio.gather(*map(one, pictures))
            seconds = time.perf_counter() - started
            hits = since(before, await of_encoders(stub))
            if name == "new":
                check_new(f"{side} pixels, {many} at a time", hits)
            figures |= {
                f"{name}_pictures": count / seconds,
                f"{name}_rows": sum(each.rows for each in done) / seconds,
                f"{name}_bytes": sum(each.size for each in done) / seconds,
                f"{name}_hits": hits[STORE],
            }
    batches = [marks[start : start + many] for start in range(0, count, many)]
    return {**figures, "theirs": count / sum(peer("batch", side, batch)["all"] for batch in batches)}


@contextmanager
def peers(folder: Path, threads: int) -> Iterator[Peer]:
    """The process with the peers; gives the function that asks it."""
    with partner("benchmarks.encoder_peers", str(folder), str(threads), OMP_WAIT_POLICY="PASSIVE") as child:
        assert child.stdin is not None
        assert child.stdout is not None
        asked, answers = child.stdin, child.stdout
        while answers.readline() != "ready\n":
            if child.poll() is not None:
                raise RuntimeError("the peers did not start")

        def ask(peer: str, side: int, marks: Sequence[Mark]) -> dict[str, float]:
            asked.write(f"{peer} {side} {' '.join(map(str, marks))}\n")
            asked.flush()
            answer: dict[str, float] = json.loads(answers.readline())
            return answer

        yield ask


def main() -> None:
    """Measures and prints two tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.encoder", description=__doc__)
    add_model_options(parser)
    parser.add_argument("--runs", type=int, default=5, help="pictures of each size, one at a time; the median is shown")
    parser.add_argument("--count", type=int, default=16, help="pictures of each size for concurrent requests; 0: none")
    parser.add_argument("--many", type=int, default=8, help="concurrent requests")
    parser.add_argument("--workers", type=int, nargs="+", default=(1, 2), help="numbers of workers for those")
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count() or 1, help="threads of the peers and of one worker"
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="sides in pixels")
    given = parser.parse_args()
    folder = chosen_model(given)
    flags = ("--model", str(folder), "--threads")
    rates: dict[tuple[int, int], dict[str, float]] = {}
    with no_wrong_figures(), peers(folder, given.threads) as peer:
        with process("encoder_service", *flags, str(given.threads)) as address:
            singles = {side: asyncio.run(alone(address, peer, side, given.runs)) for side in given.sizes}
        for workers in given.workers if given.count else ():
            threads = max(1, given.threads // workers)
            with process("encoder_service", *flags, str(threads), "--workers", str(workers)) as address:
                for side in given.sizes:
                    rates[side, workers] = asyncio.run(together(address, peer, side, given.count, given.many))
    print_alone(singles)
    if rates:
        print_together(rates)


def print_alone(found: dict[int, dict[str, float]]) -> None:
    """One picture at a time."""
    print(
        "| side | rows | transformers | Twinlens | ratio | ViT : bare | ViT : theirs |", " | ".join(STAGES), "| hits |"
    )
    print("|---:" * (8 + len(STAGES)) + "|")
    for side, each in found.items():
        shares = " | ".join(f"{each[f'share_{stage}']:.1%}" for stage in STAGES)
        times = f"{each['theirs'] * 1e3:.1f} ms | {each['ours'] * 1e3:.1f} ms | {each['ratio']:.2f}"
        vit = f"{each['vit_to_bare']:.2f} | {each['vit_to_theirs']:.2f}"
        print(f"| {side} | {each['rows']:.0f} | {times} | {vit} | {shares} | {each['hits']:.0f} |")


def print_together(found: dict[tuple[int, int], dict[str, float]]) -> None:
    """Many at a time."""
    titles = ("side", "workers", "transformers", "new pictures/s", "ratio", "new rows/s", "hits")
    repeated = ("*repeated* pictures/s", "*repeated* rows/s", "MB/s", "hits")
    print("\n| " + " | ".join((*titles, *repeated)) + " |\n" + "|---:" * (len(titles) + len(repeated)) + "|")
    for (side, workers), each in found.items():
        ratio = each["new_pictures"] / each["theirs"]
        new = f"{each['theirs']:.1f} | {each['new_pictures']:.1f} | {ratio:.2f} | {each['new_rows']:.0f}"
        again = f"{each['repeated_pictures']:.1f} | {each['repeated_rows']:.0f} | {each['repeated_bytes'] / 1e6:.0f}"
        hits = [f"{each[f'{name}_hits']:.0f}" for name in ("new", "repeated")]
        print(f"| {side} | {workers} | {new} | {hits[0]} | {again} | {hits[1]} |")


if __name__ == "__main__":
    main()
