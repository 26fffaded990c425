"""The LLM service under fire: its engine dies, its callers leave, too many come, and it is told to stop."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests import pictures
from tests.faults.configuration import taken_away
from tests.launch import ROOT, Service, command_line, descendants, launch, llm_server, send
from tests.rpc.pairs import LLM_FLAGS, Pair, about, answer, asked, greedy, idle, lasting, pair, tokens
from tests.waiting import until
from twinlens import LlmClient, TwinlensError, user, v1

ENGINE = "llm_service.engine"
ANY_PORT = "--listen=127.0.0.1:0"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(scope="module")
def own(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkpoint, from which files may be taken away."""
    return Path(shutil.copytree(checkpoint, tmp_path_factory.mktemp("own") / "copy"))


@pytest.fixture(scope="module")
def both(own: Path) -> Iterator[Pair]:
    with pair(own) as running:
        yield running


@pytest.fixture
def health(both: Pair) -> Iterator[Callable[[], int]]:
    """What the LLM service's health says now."""
    with grpc.insecure_channel(both.llm.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        yield lambda: stub.Check(health_pb2.HealthCheckRequest(service="twinlens.v1.LlmService"), timeout=180).status


def engine_of(service: Service) -> int:
    (pid,) = service.children(ENGINE)
    return pid


def test_kill_of_the_engine_fails_requests_that_do_not_outlive_it_and_the_next_one_is_right(
    both: Pair, health: Callable[[], int], own: Path
) -> None:
    asking = asked(about(pictures.encoded(pictures.noise(64, 64, 8_001))))
    good = tokens(both.text, asking)
    killed = engine_of(both.llm)
    with ThreadPoolExecutor(4) as threads:
        streams = [both.text.generate(asked(user(f"count {n}"), lasting(), max_handovers=0)) for n in range(4)]
        for stream in streams:
            assert next(iter(stream)).HasField("started")
        with taken_away(own):
            os.kill(killed, signal.SIGKILL)
            errors = list(threads.map(ending, streams))
            until(lambda: health() == NOT_SERVING, "health says that it does not serve")
            now = ending(both.text.generate(asked(user("now?"), max_handovers=0)))
    assert {(error.code, error.reason) for error in errors} == {(grpc.StatusCode.UNAVAILABLE, "ENGINE_UNAVAILABLE")}
    assert all(error.retry_after is not None for error in errors)
    assert now.code is grpc.StatusCode.UNAVAILABLE
    until(lambda: health() == SERVING, "health says that it serves again")
    assert engine_of(both.llm) != killed
    assert not command_line(killed)
    assert tokens(both.text, asking) == good


def test_those_who_wait_for_their_turn_are_told_as_well_when_the_engine_is_killed(checkpoint: Path) -> None:
    flags = {**LLM_FLAGS, "max_running": 1}
    with (
        llm_server(checkpoint, **flags) as service,
        LlmClient(service.address) as client,
        ThreadPoolExecutor(7) as pool,
    ):
        running = client.generate(asked(user("count"), lasting(), max_handovers=0))
        assert next(iter(running)).HasField("started")
        waiting = [client.generate(asked(user(f"wait {n}"), max_handovers=0)) for n in range(6)]
        errors = [pool.submit(ending, stream) for stream in (running, *waiting)]
        until(lambda: client.get_load().waiting == 6, "six wait")
        os.kill(engine_of(service), signal.SIGKILL)
        assert {error.result().code for error in errors} == {grpc.StatusCode.UNAVAILABLE}
        assert all(error.result().retry_after for error in errors)
        until(lambda: serves(client), "a new engine serves")
        until(lambda: idle(client), "nothing is held")


def started(pid: int) -> int:
    """When a process was started, in ticks since boot."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def engines(service: Service) -> list[int]:
    """Its engine processes, the oldest first."""
    return sorted(service.children(ENGINE), key=started)


@pytest.mark.parametrize(
    "which", ["the engine", pytest.param("the one in reserve, then the engine", marks=pytest.mark.soak)]
)
def test_with_an_engine_in_reserve_the_next_one_is_there_already(checkpoint: Path, which: str) -> None:
    with llm_server(checkpoint, **LLM_FLAGS, spare_engine="yes") as service, LlmClient(service.address) as client:
        good = tokens(client, asked(user("hello")))
        until(lambda: len(engines(service)) == 2, "one is in reserve")
        engine, spare = engines(service)
        if which != "the engine":
            os.kill(spare, signal.SIGKILL)
            until(lambda: not command_line(spare), "it is gone")
        os.kill(engine, signal.SIGKILL)
        until(lambda: serves(client), "an engine serves again")
        assert tokens(client, asked(user("hello"))) == good
        assert (engines(service)[0] == spare) == (which == "the engine")
        until(lambda: len(engines(service)) == 2, "another one is in reserve")


def serves(client: LlmClient) -> bool:
    try:
        return len(tokens(client, asked(user("and now?")))) == 8
    except TwinlensError:
        return False


def ending(stream: Iterator[v1.GenerateResponse]) -> TwinlensError:
    """The error that a stream ends with."""
    with pytest.raises(TwinlensError) as error:
        _read(stream)
    return error.value


def _read(stream: Iterator[v1.GenerateResponse]) -> None:
    for _ in stream:
        pass


@pytest.mark.parametrize("moment", ["before it starts", "in prefill", "in decode"])
def test_a_caller_who_leaves_gives_everything_back(both: Pair, moment: str) -> None:
    cancelled = both.text.get_load().cancelled_requests
    words = "word " * 1200 if moment == "in prefill" else "count"
    stream = both.text.generate(asked(user(words), lasting()))
    if moment == "in decode":
        events = iter(stream)
        while not next(events).HasField("delta"):
            pass
    elif moment == "in prefill":
        until(lambda: both.text.get_load().running == 1, "it is being computed")
    stream.cancel()
    if moment != "before it starts":
        until(lambda: both.text.get_load().cancelled_requests > cancelled, "the service has heard of it")
    until(both.idle, "everything was given back")


def test_callers_who_leave_at_any_moment_leave_nothing_behind(both: Pair) -> None:
    file = pictures.encoded(pictures.noise(96, 96, 8_002))
    for number in range(24):
        prompt = about(file, f"Question {number % 5}?") if number % 2 else user(f"count {number}")
        stream = both.text.generate(asked(prompt, greedy(300)))
        events = iter(stream)
        for _ in range(number % 6):
            next(events)
        stream.cancel()
    until(both.idle, "everything was given back")
    assert len(tokens(both.text, asked(about(file)))) == 8


def test_a_channel_that_closes_ends_all_its_calls(both: Pair) -> None:
    with LlmClient(both.llm.address) as leaver:
        streams = [leaver.generate(asked(user(f"count {n}"), lasting())) for n in range(3)]
        for stream in streams:
            next(iter(stream))
    until(both.idle, "everything was given back")


def test_a_frozen_reader_holds_nobody_up(both: Pair) -> None:
    with both.text.generate(asked(user("count"), lasting())) as stream:
        next(iter(stream))
        assert len(tokens(both.text, asked(user("hello")))) == 8
    until(both.idle, "everything was given back")


def test_two_hundred_at_once_are_answered_or_refused_and_none_is_lost(checkpoint: Path) -> None:
    with (
        llm_server(checkpoint, **{**LLM_FLAGS, "kv_cache_bytes": "2MiB"}, max_requests=120, max_running=32) as service,
        LlmClient(service.address) as client,
    ):
        alone = [tokens(client, asked(user(f"request {n % 10}"), greedy(16))) for n in range(10)]

        def attempt(number: int) -> str:
            try:
                said = answer(client, asked(user(f"request {number % 10}"), greedy(16)))
            except TwinlensError as error:
                return error.code.name if error.retry_after else "refused without a hint"
            return "right" if said.choices[0].token_ids == alone[number % 10] else "wrong"

        with ThreadPoolExecutor(200) as threads:
            outcomes = Counter(threads.map(attempt, range(200)))
        assert set(outcomes) <= {"right", "RESOURCE_EXHAUSTED"}
        assert outcomes["right"] >= 120
        until(lambda: idle(client), "nothing is held")
        load = client.get_load()
        assert load.finished_requests == outcomes["right"] + 10
        assert load.failed_requests == outcomes["RESOURCE_EXHAUSTED"]


def test_sigterm_lets_a_stream_finish_and_turns_new_calls_away(checkpoint: Path) -> None:
    with ExitStack() as stack:
        service = stack.enter_context(llm_server(checkpoint, **LLM_FLAGS))
        client = stack.enter_context(LlmClient(service.address))
        with grpc.insecure_channel(service.address) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=180)
            assert next(watch).status == SERVING
            beside = client.generate(asked(user("stay"), lasting()))
            assert next(iter(beside)).HasField("started")
            stream = iter(client.generate(asked(user("count"), greedy(400))))
            assert next(stream).HasField("started")
            service.process.send_signal(signal.SIGTERM)
            assert next(watch).status == NOT_SERVING
            for late in (client, stack.enter_context(LlmClient(service.address))):
                with pytest.raises(TwinlensError) as error:
                    answer(late, asked(user("me too")))
                assert (error.value.code, error.value.reason) == (grpc.StatusCode.UNAVAILABLE, "STOPPING")
                assert error.value.retry_after
            beside.cancel()
            events = list(stream)
        assert events[-1].finished.usage.completion_tokens == 400
        assert service.process.wait(180) == 0


def test_sigterm_to_all_of_its_processes_lets_a_stream_finish_too(checkpoint: Path) -> None:
    """As systemd stops a unit."""
    with llm_server(checkpoint, **LLM_FLAGS) as service, LlmClient(service.address) as client:
        stream = iter(client.generate(asked(user("count"), greedy(200))))
        assert next(stream).HasField("started")
        for pid in (service.process.pid, *service.descendants()):
            send(pid, signal.SIGTERM)
        assert list(stream)[-1].finished.usage.completion_tokens == 200
        assert service.process.wait(180) == 0


def test_sigterm_with_no_time_left_ends_streams_with_a_status(checkpoint: Path) -> None:
    with llm_server(checkpoint, **LLM_FLAGS, grace_seconds=0.2) as service, LlmClient(service.address) as client:
        stream = client.generate(asked(user("count"), lasting()))
        assert next(iter(stream)).HasField("started")
        service.process.send_signal(signal.SIGTERM)
        assert ending(stream).code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        assert service.process.wait(180) == 0


def test_sigterm_while_the_engine_still_loads_ends_at_once(checkpoint: Path) -> None:
    command = [sys.executable, "-m", "llm_service", f"--model={checkpoint}", ANY_PORT, "--threads=1"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            until(lambda: any(ENGINE in line for line in descendants(process.pid).values()), "the engine has begun")
            left = descendants(process.pid)
            process.send_signal(signal.SIGTERM)
            out, _ = process.communicate(timeout=180)
        finally:
            process.kill()
    assert process.returncode == 0
    assert b"ready" not in out
    until(lambda: not any(command_line(pid) for pid in left), "the engine is gone")


def test_a_front_that_is_killed_takes_its_engine_with_it(checkpoint: Path) -> None:
    flags = [ANY_PORT, "--threads=1", "--kv-cache-bytes=4MiB", "--row-cache-bytes=1MiB"]
    with launch("testkit.light.llm", f"--model={checkpoint}", *flags, exit_code=-signal.SIGKILL) as service:
        engine = engine_of(service)
        service.process.kill()
        until(lambda: not command_line(engine), "the engine is gone")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("no weights", "model.safetensors"),
        ("broken configuration", "config.json"),
        ("another kind of model", "is not supported"),
    ],
)
def test_a_checkpoint_that_cannot_be_served_is_one_line_and_no_process_is_left(
    checkpoint: Path, tmp_path: Path, change: str, said: str
) -> None:
    folder = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    if change == "no weights":
        (folder / "model.safetensors").unlink()
    elif change == "broken configuration":
        (folder / "config.json").write_text("{")
    else:
        config = (folder / "config.json").read_text()
        (folder / "config.json").write_text(config.replace('"qwen3_vl"', '"no_such_model"'))
    assert said in refusal(f"--model={folder}")


def test_a_cache_that_holds_no_block_is_told_at_the_start(checkpoint: Path) -> None:
    said = refusal(f"--model={checkpoint}", "--threads=1", "--kv-cache-bytes=64KiB", "--block-size=256")
    assert "--kv-cache-bytes is too small" in said


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("--kv-cache-bytes=200TiB", "this machine's memory is too small: you tried to allocate "),
        ("--row-cache-bytes=200TiB", "219902325555200 bytes of shared memory cannot be had for twinlens-rows: "),
    ],
)
def test_memory_that_cannot_be_had_is_one_line(checkpoint: Path, option: str, says: str) -> None:
    assert says in refusal(f"--model={checkpoint}", "--threads=1", option)


def test_an_adapter_that_is_not_there_at_the_start_is_named(checkpoint: Path, tmp_path: Path) -> None:
    said = refusal(f"--model={checkpoint}", "--threads=1", f"--lora-dir={tmp_path}", "--lora-modules=mine=nowhere")
    assert "--lora-modules mine=nowhere: the adapter cannot be loaded: there is no such folder below" in said


def test_a_port_for_metrics_that_cannot_be_had_is_one_line(checkpoint: Path) -> None:
    said = refusal(f"--model={checkpoint}", "--threads=1", "--metrics-listen=192.0.2.1:9400", fork=False)
    assert "cannot serve metrics on 192.0.2.1:9400" in said


def refusal(*flags: str, fork: bool = True) -> str:
    """The last line that a service says which cannot begin; it ends with 1, and without a traceback."""
    with pytest.raises(RuntimeError) as error, launch("llm_service", ANY_PORT, *flags, fork=fork):
        pass
    said = str(error.value)
    assert said.startswith("the service ended with 1 before it was ready\n")
    assert "Traceback" not in said
    return said.splitlines()[-1]
