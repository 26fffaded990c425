"""`python -m benchmarks.pruning`: a video's cost by the share of its rows that is pruned: bytes sent to the LLM
service, prompt tokens, prefill, and the time to the first token.

One encoder and one LLM service. A video is a photograph in front of which a square moves; each request has a new one
and a new text, and the run fails if a cache had one. Rows are computed before they are dropped, so encoding takes
equally long at any rate. No peer has this with a separate encoder.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
import numpy as np

from benchmarks.checkpoint import add_model_options, chosen_model
from benchmarks.first_token import TIMEOUT, first_token
from benchmarks.hits import Hits, added, check_new, no_wrong_figures, of_encoders, of_llm, since, told
from benchmarks.services import both
from benchmarks.workload import Mark, new_text, photograph
from twinlens.v1 import encoder_pb2, media_pb2
from twinlens.v1.encoder_pb2_grpc import EncoderServiceStub
from twinlens.v1.llm_pb2_grpc import LlmServiceStub

if TYPE_CHECKING:
    from twinlens.v1.encoder_pb2_grpc import EncoderServiceAsyncStub
    from twinlens.v1.llm_pb2_grpc import LlmServiceAsyncStub

_RATES = (0.0, 0.25, 0.5, 0.75)


@dataclass(frozen=True, slots=True)
class Answered:
    """Tokens of the prompt, and seconds: of their prefill, of the pruning, and to the first token."""

    tokens: int
    prefill: float
    prune: float
    first: float


def _video(frames: int, side: int) -> media_pb2.PixelBlock:
    """A new one."""
    still = np.asarray(photograph(Mark.new(), side))
    moving = np.repeat(still[None], frames, axis=0)
    size = side // 4
    for number, frame in enumerate(moving):
        left = (side - size) * number // max(1, frames - 1)
        frame[size : 2 * size, left : left + size] = 255
    return media_pb2.PixelBlock(data=moving.tobytes(), frames=frames, height=side, width=side)


async def _ask(stub: LlmServiceAsyncStub, video: media_pb2.PixelBlock, rate: float) -> Answered:
    options = media_pb2.MediaOptions(video_pruning_rate=rate)
    media = media_pb2.Media(modality=media_pb2.MODALITY_VIDEO, pixels=video, options=options)
    first, finished = await first_token(stub, [media], new_text())
    stages = {timing.stage: timing.seconds for timing in finished.timings}
    return Answered(finished.usage.prompt_tokens, stages["prefill"], stages.get("encoder_prune", 0.0), first)


async def _sent(stub: EncoderServiceAsyncStub) -> int:
    """Bytes of rows so far."""
    load = await stub.GetLoad(encoder_pb2.EncoderServiceGetLoadRequest(), timeout=TIMEOUT)
    return sum(each.bytes for each in load.rows_sent)


async def _measure(encoder: str, llm: str, frames: int, side: int, runs: int) -> None:
    async with AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(grpc.aio.insecure_channel(each)) for each in (encoder, llm)]
        encoders, stub = EncoderServiceStub(channels[0]), LlmServiceStub(channels[1])

        async def hits() -> Hits:
            return added([await of_encoders(encoders), await of_llm(stub)])

        await _ask(stub, _video(frames, side), 0.5)  # to warm up
        print("| rate | bytes of rows | prompt tokens | prefill | pruning | first token | in caches |")
        print("|---:|---:|---:|---:|---:|---:|---:|")
        for rate in _RATES:
            before, sent = await hits(), await _sent(encoders)
            answers = [await _ask(stub, _video(frames, side), rate) for _ in range(runs)]
            found, size = since(before, await hits()), (await _sent(encoders) - sent) // runs
            check_new(f"rate {rate}", found)
            prefill, prune, first = (
                f"{statistics.median(getattr(each, name) for each in answers) * 1e3:.0f} ms"
                for name in ("prefill", "prune", "first")
            )
            print(
                f"| {rate} | {size} | {answers[0].tokens} | {prefill} | {prune} | {first} | {told(found)} |", flush=True
            )


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pruning", description=__doc__)
    add_model_options(parser)
    parser.add_argument("--runs", type=int, default=5, help="repetitions; the median is shown")
    parser.add_argument("--frames", type=int, default=16, help="frames of a video")
    parser.add_argument("--side", type=int, default=256, help="their width and height in pixels")
    given = parser.parse_args()
    flags = ("--threads", "1")
    with (
        no_wrong_figures(),
        both(chosen_model(given), encoder_flags=flags, llm_flags=(*flags, "--kv-cache-bytes", "1GiB")) as (
            encoder,
            llm,
        ),
    ):
        asyncio.run(_measure(encoder, llm, given.frames, given.side, given.runs))


if __name__ == "__main__":
    main()
