"""What containers are started with is what the services understand: flags, ports, probes, times, users. The chart has
tests of its own in tests/deployment."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from common.config import load
from common.rpc.server import ServerConfig
from common.telemetry import tracing
from encoder_service import server as encoder_server
from encoder_service.config import EncoderConfig
from gateway.config import GatewayConfig
from llm_service import server as llm_server
from llm_service.config import LlmConfig
from tests.launch import ROOT
from tools.rolling_trial import __main__ as rolling_trial

KINDS: dict[str, tuple[type[Any], str]] = {
    "encoder_service": (EncoderConfig, encoder_server.SERVICE),
    "llm_service": (LlmConfig, llm_server.SERVICE),
}
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
DOCKERFILE = (ROOT / "Dockerfile").read_text()
MARGIN = 10
"""Seconds to take a service apart in, after its calls have ended."""


def configured(command: list[str]) -> tuple[ServerConfig, str]:
    """The configuration that a container's command line makes, and the service's full name."""
    assert command[:2] == ["python", "-m"]
    kind, service = KINDS[command[2]]
    return load(kind, "TEST", "", [re.sub(r"\$\{\w+:-(.+)\}", r"\1", word) for word in command[3:]], {}), service


def port(address: str) -> int:
    return int(address.rpartition(":")[2])


def test_the_encoder_is_taken_apart_in_time() -> None:
    """What calls held, the last spans, and a second each for decode processes and for all the rest."""
    assert encoder_server.LAST_SECONDS + tracing.LAST_SECONDS + 1 + 1 <= MARGIN


def test_what_the_image_is_made_of_is_let_into_the_build() -> None:
    """Everything is ignored but what is named after an exclamation mark."""
    ignored, *let_in = (ROOT / ".dockerignore").read_text().split()
    assert ignored == "**"
    copied = [line.split()[1:-1] for line in DOCKERFILE.splitlines() if re.match(r"COPY (?!--from)", line)]
    names = {word.removeprefix("!") for word in let_in if word.startswith("!")}
    for source in (source for sources in copied for source in sources):
        assert source in names or any(name.startswith(f"{source}/") for name in names), source


def test_the_images_user_is_a_number() -> None:
    """Kubernetes starts no pod with `runAsNonRoot` of an image whose user has only a name, which could be root's."""
    (made,) = re.findall(r"useradd .*--uid (\d+)", DOCKERFILE)
    assert re.findall(r"^USER (.+)$", DOCKERFILE, re.MULTILINE) == [made]


each_composed = pytest.mark.parametrize("name", ["encoder", "llm"])


def test_every_service_can_have_replicas() -> None:
    """Those that publish a port take a free one for each where theirs is set to nothing."""
    for name, variable in (("encoder", "ENCODERS"), ("llm", "LLM_SERVICES"), ("gateway", "GATEWAYS")):
        service = COMPOSE["services"][name]
        assert service["scale"] == f"${{{variable}:-1}}"
        assert "depends_on" not in service  # podman removes nothing that another container depends on
        assert all(re.fullmatch(r"127\.0\.0\.1:\$\{\w+_PORT-\d+\}:\d+", port) for port in service.get("ports", ()))


def test_what_is_said_for_gpus_is_said_of_services_and_arguments_that_there_are() -> None:
    gpu = yaml.safe_load((ROOT / "deploy/compose.gpu.yaml").read_text())
    for name, service in gpu["services"].items():
        folder = service["environment"]["TRITON_CACHE_DIR"]
        volumes = [volume.split(":") for volume in COMPOSE["services"][name]["volumes"]]
        assert any(folder.startswith(f"{target}/") for _, target, *mode in volumes if not mode)
        for argument in service["build"]["args"]:
            assert re.search(rf"^ARG {argument}\b", DOCKERFILE, re.MULTILINE)


def test_an_llm_service_that_shares_a_gpu_takes_its_memory_when_the_encoder_has_its_own() -> None:
    """And compose waits for the encoder as long as it may load, since it gives up where it is unhealthy."""
    gpu = yaml.safe_load((ROOT / "deploy/compose.gpu.yaml").read_text())["services"]
    assert gpu["llm"]["depends_on"] == {"encoder": {"condition": "service_healthy"}}
    config, _ = configured(COMPOSE["services"]["encoder"]["command"])
    assert isinstance(config, EncoderConfig)
    assert int(gpu["encoder"]["healthcheck"]["start_period"].removesuffix("s")) >= 2 * config.start_seconds


def test_the_trial_asks_for_metrics_that_there_are() -> None:
    """And for replicas by the variables and the labels that compose.yaml has."""
    text = "".join(path.read_text() for path in (ROOT / "docs").rglob("*.md"))
    for service, (number, metric) in rolling_trial.METRICS.items():
        assert metric.removeprefix("twinlens_gateway_").removeprefix("twinlens_llm_") in text
        assert f":{number}" in " ".join(COMPOSE["services"][service]["command"])
    assert {f"${{{name}:-1}}" for name in rolling_trial.SCALES.values()} == {
        COMPOSE["services"][service]["scale"] for service in rolling_trial.SCALES
    }
    assert f"{rolling_trial.STOP_SECONDS}s" == COMPOSE["services"]["llm"]["stop_grace_period"]


class TestCompose:
    @each_composed
    def test_the_command_is_understood_and_its_port_is_the_one_that_is_probed(self, name: str) -> None:
        service = COMPOSE["services"][name]
        config, full_name = configured(service["command"])
        (published,) = service.get("ports") or service["expose"]
        probe = service["healthcheck"]["test"]
        assert port(config.listen) == port(published) == port(probe[3])
        assert probe[4:] == ["--service", full_name]
        assert str(port(config.listen)) in re.findall(r"\d+", re.findall("^EXPOSE (.+)$", DOCKERFILE, re.MULTILINE)[0])

    @each_composed
    def test_calls_may_end_before_the_container_is_killed(self, name: str) -> None:
        service = COMPOSE["services"][name]
        config, _ = configured(service["command"])
        assert int(service["stop_grace_period"].removesuffix("s")) >= config.grace_seconds + MARGIN

    @each_composed
    def test_folders_that_are_written_to_are_the_users(self, name: str) -> None:
        """A named volume has the owner of what the image has in its place."""
        made = re.findall(r"install -d -o twinlens (.+)$", DOCKERFILE, re.MULTILINE)[0].split()
        for volume in COMPOSE["services"][name]["volumes"]:
            source, target, *mode = volume.split(":")
            assert (source in COMPOSE["volumes"] and target in made) or mode == ["ro"]

    @each_composed
    def test_compiled_kernels_outlive_the_container(self, name: str) -> None:
        service = COMPOSE["services"][name]
        assert f"kernels:{service['environment']['NUMBA_CACHE_DIR']}" in service["volumes"]

    def test_the_gateway_listens_where_it_is_probed_and_asks_the_llm_service(self) -> None:
        service = COMPOSE["services"]["gateway"]
        assert service["command"][:3] == ["python", "-m", "gateway"]
        config = load(GatewayConfig, "TEST", "", service["command"][3:], {})
        (published,) = service["ports"]
        assert port(config.listen) == port(published)
        assert f"127.0.0.1:{port(config.listen)}/health/ready" in service["healthcheck"]["test"][-1]
        assert str(port(config.listen)) in re.findall(r"\d+", re.findall("^EXPOSE (.+)$", DOCKERFILE, re.MULTILINE)[0])
        assert config.llm == (f"dns:///llm:{port(COMPOSE['services']['llm']['ports'][0])}",)
        assert int(service["stop_grace_period"].removesuffix("s")) >= config.grace_seconds + MARGIN

    def test_the_encoders_are_looked_up_by_their_services_name(self) -> None:
        config, _ = configured(COMPOSE["services"]["llm"]["command"])
        assert config.encoders == (f"dns:///encoder:{COMPOSE['services']['encoder']['expose'][0]}",)
