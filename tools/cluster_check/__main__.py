"""`make cluster-check`: the chart in the cluster of KUBECONFIG, under load. Exits with 1 if a request failed.

It is installed into its own namespace, with pods as small as in values.yaml beside this file, under constant load
(tools/rolling_trial/load.py). Encoders and LLM services are scaled, `helm upgrade` replaces every pod, and pods are
evicted and killed. Then everything is removed. The cluster must have access to the image.
"""

from __future__ import annotations

import argparse
import json
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tools.cluster_check.cluster import CHART, RELEASE, Cluster
from tools.rolling_trial import load
from tools.rolling_trial.answers import Answers, TrialError, until

CALLER = "twinlens-check-caller"
DEPLOY_TOOLS = CHART.parents[2] / "build/deploy-tools"


def caller(image: str, labels: dict[str, str]) -> dict[str, object]:
    """The pod that callers live in, which the chart's network policies let in and any pod security standard allows."""
    security = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": CALLER, "labels": labels},
        "spec": {
            "automountServiceAccountToken": False,
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 0,
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [
                {"name": "caller", "image": image, "command": ["sleep", "86400"], "securityContext": security}
            ],
        },
    }


@contextmanager
def loaded(cluster: Cluster, answers: Answers, token: str) -> Iterator[None]:
    """Callers ask for the length of the block. TrialError where they stopped by themselves."""
    where = [f"--gateway={RELEASE}-gateway:8000", f"--llm=dns:///{RELEASE}-llm:7002", f"--token={token}"]
    program = Path(load.__file__).read_text()
    command = ["kubectl", "--namespace", cluster.namespace, "exec", "--stdin", CALLER, "--", "python", "-c", program]
    asking = subprocess.Popen([*command, *where], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    reader = threading.Thread(target=answers.read, args=(asking,))
    reader.start()
    try:
        yield
        if asking.poll() is not None:
            raise TrialError(f"the load ended by itself, with {asking.returncode}")
    finally:
        assert asking.stdin
        asking.stdin.close()
        reader.join()
        asking.wait()


class Check:
    """Its steps, one after the other."""

    def __init__(self, cluster: Cluster, upgrade: Sequence[str]) -> None:
        self._cluster = cluster
        self._upgrade = upgrade
        self._answers = Answers()

    def run(self) -> int:
        """Installs, asks, and does to pods what befalls them; returns how many requests failed."""
        cluster, token = self._cluster, secrets.token_urlsafe()
        cluster.make(token)
        cluster.release("install")
        self._installed()
        cluster.kubectl(
            "apply", "--filename", "-", given=json.dumps(caller(cluster.image(), {"twinlens-client": "true"}))
        )
        cluster.kubectl("wait", "pod", CALLER, "--for=condition=Ready", "--timeout=300s")
        with loaded(cluster, self._answers, token):
            self._phase("as it was installed", cluster.settled)
            self._phase("encoders 1 → 3", partial(self._grown, 3))
            self._phase("encoders 3 → 1", partial(cluster.scale, "encoder", 1))
            self._phase("LLM services 1 → 2", partial(cluster.scale, "llm", 2))
            self._phase("LLM services 2 → 1", partial(cluster.scale, "llm", 1))
            self._phase("helm upgrade", self._upgraded)
            self._phase("2 of each", self._doubled)
            for part in ("encoder", "llm", "gateway"):
                self._phase(f"{part} evicted", partial(self._left, part, cluster.evict))
            for part in ("encoder", "llm"):
                self._phase(f"{part} killed", partial(self._left, part, cluster.kill))
            if started := cluster.restarts():
                raise TrialError(f"started again: {'; '.join(started)}")
        self._answers.tell("what was under way", time.monotonic())
        return self._answers.failures

    def _installed(self) -> None:
        """Every pod is ready, was started once, and the API server has nothing to remark."""
        self._cluster.settled()
        if remarks := self._cluster.warnings() + self._cluster.restarts():
            raise TrialError("; ".join(remarks))
        print(f"installed in {self._cluster.namespace}: every pod is ready, no warnings", flush=True)

    def _phase(self, name: str, act: Callable[[], None]) -> None:
        began = time.monotonic()
        act()
        self._answers.go_on()
        self._answers.tell(name, began)

    def _grown(self, count: int) -> None:
        """More encoders, and each has encoded something."""
        self._cluster.scale("encoder", count)
        for name in self._cluster.names("encoder"):
            until(lambda name=name: self._cluster.encoded(name) > 0, f"{name} encodes")  # type: ignore[misc]

    def _upgraded(self) -> None:
        """Every pod is another than before."""
        parts = ("encoder", "llm", "gateway")
        before = {name for part in parts for name in self._cluster.names(part)}
        self._cluster.release("upgrade", *self._upgrade)
        self._cluster.settled()
        if kept := before.intersection(name for part in parts for name in self._cluster.names(part)):
            raise TrialError(f"not replaced: {', '.join(sorted(kept))}")

    def _doubled(self) -> None:
        for part in ("encoder", "llm"):
            self._cluster.scale(part, 2)

    def _left(self, part: str, leave: Callable[[str], None]) -> None:
        """A pod leaves, and another takes its place."""
        name = self._cluster.names(part)[0]
        leave(name)
        until(lambda: name not in self._cluster.names(part), f"{name} leaves")
        self._cluster.settled()


def missing(helm: str | None) -> str:
    """What is not here that the check needs; nothing where all is."""
    if not shutil.which("kubectl") or not helm:
        return "kubectl or helm (`make deploy-tools`) is not installed"
    asked = subprocess.run(["kubectl", "version", "--request-timeout=10s"], capture_output=True, text=True, check=False)
    return "" if asked.returncode == 0 else "no cluster answers where KUBECONFIG points"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the check where there is a cluster, and removes what it made."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.cluster_check",
        description=__doc__,
        epilog="Further arguments are helm's, such as --set image.repository=registry.example/twinlens.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--upgrade-tag", default="", help="the image's tag after the upgrade; by default the same")
    given, settings = parser.parse_known_args(argv)
    helm = shutil.which("helm") or shutil.which("helm", path=str(DEPLOY_TOOLS))
    if lacks := missing(helm):
        print(f"cluster-check: {lacks}; nothing was checked")
        return 0
    assert helm
    cluster = Cluster(f"twinlens-check-{secrets.token_hex(3)}", helm, settings)
    upgrade = [
        word for part in ("encoder", "llm", "gateway") for word in ("--set", f"{part}.podAnnotations.check=next")
    ]
    if given.upgrade_tag:
        upgrade += ["--set", f"image.tag={given.upgrade_tag}"]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("cluster-check: ended from outside"))  # not before all is removed
    try:
        failures = Check(cluster, upgrade).run()
    except TrialError as error:
        print(f"cluster-check: {error}", file=sys.stderr)
        return 1
    finally:
        cluster.remove()
    print(f"cluster-check: {failures} requests failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
