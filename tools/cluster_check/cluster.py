"""A release of the chart in its own namespace, through the command lines of kubectl and helm."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tools.rolling_trial.answers import METRICS, READY_SECONDS, SCRAPE, TrialError, measured, sees, until

CHART = Path(__file__).parents[2] / "deploy/helm/twinlens"
VALUES = Path(__file__).with_name("values.yaml")
RELEASE = "twinlens"
TOKENS = "twinlens-gateway-tokens"
PARTS = ("encoder", "llm", "gateway")
LEVELS = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn")}
"""The strictest of Kubernetes' own pod security standards, which the name space is held to."""


@dataclass(frozen=True)
class Cluster:
    """The cluster that KUBECONFIG names, and the name space that the check makes in it."""

    namespace: str
    helm: str
    settings: Sequence[str] = ()
    """Further arguments of helm install, over values.yaml."""

    def run(self, *command: str, given: str = "") -> subprocess.CompletedProcess[str]:
        """A command that must succeed; what it wrote."""
        done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
        if done.returncode:
            raise TrialError(f"{shlex.join(command)[:300]}: {done.stderr.strip()[-2000:]}")
        return done

    def kubectl(self, *command: str, given: str = "") -> str:
        """What kubectl says of the name space."""
        return self.run("kubectl", "--namespace", self.namespace, *command, given=given).stdout

    def make(self, token: str) -> None:
        """The name space, and the Secret that docs/operations/kubernetes.md has a user make."""
        self.run("kubectl", "create", "namespace", self.namespace)
        self.kubectl("label", "namespace", self.namespace, *(f"{label}={level}" for label, level in LEVELS.items()))
        self.kubectl("create", "secret", "generic", TOKENS, f"--from-literal=tokens={token}")

    def remove(self) -> None:
        """All that was made, and waits until it is gone. What is not there is no error."""
        subprocess.run(
            [self.helm, "uninstall", RELEASE, "--namespace", self.namespace, "--ignore-not-found", "--wait"],
            capture_output=True,
            check=False,
        )
        self.run("kubectl", "delete", "namespace", self.namespace, "--ignore-not-found", "--wait")

    def release(self, verb: str, *settings: str) -> None:
        """`helm install` or `helm upgrade`, and waits until every pod is ready."""
        values = ("--values", str(VALUES), *self.settings, *settings)
        wait = ("--wait", "--timeout", f"{READY_SECONDS:.0f}s")
        self.run(self.helm, verb, RELEASE, str(CHART), "--namespace", self.namespace, *values, *wait)

    def warnings(self) -> list[str]:
        """What the API server remarks on the objects of the release."""
        manifest = self.run(self.helm, "get", "manifest", RELEASE, "--namespace", self.namespace).stdout
        applied = ("apply", "--dry-run=server", "--server-side", "--force-conflicts", "--filename", "-")
        done = self.run("kubectl", "--namespace", self.namespace, *applied, given=manifest)
        return [line for line in done.stderr.splitlines() if line.startswith("Warning:")]

    def image(self) -> str:
        """The image of encoders."""
        return str(self._deployment("encoder")["spec"]["template"]["spec"]["containers"][0]["image"])

    def replicas(self, part: str) -> int:
        """How many pods of a part are wanted."""
        return int(self._deployment(part)["spec"]["replicas"])

    def pods(self, part: str) -> list[dict[str, Any]]:
        """Pods of a part that are there and not on their way out, the oldest first."""
        label = f"app.kubernetes.io/instance={RELEASE},app.kubernetes.io/component={part}"
        found = json.loads(self.kubectl("get", "pods", "--selector", label, "--output", "json"))["items"]
        kept = [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]
        return sorted(kept, key=lambda pod: str(pod["metadata"]["creationTimestamp"]))

    def names(self, part: str) -> list[str]:
        """Names of these pods."""
        return [str(pod["metadata"]["name"]) for pod in self.pods(part)]

    def scale(self, part: str, count: int) -> None:
        """`kubectl scale`, and waits until all is settled."""
        self.kubectl("scale", "deployment", f"{RELEASE}-{part}", f"--replicas={count}")
        self.settled()

    def kill(self, name: str) -> None:
        """Ends a pod without a grace: what it was doing is lost."""
        self.kubectl("delete", "pod", name, "--grace-period=0", "--force", "--wait=false")

    def evict(self, name: str) -> None:
        """Asks for a pod to leave, as a drain of its node does."""
        eviction = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": name, "namespace": self.namespace},
        }
        path = f"/api/v1/namespaces/{self.namespace}/pods/{name}/eviction"
        self.kubectl("create", "--raw", path, "--filename", "-", given=json.dumps(eviction))

    def settled(self) -> None:
        """Waits until as many pods as are wanted are ready and see as many others as there are."""
        wanted = {part: self.replicas(part) for part in PARTS}
        for part, count in wanted.items():
            until(partial(self._ready, part, count), f"{count} of {part} are ready, and no others are left")
        for part, behind in (("llm", "encoder"), ("gateway", "llm")):
            for name in self.names(part):
                until(partial(self._sees, name, part, wanted[behind]), f"{name} sees {wanted[behind]} of {behind}")

    def encoded(self, name: str) -> float:
        """Items that an encoder has encoded."""
        found = measured(self._page(name, 9400))
        return sum(value for series, value in found.items() if series.startswith("twinlens_encoder_items_total"))

    def restarts(self) -> list[str]:
        """Containers that were started again by themselves: none should be."""
        return [
            f"{pod['metadata']['name']} {status['restartCount']} times, last with {status.get('lastState')}"
            for part in PARTS
            for pod in self.pods(part)
            for status in pod["status"].get("containerStatuses", ())
            if status["restartCount"]
        ]

    def _deployment(self, part: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.kubectl("get", "deployment", f"{RELEASE}-{part}", "--output", "json"))
        return found

    def _ready(self, part: str, count: int) -> bool:
        label = f"app.kubernetes.io/instance={RELEASE},app.kubernetes.io/component={part}"
        found = json.loads(self.kubectl("get", "pods", "--selector", label, "--output", "json"))["items"]
        conditions = [entry for pod in found for entry in pod["status"].get("conditions", ())]
        ready = sum(entry["type"] == "Ready" and entry["status"] == "True" for entry in conditions)
        return bool(len(found) == ready == count)

    def _page(self, name: str, port: int) -> str:
        return self.kubectl("exec", name, "--", "python", "-c", SCRAPE.format(port))

    def _sees(self, name: str, part: str, others: int) -> bool:
        return sees(part, self._page(name, METRICS[part][0]), others)
