"""`python -m benchmarks.failures [MODEL]`: what callers notice of an encoder that dies or stops.

Two encoders, and an LLM service without a prefix cache, get a steady load of requests. They repeat eight pictures and
one question, so that answers can be compared, but no cache knows them: each file has a new mark. Cache hits are
shown. The encoders may have one for each stream that broke and was reopened; any other hit, or one in the LLM service,
ends the run. There is no peer that works without its encoder. One of the encoders is killed and restarted, then
stopped (SIGSTOP) and continued, in turns. A request is *affected* if it was in flight at that moment, and *late* by
its time beyond the median of the same undisturbed question. *Noticed* is when the LLM service sends that encoder
nothing more, *back* when it does again: after the encoder's ready line, or after SIGCONT.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from benchmarks import services
from benchmarks.hits import STORE, Hits, check_new, no_wrong_figures, of_services, told
from benchmarks.workload import new_picture, renamed
from twinlens.v1 import llm_pb2, media_pb2
from twinlens.v1.encoder_pb2_grpc import EncoderServiceStub
from twinlens.v1.llm_pb2_grpc import LlmServiceStub

if TYPE_CHECKING:
    from twinlens.v1.llm_pb2_grpc import LlmServiceAsyncStub

_TIMEOUT = 120.0
_PICTURES = 8


class Encoder:
    """One encoder, which keeps its port when it is started again."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self.address = "127.0.0.1:0"

    def start(self) -> None:
        """Returns at its ready line."""
        flags = ("--listen", self.address, "--log-level", "error", "--shared-memory=no")
        command = [sys.executable, "-m", "encoder_service", "--model", str(self._model), *flags]
        environ = services.environment()
        self._child = services.popen(command, stdout=subprocess.PIPE, text=True, env=environ, cwd=None)
        assert self._child.stdout is not None
        self.address = self._child.stdout.readline().removeprefix("ready grpc=").split()[0]

    def signal(self, number: int) -> None:
        """Sends a signal to its main process; its workers end with that."""
        os.kill(self._child.pid, number)

    def end(self) -> None:
        """Kills it, if it is there, and waits for its end."""
        self._child.kill()
        self._child.wait()


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: when it began and ended, in seconds of the clock, and what was answered; nothing where it failed."""

    question: int
    begun: float
    ended: float
    tokens: tuple[int, ...]


@dataclass
class Load:
    """Requests by so many callers, one after the other each, until it is cancelled."""

    stub: LlmServiceAsyncStub
    callers: int
    pictures: list[bytes] = field(default_factory=lambda: [new_picture(224) for _ in range(_PICTURES)])
    asked: list[Asked] = field(default_factory=list)
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    async def run(self) -> None:
        """Asks without end."""
        await asyncio.gather(*(self._caller() for _ in range(self.callers)))

    async def _caller(self) -> None:
        while True:
            number = next(self.numbers)
            question = number % _PICTURES
            data = renamed(self.pictures[question])  # the same rows under another key
            picture = media_pb2.Media(modality=media_pb2.MODALITY_IMAGE, data=data)
            parts = [llm_pb2.ChatPart(media=picture), llm_pb2.ChatPart(text="What is in the picture?")]
            request = llm_pb2.GenerateRequest(
                chat=llm_pb2.ChatInput(messages=[llm_pb2.ChatMessage(role="user", parts=parts)]),
                sampling=llm_pb2.SamplingParams(max_tokens=4, temperature=0, ignore_eos=True),
            )
            begun, tokens = time.monotonic(), list[int]()
            try:
                async for response in self.stub.Generate(request, timeout=_TIMEOUT):
                    tokens.extend(response.delta.token_ids)
            except grpc.aio.AioRpcError as error:
                print(f"a request failed: {error.code().name} {error.details()}", file=sys.stderr)
                tokens.clear()
            self.asked.append(Asked(question, begun, time.monotonic(), tuple(tokens)))


async def _until(holds: Callable[[], Awaitable[bool]]) -> float:
    """Asks fifty times a second; the seconds until it held."""
    begun = time.monotonic()
    while not await holds():  # noqa: ASYNC110 - it is another process that is asked
        await asyncio.sleep(0.02)
    return time.monotonic() - begun


@dataclass(frozen=True, slots=True)
class Incident:
    """When one encoder went, and how soon that was noticed and forgotten, in seconds."""

    at: float
    noticed: float
    back: float


async def _incident(stub: LlmServiceAsyncStub, encoder: Encoder, kind: str, away: float) -> Incident:
    """Has an encoder die or stand still for a while, and come back."""

    async def used() -> bool:
        load = await stub.GetLoad(llm_pb2.LlmServiceGetLoadRequest())
        return any(each.address == encoder.address and each.usable for each in load.encoders)

    async def unused() -> bool:
        return not await used()

    at = time.monotonic()
    encoder.signal(signal.SIGKILL if kind == "killed" else signal.SIGSTOP)
    noticed = await _until(unused)
    await asyncio.sleep(away)
    if kind == "killed":
        encoder.end()
        await asyncio.to_thread(encoder.start)
    else:
        encoder.signal(signal.SIGCONT)
    return Incident(at, noticed, await _until(used))


async def _found(stub: LlmServiceAsyncStub, encoders: list[Encoder]) -> tuple[Hits, int]:
    """What caches gave, those of encoders since they were started last, and how many streams were opened again."""
    async with AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(grpc.aio.insecure_channel(each.address)) for each in encoders]
        hits = await of_services(stub, *map(EncoderServiceStub, channels))
    return hits, (await stub.GetLoad(llm_pb2.LlmServiceGetLoadRequest())).encode_retries


async def _measure(llm: str, encoders: list[Encoder], callers: int, rounds: int, away: float) -> None:
    async with grpc.aio.insecure_channel(llm) as channel:
        stub = LlmServiceStub(channel)
        load = Load(stub, callers)
        asking = asyncio.create_task(load.run())
        quiet = 8 * callers

        async def enough() -> bool:
            return asking.done() or len(load.asked) >= quiet

        await _until(enough)
        incidents: dict[str, list[Incident]] = {"killed": [], "stopped": []}
        for number in range(rounds):
            for kind, found in incidents.items():
                found.append(await _incident(stub, encoders[number % 2], kind, away))
                await asyncio.sleep(away)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        hits, again = await _found(stub, encoders)
    check_new("the load", hits if hits[STORE] > again else {**hits, STORE: 0})
    calm, rest = load.asked[:quiet], load.asked[quiet:]
    usual = statistics.median(each.ended - each.begun for each in calm)
    right = {each.question: each.tokens for each in calm}
    failed = sum(not each.tokens for each in load.asked)
    wrong = sum(each.tokens != right[each.question] for each in rest if each.tokens)
    longest = max(each.ended - each.begun for each in calm)
    print(f"{len(load.asked)} requests, {failed} failed, {wrong} answered otherwise than undisturbed; "
          f"undisturbed {usual:.2f} s, at most {longest:.2f} s")  # fmt: skip
    print(f"Found in caches meanwhile: {told(hits)}; {again} streams were opened again\n")
    print("| encoder | times | affected | late, median | late, at most | noticed, at most | back, at most |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for kind, found in incidents.items():
        late = [each.ended - each.begun - usual for each in rest for one in found if each.begun < one.at < each.ended]
        noticed, back = max(each.noticed for each in found), max(each.back for each in found)
        cells = [f"{statistics.median(late):.2f} s", f"{max(late):.2f} s"] if late else ["–", "–"]
        print(f"| {kind} | {len(found)} | {len(late)} | {' | '.join(cells)} | {noticed:.2f} s | {back:.2f} s |")


def main() -> None:
    """Starts everything, measures, prints a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.failures", description=__doc__)
    parser.add_argument("model", nargs="?", type=Path, default=Path("models/demo"), help="checkpoint folder")
    parser.add_argument("--callers", type=int, default=16, help="concurrent requests")
    parser.add_argument("--rounds", type=int, default=4, help="repetitions of each failure")
    parser.add_argument(
        "--away", type=float, default=4.0, help="seconds before a failed encoder, once detected, is restored"
    )
    given = parser.parse_args()
    encoders = [Encoder(given.model) for _ in range(2)]
    with no_wrong_figures(), ExitStack() as stack:
        for encoder in encoders:
            encoder.start()
            stack.callback(encoder.end)
        addresses = ",".join(encoder.address for encoder in encoders)
        flags = ("--encoders", addresses, "--row-cache-bytes", "4MiB", "--prefix-cache=no")
        llm = stack.enter_context(services.process("llm_service", "--model", str(given.model), *flags))
        asyncio.run(_measure(llm, encoders, given.callers, given.rounds, given.away))


if __name__ == "__main__":
    main()
