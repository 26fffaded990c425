"""What Prometheus reads of a real LLM service, against what it did; and the bounds on what may wait."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from tests.launch import ROOT, Service, gateway, llm_server
from tests.rpc.pairs import LLM_FLAGS, answer, asked, greedy, idle, lasting, refusal, tokens
from tests.scrape import families, labelled, picker_specs, scrape
from tests.waiting import until
from twinlens import LlmClient, user

PREFIX = "twinlens_llm_"


@pytest.fixture(scope="module")
def service(checkpoints: Callable[..., Path]) -> Iterator[Service]:
    """A service without an encoder that computes two at once, and lets three wait."""
    flags = {**LLM_FLAGS, "max_running": 2, "max_waiting": 3, "max_waiting_tokens": 600}
    with llm_server(checkpoints("qwen3_vl"), metrics_listen="127.0.0.1:0", **flags) as running:
        yield running


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[LlmClient]:
    with LlmClient(service.address) as calls:
        yield calls


def samples(service: Service) -> dict[str, float]:
    return {name.removeprefix(PREFIX): value for name, value in scrape(service.metrics).items()}


def test_the_log_says_how_much_there_is_room_for(service: Service) -> None:
    lines = [json.loads(line) for line in service.log.read_text().splitlines() if "room for sequences" in line]
    (said,) = lines
    until(lambda: samples(service)["kv_blocks"], "the engine's first state has come")
    found = samples(service)
    info = next(name for name in scrape(service.metrics) if name.startswith(f"{PREFIX}cache_config_info"))
    size = int(re.findall(r'block_size="(\d+)"', info)[0])
    assert said["kv_tokens"] == found["kv_blocks"] * size
    assert said["full_contexts"] == round(said["kv_tokens"] / said["context"], 2) > 0
    assert (said["max_running"], said["step_tokens"]) == (2, found["step_tokens"])
    assert said["kv_bytes"] > said["kv_tokens"]


def test_a_request_is_counted_and_timed(service: Service, client: LlmClient) -> None:
    before = samples(service)
    begun = time.perf_counter()
    said = [answer(client, asked(user("What is there? " * 8), greedy(12))) for _ in range(2)]
    took = time.perf_counter() - begun
    prompt, cached = said[0].usage.prompt_tokens, said[1].usage.cached_tokens
    assert cached > 0

    def grown() -> dict[str, float]:
        return {name: value - before.get(name, 0) for name, value in samples(service).items()}

    until(lambda: grown()["generation_tokens_total"] == 24, "the engine's beat has come")
    found = grown()
    assert found["time_to_first_token_seconds_count"] == found["e2e_request_latency_seconds_count"] == 2
    assert found["inter_token_latency_seconds_count"] == 2 * 11
    assert found["request_queue_time_seconds_count"] == 2
    assert 0 < found["time_to_first_token_seconds_sum"] < found["e2e_request_latency_seconds_sum"] < took
    assert found["inter_token_latency_seconds_sum"] < found["e2e_request_latency_seconds_sum"]
    assert found['request_success_total{finished_reason="length"}'] == 2
    assert found['requests_total{outcome="finished"}'] == 2
    assert found["prompt_tokens_total"] == found["prefix_cache_queries_total"] == 2 * prompt
    assert found["prefix_cache_hits_total"] == cached
    assert found["request_prompt_tokens_sum"] == 2 * prompt
    assert found["request_generation_tokens_sum"] == 24
    assert found["engine_steps_total"] >= 24
    assert found["engine_graph_steps_total"] == 0, "there are no graphs on a CPU"
    until(lambda: samples(service)["kv_cache_usage_ratio"] == 0, "a beat after the last step has come")
    now = samples(service)
    assert (now["num_requests_running"], now["num_requests_waiting"], now["engine_up"]) == (0, 0, 1)
    assert now["num_requests_waiting_for_media"] == 0
    assert now["kv_blocks_cached"] > 0


def test_what_runs_is_seen_while_it_runs_and_load_says_the_same(service: Service, client: LlmClient) -> None:
    cancelled = client.get_load().cancelled_requests
    with ExitStack() as streams:
        for number in range(3):
            stream = streams.enter_context(client.generate(asked(user(f"count {number}"), lasting())))
            if number < 2:
                assert next(iter(stream)).HasField("started")
        until(lambda: client.get_load().waiting_tokens > 0, "the third waits, and its prompt is laid out")
        load = client.get_load()
        assert (load.running, load.waiting) == (2, 1)
        until(lambda: samples(service)["num_sequences_running"] == 2, "two run, as the engine's next beat says")
        found = samples(service)
        assert found["num_requests_waiting"] == 1
        assert 0 < found["kv_cache_usage_ratio"] <= 1, "they hold blocks"
    until(lambda: idle(client), "all were given up")
    until(lambda: samples(service)["kv_cache_usage_ratio"] == 0, "and the blocks")
    until(lambda: client.get_load().cancelled_requests == cancelled + 3, "they are counted")
    assert samples(service)['requests_total{outcome="cancelled"}'] == cancelled + 3


def test_a_scrape_says_what_runs_and_which_encoders_it_needs(service: Service, client: LlmClient) -> None:
    info = client.get_info()
    (line,) = [name for name in samples(service) if name.startswith("info")]
    for label, value in (("version", info.version), ("model", info.model), ("digest", info.encoder_digest)):
        assert f'{label}="{value}"' in line
    assert samples(service)[line] == 1
    assert samples(service)["kv_blocks"] == client.get_load().kv_blocks_total


def test_what_would_wait_too_long_is_refused_at_once_while_the_engine_is_busy(
    service: Service, client: LlmClient
) -> None:
    refused = client.get_load().refused_requests
    with ExitStack() as streams:
        for number in range(2):
            stream = streams.enter_context(client.generate(asked(user(f"busy {number}"), lasting())))
            assert next(iter(stream)).HasField("started")
        waiting = [streams.enter_context(client.generate(asked(user(f"wait {n}"), greedy(2)))) for n in range(3)]
        until(lambda: client.get_load().waiting == 3, "three wait")
        errors = []
        with ThreadPoolExecutor(8) as threads:
            errors = list(threads.map(lambda n: refusal(client, asked(user(f"more {n}"))), range(32)))
        assert {(error.code, error.reason) for error in errors} == {
            (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_WAITING")
        }
        assert all(error.retry_after for error in errors)
        assert len(waiting) == 3
    assert client.get_load().refused_requests == refused + 32
    assert samples(service)['errors_total{reason="TOO_MANY_WAITING"}'] == 32
    until(lambda: idle(client), "all were given up")
    assert len(tokens(client, asked(user("and now?")))) == 8


def test_too_many_tokens_may_not_wait_though_few_requests_do(client: LlmClient) -> None:
    with ExitStack() as streams:
        for number in range(2):
            stream = streams.enter_context(client.generate(asked(user(f"busy {number}"), lasting())))
            assert next(iter(stream)).HasField("started")
        streams.enter_context(client.generate(asked(user("word " * 150), greedy(2))))
        until(lambda: client.get_load().waiting_tokens > 100, "one waits")
        error = refusal(client, asked(user("word " * 500)))
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_WAITING_TOKENS")
        assert error.retry_after
    until(lambda: idle(client), "all were given up")
    assert len(tokens(client, asked(user("word " * 500)))) == 8, "alone it is taken"


def test_the_page_of_metrics_names_every_metric_and_no_other(service: Service, client: LlmClient) -> None:
    tokens(client, asked(user("hello")))
    ours = {name.removeprefix(PREFIX) for name in families(service.metrics) if name.startswith(PREFIX)}
    found = {name.removesuffix("_created") for name in ours}
    table = (
        (ROOT / "docs/operations/monitoring.md").read_text().partition("| `twinlens_llm_…` | |")[2].partition("\n\n")[0]
    )
    cells = [line.split("|")[1] for line in table.splitlines()[2:]]
    named = {name for cell in cells for name in re.findall(r"`(\w+)(?:\{\w+\})?`", cell)}
    assert {_plain(name) for name in named} == {_plain(name) for name in found}


def test_an_endpoint_picker_finds_what_its_configuration_names(service: Service, client: LlmClient) -> None:
    """It wants one sample of each, and numbers in those labels that it counts with."""
    until(lambda: samples(service)["kv_blocks"] > 0, "the engine's beat has come")
    page = labelled(service.metrics)
    specs = picker_specs()
    assert len(specs) == 5
    found = {spec: page[name] for spec, name in specs.items()}
    assert all(len(each) == 1 for each in found.values())
    ((cache, _),) = found["cacheInfoSpec"]
    load = client.get_load()
    assert (int(cache["block_size"]), int(cache["num_gpu_blocks"])) == (16, load.kv_blocks_total)
    ((adapters, when),) = found["loraSpec"]
    assert adapters == {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}
    assert abs(when - time.time()) < 3600, "the latest one counts, by its value"


def test_a_picker_that_asks_a_gateway_beside_the_service_finds_what_it_scores_by(
    service: Service, client: LlmClient
) -> None:
    specs = picker_specs("twinlens-gateway")
    with gateway(service.address) as door, ExitStack() as streams:

        def read() -> list[float]:
            page = labelled(door.address)
            return [page[specs[key]][0][1] for key in ("queuedRequestsSpec", "runningRequestsSpec", "kvUsageSpec")]

        until(lambda: read() == [0, 0, 0], "it has looked")
        for number in range(3):
            stream = streams.enter_context(client.generate(asked(user(f"count {number}"), lasting())))
            if number < 2:
                assert next(iter(stream)).HasField("started")

        def seen() -> bool:
            waiting, running, share = read()
            return (waiting, running) == (1, 2) and 0 < share <= 1

        until(seen, "two run, and one waits")
        assert all(len(labelled(door.address)[name]) == 1 for name in specs.values()), "a picker wants one of each"
    until(lambda: idle(client), "all were given up")


def _plain(name: str) -> str:
    return name.removesuffix("_total")
