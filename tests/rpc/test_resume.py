"""An answer that was cut off anywhere goes on, behind what its caller has of it, as if it had never stopped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from tokenizers import Tokenizer

from llm_service.prompt.detokenizer import Detokenizer
from testkit.checkpoints import SPECIAL_IDS
from tests import pictures
from tests.rpc.pairs import Pair, about, asked, greedy, pair, refusal
from twinlens import LlmClient, user, v1

SCHEMA = json.dumps({"type": "object", "properties": {"a": {"enum": [1, 22, 333]}}, "required": ["a"]})
PICTURE = pictures.encoded(pictures.noise(64, 96, 4_711))


@dataclass(slots=True)
class Heard:
    """What a caller has of one choice."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[v1.TokenLogprobs] = field(default_factory=list)
    finished: v1.GenerateFinished | None = None

    @property
    def end(self) -> tuple[int, str, int, int]:
        """Why it ended, with which stop text or token, behind how many tokens."""
        assert self.finished is not None
        ended = self.finished
        return ended.reason, ended.stop_text, ended.stop_token_id, ended.usage.completion_tokens


def hear(choices: dict[int, Heard], event: v1.GenerateResponse) -> None:
    match event.WhichOneof("event"):
        case "delta":
            choice = choices[event.delta.index]
            assert choice.finished is None
            choice.token_ids.extend(event.delta.token_ids)
            choice.text += event.delta.text
            choice.logprobs.extend(event.delta.logprobs)
        case "finished":
            assert choices[event.finished.index].finished is None
            choices[event.finished.index].finished = event.finished


def heard(events: list[v1.GenerateResponse], choices: int) -> dict[int, Heard]:
    out = {index: Heard() for index in range(choices)}
    for event in events:
        hear(out, event)
    return out


def resumed(request: v1.GenerateRequest, choices: dict[int, Heard]) -> v1.GenerateRequest:
    """The request for the rest."""
    rest = v1.GenerateRequest()
    rest.CopyFrom(request)
    for index, choice in choices.items():
        if choice.finished is not None:
            rest.resume.add(index=index, finished=True)
        elif choice.token_ids:
            rest.resume.add(index=index, token_ids=choice.token_ids)
    return rest


def check_cut(client: LlmClient, request: v1.GenerateRequest, events: list[v1.GenerateResponse], cut: int) -> None:
    """What was heard up to a cut, and what follows it, are together what is heard without one."""
    n = request.sampling.n or 1
    whole, choices = heard(events, n), heard(events[:cut], n)
    with client.generate(resumed(request, choices), timeout=180) as stream:
        first, *rest = stream
    assert first.HasField("started")
    assert first.started.prompt_tokens == events[0].started.prompt_tokens
    has_begun = any(choice.token_ids for choice in choices.values())
    for event in rest:
        assert not (has_begun and event.delta.HasField("prompt")), "the prompt's logprobs are told once"
        hear(choices, event)
    for index, choice in whole.items():
        said = choices[index]
        assert (said.token_ids, said.text, said.end) == (choice.token_ids, choice.text, choice.end), f"cut {cut}"
        assert [each.text for each in said.logprobs] == [each.text for each in choice.logprobs]
        assert [each.logprob for each in said.logprobs] == pytest.approx(
            [each.logprob for each in choice.logprobs], abs=1e-3
        )


@pytest.fixture(scope="module")
def both(checkpoint: Path) -> Iterator[Pair]:
    with pair(checkpoint) as running:
        yield running


def whole_of(pair: Pair, request: v1.GenerateRequest) -> list[v1.GenerateResponse]:
    """What is said, as a caller hears it who is never behind: one event for each token."""
    sampling = request.sampling
    tokenizer = Tokenizer.from_file(str(pair.checkpoint / "tokenizer.json"))
    skips = sampling.skip_special_tokens or not sampling.HasField("skip_special_tokens")
    how = {"shows_stop": sampling.include_stop_str_in_output, "skip_special": skips}
    texts = {n: Detokenizer(tokenizer, sampling.stop, sampling.min_tokens, **how) for n in range(sampling.n or 1)}
    with pair.text.generate(request, timeout=180) as stream:
        return [each for event in stream for each in one_by_one(event, texts)]


def one_by_one(event: v1.GenerateResponse, texts: dict[int, Detokenizer]) -> Iterator[v1.GenerateResponse]:
    """A delta's tokens as deltas of their own; what is told when a choice ends comes with its last one."""
    *before, last = event.delta.token_ids or [None]
    if last is None:
        yield event
        return
    index, left, scores = event.delta.index, event.delta.text, event.delta.logprobs
    for number, token in enumerate(before):
        text = texts[index].push(token)
        assert left.startswith(text)
        left = left[len(text) :]
        delta = v1.GenerateDelta(index=index, text=text, token_ids=[token], logprobs=scores[number : number + 1])
        yield v1.GenerateResponse(delta=delta)
    texts[index].push(last)
    delta = v1.GenerateDelta(index=index, text=left, token_ids=[last], logprobs=scores[len(before) :])
    yield v1.GenerateResponse(delta=delta)


def drawn(**more: Any) -> v1.SamplingParams:
    return v1.SamplingParams(**{"max_tokens": 24, "temperature": 1.5, "seed": 7, "ignore_eos": True, **more})


COUNT = user("Count to ten, please.")
REQUESTS: dict[str, v1.GenerateRequest] = {
    "greedy": asked(COUNT, greedy(24)),
    "drawn by a seed": asked(COUNT, drawn()),
    "penalised": asked(COUNT, drawn(presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.3)),
    "logprobs": asked(COUNT, drawn(logprobs=2)),
    "logprobs of the prompt": asked(COUNT, greedy(6, prompt_logprobs=1)),
    "json": asked(COUNT, drawn(max_tokens=64, json_schema=SCHEMA, ignore_eos=False)),
    "regex": asked(COUNT, drawn(max_tokens=64, regex="([a-c]é){2,9}", ignore_eos=False)),
    "two choices": asked(COUNT, drawn(n=2, max_tokens=12)),
    "choices that end apart": asked(COUNT, drawn(n=2, max_tokens=64, json_schema=SCHEMA, ignore_eos=False)),
    "a picture": asked(about(PICTURE), greedy(12)),
    "at least so many": asked(COUNT, drawn(min_tokens=6, max_tokens=30, stop_token_ids=range(0, 400, 3))),
    "bad words": asked(COUNT, drawn(allowed_token_ids=range(64, 90), bad_words=["a", "bc", "cb", "dde", "ffff"])),
    "special tokens shown": asked(
        COUNT, drawn(logit_bias=dict.fromkeys(SPECIAL_IDS.values(), 60), skip_special_tokens=False)
    ),
    "its stop token shown": asked(
        COUNT, drawn(min_tokens=6, max_tokens=30, stop_token_ids=range(0, 400, 3), include_stop_str_in_output=True)
    ),
}


def cuts(count: int) -> list[int]:
    """Where answers of so many events are cut: everywhere, and of long ones every fifth place between their ends."""
    return [cut for cut in range(1, count + 1) if cut <= 12 or cut > count - 12 or cut % 5 == 0]


@pytest.mark.parametrize("name", REQUESTS)
def test_behind_any_token_an_answer_goes_on_as_if_it_had_not_stopped(both: Pair, name: str) -> None:
    events = whole_of(both, REQUESTS[name])
    assert len(events) > 4
    for cut in cuts(len(events)):
        check_cut(both.text, REQUESTS[name], events, cut)


@pytest.mark.parametrize("shows", [False, True], ids=["before it", "behind it"])
@pytest.mark.parametrize("length", [2, 3, 6])
def test_a_stop_text_is_found_across_every_cut(both: Pair, length: int, shows: bool) -> None:
    text = heard(whole_of(both, asked(COUNT, drawn())), 1)[0].text
    stop = text[len(text) // 2 :][:length]
    request = asked(COUNT, drawn(stop=[stop, "never said at all"], include_stop_str_in_output=shows))
    events = whole_of(both, request)
    assert events[-1].finished.stop_text == stop
    assert heard(events, 1)[0].text == text[: text.index(stop) + (length if shows else 0)]
    if not shows:
        assert any(not event.delta.text for event in events[1:-1]), "nothing is held back, so nothing is tested"
    for cut in range(1, len(events) + 1):
        check_cut(both.text, request, events, cut)


@pytest.mark.parametrize("name", ["greedy", "penalised", "json", "a picture"])
def test_the_real_model_goes_on_as_well(qwen3: Pair, name: str) -> None:
    events = whole_of(qwen3, REQUESTS[name])
    for cut in (1, 2, len(events) // 2, len(events) - 1, len(events)):
        check_cut(qwen3.text, REQUESTS[name], events, cut)


def test_where_all_choices_are_finished_nothing_is_computed(both: Pair) -> None:
    steps = both.text.get_load().steps
    request = asked(
        about(PICTURE), drawn(n=2, stop=["a"]), resume=[v1.ResumedChoice(index=n, finished=True) for n in (0, 1)]
    )
    (only,) = whole_of(both, request)
    assert only.HasField("started")
    assert both.text.get_load().steps == steps
    assert both.text.get_load().finished_requests > 0


def test_resumed_tokens_come_from_the_prefix_cache_as_a_prompt_does(both: Pair) -> None:
    request = asked(user("Tell me a story " * 20), greedy(64))
    events = whole_of(both, request)
    before = both.text.get_load()
    check_cut(both.text, request, events, 50)
    load = both.text.get_load()
    assert load.prefix_hit_tokens - before.prefix_hit_tokens > events[0].started.prompt_tokens - 16


def choice(*tokens: int, index: int = 0, finished: bool = False) -> v1.ResumedChoice:
    return v1.ResumedChoice(index=index, token_ids=tokens, finished=finished)


@pytest.mark.parametrize(
    ("sampling", "resume", "reason", "field"),
    {
        "no such choice": ({}, [choice(5, index=1)], "BAD_RESUME", "resume[0].index"),
        "below zero": ({}, [choice(5, index=-1)], "BAD_RESUME", "resume[0].index"),
        "one twice": ({"n": 2}, [choice(5), choice(6)], "BAD_RESUME", "resume[1].index"),
        "too many tokens": ({"max_tokens": 2}, [choice(5, 6, 7)], "BAD_RESUME", "resume[0].token_ids"),
        "no token": ({}, [choice(1 << 31)], "TOKEN_OUT_OF_RANGE", "resume[0].token_ids"),
        "not the form": ({"regex": "[0-9]+"}, [choice(70, 71)], "BAD_RESUME", "resume"),
        "behind a stop token": ({"stop_token_ids": [70]}, [choice(70, 71)], "BAD_RESUME", "resume"),
    }.values(),
)
def test_what_a_choice_cannot_have_said_is_refused(
    both: Pair, sampling: dict[str, Any], resume: list[v1.ResumedChoice], reason: str, field: str
) -> None:
    error = refusal(both.text, asked(COUNT, drawn(**sampling), resume=resume))
    assert (error.code, error.reason, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, reason, field)


def test_nothing_was_said_behind_a_stop_text(both: Pair) -> None:
    said = both.text.tokenize("the end, and more")
    error = refusal(both.text, asked(COUNT, drawn(stop=["end"]), resume=[choice(*said)]))
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "BAD_RESUME")
