"""The engine dies under running answers: for their callers that is a pause, and nothing else."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests import pictures
from tests.faults.configuration import taken_away
from tests.faults.deadly_engine import BROKEN, DEADLY, HANGING, LARGE
from tests.gateway.trio import Door
from tests.gateway.trio import said as said_by
from tests.launch import Service, gateway, launch, llm_server, send
from tests.rpc.pairs import LLM_FLAGS, Pair, about, answer, asked, greedy, holds_nothing, lasting, pair, refusal
from tests.scrape import scrape
from tests.waiting import until
from twinlens import LlmClient, TwinlensError, user, v1

ENGINE = "llm_service.engine"
ATTEMPTS = "twinlens_llm_encode_attempts_total"
FLAGS: dict[str, object] = {**LLM_FLAGS, "metrics_listen": "127.0.0.1:0"}
SCHEMA = '{"type": "array", "items": {"enum": [1, 22, 333]}, "minItems": 40}'


def drawn(**more: Any) -> v1.SamplingParams:
    return v1.SamplingParams(**{"max_tokens": 400, "temperature": 1.0, "seed": 3, "ignore_eos": True, **more})


def requests() -> list[v1.GenerateRequest]:
    """Answers of every kind, each long enough to be cut."""
    file = pictures.encoded(pictures.noise(64, 96, 9_313))
    return [
        asked(user("count"), greedy(400)),
        asked(user("draw"), drawn()),
        asked(user("two"), drawn(n=2)),
        asked(user("penalise"), drawn(presence_penalty=1.0, repetition_penalty=1.2)),
        asked(user("form"), drawn(json_schema=SCHEMA, ignore_eos=False)),
        asked(user("likely"), drawn(logprobs=1)),
        asked(user("prompt " * 200), greedy(300, prompt_logprobs=0)),
        asked(about(file), greedy(400)),
        asked(about(file, "And what is that?"), drawn()),
    ]


def said(client: LlmClient, request: v1.GenerateRequest) -> list[tuple[object, ...]]:
    """What a whole answer says, as far as it does not tell of time or caches."""
    whole = answer(client, request)
    return [
        (
            choice.text,
            choice.token_ids,
            choice.reason,
            [each.text for each in choice.logprobs],
            choice.usage.completion_tokens,
        )
        for choice in whole.choices
    ] + [(len(whole.prompt_logprobs),)]


def kill(service: Service) -> None:
    """Kills the engine that runs now."""
    (pid,) = service.children(ENGINE)
    os.kill(pid, signal.SIGKILL)


def computes(client: LlmClient) -> bool:
    """An engine serves, and is at some request."""
    try:
        return client.get_load().running > 0
    except TwinlensError as error:
        if error.reason != "ENGINE_UNAVAILABLE":
            raise
        return False


def both_idle(both: Pair) -> bool:
    """An engine serves, and nothing is held for anyone by either service."""
    return holds_nothing(both.text) and both.idle()


def handed_over(service: Service) -> float:
    return scrape(service.metrics)["twinlens_llm_requests_handed_over_total"]


@pytest.fixture(scope="module")
def both(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Over a copy of the checkpoint, whose configuration may be taken away."""
    own = Path(shutil.copytree(checkpoint, tmp_path_factory.mktemp("own") / "copy"))
    with pair(own, **FLAGS, max_handovers=1000) as running:
        yield running


def test_no_answer_fails_or_changes_however_often_the_engine_is_killed(both: Pair) -> None:
    asking = requests()
    undisturbed = [said(both.text, request) for request in asking]
    before = handed_over(both.llm)
    long = asked(user("on and on"), greedy(4000))
    with ThreadPoolExecutor(len(asking)) as threads, both.text.generate(long) as stream:
        assert next(iter(stream)).HasField("started")  # so that the first kill hits one, however late it comes
        answers = [threads.submit(said, both.text, request) for request in asking]
        kill(both.llm)
        for _ in range(2):
            until(lambda: computes(both.text) or all(each.done() for each in answers), "an engine computes")
            if not all(each.done() for each in answers):
                kill(both.llm)
        assert [each.result() for each in answers] == undisturbed
    assert handed_over(both.llm) > before
    until(lambda: both_idle(both), "everything was given back")
    assert said(both.text, asking[0]) == undisturbed[0]


def test_who_waits_and_who_comes_meanwhile_is_answered_as_well(checkpoint: Path) -> None:
    with (
        llm_server(checkpoint, **{**LLM_FLAGS, "max_running": 1}) as service,
        LlmClient(service.address) as client,
        ThreadPoolExecutor(5) as threads,
    ):
        running = client.generate(asked(user("count"), lasting()))
        events = iter(running)
        assert next(events).HasField("started")
        waiting = [threads.submit(answer, client, asked(user(f"wait {n}"), greedy(20))) for n in range(4)]
        until(lambda: client.get_load().waiting == 4, "four wait")
        kill(service)
        late = threads.submit(answer, client, asked(user("now?"), greedy(20)))
        until(lambda: computes(client), "the next engine goes on with the one that ran")
        running.cancel()
        assert [len(each.result().choices[0].token_ids) for each in (*waiting, late)] == [20] * 5
        until(lambda: holds_nothing(client), "nothing is held")


def test_who_asks_a_gateway_meanwhile_waits_as_well(both: Pair) -> None:
    until(lambda: len(answer(both.text, asked(user("hello"))).choices[0].token_ids) == 8, "an engine serves")
    with gateway(both.llm.address) as running, ThreadPoolExecutor(1) as threads:
        door = Door(running)
        with taken_away(both.checkpoint):
            kill(both.llm)
            until(lambda: door.metric("llm_services_usable") == 0, "the gateway has noticed")
            late = threads.submit(door.post, "/v1/chat/completions", {"messages": [said_by("now?")], "max_tokens": 4})
            until(lambda: late.done() or door.metric("open_requests") == 1, "it has come")
        assert late.result().status == 200


def test_a_request_that_is_not_to_be_handed_over_fails_with_its_engine(both: Pair) -> None:
    stream = both.text.generate(asked(user("count"), lasting(), max_handovers=0))
    events = iter(stream)
    assert next(events).HasField("started")
    with taken_away(both.checkpoint):
        kill(both.llm)
        with pytest.raises(TwinlensError) as error:
            list(events)
        now = refusal(both.text, asked(user("now?"), max_handovers=0))
        before = scrape(both.llm.metrics)[ATTEMPTS]
        picture = pictures.encoded(pictures.noise(64, 64, 9_417))
        assert refusal(both.text, asked(about(picture), max_handovers=0)).reason == "ENGINE_UNAVAILABLE"
        assert scrape(both.llm.metrics)[ATTEMPTS] == before, "no encoder has worked in vain"
    assert (error.value.code, error.value.reason) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_UNAVAILABLE")
    assert error.value.retry_after is not None
    assert (now.code, now.reason) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_UNAVAILABLE")
    until(lambda: len(answer(both.text, asked(user("and now?"))).choices[0].token_ids) == 8, "an engine serves")


@pytest.mark.parametrize("leaves", ["cancels", "aborts"])
def test_a_caller_who_leaves_while_no_engine_serves_gives_everything_back(both: Pair, leaves: str) -> None:
    file = pictures.encoded(pictures.noise(64, 64, 9_411))
    asking = asked(about(file), lasting(), request_id="leaver")
    until(lambda: len(answer(both.text, asked(user("hello"))).choices[0].token_ids) == 8, "an engine serves")
    stream = both.text.generate(asking)
    events = iter(stream)
    assert next(events).HasField("started")
    with taken_away(both.checkpoint):
        kill(both.llm)
        until(lambda: not computes(both.text), "the engine is gone")
        if leaves == "cancels":
            stream.cancel()
        else:
            assert both.text.abort("leaver") == 1
            with pytest.raises(TwinlensError) as error:
                list(events)
            assert error.value.reason == "ABORTED"
    until(lambda: both_idle(both), "everything was given back")


def test_a_request_that_kills_every_engine_ends_and_takes_no_other_along(checkpoint: Path) -> None:
    """With every option as it comes: each answer may outlive two engines, and the third end is the deadly one's own."""
    flags = [
        f"--model={checkpoint}",
        "--listen=127.0.0.1:0",
        "--overlap=yes",
        "--kv-cache-bytes=32MiB",
        "--metrics-listen=127.0.0.1:0",
    ]
    deadly = drawn(logit_bias={DEADLY: -1.0}, presence_penalty=0.5)
    asking = [asked(user(f"count {n}"), drawn(seed=n)) for n in range(6)]
    with launch("tests.faults.deadly_engine", *flags) as service, LlmClient(service.address) as client:
        undisturbed = [said(client, request) for request in asking]
        with ThreadPoolExecutor(len(asking) + 1) as threads, client.generate(asked(user("stay"), lasting())) as beside:
            running = [client.generate(request) for request in asking]
            answers = [threads.submit(heard, stream) for stream in running]
            until(lambda: client.get_load().running > len(asking), "they are computed")
            dying = threads.submit(refusal, client, asked(user("die"), deadly))
            until(lambda: ends(service) > 0, "it has taken one engine along")
            beside.cancel()
            error = dying.result()
            assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_UNAVAILABLE")
            assert [each.result() for each in answers] == [tokens for ((_, tokens, *_), _) in undisturbed]
        assert ends(service) == 3
        until(lambda: service.log.read_text().count("killed by SIGKILL") == 3, "the log says how they ended")
        assert scrape(service.metrics)["twinlens_llm_engine_deaths_total"] == 3
        until(lambda: holds_nothing(client), "nothing is held")


@pytest.mark.soak
def test_steps_that_find_too_little_memory_end_no_engine_unless_they_are_of_one_token(checkpoint: Path) -> None:
    flags = [f"--model={checkpoint}", "--listen=127.0.0.1:0", "--kv-cache-bytes=32MiB"]
    asking = [asked(user(f"count {n}"), drawn(seed=n)) for n in range(6)]
    with launch("tests.faults.deadly_engine", *flags) as service, LlmClient(service.address) as client:
        undisturbed = [said(client, request) for request in asking]
        with ThreadPoolExecutor(len(asking) + 1) as threads:
            large = threads.submit(answer, client, asked(user("large"), drawn(logit_bias={LARGE: 4.0})))
            answers = [threads.submit(said, client, request) for request in asking]
            assert [each.result() for each in answers] == undisturbed
            assert len(large.result().choices[0].token_ids) == 400
        assert "too little memory for a step" in service.log.read_text()
        until(lambda: client.get_load().preemptions > 0, "the engine's beat has come")
        assert ends(service) == 0
        assert refusal(client, asked(user("die"), drawn(logit_bias={LARGE: 0.0}))).reason == "ENGINE_UNAVAILABLE"
        assert ends(service) == 3
        until(lambda: holds_nothing(client), "nothing is held")


def ends(service: Service) -> int:
    """Engines of the service that have ended."""
    return service.log.read_text().count("the engine has ended")


def test_of_an_engine_that_hangs_the_log_says_where(checkpoint: Path) -> None:
    flags = [f"--model={checkpoint}", "--listen=127.0.0.1:0", "--kv-cache-bytes=32MiB", "--step-seconds=1"]
    with launch("tests.faults.deadly_engine", *flags) as service, LlmClient(service.address) as client:
        hanging = drawn(logit_bias={HANGING: -1.0})
        error = refusal(client, asked(user("hang"), hanging, max_handovers=0))
        assert error.reason == "ENGINE_UNAVAILABLE"
        until(lambda: "in launch_or_die" in service.log.read_text(), "the log says where")
        until(lambda: len(answer(client, asked(user("and now?"))).choices[0].token_ids) == 8, "an engine serves")


def test_of_an_engine_that_finds_a_defect_in_itself_the_log_says_what_and_where(checkpoint: Path) -> None:
    flags = [f"--model={checkpoint}", "--listen=127.0.0.1:0", "--kv-cache-bytes=32MiB"]
    with launch("tests.faults.deadly_engine", *flags) as service, LlmClient(service.address) as client:
        breaking = asked(user("break"), drawn(logit_bias={BROKEN: -1.0}), max_handovers=0)
        assert refusal(client, breaking).reason == "ENGINE_UNAVAILABLE"
        until(lambda: "post-mortem of the engine" in service.log.read_text(), "it has been looked at")
        (found,) = (line for line in service.log.read_text().splitlines() if "post-mortem of the engine" in line)
        assert "ValueError in __main__.Broken.result, line " in found
        assert "exit status 1" in found


def heard(stream: Iterator[v1.GenerateResponse]) -> list[int]:
    """The tokens of a whole stream."""
    return [token for event in stream for token in event.delta.token_ids]


@pytest.mark.soak
def test_the_real_model_goes_on_in_its_next_engine(checkpoint: Path) -> None:
    with pair(checkpoint, light=False, max_handovers=100, spare_engine="yes") as both:
        asking = [
            asked(user("count"), greedy(200)),
            asked(about(pictures.encoded(pictures.noise(64, 64, 9_512))), greedy(200)),
        ]
        undisturbed = [said(both.text, request) for request in asking]
        with ThreadPoolExecutor(2) as threads:
            answers = [threads.submit(said, both.text, request) for request in asking]
            until(lambda: computes(both.text) or all(each.done() for each in answers), "an engine computes")
            for pid in both.llm.children(ENGINE):
                send(pid, signal.SIGKILL)
            assert [each.result() for each in answers] == undisturbed
        until(lambda: both_idle(both), "an engine serves, though the answers may have ended before")
