"""What containers are started with is what the services understand: flags, ports, probes, times, users, metrics."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from common import tracing
from common.config import load
from common.grpc_server import ServerConfig
from encoder_service import server as encoder_server
from encoder_service.config import EncoderConfig
from gateway.config import GatewayConfig
from llm_service import server as llm_server
from llm_service.config import LlmConfig
from tests.launch import ROOT
from twinlens import __version__

KINDS: dict[str, tuple[type[Any], str]] = {
    "encoder_service": (EncoderConfig, encoder_server.SERVICE),
    "llm_service": (LlmConfig, llm_server.SERVICE),
}
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
DOCKERFILE = (ROOT / "Dockerfile").read_text()
MANIFESTS = [
    manifest
    for path in sorted((ROOT / "deploy/kubernetes").glob("*.yaml"))
    for manifest in yaml.safe_load_all(path.read_text())
]
MARGIN = 10
"""Seconds to take a service apart in, after its calls have ended."""


def of_kind(kind: str) -> dict[str, dict[str, Any]]:
    return {each["metadata"]["name"]: each["spec"] for each in MANIFESTS if each["kind"] == kind}


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


each_composed = pytest.mark.parametrize("name", [name for name in COMPOSE["services"] if name != "gateway"])
each_deployment = pytest.mark.parametrize("name", of_kind("Deployment"))


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


class TestKubernetes:
    @staticmethod
    def pod(name: str) -> dict[str, Any]:
        return of_kind("Deployment")[name]["template"]["spec"]

    def container(self, name: str) -> dict[str, Any]:
        (container,) = self.pod(name)["containers"]
        return container

    @each_deployment
    def test_the_command_is_understood_and_its_ports_are_those_that_are_named(self, name: str) -> None:
        container = self.container(name)
        config, full_name = configured([*container["command"], *container["args"]])
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        assert ports == {"grpc": port(config.listen), "metrics": port(config.metrics_listen)}
        for probe in ("startupProbe", "readinessProbe"):
            assert container[probe]["grpc"] == {"port": ports["grpc"], "service": full_name}
        assert container["livenessProbe"]["httpGet"] == {"path": "/metrics", "port": "metrics"}
        spec = of_kind("Deployment")[name]["template"]["metadata"]
        assert spec["annotations"]["prometheus.io/port"] == str(ports["metrics"])

    @each_deployment
    def test_calls_may_end_before_the_pod_is_killed(self, name: str) -> None:
        container = self.container(name)
        config, _ = configured([*container["command"], *container["args"]])
        _, pause = container["lifecycle"]["preStop"]["exec"]["command"]
        needed = int(pause) + config.grace_seconds + MARGIN
        assert self.pod(name)["terminationGracePeriodSeconds"] >= needed

    @each_deployment
    def test_a_service_is_given_as_long_to_start_as_it_gives_its_processes(self, name: str) -> None:
        container = self.container(name)
        config, _ = configured([*container["command"], *container["args"]])
        probe = container["startupProbe"]
        assert probe["periodSeconds"] * probe["failureThreshold"] >= config.start_seconds

    @each_deployment
    def test_it_runs_as_the_images_user_and_writes_to_volumes_alone(self, name: str) -> None:
        pod, container = self.pod(name), self.container(name)
        assert f"--uid {pod['securityContext']['runAsUser']} " in DOCKERFILE
        assert container["securityContext"]["readOnlyRootFilesystem"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        assert container["image"] == f"twinlens:{__version__}"

    @each_deployment
    def test_selectors_find_its_pods(self, name: str) -> None:
        deployment = of_kind("Deployment")[name]
        labels = deployment["template"]["metadata"]["labels"]
        assert deployment["selector"]["matchLabels"] == labels
        assert of_kind("Service")[name]["selector"] == labels
        assert of_kind("NetworkPolicy")[name]["podSelector"]["matchLabels"] == labels

    def test_the_encoders_are_looked_up_by_their_services_name(self) -> None:
        container = self.container("twinlens-llm")
        config, _ = configured([*container["command"], *container["args"]])
        service = of_kind("Service")["twinlens-encoder"]
        assert service["clusterIP"] == "None", "one address would hide all encoders but one"
        assert config.encoders == (f"dns:///twinlens-encoder:{service['ports'][0]['port']}",)

    @pytest.mark.parametrize("name", of_kind("HorizontalPodAutoscaler"))
    def test_what_is_scaled_is_there_and_so_is_what_it_is_scaled_by(self, name: str) -> None:
        scaler = of_kind("HorizontalPodAutoscaler")[name]
        assert scaler["scaleTargetRef"]["name"] in of_kind("Deployment")
        assert {each["pods"]["metric"]["name"] for each in scaler["metrics"]} <= set(gauges())


def gauges() -> Iterator[str]:
    """What both services tell of a moment; a total would have to be made a rate first."""
    for service, prefix in (("encoder_service", "twinlens_encoder"), ("llm_service", "twinlens_llm")):
        for node in ast.walk(ast.parse((ROOT / service / "meters.py").read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "gauge":
                yield f"{prefix}_{ast.literal_eval(node.args[0])}"
