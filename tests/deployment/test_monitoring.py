"""What autoscalers, the board and alerts ask is what running services tell a real Prometheus."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import pictures
from tests.deployment.charts import CHART, VALUES, manifests, of_kind, template
from tests.deployment.prometheus import CONFIG, RULE_FILES, Prometheus, program, prometheus
from tests.gateway.trio import Trio, fronted, image, said, text
from tests.launch import ROOT
from tests.ports import held_address
from tests.rpc.pairs import pair
from tests.waiting import until

ALERTS = yaml.safe_load((CHART / "files/alerts.yaml").read_text())["groups"][0]["rules"]
VLLM_NAMES = yaml.safe_load((CHART / "files/vllm-names.yaml").read_text())["groups"][0]["rules"]
BOARD = json.loads((CHART / "files/dashboard.json").read_text())
RULES = yaml.safe_load((CHART / "files/adapter-rules.yaml").read_text())["rules"]["custom"]
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
CASES = Path(__file__).with_name("alerts_test.yaml")


def queries() -> Iterator[tuple[str, str]]:
    """Each with who asks it; an alert without the bound that it fires at."""
    for rule in ALERTS:
        measured, bounds = re.subn(r"\s(==|>|<)\s[\d.]+$", "", rule["expr"])
        assert bounds == 1, rule["alert"]
        yield rule["alert"], measured
    for panel in BOARD["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"].replace("$__rate_interval", "1m")
    for rule in RULES:
        query = rule["metricsQuery"].replace("{<<.LabelMatchers>>}", "").replace("<<.GroupBy>>", "instance")
        assert "<<" not in query
        yield rule["name"]["as"], query
        yield f"the series of {rule['name']['as']}", re.sub(r"\{.*\}", "", rule["seriesQuery"])


METRICS = {"metrics_listen": "127.0.0.1:0"}
PREFILLS = {"prefill_services": "127.0.0.1:1", "kv_host_bytes": "8MiB"}
"""Nobody is there, and no prompt is long enough for it: what is counted is there all the same."""


@pytest.fixture(scope="module")
def observed(
    checkpoints: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Trio, Prometheus]]:
    """All services, and a Prometheus that scrapes them."""
    program("prometheus")
    port = int(held_address().rpartition(":")[2])
    with (
        pair(checkpoints("qwen3_vl"), encoder_flags=METRICS, **METRICS, **PREFILLS) as services,
        fronted(services) as door,
        prometheus(
            tmp_path_factory.mktemp("prometheus"),
            port,
            encoder=services.encoder.metrics,
            llm=services.llm.metrics,
            gateway=door.gateway.address,
        ) as running,
    ):
        yield door, running


NUMBERS = itertools.count(900)


def ask(door: Trio) -> None:
    """A new picture is asked about, twice."""
    picture = pictures.encoded(pictures.noise(64, 48, next(NUMBERS)))
    for _ in range(2):
        assert door.chat(messages=[said(image(picture), text("What is it?"))]).status == 200


def test_every_query_has_an_answer(observed: tuple[Trio, Prometheus]) -> None:
    """Requests go on meanwhile: some queries ask for what grew between two scrapes."""
    door, running = observed
    left = list(queries())

    def answered() -> bool:
        ask(door)
        left[:] = [(who, query) for who, query in left if not running.values(query)]
        return not left

    try:
        until(answered, "every query is answered")
    except AssertionError:
        assert not left  # says which


WITHOUT_DRAFTS = "vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"
"""There is none of these where nobody drafts."""


def test_figures_are_there_by_vllms_names(observed: tuple[Trio, Prometheus]) -> None:
    """Of each series that the rules read there is one, and theirs grows as it does, with the model's name."""
    door, running = observed
    ask(door)
    names = [rule["record"] for rule in VLLM_NAMES if rule["record"].startswith("vllm:")]
    assert len(names) == len(VLLM_NAMES) - 1
    undrafted = {name.replace("vllm:", "twinlens_llm_") for name in WITHOUT_DRAFTS}
    read = {each for rule in VLLM_NAMES for each in re.findall(r"twinlens_llm_\w+", rule["expr"])} - undrafted
    until(lambda: read <= set(running.get("label/__name__/values")), "all that the rules read is there")
    until(lambda: all(running.values(name) for name in names if name not in WITHOUT_DRAFTS), "all are recorded")
    for name in ("prompt_tokens_total", "time_to_first_token_seconds_bucket", "request_success_total"):
        own, theirs = f"twinlens_llm_{name}", f'vllm:{name}{{model_name="{door.model}"}}'
        until(lambda own=own, theirs=theirs: recorded(running, own) == recorded(running, theirs), f"{theirs} is {own}")
        assert recorded(running, theirs)


def recorded(running: Prometheus, query: str) -> list[float]:
    return sorted(running.values(query))


def test_no_alert_fires_while_all_is_well(observed: tuple[Trio, Prometheus]) -> None:
    door, running = observed
    ask(door)
    until(lambda: all(rule["health"] == "ok" for rule in loaded(running)), "all rules were evaluated")
    assert {rule["name"] for rule in loaded(running)} == {rule["alert"] for rule in ALERTS}
    assert not [rule["name"] for rule in loaded(running) if rule["state"] == "firing"]


def loaded(running: Prometheus) -> list[dict[str, Any]]:
    groups = {group["name"]: group["rules"] for group in running.get("rules")["groups"]}
    return list(groups["twinlens"])


def test_alerts_fire_where_they_should_and_nowhere_else() -> None:
    cases = yaml.safe_load(CASES.read_text())["tests"]
    seen = {(test["alertname"], bool(test["exp_alerts"])) for case in cases for test in case["alert_rule_test"]}
    assert seen == {(rule["alert"], fires) for rule in ALERTS for fires in (True, False)}
    done = subprocess.run(
        [program("promtool"), "test", "rules", CASES], capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_configuration_is_prometheuss(tmp_path: Path) -> None:
    config = yaml.safe_load(CONFIG.read_text())
    assert [Path(each).name for each in config["rule_files"]] == [Path(each).name for each in RULE_FILES]
    config["rule_files"] = RULE_FILES
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    done = subprocess.run(
        [program("promtool"), "check", "config", tmp_path / "prometheus.yml"],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_compose_scrapes_where_its_services_tell() -> None:
    for job in yaml.safe_load(CONFIG.read_text())["scrape_configs"]:
        (found,) = job["dns_sd_configs"]
        (name,) = found["names"]
        words = COMPOSE["services"][name]["command"]
        option = "--listen" if name == "gateway" else "--metrics-listen"
        assert words[words.index(option) + 1] == f"0.0.0.0:{found['port']}"


def test_compose_mounts_what_is_there_and_names_each_image_by_its_release() -> None:
    for name in ("prometheus", "grafana", "jaeger"):
        service = COMPOSE["services"][name]
        assert service["profiles"] == ["observe"]
        assert re.fullmatch(r"docker\.io/[\w/]+:v?[\d.]+", service["image"])
        for source in (volume.split(":")[0] for volume in service.get("volumes", ())):
            assert source in COMPOSE["volumes"] or (ROOT / source).is_file()


def test_the_chart_has_the_same_rules_and_the_same_board() -> None:
    (rules,) = of_kind(manifests("gpu"), "PrometheusRule").values()
    assert rules["spec"]["groups"][0]["rules"] == ALERTS
    both = of_kind(template(*VALUES["gpu"], "--set", "monitoring.vllmNames=true"), "PrometheusRule")
    assert both["twinlens"] == rules
    assert both["twinlens-vllm-names"]["spec"]["groups"][0]["rules"] == VLLM_NAMES
    board = of_kind(manifests("gpu"), "ConfigMap")["twinlens-dashboard"]
    assert json.loads(board["data"]["twinlens.json"]) == BOARD
