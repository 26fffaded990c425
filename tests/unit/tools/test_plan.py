"""The plan's simulation against what can be worked out by hand, and its measures against light services."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch import ROOT
from tests.rpc.pairs import pair
from tools.plan.__main__ import compared
from tools.plan.autoscaler import STABLE, Autoscaler, Targets
from tools.plan.costs import Costs
from tools.plan.simulation import Clock, Cluster, Device, percentile
from tools.plan.workload import Request, Workload, arrivals

COSTS = Costs(
    batch=0.5, patch=0.01, picture=0.1, picture_patch=0.001, front=0.05, step=0.02, prefill=0.001, decode=0.004
)
WORKLOAD = Workload(patches=100, pictures=1, prompt_tokens=25, answer_tokens=3)
ENCODED = 0.1 + 0.1 + 0.5 + 1.0
FIRST = 0.05 + ENCODED + 0.02 + 0.001 * 50


def played(cluster: Cluster, *requests: Request) -> list[tuple[float, float]]:
    """Seconds to the first and to the last token of each."""
    cluster.play(requests)
    return [(each.first_token - each.arrived, each.ended - each.arrived) for each in cluster.measured]


def test_one_request_takes_the_sum_of_its_stages() -> None:
    (seen,) = played(Cluster.split(COSTS, WORKLOAD, 1, 1), Request(0, 3.0, (0,)))
    assert seen == (pytest.approx(FIRST), pytest.approx(FIRST + 2 * 0.024))


def test_pictures_that_wait_go_together_and_those_that_are_known_are_not_computed() -> None:
    cluster = Cluster.split(COSTS, WORKLOAD, 1, 1)
    first, second, third, again = played(
        cluster, Request(0, 0.0, (0,)), Request(1, 1.0, (1,)), Request(2, 1.0, (2,)), Request(3, 100.0, (2,))
    )
    assert first[0] == pytest.approx(FIRST)
    batch = 0.5 + 2 * 1.0
    waited = 0.05 + ENCODED - 1.0 + batch
    assert second[0] == pytest.approx(waited + 0.02 + 0.001 * 50)
    assert third[0] == pytest.approx(second[0] + 0.02 + 0.001 * 50 + 0.004), "the first of them had begun a step"
    assert again[0] == pytest.approx(0.05 + 0.1 / 2 + 0.02 + 0.001 * 50)
    assert cluster.encoders[0].device.busy_seconds == pytest.approx(1.5 + batch)


def test_devices_that_share_a_core_are_busy_for_as_long_as_that_takes_them() -> None:
    clock = Clock(cores=1)
    devices = [Device(clock), Device(clock)]
    seen: list[float] = []
    for device in devices:
        device.ask(lambda: 4.0, lambda: None)
    clock.at(2.0, lambda: seen.extend(device.busy_seconds for device in devices))
    clock.run(lambda: False)
    assert seen == [2.0, 2.0]
    assert [device.busy_seconds for device in devices] == [8.0, 8.0]


def test_requests_that_come_together_go_through_the_front_one_after_the_other() -> None:
    text = Workload(pictures=0, prompt_tokens=50, answer_tokens=1)
    seen = played(Cluster.split(COSTS, text, 1, 1), Request(0, 0.0, ()), Request(1, 0.0, ()))
    assert [first for first, _ in seen] == [pytest.approx(0.05 + 0.07), pytest.approx(0.05 + 0.07 + 0.07)]
    assert played(Cluster.split(COSTS, text, 1, 2), Request(0, 0.0, ()), Request(1, 0.0, ())) == [seen[0]] * 2


def test_prompts_are_computed_in_chunks_beside_running_answers() -> None:
    costs = _with(step_tokens=30)
    text = Workload(pictures=0, prompt_tokens=50, answer_tokens=2)
    (seen,) = played(Cluster.split(costs, text, 1, 1), Request(0, 0.0, ()))
    assert seen[0] == pytest.approx(0.05 + (0.02 + 0.03) + (0.02 + 0.02))


def test_tasks_of_one_machine_share_its_cores() -> None:
    clock, ended = Clock(2), []
    for seconds in (1.0, 2.0, 3.0):
        clock.compute(seconds, lambda: ended.append(clock.now))
    clock.run(lambda: len(ended) == 3)
    assert ended == [pytest.approx(1.5), pytest.approx(2.5), pytest.approx(3.5)]


def test_apart_a_picture_does_not_hold_up_answers() -> None:
    long = Workload(patches=100, pictures=1, prompt_tokens=25, answer_tokens=40)
    requests = [Request(0, 0.0, (0,)), Request(1, 1.8, (1,))]
    apart, together = (
        played(cluster, *requests) for cluster in (Cluster.split(COSTS, long, 1, 1), Cluster.joined(COSTS, long, 1))
    )
    assert apart[0][1] == pytest.approx(FIRST + 39 * 0.024, abs=0.1)
    assert together[0][1] > apart[0][1] + 1.4


def test_arrivals_come_at_their_rate_and_repeat_their_share() -> None:
    came = list(arrivals(Workload(repeats=0.5), [(1000, 2.0), (1000, 0.0), (1000, 4.0)]))
    assert sum(each.at < 1000 for each in came) == pytest.approx(2000, rel=0.1)
    assert not [each for each in came if 1000 <= each.at < 2000]
    assert len({each.pictures for each in came}) == pytest.approx(len(came) / 2, rel=0.1)
    assert came == list(arrivals(Workload(repeats=0.5), [(1000, 2.0), (1000, 0.0), (1000, 4.0)]))


def test_the_autoscaler_follows_the_load_up_at_once_and_down_after_ten_minutes() -> None:
    costs = _with(patch=0.001, batch=0.0, start_seconds=30.0)
    workload = Workload(patches=100, pictures=1, prompt_tokens=25, answer_tokens=2)
    cluster = Cluster.split(costs, workload, 1, 1)
    scaler = Autoscaler(cluster, Targets(busy_workers=0.5, backlog_seconds=1e9))
    scaler.play(arrivals(workload, [(300, 1.0), (600, 20.0), (1500, 1.0)]))
    at = {look.at: look for look in scaler.looks}
    assert at[300.0].encoders == 1
    grown = at[885.0]
    assert grown.encoders >= math.ceil(20 * 0.1 / 0.5 * 0.9)
    assert at[900.0 + STABLE - 60].encoders >= grown.encoders - 1
    assert scaler.looks[-1].encoders == 1


def test_targets_that_want_more_of_a_replica_cost_less_and_answer_later() -> None:
    """Of each target, from the eager to the frugal one, with the other ones as the chart has them."""
    asked = Workload(patches=20, pictures=1, prompt_tokens=5, answer_tokens=20)
    found = compared(COSTS, asked, [(60, 0.5), (240, 4.0)])
    kinds = [
        (lambda each: each.targets.busy_workers, lambda each: each.encoder_hours),
        (lambda each: each.targets.backlog_seconds, lambda each: each.encoder_hours),
        (lambda each: each.targets.sequences, lambda each: each.llm_hours),
    ]
    for target, hours in kinds:
        eager, *_, frugal = sorted(found, key=target)
        assert target(eager) < target(frugal)
        assert hours(eager) > hours(frugal)
        assert eager.first_token <= frugal.first_token


def test_a_percentile_is_a_value_that_was_seen() -> None:
    assert percentile([3.0, 1.0, 2.0, 4.0], 0.5) == 2.0
    assert percentile([3.0, 1.0, 2.0, 4.0], 0.95) == 4.0
    assert math.isnan(percentile([], 0.5))


def _with(**changed: float) -> Costs:
    fields = {name: getattr(COSTS, name) for name in COSTS.__dataclass_fields__}
    return Costs(**{**fields, **changed})


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tools.plan", *words], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )


def test_the_command_finds_the_smallest_that_meets_the_targets(tmp_path: Path) -> None:
    _with(batch=0.01, patch=0.0005, prefill=0.0001, decode=0.0005, front=0.01).write(tmp_path / "costs.json")
    done = _run(
        *("ask", "--device", f"cpu={tmp_path}/costs.json:2", "--rate", "30", "--patches", "100"),
        *("--answer-tokens", "10", "--first-token", "1", "--between-tokens", "0.1"),
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split(None, 1)[0] for line in done.stdout.splitlines()[1:]]
    assert [float(price) for price in rows] == sorted(float(price) for price in rows)
    assert "3 encoders and 1 LLM service" in done.stdout
    assert "both services on each" in done.stdout


def test_targets_that_a_request_alone_misses_are_refused_before_plans_are_tried(tmp_path: Path) -> None:
    _with().write(tmp_path / "costs.json")
    done = _run(
        *("ask", "--device", f"cpu={tmp_path}/costs.json", "--rate", "1000", "--patches", "100"),
        *("--prompt-tokens", "25", "--answer-tokens", "3", "--first-token", "1", "--between-tokens", "0.05"),
    )
    assert done.returncode == 1
    best = f"after {FIRST:.3f} s and 0.0240 s on cpu"
    assert done.stderr.startswith("plan: no plan of up to 64 devices meets the targets; a request alone")
    assert done.stderr.endswith(f"{best}\n")


def test_costs_are_measured_on_a_pair_and_can_be_read_again(tmp_path: Path, checkpoints: Callable[..., Path]) -> None:
    with pair(checkpoints("qwen3_vl")) as services:
        done = _run("measure", "--llm", services.llm.address, str(tmp_path / "costs.json"), "--large", "256")
    assert done.returncode == 0, done.stderr
    costs = Costs.read(tmp_path / "costs.json")
    assert costs.front + costs.step + costs.prefill > 0, "of these a busy machine may take one for another"
    assert costs.step + costs.decode > 0
    assert set(json.loads((tmp_path / "costs.json").read_text())) == set(Costs.__dataclass_fields__)
