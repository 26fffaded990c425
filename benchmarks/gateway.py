"""`python -m benchmarks.gateway`: what HTTP costs: the same requests through the gateway and by gRPC, in turns.

An encoder, an LLM service and a gateway run as processes of their own; this process is the caller of both. In each
round, so many streams ask by gRPC and as many through the gateway, all at once, and the next round begins with the
other way. Every question is new: it begins with words that none before had, and the run fails where a prefix cache
knew some of it. gRPC is what HTTP is compared with, so there is no other peer. With `--engine light`, tokens are hashes
in place of a model's (tests/light), so that what surrounds it shows: the machine is full then, and what the gateway
computes is missing elsewhere. With `--engine paced`, a step sleeps for 30 ms besides, as if a GPU computed it.

CPU is what the process computed, in user and in system time, for each token of the answers.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import statistics
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import grpc

from benchmarks.hits import PREFIX, check_new, no_wrong_figures, of_llm, since, told
from benchmarks.http_stream import HttpCaller
from benchmarks.services import Running, running
from benchmarks.sides import Timed
from benchmarks.workload import QUESTION, Mark, new_picture
from twinlens.v1 import llm_pb2, media_pb2
from twinlens.v1.llm_pb2_grpc import LlmServiceStub

if TYPE_CHECKING:
    from twinlens.v1.llm_pb2_grpc import LlmServiceAsyncStub

_TIMEOUT = 300.0
_READY_SECONDS = 30.0
_WARM_UP_TOKENS = 4
_SIDE = 224
_MODULES = {
    "model": ("encoder_service", "llm_service"),
    "light": ("tests.light.encoder", "tests.light.llm"),
    "paced": ("tests.light.encoder", "benchmarks.paced_llm"),
}
"""An encoder and an LLM service, by what computes in them."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What one request asks: a new text, and a new picture where it has one (JPEG)."""

    text: str
    picture: bytes = b""


class Way(Protocol):
    """How requests reach the LLM service."""

    name: str

    def connected(self, streams: int) -> AbstractAsyncContextManager[None]:
        """For the length of the block there is a connection for each stream that wants one of its own."""
        ...

    async def ask(self, stream: int, asked: Ask, tokens: int) -> Timed:
        """One greedy answer of exactly so many tokens, on the connection that this stream has."""
        ...


class Grpc:
    """By the contract, all streams over one connection."""

    name = "gRPC"

    def __init__(self, stub: LlmServiceAsyncStub) -> None:
        self._stub = stub

    def connected(self, streams: int) -> AbstractAsyncContextManager[None]:
        """See `Way`."""
        return nullcontext()

    async def ask(self, stream: int, asked: Ask, tokens: int) -> Timed:
        """See `Way`. The first token is there when some of its text is, as HTTP has no event without one."""
        media = media_pb2.Media(modality=media_pb2.MODALITY_IMAGE, data=asked.picture)
        parts = [llm_pb2.ChatPart(media=media)] if asked.picture else []
        parts.append(llm_pb2.ChatPart(text=asked.text))
        request = llm_pb2.GenerateRequest(
            chat=llm_pb2.ChatInput(messages=[llm_pb2.ChatMessage(role="user", parts=parts)]),
            sampling=llm_pb2.SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True),
        )
        began, first, count = time.perf_counter(), 0.0, 0
        call = self._stub.Generate(request, timeout=_TIMEOUT)
        while (event := await call.read()) is not grpc.aio.EOF:
            delta = event.delta
            count += len(delta.token_ids)
            if not first and delta.text:
                first = time.perf_counter() - began
        if count != tokens:
            raise RuntimeError(f"the LLM service gave {count} tokens instead of {tokens}")
        return Timed(first, time.perf_counter() - began, count)


class Http:
    """Through the gateway, each stream over a connection of its own."""

    name = "HTTP"

    def __init__(self, address: str) -> None:
        self._address = address
        self._callers: list[HttpCaller] = []

    @asynccontextmanager
    async def connected(self, streams: int) -> AsyncIterator[None]:
        """See `Way`. They are new in each round: the gateway keeps none that have no request for long."""
        self._callers = [await HttpCaller.connect(self._address) for _ in range(streams)]
        try:
            yield
        finally:
            for caller in self._callers:
                await caller.close()

    async def ask(self, stream: int, asked: Ask, tokens: int) -> Timed:
        """See `Way`."""
        content: Any = asked.text
        if asked.picture:
            url = f"data:image/jpeg;base64,{base64.b64encode(asked.picture).decode()}"
            content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": asked.text}]
        return await self._callers[stream].chat(content, tokens)


@dataclass(slots=True)
class Sample:
    """One way's answers of all rounds; seconds of CPU by process, each for all of them."""

    answers: list[list[Timed]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    cpu: dict[str, float] = field(default_factory=dict)

    @property
    def first(self) -> float:
        """The median of all times to a first token, in ms."""
        return 1e3 * statistics.median(answer.first for answers in self.answers for answer in answers)

    @property
    def per_token(self) -> float:
        """The median time for each further token, in ms."""
        return 1e3 * statistics.median(answer.per_token for answers in self.answers for answer in answers)

    @property
    def rates(self) -> list[float]:
        """Tokens a second of each round."""
        pairs = zip(self.answers, self.seconds, strict=True)
        return [sum(answer.tokens for answer in answers) / seconds for answers, seconds in pairs]

    def cpu_per_token(self, process: str) -> float:
        """In ms."""
        return 1e3 * self.cpu.get(process, 0.0) / sum(answer.tokens for answers in self.answers for answer in answers)


@dataclass(frozen=True, slots=True)
class Deployment:
    """All three, and what asks them."""

    processes: dict[str, Running]
    stub: LlmServiceAsyncStub
    ways: Sequence[Way]

    async def round(self, way: Way, asked: Sequence[Ask], tokens: int, into: Sample) -> None:
        """All of these at once, one way."""
        async with way.connected(len(asked)):
            before, began = self._cpu_seconds(), time.perf_counter()
            answers = await asyncio.gather(*(way.ask(number, each, tokens) for number, each in enumerate(asked)))
            into.seconds.append(time.perf_counter() - began)
            into.answers.append(list(answers))
            for name, seconds in self._cpu_seconds().items():
                into.cpu[name] = into.cpu.get(name, 0.0) + seconds - before[name]

    def _cpu_seconds(self) -> dict[str, float]:
        """Of each process since it began, this one included."""
        return {name: each.cpu_seconds() for name, each in self.processes.items()} | {"caller": time.process_time()}


@contextmanager
def _started(model: Path, engine: str) -> Iterator[dict[str, Running]]:
    """An encoder, an LLM service and a gateway, by name."""
    modules = _MODULES[engine]
    with ExitStack() as stack:
        encoder = stack.enter_context(running(modules[0], "--model", str(model)))
        llm = stack.enter_context(running(modules[1], "--model", str(model), "--encoders", encoder.address))
        gateway = stack.enter_context(running("gateway", "--llm", llm.address))
        yield {"gateway": gateway, "LLM service": llm}


@asynccontextmanager
async def _spoken_to(processes: dict[str, Running]) -> AsyncIterator[Deployment]:
    """Once the gateway can serve."""
    address = processes["gateway"].address
    async with grpc.aio.insecure_channel(processes["LLM service"].address) as channel:
        await _ready(address)
        stub = LlmServiceStub(channel)
        yield Deployment(processes, stub, [Grpc(stub), Http(address)])


async def _ready(address: str) -> None:
    """Returns once the gateway has found its LLM service."""
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(_READY_SECONDS):
        while True:
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(f"GET /health/ready HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n".encode())
            status = await reader.readline()
            writer.close()
            if b" 200 " in status:
                return
            await asyncio.sleep(0.05)


async def _row(of: Deployment, streams: int, rounds: int, tokens: int, *, pictures: bool) -> str:
    """A line of the table."""

    def asked() -> list[Ask]:
        # Backwards, a mark begins with what is new in it: not even the first block of a prompt was seen before.
        return [Ask(f"{Mark.new()}"[::-1] + QUESTION, new_picture(_SIDE) if pictures else b"") for _ in range(streams)]

    for way in of.ways:
        await of.round(way, asked(), _WARM_UP_TOKENS, Sample())
    before = await of_llm(of.stub)
    samples = {way.name: Sample() for way in of.ways}
    for number in range(rounds):
        for way in of.ways if number % 2 == 0 else of.ways[::-1]:
            await of.round(way, asked(), tokens, samples[way.name])
    found = since(before, await of_llm(of.stub))
    check_new(f"{streams} streams", {PREFIX: found[PREFIX]})
    plain, http = samples["gRPC"], samples["HTTP"]
    ratio = statistics.median(ours / theirs for ours, theirs in zip(http.rates, plain.rates, strict=True))
    cells = [
        f"{streams}, with pictures" if pictures else f"{streams}",
        f"{plain.first:.1f}",
        f"{http.first:.1f}",
        f"{http.first - plain.first:+.1f}",
        f"{plain.per_token:.2f}",
        f"{http.per_token:.2f}",
        f"{http.per_token - plain.per_token:+.2f}",
        f"{statistics.median(plain.rates):.0f}",
        f"{statistics.median(http.rates):.0f}",
        f"{ratio:.3f}",
        f"{http.cpu_per_token('gateway'):.3f}",
        f"{plain.cpu_per_token('LLM service'):.3f} / {http.cpu_per_token('LLM service'):.3f}",
        f"{plain.cpu_per_token('caller'):.3f} / {http.cpu_per_token('caller'):.3f}",
        told(found),
    ]
    return f"| {' | '.join(cells)} |"


async def _measure(given: argparse.Namespace, processes: dict[str, Running]) -> None:
    print(
        "| streams | TTFT gRPC, ms | HTTP | added | per token gRPC, ms | HTTP | added | tokens/s gRPC | HTTP | ratio"
        " | CPU ms/token: gateway | LLM service's front, gRPC / HTTP | caller, gRPC / HTTP | in caches |\n"
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|"
    )
    async with _spoken_to(processes) as all_three:
        for streams in given.streams:
            print(await _row(all_three, streams, given.rounds, given.tokens, pictures=False), flush=True)
        print(await _row(all_three, 1, given.rounds, given.tokens, pictures=True), flush=True)


def main() -> None:
    """Measures and prints a table of medians."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway", description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/demo"))
    parser.add_argument("--engine", choices=_MODULES, default="model", help="what computes")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--rounds", type=int, default=6, help="of each way; medians are shown")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    given = parser.parse_args()
    with no_wrong_figures(), _started(given.model, given.engine) as processes:
        asyncio.run(_measure(given, processes))


if __name__ == "__main__":
    main()
