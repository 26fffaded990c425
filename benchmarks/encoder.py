"""`python -m benchmarks.encoder`: pictures through the encoder service, by size and number of workers, cold and hit.

transformers' image processor and vision tower, and our tower's bare forward pass, run in turns with the service, on the
same checkpoint, pictures and threads. A ratio below 1 is in our favour.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from benchmarks.checkpoint import add_model_options, chosen_model
from benchmarks.services import process
from benchmarks.workload import jpeg, photograph
from twinlens.v1 import encoder_pb2, media_pb2
from twinlens.v1.encoder_pb2_grpc import EncoderServiceStub

SIZES = (224, 448, 896, 1344)
STAGES = ("decode", "preprocess", "vit", "transfer")
Peer = Callable[[str, int, int], dict[str, float]]

_numbers = itertools.count(1000)


@dataclass(frozen=True, slots=True)
class Encoded:
    """One picture that came back: seconds until its last row was here, rows, their bytes, seconds by stage."""

    seconds: float
    rows: int
    size: int
    stages: dict[str, float]


async def encode(stub: EncoderServiceStub, data: bytes) -> Encoded:
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


async def worker_seconds(stub: EncoderServiceStub) -> dict[str, float]:
    """What the workers have spent since the start, without waiting."""
    load = await stub.GetLoad(encoder_pb2.EncoderServiceGetLoadRequest())
    totals = {timing.stage: timing.seconds for timing in load.stage_totals}
    return {stage: totals.get(f"worker_{stage}", 0.0) for stage in ("preprocess", "vit")}


async def alone(address: str, peer: Peer, side: int, runs: int) -> dict[str, float]:
    """Medians of one picture at a time, each followed by the same picture through the peers."""
    found: list[dict[str, float]] = []
    async with grpc.aio.insecure_channel(address, [("grpc.max_receive_message_length", -1)]) as channel:
        stub = EncoderServiceStub(channel)
        for number in itertools.islice(_numbers, runs + 1):
            before = await worker_seconds(stub)
            one = await encode(stub, jpeg(photograph(number, side)))
            worker = {stage: seconds - before[stage] for stage, seconds in (await worker_seconds(stub)).items()}
            theirs, bare = peer("transformers", side, number), peer("bare", side, number)
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
    return {name: statistics.median(each[name] for each in found[1:]) for name in found[0]}


async def together(address: str, side: int, count: int, many: int) -> dict[str, float]:
    """Rates of `count` new pictures, `many` at a time, and of the same ones again."""
    pictures = [jpeg(photograph(number, side)) for number in itertools.islice(_numbers, count)]
    async with grpc.aio.insecure_channel(address, [("grpc.max_receive_message_length", -1)]) as channel:
        stub, slots = EncoderServiceStub(channel), asyncio.Semaphore(many)

        async def one(data: bytes) -> Encoded:
            async with slots:
                return await encode(stub, data)

        await one(jpeg(photograph(next(_numbers), side)))
        figures: dict[str, float] = {}
        for name in ("cold", "hit"):
            started = time.perf_counter()
            done = await asyncio.gather(*map(one, pictures))
            seconds = time.perf_counter() - started
            figures |= {
                f"{name}_pictures": count / seconds,
                f"{name}_rows": sum(each.rows for each in done) / seconds,
                f"{name}_bytes": sum(each.size for each in done) / seconds,
            }
    return figures


@contextmanager
def peers(folder: Path, threads: int) -> Iterator[Peer]:
    """The process with the peers; gives the function that asks it."""
    command = [sys.executable, "-m", "benchmarks.encoder_peers", str(folder), str(threads)]
    environ = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        asked, answers = child.stdin, child.stdout
        while answers.readline() != "ready\n":
            if child.poll() is not None:
                raise RuntimeError("the peers did not start")

        def ask(peer: str, side: int, number: int) -> dict[str, float]:
            asked.write(f"{peer} {side} {number}\n")
            asked.flush()
            answer: dict[str, float] = json.loads(answers.readline())
            return answer

        yield ask
        asked.close()


def main() -> None:
    """Measures and prints two tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.encoder", description=__doc__)
    add_model_options(parser)
    parser.add_argument("--runs", type=int, default=5, help="pictures of each size, one at a time; the median is shown")
    parser.add_argument("--count", type=int, default=16, help="pictures of each size that come together; 0 for none")
    parser.add_argument("--many", type=int, default=8, help="how many of those are asked for at once")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of the peers, and of one worker")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="sides in pixels")
    given = parser.parse_args()
    folder = chosen_model(given)
    flags = ("--model", str(folder), "--threads")
    rates: dict[tuple[int, int], dict[str, float]] = {}
    with peers(folder, given.threads) as peer, process("encoder_service", *flags, str(given.threads)) as address:
        singles = {side: asyncio.run(alone(address, peer, side, given.runs)) for side in given.sizes}
    for workers in (1, 2) if given.count else ():
        threads = max(1, given.threads // workers)
        with process("encoder_service", *flags, str(threads), "--workers", str(workers)) as address:
            for side in given.sizes:
                rates[side, workers] = asyncio.run(together(address, side, given.count, given.many))
    print_alone(singles)
    if rates:
        print_together(rates)


def print_alone(found: dict[int, dict[str, float]]) -> None:
    """One picture at a time."""
    print("| side | rows | transformers | twinlens | ratio | ViT : bare | ViT : theirs |", " | ".join(STAGES), "|")
    print("|---:" * (7 + len(STAGES)) + "|")
    for side, each in found.items():
        shares = " | ".join(f"{each[f'share_{stage}']:.1%}" for stage in STAGES)
        times = f"{each['theirs'] * 1e3:.1f} ms | {each['ours'] * 1e3:.1f} ms | {each['ratio']:.2f}"
        vit = f"{each['vit_to_bare']:.2f} | {each['vit_to_theirs']:.2f}"
        print(f"| {side} | {each['rows']:.0f} | {times} | {vit} | {shares} |")


def print_together(found: dict[tuple[int, int], dict[str, float]]) -> None:
    """Many at a time."""
    print("\n| side | workers | new pictures/s | new rows/s | hit pictures/s | hit rows/s | hit MB/s |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for (side, workers), each in found.items():
        cold = f"{each['cold_pictures']:.1f} | {each['cold_rows']:.0f}"
        hit = f"{each['hit_pictures']:.1f} | {each['hit_rows']:.0f} | {each['hit_bytes'] / 1e6:.0f}"
        print(f"| {side} | {workers} | {cold} | {hit} |")


if __name__ == "__main__":
    main()
