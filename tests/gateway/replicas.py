"""A gateway before several scripted LLM services, and a script that breaks off where a test says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import grpc

from tests.gateway.trio import Door
from tests.launch import gateway
from tests.unit.twinlens.conftest import serving
from tests.unit.twinlens.fakes import FakeLlm, refuse
from tests.waiting import until
from twinlens import v1

End = Callable[[grpc.ServicerContext], NoReturn]
"""How a call ends that is broken off."""


@contextmanager
def replicas(services: Sequence[FakeLlm], addresses: Path | None = None, **flags: object) -> Iterator[Door]:
    """A gateway over these services, which it is told of in a file where one is given."""
    with ExitStack() as running:
        known = [running.enter_context(serving(llm=each)) for each in services]
        if addresses is not None:
            addresses.write_text("\n".join(known))
        door = Door(running.enter_context(gateway(*([f"file://{addresses}"] if addresses else known), **flags)))
        until(lambda: door.metric("llm_services_usable") == len(services), "all can be used")
        yield door


def lose(context: grpc.ServicerContext) -> NoReturn:
    """As a link that breaks: a status without a word of the service's."""
    context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
    raise AssertionError


def ending(code: grpc.StatusCode, reason: str) -> End:
    """As a service that says why."""
    number: int = code.value[0]
    return lambda context: refuse(context, code, v1.Status(code=number, message="no", reason=reason))


stop_in_order = ending(grpc.StatusCode.UNAVAILABLE, "CALL_ENDED")


@dataclass
class Script:
    """What all services say: each choice its words, a token each, in turns. `cuts` are taken by the calls in turn:
    after so many events a call ends in the way given; one beyond them goes through. `asked` is what each was asked."""

    words: list[list[str]]
    cuts: list[tuple[int, End]] = field(default_factory=list)
    asked: list[v1.GenerateRequest] = field(default_factory=list)
    thinking: bool = False

    def events(self, request: v1.GenerateRequest, prompt_tokens: int, cached: int) -> Iterator[v1.GenerateResponse]:
        """An answer's events, from where it is resumed on."""
        yield v1.GenerateResponse(
            started=v1.GenerateStarted(
                prompt_tokens=prompt_tokens,
                cached_tokens=cached,
                thinking=self.thinking,
                resumed_choices=len(request.resume),
            )
        )
        there = {each.index: each for each in request.resume}
        done = [there[n].finished if n in there else False for n in range(len(self.words))]
        said = [len(there[n].token_ids) if n in there else 0 for n in range(len(self.words))]
        for index, resumed in there.items():
            assert resumed.finished or list(resumed.token_ids) == list(range(said[index])), "its own tokens"
        while not all(done):
            # The choice that has said least is next, so that every order of events is that of the whole answer.
            index = min((n for n in range(len(done)) if not done[n]), key=lambda n: said[n])
            if said[index] == len(self.words[index]):
                done[index] = True
                usage = v1.Usage(prompt_tokens=prompt_tokens, cached_tokens=cached, completion_tokens=said[index])
                finished = v1.GenerateFinished(index=index, reason=v1.FINISH_REASON_STOP, usage=usage)
                yield v1.GenerateResponse(finished=finished)
                continue
            word = self.words[index][said[index]]
            scored = [v1.TokenLogprobs(logprob=-0.5 - said[index], text=word, text_bytes=word.encode())]
            logprobs = scored if request.sampling.HasField("logprobs") else []
            delta = v1.GenerateDelta(index=index, text=word, token_ids=[said[index]], logprobs=logprobs)
            said[index] += 1
            yield v1.GenerateResponse(delta=delta)


class Player(FakeLlm):
    """An LLM service that plays the script. `usable` is what it says of itself; one that is `old` does not know of
    `resume`."""

    def __init__(self, script: Script, prompt_tokens: int = 9, cached: int = 4) -> None:
        super().__init__()
        self.script = script
        self.prompt_tokens = prompt_tokens
        self.cached = cached
        self.usable = True
        self.old = False

    def Generate(self, request, context):
        self.requests.append(request)
        self.script.asked.append(request)
        if self.old:
            request = v1.GenerateRequest(chat=request.chat, sampling=request.sampling)
        cut, end = self.script.cuts.pop(0) if self.script.cuts else (-1, lose)
        for number, event in enumerate(self.script.events(request, self.prompt_tokens, self.cached)):
            if number == cut:
                end(context)
            yield event
        if cut >= 0:
            end(context)

    def GetInfo(self, request, context):
        info = super().GetInfo(request, context)
        return info if self.usable else v1.LlmServiceGetInfoResponse(version=info.version)
