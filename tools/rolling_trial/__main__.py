"""`make rolling-trial`: compose.yaml with replicas, under load, scaled and upgraded. Exits with 1 if a request failed.

Two encoders, two LLM services and two gateways run as a separate project, under constant load
(tools/rolling_trial/load.py). Encoders go from 2 to 1, 3, 1 and 2; then every replica is replaced by one of
another image, encoders first, gateways last. The image must exist: `docker compose build`, or `podman build`.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tools.rolling_trial.answers import METRICS, SCRAPE, Answers, TrialError, sees, until

ROOT = Path(__file__).parents[2]
PROJECT = "twinlens-trial"
ENGINES = {"docker": "docker compose", "podman": "podman-compose"}
"""Their compose commands; the first that works is taken."""
SCALES = {"encoder": "ENCODERS", "llm": "LLM_SERVICES", "gateway": "GATEWAYS"}
STOP_SECONDS = 40


@dataclass
class Deployment:
    """The compose project: we stop its containers by name, and compose makes those that are missing."""

    engine: str
    compose: list[str]
    image: str
    scale: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SCALES, 2))

    def run(self, *command: str, check: bool = True, given: str | None = None) -> str:
        """What a command of the engine says."""
        done = subprocess.run([self.engine, *command], input=given, capture_output=True, text=True, check=False)
        if check and done.returncode:
            raise TrialError(f"{self.engine} {shlex.join(command)}: {done.stderr.strip()}")
        return done.stdout.strip()

    def composed(self, *command: str) -> None:
        """Runs compose on the project, with ports that it finds."""
        counts = {SCALES[service]: str(count) for service, count in self.scale.items()}
        environment = {**os.environ, **counts, "IMAGE": self.image, "LLM_PORT": "", "GATEWAY_PORT": ""}
        environment["MODEL"] = "models/demo"
        done = subprocess.run(
            [*self.compose, "-p", PROJECT, "-f", str(ROOT / "compose.yaml"), *command],
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise TrialError(f"{shlex.join(self.compose)} {shlex.join(command)}: {done.stderr.strip()[-2000:]}")

    def replicas(self, service: str) -> list[str]:
        """Names of containers that are there, in the order of their numbers."""
        label = "com.docker.compose"
        filters = [f"--filter=label={label}.project={PROJECT}", f"--filter=label={label}.service={service}"]
        names = self.run("ps", "--all", "--format", "{{.Names}}", *filters).split()
        return sorted(names, key=lambda name: int("".join(filter(str.isdigit, name)) or 0))

    def up(self) -> None:
        """Makes what is missing, and waits until everything serves and is known to those who need it."""
        self.composed("up", "--detach", "--no-build", "--no-recreate")
        self.settled()

    def settled(self) -> None:
        """Waits until every replica is healthy and sees as many others as there are."""
        for name in (name for service in SCALES for name in self.replicas(service)):
            until(partial(self._healthy, name), f"{name} serves")
        for service, behind in (("llm", "encoder"), ("gateway", "llm")):
            for name in self.replicas(service):
                until(
                    partial(self._sees, name, service, self.scale[behind]),
                    f"{name} sees {self.scale[behind]} of {behind}",
                )

    def remove(self, name: str) -> None:
        """SIGTERM, as long to drain as compose.yaml gives, and gone. TrialError where it did not end by itself."""
        self.run("stop", "--time", str(STOP_SECONDS), name)
        code = self.run("inspect", "--format", "{{.State.ExitCode}}", name)
        if code != "0":
            raise TrialError(f"{name} ended with {code}: {self.run('logs', '--tail', '20', name)}")
        self.run("rm", name)

    def to(self, service: str, count: int) -> None:
        """Scales a service."""
        self.scale[service] = count
        for name in self.replicas(service)[count:]:
            self.remove(name)
        self.up()

    def replace(self, service: str) -> None:
        """One replica after the other makes room for one of the present image."""
        wanted = self.run("image", "inspect", "--format", "{{.Id}}", self.image)
        for name in self.replicas(service):
            self.remove(name)
            self.up()
        for name in self.replicas(service):
            if self.run("inspect", "--format", "{{.Image}}", name) != wanted:
                raise TrialError(f"{name} is not of the image {self.image}")

    def down(self) -> None:
        """Takes everything down, volumes too."""
        self.composed("down", "--volumes", "--timeout", "10")

    def _healthy(self, name: str) -> bool:
        """What compose.yaml's health check says, asked by us: not every engine asks by itself."""
        if self.run("inspect", "--format", "{{.State.Running}}", name) != "true":
            raise TrialError(f"{name} ended: {self.run('logs', '--tail', '20', name)}")
        kind, *command = json.loads(self.run("inspect", "--format", "{{json .Config.Healthcheck.Test}}", name))
        if kind == "CMD-SHELL":
            command = ["sh", "-c", *command]
        asked = subprocess.run([self.engine, "exec", name, *command], capture_output=True, check=False)
        return asked.returncode == 0

    def _sees(self, name: str, service: str, others: int) -> bool:
        return sees(service, self.run("exec", name, "python", "-c", SCRAPE.format(METRICS[service][0])), others)


@contextmanager
def loaded(deployment: Deployment, answers: Answers) -> Iterator[None]:
    """Callers ask for the length of the block. TrialError where they stopped by themselves."""
    mounted = f"{ROOT / 'tools/rolling_trial/load.py'}:/srv/load.py:ro"
    command = [deployment.engine, "run", "--rm", "--interactive", "--network", f"{PROJECT}_default"]
    load = subprocess.Popen(
        [*command, "--volume", mounted, deployment.image, "python", "/srv/load.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    reader = threading.Thread(target=answers.read, args=(load,))
    reader.start()
    try:
        yield
        if load.poll() is not None:
            raise TrialError(f"the load ended by itself, with {load.returncode}")
    finally:
        assert load.stdin
        load.stdin.close()
        reader.join()
        load.wait()


def trial(deployment: Deployment, upgrade: str) -> int:
    """Runs it; returns how many requests failed."""
    deployment.up()
    answers = Answers()
    with loaded(deployment, answers):
        answers.go_on()
        steps: list[tuple[str, str, int]] = [
            ("encoders 2 → 1", "encoder", 1),
            ("encoders 1 → 3", "encoder", 3),
            ("encoders 3 → 1", "encoder", 1),
            ("encoders 1 → 2", "encoder", 2),
            *((f"every {service} replaced", service, 0) for service in SCALES),
        ]
        answers.tell("as it was started", time.monotonic())
        for phase, service, count in steps:
            began = time.monotonic()
            if count:
                deployment.to(service, count)
            else:
                deployment.image = upgrade
                deployment.replace(service)
            answers.go_on()
            answers.tell(phase, began)
    answers.tell("what was under way", time.monotonic())
    return answers.failures


def works(*command: str) -> bool:
    """Whether a program is here and the command succeeds: of docker the client may be here alone."""
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def main(argv: Sequence[str] | None = None) -> int:
    """Finds an engine and its compose, runs the trial, and takes everything down."""
    parser = argparse.ArgumentParser(prog="python -m tools.rolling_trial", description=__doc__)
    parser.add_argument("--engine", default="", choices=ENGINES, help="by default the first that works")
    parser.add_argument("--compose", default="", help="by default 'docker compose' or podman-compose")
    parser.add_argument("--image", default="twinlens")
    given = parser.parse_args(argv)
    for engine in [given.engine] if given.engine else ENGINES:
        compose = shlex.split(given.compose or ENGINES[engine])
        if works(engine, "info") and works(*compose, "version"):
            break
    else:
        print("rolling-trial: neither docker nor podman works here with its compose; nothing was tried")
        return 0
    deployment = Deployment(engine, compose, given.image)
    upgrade = f"{PROJECT}:next"
    failures = 0
    try:
        deployment.run("build", "--tag", upgrade, "-", given=f"FROM {given.image}\nLABEL twinlens.trial=next\n")
        failures = trial(deployment, upgrade)
    except TrialError as error:
        print(f"rolling-trial: {error}", file=sys.stderr)
        return 1
    finally:
        deployment.down()
        deployment.run("rmi", upgrade, check=False)
    print(f"rolling-trial: {failures} requests failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
