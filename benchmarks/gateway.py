"""`python -m benchmarks.gateway`: the cost of HTTP: the same requests through the gateway and by gRPC, in turns.

An encoder, an LLM service and a gateway run as separate processes. This process calls both, by gRPC over one
connection, by HTTP over one for each stream. In each round a number of streams ask one question after the other by
gRPC, and as many through the gateway; the next round begins with the other way. Streams start spread over the time of
an answer, for a steady load, or all at once, so that the first token waits for the work of all. Every question is new:
it begins with new words, and the run fails if a prefix cache had any of it. gRPC is the baseline; there is no other
peer. With `--engine light`, tokens are hashes instead of a model's (testkit/light), so that the rest shows: the
machine is then saturated, and the gateway's CPU time is missing elsewhere. With `--engine paced`, a step also sleeps
for 30 ms, as if a GPU computed it.

A figure is the median of the rounds, with minimum and maximum; next to gRPC, of the differences within a round. CPU is
user and system time for each token of the answers; for the LLM service it is its front's, without its engine's.
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
    "light": ("testkit.light.encoder", "testkit.light.llm"),
    "paced": ("testkit.light.encoder", "benchmarks.paced_llm"),
}
"""An encoder and an LLM service, by what computes in them."""


@dataclass(frozen=True, slots=True)
class Load:
    """So many streams, which begin `spread` over the time of an answer, or all at once."""

    streams: int
    spread: bool = True
    pictures: bool = False

    @property
    def answers(self) -> int:
        """That each stream asks for in a round."""
        if not self.spread:
            return 1
        return 2 if self.streams == 1 else 3

    def __str__(self) -> str:
        about = ", each with a new picture" if self.pictures else ""
        if self.streams == 1:
            return f"1 stream{about}"
        return f"{self.streams} streams{about}, {'begun one by one' if self.spread else 'all at once'}"


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
        while isinstance(event := await call.read(), llm_pb2.GenerateResponse):
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
    """One way's answers that were measured, by round; seconds of CPU by process and tokens, of whole rounds."""

    answers: list[list[Timed]] = field(default_factory=list)
    cpu: list[dict[str, float]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    @property
    def first(self) -> list[float]:
        """The median time to a first token of each round, in ms."""
        return [1e3 * statistics.median(answer.first for answer in answers) for answers in self.answers]

    @property
    def per_token(self) -> list[float]:
        """The median time for each further token of each round, in ms."""
        return [1e3 * statistics.median(answer.per_token for answer in answers) for answers in self.answers]

    def rates(self, streams: int) -> list[float]:
        """Tokens a second of each round, while so many streams are under way."""
        return [
            streams * sum(answer.tokens for answer in answers) / sum(answer.whole for answer in answers)
            for answers in self.answers
        ]

    def cpu_per_token(self, process: str) -> list[float]:
        """Of each round, in ms."""
        return [1e3 * used[process] / tokens for used, tokens in zip(self.cpu, self.tokens, strict=True)]


@dataclass(frozen=True, slots=True)
class Deployment:
    """All three, and what asks them."""

    processes: dict[str, Running]
    stub: LlmServiceAsyncStub
    ways: Sequence[Way]

    async def round(self, way: Way, asked: Sequence[Sequence[Ask]], tokens: int, answer_seconds: float) -> Sample:
        """One way, a stream for each of these lists, which it asks one after the other. Streams begin evenly over
        `answer_seconds`; 0: all at once. What is measured are each stream's answers but for its first and its last,
        where it has more than two: all streams are under way then."""
        async with way.connected(len(asked)):
            before = self._cpu_seconds()
            told = await asyncio.gather(
                *(
                    self._stream(way, number, each, tokens, answer_seconds * number / len(asked))
                    for number, each in enumerate(asked)
                )
            )
            used = {name: seconds - before[name] for name, seconds in self._cpu_seconds().items()}
        measured = [answer for answers in told for answer in (answers[1:-1] if len(answers) > 2 else answers)]
        return Sample([measured], [used], [tokens * sum(map(len, asked))])

    async def _stream(self, way: Way, number: int, asked: Sequence[Ask], tokens: int, delay: float) -> list[Timed]:
        await asyncio.sleep(delay)
        return [await way.ask(number, each, tokens) for each in asked]

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
        await gateway_ready(address)
        stub = LlmServiceStub(channel)
        yield Deployment(processes, stub, [Grpc(stub), Http(address)])


async def gateway_ready(address: str, services: int = 1, seconds: float = _READY_SECONDS) -> None:
    """Returns once the gateway can use so many LLM services."""
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(seconds):
        while True:
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(f"GET /metrics HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n".encode())
            metrics = await reader.read()
            writer.close()
            if f"\ntwinlens_gateway_llm_services_usable {float(services)}\n".encode() in metrics:
                return
            await asyncio.sleep(0.05)


async def _table(of: Deployment, load: Load, rounds: int, tokens: int) -> str:
    """What one load costs both ways, as lines of a table."""

    def asked(each: int) -> list[list[Ask]]:
        # Backwards, a mark begins with what is new in it: not even the first block of a prompt was seen before.
        return [
            [Ask(f"{Mark.new()}"[::-1] + QUESTION, new_picture(_SIDE) if load.pictures else b"") for _ in range(each)]
            for _ in range(load.streams)
        ]

    for way in of.ways:
        await of.round(way, asked(1), _WARM_UP_TOKENS, 0.0)
    warm = await of.round(of.ways[0], asked(1), tokens, 0.0)
    answer_seconds = statistics.median(answer.whole for answer in warm.answers[0]) if load.spread else 0.0
    before = await of_llm(of.stub)
    samples = {way.name: Sample() for way in of.ways}
    for number in range(rounds):
        for way in of.ways if number % 2 == 0 else of.ways[::-1]:
            one, into = await of.round(way, asked(load.answers), tokens, answer_seconds), samples[way.name]
            into.answers += one.answers
            into.cpu += one.cpu
            into.tokens += one.tokens
    found = since(before, await of_llm(of.stub))
    check_new(str(load), {PREFIX: found[PREFIX]})
    plain, http = samples["gRPC"], samples["HTTP"]
    rates = plain.rates(load.streams), http.rates(load.streams)
    percent = [100 * (theirs / ours - 1) for ours, theirs in zip(*rates, strict=True)]
    lines = [
        f"| {load}; in caches: {told(found)} | gRPC | HTTP | HTTP beside gRPC |",
        "|---|---:|---:|---:|",
        f"| first token, ms | {_compared(plain.first, http.first)} |",
        f"| each further token, ms | {_compared(plain.per_token, http.per_token)} |",
        f"| tokens/s | {spread(rates[0], 0)} | {spread(rates[1], 0)} | {spread(percent, 1, '+')} % |",
        f"| CPU of the gateway, ms/token | | {spread(http.cpu_per_token('gateway'), 3)} | |",
    ]
    for process in ("LLM service", "caller"):
        used = plain.cpu_per_token(process), http.cpu_per_token(process)
        lines.append(f"| CPU of the {process}, ms/token | {spread(used[0], 3)} | {spread(used[1], 3)} | |")
    return "\n".join(lines)


def _compared(plain: Sequence[float], http: Sequence[float]) -> str:
    added = [theirs - ours for ours, theirs in zip(plain, http, strict=True)]
    return f"{spread(plain, 2)} | {spread(http, 2)} | {spread(added, 2, '+')}"


def spread(values: Sequence[float], digits: int, sign: str = "") -> str:
    """The median, and the least and the greatest.

    >>> spread([2.0, 1.0, 4.0], 1, "+")
    '+2.0 (+1.0 to +4.0)'
    """
    form = f"{sign}.{digits}f"
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


async def _measure(given: argparse.Namespace, processes: dict[str, Running]) -> None:
    async with _spoken_to(processes) as all_three:
        loads = [Load(streams) for streams in given.streams]
        loads += [Load(most, spread=False)] if (most := max(given.streams)) > 1 else []
        loads.append(Load(1, pictures=True))
        for load in loads:
            print(await _table(all_three, load, given.rounds, given.tokens), end="\n\n", flush=True)


def main() -> None:
    """Measures and prints a table for each load."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway", description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/demo"))
    parser.add_argument("--engine", choices=_MODULES, default="model", help="the kind of engine")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--rounds", type=int, default=4, help="rounds of each way")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of each answer")
    given = parser.parse_args()
    with no_wrong_figures(), _started(given.model, given.engine) as processes:
        asyncio.run(_measure(given, processes))


if __name__ == "__main__":
    main()
