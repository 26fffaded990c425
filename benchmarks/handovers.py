"""`python -m benchmarks.handovers`: the pause that callers of a gateway notice when the service of their answer is
killed.

An encoder, LLM services and a gateway run as separate processes, with an engine whose steps take 30 ms, as if a GPU
computed them, and whose tokens are hashes. In each round streams start at once, and in the middle of their answers one
of two LLM services is killed; or, with a single service, its engine, without a spare engine and with one
(`--spare-engine`). Every answer must finish with all of its tokens, or the run fails; tests check the tokens
themselves. Every question is new, and the run fails if a prefix cache had any of it. The killed process is restarted
before the next round; rounds without a kill alternate. No peer continues an answer.

A *pause* is the longest time between two parts of an answer. Answers count as held up if their pause is longer than
any of an undisturbed round; on a busy machine that misses some that were handed over. The time to the first token of a
new prompt is shown as the target for a pause; the start of an engine adds to it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.gateway import gateway_ready, spread
from benchmarks.hits import PREFIX, check_new, no_wrong_figures
from benchmarks.http_stream import HttpCaller
from benchmarks.services import Running, running
from benchmarks.sides import Timed
from benchmarks.workload import QUESTION, Mark

_ENCODER, _LLM, _ENGINE = "testkit.light.encoder", "benchmarks.paced_llm", "benchmarks.paced_engine"
_READY_SECONDS = 60.0
_WARM_UP_TOKENS = 4
_HALF_STEP = 0.0175
"""Seconds: half of what a token takes."""


@dataclass(eq=False)
class Service:
    """An LLM service at one address, which can be started again."""

    flags: tuple[str, ...]
    address: str = "127.0.0.1:0"
    process: Running | None = None
    _stack: ExitStack = field(default_factory=ExitStack)

    def start(self) -> None:
        """Returns once it serves."""
        self.process = self._stack.enter_context(running(_LLM, *self.flags, "--listen", self.address))
        self.address = self.process.address

    def end(self) -> None:
        """Drains it, or takes note that it was killed."""
        self._stack.close()

    @property
    def pid(self) -> int:
        """Of its front."""
        assert self.process is not None
        return self.process.pid

    @property
    def engine(self) -> int:
        """The process of the engine that serves: the oldest of those that it has started."""
        children = [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]
        engines = [pid for pid in children if _ENGINE.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()]
        return min(engines, key=_started)


def _started(pid: int) -> int:
    """When a process was started, in ticks since the machine was."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


@dataclass(frozen=True, slots=True)
class Site:
    """LLM services, and the gateway before them."""

    services: list[Service]
    gateway: str

    async def all_serve(self) -> None:
        """Returns once the gateway can use all of them."""
        await gateway_ready(self.gateway, services=len(self.services), seconds=_READY_SECONDS)


@contextmanager
def _site(model: Path, services: int, *flags: str) -> Iterator[Site]:
    with ExitStack() as stack:
        encoder = stack.enter_context(running(_ENCODER, "--model", str(model)))
        llms = [Service(("--model", str(model), "--encoders", encoder.address, *flags)) for _ in range(services)]
        for each in llms:
            stack.callback(each.end)
            each.start()
        addresses = ",".join(each.address for each in llms)
        gateway = stack.enter_context(running("gateway", "--llm", addresses))
        yield Site(llms, gateway.address)


async def _round(site: Site, streams: int, tokens: int, kill: Callable[[], None] | None) -> list[Timed]:
    """All answers; what is killed is when about half of their time is over."""
    await site.all_serve()
    callers = [await HttpCaller.connect(site.gateway) for _ in range(streams)]
    try:
        asked = [asyncio.create_task(each.chat(f"{Mark.new()}"[::-1] + QUESTION, tokens)) for each in callers]
        if kill is not None:
            await asyncio.sleep(tokens * _HALF_STEP)
            kill()
        answers = await asyncio.gather(*asked)
        check_new("a prompt", {PREFIX: sum(caller.cached for caller in callers)})
        return answers
    finally:
        for caller in callers:
            await caller.close()


async def _measure(given: argparse.Namespace, what: str, site: Site, *, engine: bool) -> str:
    """A line of the table."""
    firsts: list[float] = []
    undisturbed: list[float] = []
    pauses: list[float] = []
    await _round(site, given.streams, _WARM_UP_TOKENS, None)
    for number in range(given.rounds):
        victim = site.services[number % len(site.services)]

        def kill(victim: Service = victim) -> None:
            os.kill(victim.engine if engine else victim.pid, signal.SIGKILL)

        calm = await _round(site, given.streams, given.tokens, None)
        firsts += [answer.first for answer in calm]
        undisturbed += [answer.pause for answer in calm]
        disturbed = await _round(site, given.streams, given.tokens, kill)
        pauses += [answer.pause for answer in disturbed if answer.pause > max(undisturbed)]
        if not engine:
            victim.end()
            victim.start()
    if not pauses:
        return f"| {what} | none | | | |"
    cells = [what, f"{len(pauses)} of {given.streams * given.rounds}", _ms(pauses), _ms(undisturbed), _ms(firsts)]
    return f"| {' | '.join(cells)} |"


def _ms(seconds: Sequence[float]) -> str:
    return spread([1e3 * each for each in seconds], 0)


def main() -> None:
    """Measures and prints a table: medians, with the least and the greatest."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.handovers", description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/demo"))
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3, help="rounds with a kill")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each answer")
    given = parser.parse_args()
    print("| killed | answers held up | pause, ms | undisturbed, ms | first token, ms |")
    print("|---|---:|---:|---:|---:|")
    for what, services, flags in (
        ("one of two LLM services", 2, ()),
        ("the engine of the only one", 1, ()),
        ("the same, with another in reserve", 1, ("--spare-engine",)),
    ):
        with no_wrong_figures(), _site(given.model, services, *flags) as site:
            print(asyncio.run(_measure(given, what, site, engine=services == 1)), flush=True)


if __name__ == "__main__":
    main()
