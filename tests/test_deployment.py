"""What containers are started with is what the services understand: flags, ports, probes, times, users, metrics."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
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


def test_what_the_image_is_made_of_is_let_into_the_build() -> None:
    """Everything is ignored but what is named after an exclamation mark."""
    ignored, *let_in = (ROOT / ".dockerignore").read_text().split()
    assert ignored == "**"
    copied = [line.split()[1:-1] for line in DOCKERFILE.splitlines() if re.match(r"COPY (?!--from)", line)]
    names = {word.removeprefix("!") for word in let_in if word.startswith("!")}
    for source in (source for sources in copied for source in sources):
        assert source in names or any(name.startswith(f"{source}/") for name in names), source


each_composed = pytest.mark.parametrize("name", [name for name in COMPOSE["services"] if name != "gateway"])
each_deployment = pytest.mark.parametrize("name", of_kind("Deployment"))
each_of_both_services = pytest.mark.parametrize(
    "name", [name for name in of_kind("Deployment") if name != "twinlens-gateway"]
)


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

    @each_of_both_services
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

    @each_of_both_services
    def test_calls_may_end_before_the_pod_is_killed(self, name: str) -> None:
        container = self.container(name)
        config, _ = configured([*container["command"], *container["args"]])
        _, pause = container["lifecycle"]["preStop"]["exec"]["command"]
        needed = int(pause) + config.grace_seconds + MARGIN
        assert self.pod(name)["terminationGracePeriodSeconds"] >= needed

    @each_of_both_services
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

    def test_the_gateway_is_probed_where_it_listens_and_its_tokens_are_a_secrets(self, tmp_path: Path) -> None:
        pod, container = self.pod("twinlens-gateway"), self.container("twinlens-gateway")
        (folder,) = [mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "tokens"]
        (secret,) = [volume["secret"] for volume in pod["volumes"] if volume["name"] == "tokens"]
        tokens = tmp_path / "tokens"
        tokens.write_text("one\ntwo\n")
        assert container["command"] == ["python", "-m", "gateway"]
        args = [word.replace(f"{folder}/", f"{tmp_path}/") for word in container["args"]]
        config = load(GatewayConfig, "TEST", "", args, {})
        assert config.tokens() == (b"one", b"two")
        assert secret == {"secretName": "twinlens-gateway-tokens"}
        (named,) = container["ports"]
        assert named == {"name": "http", "containerPort": port(config.listen)}
        for probe, path in (("readinessProbe", "/health/ready"), ("livenessProbe", "/health/live")):
            assert container[probe]["httpGet"] == {"path": path, "port": "http"}
        (served,) = of_kind("Service")["twinlens-gateway"]["ports"]
        assert served["targetPort"] == "http"
        annotations = of_kind("Deployment")["twinlens-gateway"]["template"]["metadata"]["annotations"]
        assert annotations["prometheus.io/port"] == str(port(config.listen))
        _, pause = container["lifecycle"]["preStop"]["exec"]["command"]
        assert pod["terminationGracePeriodSeconds"] >= int(pause) + config.grace_seconds + MARGIN

    def test_the_gateways_find_the_llm_services_and_are_let_in_there(self) -> None:
        (address,) = [word for word in self.container("twinlens-gateway")["args"] if word.startswith("--llm=")]
        service = of_kind("Service")["twinlens-llm"]
        assert service["clusterIP"] == "None", "one address would hide all LLM services but one"
        assert address == f"--llm=dns:///twinlens-llm:{service['ports'][0]['port']}"
        callers, _ = of_kind("NetworkPolicy")["twinlens-llm"]["ingress"]
        labels = of_kind("Deployment")["twinlens-gateway"]["template"]["metadata"]["labels"]
        assert {"podSelector": {"matchLabels": labels}} in callers["from"]

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
    """What each process tells of a moment; a total would have to be made a rate first."""
    told = {"encoder_service": "twinlens_encoder", "llm_service": "twinlens_llm", "gateway": "twinlens_gateway"}
    for service, prefix in told.items():
        for node in ast.walk(ast.parse((ROOT / service / "meters.py").read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "gauge":
                yield f"{prefix}_{ast.literal_eval(node.args[0])}"
