"""`python -m benchmarks.company`: how requests affect each other on the same cores, compared with transformers in
turns.

Each round measures the first token of a new picture on an idle system; several new pictures at once, in transformers
as one batch; and a running answer when requests with new pictures arrive. transformers runs one call after the other,
so the last has no peer: it is compared with the same answer's pace before.

Each question and picture is new, and both get the same file; the run fails if a cache of the services had one. A
picture is *encoded* at the end of its `encoder_vit` stage, as the service reports it; or at the first token, if the
answer ends before that report. A pace is a time span divided by the answer's tokens within it.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import statistics
import time
from collections.abc import AsyncIterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import grpc
import torch

from benchmarks import hits, machine
from benchmarks.checkpoint import add_model_options, chosen_model
from benchmarks.hits import check_new, no_wrong_figures, since, told
from benchmarks.services import both
from benchmarks.transformers_side import Peer
from benchmarks.twinlens_side import request_for
from benchmarks.workload import Question
from common.hardware import usable_cores
from twinlens.v1 import llm_pb2
from twinlens.v1.encoder_pb2_grpc import EncoderServiceStub
from twinlens.v1.llm_pb2_grpc import LlmServiceStub

_TIMEOUT = 300.0
_WARM_UP_TOKENS = 4
_ENDLESS = 2000
"""Tokens of the answer that is ended when the others are through."""


@dataclass(slots=True)
class Answer:
    """When it was asked for, when each token came, and when its picture was encoded; of `time.perf_counter`."""

    asked: float
    tokens: list[float] = field(default_factory=list)
    encoded: float = 0.0

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.tokens[0] - self.asked

    def pace(self, begin: float, end: float) -> float:
        """Seconds a token, of those that came between two moments."""
        return (end - begin) / max(1, sum(begin < each <= end for each in self.tokens))

    def longest(self, begin: float, end: float) -> float:
        """The longest wait for a token that lies, with both its ends, between two moments."""
        inside = [each for each in self.tokens if begin <= each <= end]
        return max((later - each for each, later in pairwise(inside)), default=end - begin)


@dataclass(frozen=True, slots=True)
class Together:
    """Several at once: answers' tokens a second, seconds until the first and the last of the first tokens, and until
    the last picture was encoded."""

    rate: float
    first: float
    last: float
    encoded: float


@dataclass(frozen=True, slots=True)
class Running:
    """Seconds a token of an answer: alone, while others' pictures are encoded, and until the others have their first
    tokens; and the longest wait for one in all of that."""

    alone: float
    encoding: float
    prefilling: float
    longest: float


class Services:
    """Both, as a client sees them."""

    def __init__(self, encoder: grpc.aio.Channel, llm: grpc.aio.Channel) -> None:
        self._encoder = EncoderServiceStub(encoder)
        self._llm = LlmServiceStub(llm)

    async def hits(self) -> hits.Hits:
        """Of both services."""
        return await hits.of_services(self._llm, self._encoder)

    async def ask(self, request: llm_pb2.GenerateRequest) -> Answer:
        """One answer."""
        answer = Answer(time.perf_counter())
        await _read(self._llm.Generate(request, timeout=_TIMEOUT), answer)
        return answer

    async def together(self, questions: Sequence[Question], tokens: int) -> Together:
        """All at once."""
        requests = [_request(question, tokens) for question in questions]
        started = time.perf_counter()
        answers = await asyncio.gather(*map(self.ask, requests))
        firsts = [answer.tokens[0] - started for answer in answers]
        ended = max(answer.tokens[-1] for answer in answers) - started
        encoded = max(answer.encoded for answer in answers) - started
        return Together(len(questions) * tokens / ended, min(firsts), max(firsts), encoded)

    async def running(self, question: Question, others: Sequence[Question], alone: int) -> Running:
        """An answer that gets `alone` tokens before the others come, who want one each."""
        requests = [_request(other, 1) for other in others]
        call = self._llm.Generate(_request(question, _ENDLESS), timeout=_TIMEOUT)
        answer = Answer(time.perf_counter())
        await _read(call, answer, alone + 1)
        rest, came = asyncio.create_task(_read(call, answer)), time.perf_counter()
        try:
            asked = await asyncio.gather(*map(self.ask, requests))
        finally:
            rest.cancel()
            call.cancel()
            await asyncio.wait({rest})
        encoded, begun = max(each.encoded for each in asked), max(each.tokens[0] for each in asked)
        lone = statistics.median(later - each for each, later in pairwise(answer.tokens[: alone + 1]))
        return Running(lone, answer.pace(came, encoded), answer.pace(came, begun), answer.longest(came, begun))


def _request(question: Question, tokens: int) -> llm_pb2.GenerateRequest:
    return request_for(question.file(), question.text, tokens)


async def _read(call: AsyncIterable[llm_pb2.GenerateResponse], answer: Answer, enough: int | None = None) -> None:
    """Notes tokens as they come, until there are `enough` or the end."""
    async for response in call:
        match response.WhichOneof("event"):
            case "delta":
                answer.tokens += [time.perf_counter()] * len(response.delta.token_ids)
            case "finished":
                ends = [each.end_seconds for each in response.finished.timings if each.stage == "encoder_vit"]
                answer.encoded = answer.asked + max(ends) if ends else answer.tokens[0]
        if enough is not None and len(answer.tokens) >= enough:
            return


@dataclass(slots=True)
class Found:
    """What the rounds gave: seconds to the first token, ours and theirs; several at once; the running answers."""

    alone: list[tuple[float, float]] = field(default_factory=list)
    ours: list[Together] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)
    running: list[Running] = field(default_factory=list)


async def _measure(peer: Peer | None, encoder: str, llm: str, given: argparse.Namespace) -> Found:
    found = Found()

    async def alone() -> None:
        question = Question.new()
        ours = (await services.ask(_request(question, 1))).first
        found.alone.append((ours, peer.run([question], 1).first if peer else 0.0))

    async def at_once() -> None:
        questions = [Question.new() for _ in range(given.at_once)]
        found.ours.append(await services.together(questions, given.tokens))
        if peer:
            found.theirs.append(len(questions) * given.tokens / peer.run(questions, given.tokens).whole)

    async with grpc.aio.insecure_channel(encoder) as one, grpc.aio.insecure_channel(llm) as other:
        services = Services(one, other)
        await services.together([Question.new() for _ in range(3)], _WARM_UP_TOKENS)
        if peer:
            peer.run([Question.new() for _ in range(2)], _WARM_UP_TOKENS)
        before = await services.hits()
        for _ in range(given.rounds):
            for _ in range(given.pictures):
                await alone()
            await at_once()
            others = [Question.new() for _ in range(given.at_once)]
            found.running.append(await services.running(Question.new(), others, given.lone_tokens))
        gone = since(before, await services.hits())
    check_new("company", gone)
    _print(found, given)
    print(f"\nFound in caches meanwhile: {told(gone)}")
    return found


def _print(found: Found, given: argparse.Namespace) -> None:
    middle = statistics.median
    many = given.at_once
    print("| | transformers | Twinlens | ratio |\n|---|---:|---:|---:|")
    ours, theirs = (middle(column) for column in zip(*found.alone, strict=True))
    ratio = f"{middle(mine / other for mine, other in found.alone):.2f}" if theirs else ""
    print(f"| TTFT, new picture, alone | {_ms(theirs)} | {_ms(ours)} | {ratio} |")
    rate, peer = middle(each.rate for each in found.ours), middle(found.theirs) if found.theirs else 0.0
    told = f"{peer:.1f} | {rate:.1f} | {rate / peer:.2f}" if peer else f"– | {rate:.1f} | "
    print(f"| tokens/s, {many} new pictures at once | {told} |")
    print(f"| first answer of {many} begins | – | {_ms(middle(each.first for each in found.ours))} | |")
    print(f"| last picture of {many} is encoded | – | {_ms(middle(each.encoded for each in found.ours))} | |")
    print(f"| last answer of {many} begins | – | {_ms(middle(each.last for each in found.ours))} | |")
    print(f"\n| a running answer, {many} new pictures come | a token | of its lone pace |\n|---|---:|---:|")
    for name in ("alone", "encoding", "prefilling", "longest"):
        taken = middle(getattr(each, name) for each in found.running)
        share = middle(getattr(each, name) / each.alone for each in found.running)
        print(f"| {_RUNNING[name]} | {_ms(taken)} | {share:.2f} |")


_RUNNING = {
    "alone": "before they come",
    "encoding": "until the last picture is encoded",
    "prefilling": "until the last of them has its first token",
    "longest": "the longest wait for a token meanwhile",
}


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms" if seconds else "–"


def main() -> None:
    """Measures and prints tables of medians."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.company", description=__doc__)
    add_model_options(parser)
    parser.add_argument("--rounds", type=int, default=1, help="rounds of all three; one takes about 100 s on two cores")
    parser.add_argument("--pictures", type=int, default=4, help="new pictures alone in each round")
    parser.add_argument("--at-once", type=int, default=8, help="concurrent new pictures")
    parser.add_argument("--tokens", type=int, default=65, help="tokens of each concurrent answer")
    parser.add_argument(
        "--lone-tokens", type=int, default=24, help="tokens of the running answer before the others arrive"
    )
    parser.add_argument("--no-peer", action="store_true", help="leave transformers out")
    parser.add_argument("--encoder-options", default="", help="options of the encoder service, as one string")
    parser.add_argument("--llm-options", default="", help="options of the LLM service, as one string")
    given = parser.parse_args()
    folder: Path = chosen_model(given)
    torch.set_num_threads(usable_cores())
    peer = None if given.no_peer else Peer(folder)
    encoder_flags, llm_flags = (tuple(shlex.split(each)) for each in (given.encoder_options, given.llm_options))
    print(f"{machine.processor()}; {folder.name}\n")
    with no_wrong_figures(), both(folder, encoder_flags=encoder_flags, llm_flags=llm_flags) as (encoder, llm):
        asyncio.run(_measure(peer, encoder, llm, given))


if __name__ == "__main__":
    main()
