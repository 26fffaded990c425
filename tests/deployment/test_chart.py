"""The chart: what it renders is valid, keeps policies, and is what the services understand."""

from __future__ import annotations

import dataclasses
import ipaddress
import itertools
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.config import load
from common.rpc.server import ServerConfig
from encoder_service import server as encoder_server
from encoder_service.config import EncoderConfig
from gateway.config import GatewayConfig
from llm_service import server as llm_server
from llm_service.config import LlmConfig
from tests.deployment.charts import (
    CHART,
    VALUES,
    Object,
    installed,
    manifests,
    objects,
    of_kind,
    pods,
    run_helm,
    template,
)
from tests.launch import ROOT
from twinlens import __version__

MARGIN = 10
"""Seconds to take a service apart in, after its calls have ended."""

KINDS: dict[str, tuple[type[Any], str]] = {
    "encoder_service": (EncoderConfig, encoder_server.SERVICE),
    "llm_service": (LlmConfig, llm_server.SERVICE),
}
DOCKERFILE = (ROOT / "Dockerfile").read_text()
LOW = ("CKV_K8S_15", "CKV_K8S_43")
"""Pull images always, and name them by a digest, which whoever has built the image knows: both are rated low."""
OF_OTHERS = {"LeaderWorkerSet", "ScaledObject", "PodMonitor", "PrometheusRule", "InferencePool"}
each_values = pytest.mark.parametrize("values", VALUES)


def container(pod: Object) -> Object:
    """The service's own; a gateway may be beside it."""
    found, *beside = pod["spec"]["containers"]
    assert [each["name"] for each in beside] in ([], ["gateway"])
    return found


def gateway_of(found: dict[str, Object]) -> Object:
    """A pod with nothing but the gateway's container, wherever that is."""
    pod = found.get("twinlens-gateway") or found.get("twinlens-llm") or found["twinlens-llm/leader"]
    (box,) = [each for each in pod["spec"]["containers"] if each["name"] == "gateway"]
    return {**pod, "spec": {**pod["spec"], "containers": [box]}}


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    """What is mounted below /secrets, with files that the services can read."""
    trustme = pytest.importorskip("trustme")
    authority = trustme.CA()
    issued = authority.issue_cert(*(f"twinlens-{part}" for part in ("encoder", "llm", "prefill", "gateway")))
    for name in ("tls", "llm", "encoder", "gateway"):
        (tmp_path / name).mkdir()
    authority.cert_pem.write_to_path(str(tmp_path / "tls/ca.crt"))
    issued.private_key_pem.write_to_path(str(tmp_path / "tls/tls.key"))
    for blob in issued.cert_chain_pems:
        blob.write_to_path(str(tmp_path / "tls/tls.crt"), append=True)
    for name in ("llm", "encoder"):
        (tmp_path / name / "token").write_text(f"{name}'s\n")
    (tmp_path / "gateway/tokens").write_text("one\ntwo\n")
    return tmp_path


def configured(pod: Object, secrets: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, str]:
    """The configuration that a pod's command line makes, and the service's full name."""
    # GPUs are not here, and what the variables say is for the cluster to fill in.
    monkeypatch.setattr("llm_service.config.check_device", lambda *_: None)
    words = [*container(pod)["command"], *container(pod)["args"]]
    for name, value in (("$(LWS_LEADER_ADDRESS)", "twinlens-llm-0.twinlens-llm-0"), ("$(LWS_WORKER_INDEX)", "1")):
        words = [word.replace(name, value) for word in words]
    words = [word.replace("=/secrets/", f"={secrets}/") for word in words]
    assert words[:2] == ["python", "-m"]
    kind, service = KINDS.get(words[2], (GatewayConfig, ""))
    return load(kind, "TEST", "", words[3:], {}), service


def port(address: str) -> int:
    return int(address.rpartition(":")[2])


class TestSchemas:
    @pytest.mark.parametrize("version", ["1.36", "1.37"])
    def test_what_is_rendered_is_what_kubernetes_knows(self, version: str, tmp_path: Path) -> None:
        """Kinds that others bring are not known there; the pods inside of them are looked at as pods."""
        validate = installed("kubernetes-validate")
        known = 0
        for values in VALUES:
            inner = [
                {
                    "apiVersion": "v1",
                    "kind": "PodTemplate",
                    "metadata": {"name": name.replace("/", "-")},
                    "template": pod,
                }
                for name, pod in pods(manifests(values)).items()
            ]
            (tmp_path / f"{values}.yaml").write_text(manifests(values) + "\n---\n" + yaml.safe_dump_all(inner))
            known += sum(each["kind"] not in OF_OTHERS for each in [*objects(manifests(values)), *inner])
        done = subprocess.run(
            [validate, "--kubernetes-version", version, "--strict", *sorted(tmp_path.iterdir())],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        assert done.stdout.count("passed for resource") == known

    def test_a_policy_checker_finds_nothing_above_low(self, tmp_path: Path) -> None:
        checkov = installed("checkov")
        for name in VALUES:
            (tmp_path / f"{name}.yaml").write_text(manifests(name))
        words = ["--framework", "kubernetes", "--skip-check", ",".join(LOW), "--skip-download", "--output", "json"]
        done = subprocess.run(
            [checkov, "--directory", tmp_path, *words],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        report = json.loads(done.stdout)
        found = {(each["check_id"], each["resource"]) for each in report["results"]["failed_checks"]}
        assert not found
        assert report["summary"]["passed"] > 100
        assert not report["summary"]["parsing_errors"]

    def test_helm_finds_nothing_to_say(self) -> None:
        done = run_helm("lint", "--strict", "--quiet", str(CHART))
        assert done.returncode == 0, done.stdout

    @pytest.mark.parametrize(
        ("wrong", "where"),
        [
            ("encoder.replica=3", "replica"),
            ("encoder.options.listen=0.0.0.0:1", "/encoder/options/listen"),
            ("autoscaling.kind=vpa", "/autoscaling/kind"),
            ("image.digest=latest", "/image/digest"),
            ("encoder.strategy.maxSurge=0", "/encoder/strategy"),
            ("prefill.strategy.maxSurge=1", "/prefill/strategy"),
            ("networkPolicy.dns.peers=null", "/networkPolicy/dns"),
            ("networkPolicy.dns.ports={0}", "/networkPolicy/dns/ports"),
        ],
    )
    def test_values_that_nothing_reads_are_refused(self, wrong: str, where: str) -> None:
        done = run_helm("template", "twinlens", str(CHART), "--set", wrong)
        assert done.returncode != 0
        assert where in done.stderr

    def test_the_charts_version_is_the_releases(self) -> None:
        chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
        assert chart["version"] == chart["appVersion"] == __version__


@each_values
class TestPods:
    def test_commands_are_understood_and_ports_are_those_that_are_probed(
        self, values: str, certificates: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        served = 0
        for name, pod in pods(manifests(values)).items():
            config, service = configured(pod, certificates, monkeypatch)
            box = container(pod)
            if not isinstance(config, ServerConfig) or name.endswith("/worker"):
                continue
            ports = {each["name"]: each["containerPort"] for each in box["ports"]}
            expected = {"grpc": port(config.listen), "metrics": port(config.metrics_listen)}
            if service == llm_server.SERVICE and config.kv_events:
                expected |= {"kv-events": port(config.kv_events), "kv-replay": port(config.kv_events_replay)}
            assert ports == expected
            for probe in (box["startupProbe"], box["readinessProbe"]):
                if "grpc" in probe:
                    assert (config.tls_cert, config.auth_token_file) == ("", ""), "the kubelet speaks neither"
                    assert probe["grpc"] == {"port": ports["grpc"], "service": service}
                else:
                    words = probe["exec"]["command"]
                    assert words[:3] == ["twinlens", "health", f"127.0.0.1:{ports['grpc']}"]
                    assert f"--service={service}" in words
            assert box["livenessProbe"]["httpGet"] == {"path": "/metrics", "port": "metrics"}
            starts = box["startupProbe"]
            assert starts["periodSeconds"] * starts["failureThreshold"] >= config.start_seconds
            served += 1
        assert served == (3 if values == "prefill" else 2)

    def test_what_downloads_a_checkpoint_has_the_same_time_for_it(self, values: str) -> None:
        boxes = [container(pod) for name, pod in pods(manifests(values)).items() if name != "twinlens-gateway"]
        probes = [box["startupProbe"] for box in boxes if "startupProbe" in box]
        (seconds,) = {each["periodSeconds"] * each["failureThreshold"] for each in probes}
        assert seconds >= 1800

    def test_calls_may_end_before_a_pod_is_killed(
        self, values: str, certificates: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name, pod in pods(manifests(values)).items():
            if name.endswith("/worker"):
                continue
            config, _ = configured(pod, certificates, monkeypatch)
            _, pause = container(pod)["lifecycle"]["preStop"]["exec"]["command"]
            assert pod["spec"]["terminationGracePeriodSeconds"] >= int(pause) + config.grace_seconds + MARGIN

    def test_an_encoder_s_memory_holds_what_its_options_let_it_take(
        self, values: str, certificates: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pod = pods(manifests(values))["twinlens-encoder"]
        limits = container(pod)["resources"]["limits"]
        monkeypatch.setattr("encoder_service.config.usable_cores", lambda: int(limits["cpu"]))
        config, _ = configured(pod, certificates, monkeypatch)
        given = config.store_bytes + config.staging_bytes + config.max_queued_bytes + config.max_inflight_bytes
        needed = given / (1 << 30) + 0.75 * config.decoders() + config.workers
        assert int(limits["memory"].removesuffix("Gi")) >= needed + 0.2, "and the weights"

    def test_they_run_as_the_images_user_and_write_to_volumes_alone(self, values: str) -> None:
        for pod in pods(manifests(values)).values():
            boxes = pod["spec"]["containers"]
            assert f"--uid {pod['spec']['securityContext']['runAsUser']} " in DOCKERFILE
            assert all(box["securityContext"]["readOnlyRootFilesystem"] for box in boxes)
            mounted = {mount["name"] for box in boxes for mount in box["volumeMounts"]}
            assert mounted == {each["name"] for each in pod["spec"]["volumes"]}
            assert all(box["image"].startswith(f"twinlens:{__version__}") for box in boxes)

    def test_services_find_each_other(self, values: str, certificates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        services = of_kind(manifests(values), "Service")
        llm, encoder = services["twinlens-llm"]["spec"], services["twinlens-encoder"]["spec"]
        assert llm["clusterIP"] == encoder["clusterIP"] == "None", "one address would hide all of them but one"
        found = pods(manifests(values))
        first = found.get("twinlens-llm") or found["twinlens-llm/leader"]
        asks, _ = configured(first, certificates, monkeypatch)
        assert asks.encoders == (f"dns:///twinlens-encoder:{encoder['ports'][0]['port']}",)
        gateway, _ = configured(gateway_of(found), certificates, monkeypatch)
        number = llm["ports"][0]["port"]
        assert gateway.llm == (f"127.0.0.1:{number}" if values == "inference" else f"dns:///twinlens-llm:{number}",)
        door = gateway.callers()
        assert all(door.known([token]) for token in (b"one", b"two"))
        assert door.known([b"three"]) is None
        for service in services.values():
            wanted = service["spec"]["selector"].items()
            if "worker-index" in str(wanted):  # the label is the LeaderWorkerSet's own
                wanted = {(key, value) for key, value in wanted if "worker-index" not in key}
            (box,) = {
                json.dumps([each for box in pod["spec"]["containers"] for each in box["ports"]])
                for pod in found.values()
                if wanted <= pod["metadata"]["labels"].items() and "ports" in container(pod)
            }
            assert {each["targetPort"] for each in service["spec"]["ports"]} <= {
                each["name"] for each in json.loads(box)
            }

    def test_every_selector_finds_the_pods_of_one_part(self, values: str) -> None:
        found = pods(manifests(values))
        for kind in ("PodDisruptionBudget", "NetworkPolicy", "PodMonitor", "Deployment"):
            for name, each in of_kind(manifests(values), kind).items():
                selector = each["spec"].get("selector") or each["spec"]["podSelector"]
                chosen = {
                    pod.partition("/")[0]
                    for pod, spec in found.items()
                    if selector["matchLabels"].items() <= spec["metadata"]["labels"].items()
                }
                assert chosen == {name}, kind

    def test_policies_let_through_what_the_services_say_to_each_other_and_nothing_else(self, values: str) -> None:
        found = {name: pod["metadata"]["labels"] for name, pod in pods(manifests(values)).items()}
        policies = [each["spec"] for each in of_kind(manifests(values), "NetworkPolicy").values()]

        def lets(direction: str, of: Object, other: Object, number: int) -> bool:
            peers = {"ingress": "from", "egress": "to"}[direction]
            rules = [
                rule
                for policy in policies
                if policy["podSelector"]["matchLabels"].items() <= of.items()
                for rule in policy[direction]
                if "ports" not in rule or any(each["port"] == number for each in rule["ports"])
            ]
            return any(
                peers not in rule
                or any(
                    peer.get("podSelector", {}).get("matchLabels", {"no": "one"}).items() <= other.items()
                    for peer in rule[peers]
                )
                for rule in rules
            )

        allowed = {
            (one.partition("/")[0], other.partition("/")[0], number)
            for (one, ours), (other, theirs) in itertools.product(found.items(), repeat=2)
            for number in (7001, 7002, 29500)
            if lets("egress", ours, theirs, number) and lets("ingress", theirs, ours, number)
        }
        expected = {("twinlens-llm", "twinlens-encoder", 7001)}
        if values != "inference":
            expected |= {("twinlens-gateway", "twinlens-llm", 7002)}
        if values == "multihost":
            expected |= {("twinlens-llm", "twinlens-llm", number) for number in (7001, 7002, 29500)}
        if values == "prefill":
            expected |= {("twinlens-llm", "twinlens-prefill", 7002), ("twinlens-prefill", "twinlens-encoder", 7001)}
        assert allowed == expected

    def test_what_is_scaled_has_no_fixed_count_and_is_scaled_by_what_is_served(self, values: str) -> None:
        scalers = of_kind(manifests(values), "HorizontalPodAutoscaler") | of_kind(manifests(values), "ScaledObject")
        parts = {"encoder", "llm", *{"inference": (), "prefill": ("prefill", "gateway")}.get(values, ("gateway",))}
        assert set(scalers) == {f"twinlens-{part}" for part in parts}
        rules = yaml.safe_load((CHART / "files/adapter-rules.yaml").read_text())["rules"]["custom"]
        served = {rule["name"]["as"]: rule["metricsQuery"] for rule in rules}
        for name, scaler in scalers.items():
            target = scaler["spec"]["scaleTargetRef"]
            scaled = of_kind(manifests(values), target["kind"])[target["name"]]
            assert target["apiVersion"] == scaled["apiVersion"]
            assert "replicas" not in scaled["spec"]
            if scaler["kind"] == "ScaledObject":
                pods_of = f'namespace="vision",pod=~"{name}-.+"'
                asked = {each["metadata"]["query"] for each in scaler["spec"]["triggers"]}
                queries = {query.replace(" by (<<.GroupBy>>)", "") for query in served.values()}
                assert asked <= {query.replace("<<.LabelMatchers>>", pods_of) for query in queries}
            else:
                assert {each["pods"]["metric"]["name"] for each in scaler["spec"]["metrics"]} <= set(served)


class TestSpecial:
    def test_without_an_autoscaler_counts_are_fixed(self) -> None:
        text = template()
        assert not of_kind(text, "HorizontalPodAutoscaler")
        assert {each["spec"]["replicas"] for each in of_kind(text, "Deployment").values()} == {2}

    def test_where_gpus_are_all_taken_a_pod_makes_room_for_the_one_that_replaces_it(self) -> None:
        """A pod too many would wait for a GPU for ever, and the upgrade for the pod."""
        less, more = {"maxUnavailable": 1, "maxSurge": 0}, {"maxUnavailable": 0, "maxSurge": 1}
        for values in ("cpu", "prefill", "multihost"):
            text = manifests(values)
            found = {name: each["spec"]["strategy"] for name, each in of_kind(text, "Deployment").items()}
            for name, each in of_kind(text, "LeaderWorkerSet").items():
                rollout = each["spec"]["rolloutStrategy"]
                found[name] = {"rollingUpdate": rollout["rollingUpdateConfiguration"]}
            for name, strategy in found.items():
                part = of_kind(text, "Deployment").get(name) or of_kind(text, "LeaderWorkerSet")[name]
                assert strategy == {"rollingUpdate": less if "nvidia.com/gpu" in json.dumps(part) else more}
        own = "prefill.strategy.maxUnavailable=0,prefill.strategy.maxSurge=50%,llm.strategy.maxUnavailable=25%"
        deployments = of_kind(template(*VALUES["prefill"], "--set", own), "Deployment")
        for part, expected in (
            ("prefill", {"maxUnavailable": 0, "maxSurge": "50%"}),
            ("llm", {"maxUnavailable": "25%", "maxSurge": 0}),
            ("encoder", less),
        ):
            assert deployments[f"twinlens-{part}"]["spec"]["strategy"]["rollingUpdate"] == expected

    @pytest.mark.parametrize("values", ["cpu", "gpu"])
    def test_pods_are_spread_over_nodes_that_are_in_no_zone(self, values: str) -> None:
        """The scheduler passes over nodes that lack a key of any constraint; of preferences it passes over the term."""
        for pod in pods(manifests(values)).values():
            labels = pod["metadata"]["labels"]
            (spread,) = pod["spec"]["topologySpreadConstraints"]
            assert spread["topologyKey"] == "kubernetes.io/hostname"
            assert spread["matchLabelKeys"] == ["pod-template-hash"], "old pods of an upgrade would count as well"
            assert spread["labelSelector"]["matchLabels"].items() <= labels.items()
            apart = pod["spec"]["affinity"]["podAntiAffinity"]
            ((_, (preferred,)),) = apart.items()
            term = preferred["podAffinityTerm"]
            assert term["topologyKey"] == "topology.kubernetes.io/zone"
            assert term["labelSelector"]["matchLabels"].items() <= labels.items()

    def test_with_nixl_both_services_have_it_and_its_ports_are_theirs_alone(self) -> None:
        text = template("--set", "nixl.backend=UCX", "--set", "nixl.ports=4000-4099")
        ports = [{"protocol": "TCP", "port": 4000, "endPort": 4099}]
        for name, part, other in (("twinlens-encoder", "encoder", "llm"), ("twinlens-llm", "llm", "encoder")):
            (container,) = pods(text)[name]["spec"]["containers"]
            assert "--nixl=UCX" in container["args"]
            assert {"name": "UCX_TCP_PORT_RANGE", "value": "4000-4099"} in container["env"], part
            policy = of_kind(text, "NetworkPolicy")[name]["spec"]
            for direction, peers in (("ingress", "from"), ("egress", "to")):
                (rule,) = [each for each in policy[direction] if each.get("ports") == ports]
                (peer,) = rule[peers]
                assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == other
        (container,) = pods(text)["twinlens-gateway"]["spec"]["containers"]
        assert "--nixl=UCX" not in container["args"]
        assert "4000" not in str(of_kind(text, "NetworkPolicy")["twinlens-gateway"])

    def test_pods_may_be_of_a_user_whom_the_cluster_chooses(self) -> None:
        """As in OpenShift: what is written has a volume that is not in a home that is another user's."""
        no_numbers = ",".join(f"podSecurityContext.{each}=null" for each in ("runAsUser", "runAsGroup", "fsGroup"))
        text = template(*VALUES["prefill"], "--set", no_numbers)
        assert "10001" not in text
        for name, pod in pods(text).items():
            assert pod["spec"]["securityContext"]["runAsNonRoot"]
            box = container(pod)
            assert not [each for each in box["volumeMounts"] if each["mountPath"].startswith("/home")]
            if name != "twinlens-gateway":
                told = {each["name"]: each.get("value", "") for each in box["env"]}
                for variable in ("HF_HOME", "NUMBA_CACHE_DIR", "TRITON_CACHE_DIR"):
                    (mount,) = [m for m in box["volumeMounts"] if told[variable].startswith(m["mountPath"])]
                    assert not mount.get("readOnly")

    @pytest.mark.parametrize("part", ["encoder", "llm", "prefill", "gateway"])
    @pytest.mark.parametrize("inside", [False, True])
    def test_each_part_takes_what_pods_have_in_kubernetes(self, part: str, inside: bool) -> None:
        affinity = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}
        own = {
            "affinity": affinity,
            "topologySpreadConstraints": [{"maxSkew": 2, "topologyKey": "rack", "whenUnsatisfiable": "DoNotSchedule"}],
            "podSecurityContext": {"runAsUser": 4321, "supplementalGroups": [7]},
            "extraEnv": [{"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "one"}}}],
            "extraVolumes": [{"name": "more", "emptyDir": {}}],
            "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
        }
        given = [word for name, value in own.items() for word in ("--set-json", f"{part}.{name}={json.dumps(value)}")]
        text = template(*VALUES["prefill"], "--set", f"gateway.inPod={json.dumps(inside)}", *given)
        changed = {f"twinlens-{part}", *(["twinlens-prefill"] if part == "llm" else [])}
        for name, pod in pods(text).items():
            spec = pod["spec"]
            for box in spec["containers"]:
                mine = f"twinlens-{box['name']}" in changed
                assert (own["extraEnv"][0] in box.get("env", [])) == mine
                assert (own["extraVolumeMounts"][0] in box["volumeMounts"]) == mine
            mounted = {mount["name"] for box in spec["containers"] for mount in box["volumeMounts"]}
            assert mounted == {each["name"] for each in spec["volumes"]}
            mine = name in changed
            assert (spec["affinity"] == affinity) == mine
            assert (spec["securityContext"]["runAsUser"] == 4321) == mine
            assert spec["securityContext"]["fsGroup"] == 10001
            spread = spec["topologySpreadConstraints"]
            assert ([each["topologyKey"] for each in spread] == ["rack"]) == mine
            for each in spread:
                assert each["labelSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()

    def test_containers_may_be_allowed_to_pin_memory_for_nixl(self) -> None:
        """Kubernetes gives no capability to whoever is not root."""
        own = {"capabilities": {"add": ["IPC_LOCK"]}, "runAsUser": 0, "runAsNonRoot": False}
        given = [f"{part}.securityContext={json.dumps(own)}" for part in ("encoder", "llm")]
        found = pods(template(*VALUES["prefill"], "--set-json", given[0], "--set-json", given[1]))
        default = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "runAsNonRoot": True}
        for name, pod in found.items():
            changed = own if name != "twinlens-gateway" else {}
            capabilities = {"drop": ["ALL"], **changed.get("capabilities", {})}
            assert container(pod)["securityContext"] == {**default, **changed, "capabilities": capabilities}

    def test_names_are_asked_for_where_the_cluster_answers_for_them(self) -> None:
        peers = [
            {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "openshift-dns"}}},
            {"ipBlock": {"cidr": "169.254.20.10/32"}},
        ]
        given = json.dumps({"peers": peers, "ports": [5353]})
        usual = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}}]
        for more, who, port in (((), usual, 53), (("--set-json", f"networkPolicy.dns={given}"), peers, 5353)):
            for policy in of_kind(template(*more), "NetworkPolicy").values():
                rule = policy["spec"]["egress"][0]
                assert rule["to"] == who
                assert rule["ports"] == [{"port": port, "protocol": protocol} for protocol in ("UDP", "TCP")]

    def test_the_hub_is_reached_by_either_protocol_and_a_metadata_service_by_none(self) -> None:
        metadata = [ipaddress.ip_address(each) for each in ("169.254.169.254", "fd00:ec2::254", "fe80::a9fe:a9fe")]
        hub = [ipaddress.ip_address(each) for each in ("18.164.174.1", "2600:9000:2490::1")]
        for part in ("encoder", "llm"):
            policy = of_kind(manifests("gpu"), "NetworkPolicy")[f"twinlens-{part}"]["spec"]
            (rule,) = [each for each in policy["egress"] if {"port": 443, "protocol": "TCP"} in each["ports"]]
            blocks = [each["ipBlock"] for each in rule["to"]]

            def let(address: Any, blocks: list[Object] = blocks) -> bool:
                return any(
                    address in ipaddress.ip_network(block["cidr"])
                    and not any(address in ipaddress.ip_network(each) for each in block["except"])
                    for block in blocks
                )

            assert all(map(let, hub))
            assert not any(map(let, metadata))

    def test_a_pool_has_the_pods_that_answer_http_and_a_picker_knows_whose_metrics_they_have(self) -> None:
        text = manifests("inference")
        (pool,) = of_kind(text, "InferencePool").values()
        chosen = {
            name: pod
            for name, pod in pods(text).items()
            if pool["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        }
        assert set(chosen) == {"twinlens-llm"}
        (http,) = gateway_of(chosen)["spec"]["containers"][0]["ports"]
        assert pool["spec"]["targetPorts"] == [{"number": http["containerPort"]}]
        assert pool["spec"]["endpointPickerRef"] == {
            "name": "twinlens-epp",
            "port": {"number": 9002},
            "failureMode": "FailOpen",
        }
        picker = yaml.safe_load((CHART / "files/endpoint-picker.yaml").read_text())
        (extractor,) = (each for each in picker["plugins"] if each["type"] == "core-metrics-extractor")
        names = {each["name"] for each in extractor["parameters"]["engineConfigs"]}
        for engine in sorted(names):
            text = template(*VALUES["inference"], "--set", f"inferencePool.engine={engine}")
            assert pods(text)["twinlens-llm"]["metadata"]["labels"]["llm-d.ai/engine-type"] == engine
        assert chosen["twinlens-llm"]["metadata"]["labels"]["llm-d.ai/engine-type"] in names
        assert of_kind(manifests("inference"), "Service")["twinlens-gateway"]["spec"]["selector"].items() <= (
            pool["spec"]["selector"]["matchLabels"].items()
        )

    def test_pickers_may_scrape_and_hear_of_kv_blocks_and_nobody_else_may(self) -> None:
        policy = of_kind(manifests("inference"), "NetworkPolicy")["twinlens-llm"]["spec"]
        rules = {each["port"]: rule for rule in policy["ingress"] for each in rule["ports"]}
        assert set(rules) == {7002, 8000, 9400, 5557, 5558}
        for number in (5557, 5558):
            (peer,) = rules[number]["from"]
            assert peer["podSelector"]["matchLabels"] == {"inferencepool": "twinlens-epp"}
            assert {each["port"] for each in rules[number]["ports"]} == {9400, 5557, 5558}
        asked = [rule for rule in policy["ingress"] if {"port": 8000, "protocol": "TCP"} in rule["ports"]]
        assert any("from" not in rule for rule in asked), "whoever has a token"

    @pytest.mark.parametrize("how", ["gateway.inPod=true", "gateway.enabled=false"])
    def test_without_clients_and_gateways_of_their_own_nobody_asks_llm_services(self, how: str) -> None:
        text = template("--set", how, "--set-json", "networkPolicy.clients=[]")
        policy = of_kind(text, "NetworkPolicy")["twinlens-llm"]["spec"]
        assert not [each for rule in policy["ingress"] for each in rule["ports"] if each["port"] == 7002]

    def test_kv_events_have_a_topic_that_names_pod_and_model(
        self, certificates: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for more, topic in (
            ((), "kv@$(POD_IP):8000@demo"),
            (("--set", "model.name=Qwen/Small,model.hub=true"), "kv@$(POD_IP):8000@Qwen/Small"),
            (("--set", "llm.options.served-model-name=mine"), "kv@$(POD_IP):8000@mine"),
            (("--set", "kvEvents.topic=kv@here@there"), "kv@here@there"),
        ):
            pod = pods(template(*VALUES["inference"], *more))["twinlens-llm"]
            config, _ = configured(pod, certificates, monkeypatch)
            assert config.kv_events_topic == topic
            (address,) = [each for each in container(pod)["env"] if each["name"] == "POD_IP"]
            assert address["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}
        assert "kv-events" not in json.dumps(pods(manifests("cpu")))

    def test_a_gateway_beside_an_llm_service_over_several_hosts_asks_it_under_its_certificates_name(
        self, certificates: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        text = template(*VALUES["multihost"], "--values", f"{CHART}/values-inference.yaml")
        found = pods(text)
        gateway, _ = configured(gateway_of(found), certificates, monkeypatch)
        assert gateway.llm == ("twinlens-llm:7002",)
        assert gateway.llm_cert
        leader, worker = found["twinlens-llm/leader"]["spec"], found["twinlens-llm/worker"]["spec"]
        assert leader["hostAliases"] == [{"ip": "127.0.0.1", "hostnames": ["twinlens-llm"]}]
        assert len(worker["containers"]) == 1
        for spec in (leader, worker):
            mounted = {mount["name"] for box in spec["containers"] for mount in box["volumeMounts"]}
            assert mounted == {each["name"] for each in spec["volumes"]}
        first = {"leaderworkerset.sigs.k8s.io/worker-index": "0"}
        (pool,) = of_kind(text, "InferencePool").values()
        assert pool["spec"]["selector"]["matchLabels"].items() >= first.items()
        assert of_kind(text, "Service")["twinlens-gateway"]["spec"]["selector"].items() >= first.items()

    def test_a_gateway_beside_an_llm_service_has_its_time_to_end(self) -> None:
        text = template(*VALUES["inference"], "--set", "gateway.graceSeconds=90")
        assert pods(text)["twinlens-llm"]["spec"]["terminationGracePeriodSeconds"] == 110

    @pytest.mark.parametrize(
        ("wrong", "why"),
        [
            (("--set", "gateway.inPod=false"), "inferencePool needs gateway.inPod"),
            (("--set", "gateway.https=true"), "gateway.https is not for gateway.inPod"),
            (("--set", "inferencePool.picker.name="), "inferencePool.picker.name"),
            (("--set", "llm.options.kv-events=tcp://*:1"), "kv-events"),
        ],
    )
    def test_a_pool_that_would_not_work_is_refused(self, wrong: tuple[str, ...], why: str) -> None:
        done = run_helm("template", "twinlens", str(CHART), *VALUES["inference"], *wrong)
        assert done.returncode != 0
        assert why in done.stderr

    def test_hosts_of_one_llm_service_meet_and_one_of_them_serves(
        self, certificates: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found = pods(manifests("multihost"))
        (group,) = of_kind(manifests("multihost"), "LeaderWorkerSet").values()
        serves, _ = configured(found["twinlens-llm/leader"], certificates, monkeypatch)
        lends, _ = configured(found["twinlens-llm/worker"], certificates, monkeypatch)
        assert serves.meeting({}).node_rank == 0
        assert lends.meeting({}).node_rank == 1
        assert serves.meeting({}).address == lends.meeting({}).address
        assert serves.meeting({}).nodes == lends.meeting({}).nodes == group["spec"]["leaderWorkerTemplate"]["size"]
        gpus = int(container(found["twinlens-llm/leader"])["resources"]["limits"]["nvidia.com/gpu"])
        assert serves.tp == lends.tp == gpus * serves.meeting({}).nodes
        selector = of_kind(manifests("multihost"), "Service")["twinlens-llm"]["spec"]["selector"]
        assert selector["leaderworkerset.sigs.k8s.io/worker-index"] == "0"

    def test_hosts_of_one_llm_service_find_each_other_before_they_are_ready(self) -> None:
        """They are ready once all have met. Where groups share one subdomain, its Service is of the set's own name; the
        set's controller makes one that names pods which are not ready, but leaves one alone that is there."""
        services = of_kind(manifests("multihost"), "Service")
        ((name, group),) = of_kind(manifests("multihost"), "LeaderWorkerSet").items()
        shared = group["spec"].get("networkConfig", {}).get("subdomainPolicy") != "UniquePerReplica"
        assert not shared or name not in services or services[name]["spec"].get("publishNotReadyAddresses")

    def test_an_encoder_and_an_llm_service_of_one_node_share_a_folder(self) -> None:
        found = pods(manifests("gpu"))
        for name in ("twinlens-encoder", "twinlens-llm"):
            (local,) = [each for each in found[name]["spec"]["volumes"] if each["name"] == "local"]
            assert local["hostPath"] == {"path": "/run/twinlens", "type": "Directory"}
            assert "--local-dir=/srv/local" in container(found[name])["args"]
        (term,) = found["twinlens-llm"]["spec"]["affinity"]["podAffinity"][
            "preferredDuringSchedulingIgnoredDuringExecution"
        ]
        wanted = term["podAffinityTerm"]["labelSelector"]["matchLabels"]
        assert wanted.items() <= found["twinlens-encoder"]["metadata"]["labels"].items()
        assert "podAffinity" not in pods(manifests("cpu"))["twinlens-llm"]["spec"]["affinity"]

    def test_tls_and_tokens_are_both_ends(self, certificates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        found = pods(manifests("multihost"))
        encoder, _ = configured(found["twinlens-encoder"], certificates, monkeypatch)
        llm, _ = configured(found["twinlens-llm/leader"], certificates, monkeypatch)
        gateway, _ = configured(found["twinlens-gateway"], certificates, monkeypatch)
        assert encoder.tls_client_ca
        assert llm.tls_client_ca
        assert llm.encoder_security().cert
        assert gateway.llm_cert
        assert gateway.tls_cert
        assert encoder.auth_token_file == llm.encoder_token_file
        assert llm.auth_token_file == gateway.llm_token_file
        for name in ("twinlens-gateway", "twinlens-encoder", "twinlens-llm/leader"):
            volumes = {each["name"]: each for each in found[name]["spec"]["volumes"]}
            assert volumes["tls"]["secret"]["secretName"] == f"{name.partition('/')[0]}-tls"
        for probe in ("readinessProbe", "livenessProbe"):
            assert container(found["twinlens-gateway"])[probe]["httpGet"]["scheme"] == "HTTPS"

    @pytest.mark.parametrize("values", ["multihost", "prefill", "gpu"])
    def test_services_say_that_they_speak_without_tls_where_they_do(self, values: str) -> None:
        """A mesh or a load balancer would speak so to a port that wants TLS."""
        plain = values == "gpu"
        for service in of_kind(manifests(values), "Service").values():
            for each in service["spec"]["ports"]:
                assert each.get("appProtocol") == ("kubernetes.io/h2c" if plain and each["name"] == "grpc" else None)

    def test_large_numbers_are_written_out(self) -> None:
        text = template(
            "--set", "encoder.options.max-queued-bytes=1073741824", "--set", "encoder.options.shared-memory=false"
        )
        args = container(pods(text)["twinlens-encoder"])["args"]
        assert "--max-queued-bytes=1073741824" in args
        assert "--shared-memory=false" in args

    def test_numbers_of_variables_are_written_out(self) -> None:
        """As of a file of values: `--set` has whole numbers, a file has floats."""
        text = template(
            "--set-json", 'llm.environment={"NCCL_BUFFSIZE": 8388608, "SHARE": 0.5, "ON": true, "WORD": "8"}'
        )
        told = {each["name"]: each["value"] for each in container(pods(text)["twinlens-llm"])["env"]}
        assert told.items() >= {"NCCL_BUFFSIZE": "8388608", "SHARE": "0.5", "ON": "true", "WORD": "8"}.items()

    def test_a_host_may_stand_for_many(self) -> None:
        text = template("--set-json", 'ingress={"enabled": true, "host": "*.example.org", "tlsSecret": "many"}')
        spec = of_kind(text, "Ingress")["twinlens-gateway"]["spec"]
        assert [each["host"] for each in spec["rules"]] == spec["tls"][0]["hosts"] == ["*.example.org"]

    def test_caches_and_models_may_be_claims(self) -> None:
        volume = "model.volume.persistentVolumeClaim.claimName=models"
        text = template("--set", volume, "--set", "cache.hub.size=10Gi", "--set", "cache.kernels.claimName=warm")
        claims = {
            each["name"]: each["persistentVolumeClaim"]["claimName"]
            for each in pods(text)["twinlens-llm"]["spec"]["volumes"]
            if "persistentVolumeClaim" in each
        }
        assert claims == {"models": "models", "hub": "twinlens-hub", "kernels": "warm"}
        assert set(of_kind(text, "PersistentVolumeClaim")) == {"twinlens-hub"}

    def test_whoever_wants_grpc_alone_leaves_the_gateway_out(self) -> None:
        text = template("--set", "gateway.enabled=false")
        assert "gateway" not in json.dumps([each for each in objects(text) if each["kind"] != "NetworkPolicy"])
        assert set(of_kind(text, "NetworkPolicy")) == {"twinlens-encoder", "twinlens-llm"}


@pytest.mark.parametrize(("values", "device"), [("values.yaml", "cpu"), ("values-gpu.yaml", "cuda")])
def test_an_llm_service_takes_more_calls_at_once_than_it_holds_requests(
    values: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one that it has room for is refused, and so is who asks it how it is."""
    monkeypatch.setattr("llm_service.config.check_device", lambda *_: None)
    monkeypatch.setattr("llm_service.config.cuda_memory", lambda _: 80 << 30)
    options = yaml.safe_load((CHART / values).read_text())["llm"]["options"]
    words = [f"--device={device}", "--model=m", *(f"--{name}={value}" for name, value in options.items())]
    config = load(LlmConfig, "TEST", "", words, {})
    assert config.request_limit() < config.max_concurrent_calls


class TestPrefill:
    """LLM services that compute prompts for those that answer."""

    def test_prompts_are_computed_by_the_services_that_lend(
        self, certificates: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        text = manifests("prefill")
        found = pods(text)
        llm, _ = configured(found["twinlens-llm"], certificates, monkeypatch)
        prefill, _ = configured(found["twinlens-prefill"], certificates, monkeypatch)
        assert prefill.lend_prefill
        assert not llm.lend_prefill
        service = of_kind(text, "Service")["twinlens-prefill"]["spec"]
        assert service["clusterIP"] == "None", "one address would hide all of them but one"
        (grpc,) = service["ports"]
        assert grpc["port"] == port(prefill.listen)
        assert llm.prefill_services == (f"dns:///twinlens-prefill:{grpc['port']}",)

    def test_what_does_not_differ_on_purpose_is_the_same_on_both(
        self, certificates: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        more = "dtype=bfloat16,served-model-name=mine,block-size=32,keep-media-whole=true,prefill-tokens=1024"
        environment = "--set-json", 'llm.environment={"NCCL_DEBUG": "INFO"}'
        given = ",".join(f"llm.options.{each}" for each in more.split(","))
        found = pods(template(*VALUES["prefill"], "--set", given, *environment))
        llm, _ = configured(found["twinlens-llm"], certificates, monkeypatch)
        prefill, _ = configured(found["twinlens-prefill"], certificates, monkeypatch)
        of_one = {"prefill_services", "prefill_ca", "prefill_cert", "prefill_key", "prefill_token_file"}
        names = {each.name for each in dataclasses.fields(llm)}
        differ = {name for name in names if getattr(llm, name) != getattr(prefill, name)}
        assert differ == {"lend_prefill", "max_running", "max_waiting", "max_waiting_media"} | of_one
        assert (prefill.tp, prefill.dtype, prefill.block_size, prefill.keep_media_whole) == (2, "bfloat16", 32, True)
        assert prefill.kv_host_bytes == 12 << 30
        boxes = container(found["twinlens-llm"]), container(found["twinlens-prefill"])
        assert boxes[0]["resources"] == boxes[1]["resources"]
        assert boxes[0]["env"] == boxes[1]["env"]
        assert boxes[0]["volumeMounts"] == boxes[1]["volumeMounts"]
        assert {"name": "NCCL_DEBUG", "value": "INFO"} in boxes[1]["env"]
        for name in ("tolerations", "runtimeClassName", "terminationGracePeriodSeconds"):
            assert found["twinlens-llm"]["spec"][name] == found["twinlens-prefill"]["spec"][name]

    def test_what_it_says_itself_comes_before_what_llm_services_say(
        self, certificates: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        own = {
            "enabled": True,
            "options": {"overlap": "no", "kv-host-bytes": "16GiB", "row-cache-bytes": 1 << 30, "shared-memory": False},
            "environment": {"ONE": 2},
            "tolerations": [],
            "resources": {"limits": {"memory": "8Gi"}},
            "graceSeconds": 90,
            "replicas": 5,
        }
        text = template(
            *VALUES["prefill"],
            *("--set-json", f"prefill={json.dumps(own)}", "--set", "autoscaling.kind=none"),
            *("--set", "llm.options.shared-memory=true,llm.environment.ONE=1,llm.environment.TWO=2"),
        )
        pod = pods(text)["twinlens-prefill"]
        config, _ = configured(pod, certificates, monkeypatch)
        assert (config.tp, config.overlap, config.kv_host_bytes, config.shared_memory) == (2, "no", 16 << 30, False)
        assert config.row_cache_bytes == 1 << 30
        assert config.grace_seconds == 90
        assert pod["spec"]["terminationGracePeriodSeconds"] == 110
        assert "tolerations" not in pod["spec"]
        assert container(pod)["resources"] == own["resources"]
        told = {each["name"]: each["value"] for each in container(pod)["env"]}
        assert told.items() >= {"ONE": "2", "TWO": "2"}.items()
        assert of_kind(text, "Deployment")["twinlens-prefill"]["spec"]["replicas"] == 5

    def test_it_asks_for_the_token_of_llm_services_and_shows_a_certificate_of_its_own(
        self, certificates: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found = pods(manifests("prefill"))
        llm, _ = configured(found["twinlens-llm"], certificates, monkeypatch)
        prefill, _ = configured(found["twinlens-prefill"], certificates, monkeypatch)
        assert llm.prefill_token_file == prefill.auth_token_file != ""
        assert llm.prefill_security().cert
        assert prefill.tls_client_ca
        assert prefill.encoder_security().cert
        volumes = {each["name"]: each for each in found["twinlens-prefill"]["spec"]["volumes"]}
        assert volumes["tls"]["secret"]["secretName"] == "twinlens-prefill-tls"
        assert volumes["llm-token"]["secret"]["secretName"] == "twinlens-llm-token"
        words = container(found["twinlens-prefill"])["readinessProbe"]["exec"]["command"]
        assert {"--server-name=twinlens-prefill", "--token-file=/secrets/llm/token"} <= set(words)

    def test_without_tls_and_tokens_it_is_asked_without(
        self, certificates: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        more = "tls.enabled=false,tokens.llm=,tokens.encoder="
        found = pods(template(*VALUES["prefill"], "--set", more))
        llm, _ = configured(found["twinlens-llm"], certificates, monkeypatch)
        assert (llm.prefill_ca, llm.prefill_cert, llm.prefill_key, llm.prefill_token_file) == ("", "", "", "")
        assert container(found["twinlens-prefill"])["readinessProbe"]["grpc"]["port"] == 7002

    def test_llm_services_alone_may_ask_it(self) -> None:
        policy = of_kind(manifests("prefill"), "NetworkPolicy")["twinlens-prefill"]["spec"]
        asked, scraped = policy["ingress"]
        assert asked["ports"] == [{"port": 7002, "protocol": "TCP"}]
        (peer,) = asked["from"]
        assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "llm"
        assert scraped["ports"] == [{"port": 9400, "protocol": "TCP"}]
        assert [*scraped["from"][0]] == ["namespaceSelector"]

    def test_it_reaches_further_hosts_as_llm_services_do(self) -> None:
        further = {"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}
        text = template(*VALUES["prefill"], "--set-json", f"networkPolicy.egress.llm=[{json.dumps(further)}]")
        for name in ("twinlens-llm", "twinlens-prefill"):
            assert further in of_kind(text, "NetworkPolicy")[name]["spec"]["egress"]

    def test_rows_come_to_it_by_nixl_and_by_shared_memory(self) -> None:
        text = template(*VALUES["prefill"], "--set", "nixl.backend=UCX,sharedMemory.hostPath=/run/twinlens")
        pod = pods(text)["twinlens-prefill"]
        assert {"--nixl=UCX", "--local-dir=/srv/local"} <= set(container(pod)["args"])
        assert "podAffinity" in pod["spec"]["affinity"]
        others = {"encoder": {"llm", "prefill"}, "llm": {"encoder"}, "prefill": {"encoder"}}
        for part, expected in others.items():
            policy = of_kind(text, "NetworkPolicy")[f"twinlens-{part}"]["spec"]
            for direction, peers in (("ingress", "from"), ("egress", "to")):
                (rule,) = [each for each in policy[direction] if "endPort" in str(each.get("ports"))]
                chosen = {each["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for each in rule[peers]}
                assert chosen == expected

    def test_a_pool_gateways_and_routers_know_nothing_of_it(
        self, certificates: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        text = template("--values", f"{CHART}/values-prefill.yaml", "--values", f"{CHART}/values-inference.yaml")
        found = pods(text)
        assert [each["name"] for each in found["twinlens-prefill"]["spec"]["containers"]] == ["prefill"]
        (pool,) = of_kind(text, "InferencePool").values()
        gateways = of_kind(text, "Service")["twinlens-gateway"]["spec"]["selector"]
        labels = found["twinlens-prefill"]["metadata"]["labels"]
        for selector in (pool["spec"]["selector"]["matchLabels"], gateways):
            assert not selector.items() <= labels.items()
        assert "llm-d.ai/engine-type" not in labels
        llm, _ = configured(found["twinlens-llm"], certificates, monkeypatch)
        prefill, _ = configured(found["twinlens-prefill"], certificates, monkeypatch)
        assert llm.kv_events
        assert (prefill.kv_events, prefill.kv_events_replay) == ("", "")
        assert {each["name"] for each in container(found["twinlens-prefill"])["ports"]} == {"grpc", "metrics"}
        assert "POD_IP" not in {each["name"] for each in container(found["twinlens-prefill"])["env"]}
        policy = of_kind(text, "NetworkPolicy")["twinlens-prefill"]["spec"]
        assert {each["port"] for rule in policy["ingress"] for each in rule["ports"]} == {7002, 9400}
        assert "twinlens-epp" not in json.dumps(policy)

    def test_it_is_off_unless_asked_for(self) -> None:
        assert "prefill" not in template()

    @pytest.mark.parametrize(
        ("wrong", "why"),
        [
            ("llm.hosts=2", "prefill is not for llm.hosts above 1"),
            ("llm.options.kv-host-bytes=0", "prefill needs llm.options.kv-host-bytes"),
            ("prefill.hosts=1", "hosts"),
            ("prefill.options.lend-prefill=true", "/prefill/options/lend-prefill"),
            ("llm.options.prefill-services=other:1", "/llm/options/prefill-services"),
        ],
    )
    def test_values_with_which_it_would_not_work_are_refused(self, wrong: str, why: str) -> None:
        done = run_helm("template", "twinlens", str(CHART), *VALUES["prefill"], "--set", wrong)
        assert done.returncode != 0
        assert why in done.stderr
