"""The chart as helm renders it."""

from __future__ import annotations

import functools
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.launch import ROOT

CHART = ROOT / "deploy/helm/twinlens"
TOOLS = ROOT / "build/deploy-tools"
VALUES: dict[str, tuple[str, ...]] = {
    "cpu": ("--set", "autoscaling.kind=hpa"),
    "gpu": ("--values", f"{CHART}/values-gpu.yaml", "--set", "sharedMemory.hostPath=/run/twinlens"),
    "multihost": ("--values", f"{CHART}/values-gpu.yaml", "--values", f"{CHART}/values-multihost.yaml"),
    "prefill": (
        *("--values", f"{CHART}/values-gpu.yaml", "--values", f"{CHART}/values-prefill.yaml"),
        *("--set", "tls.enabled=true,tokens.llm=twinlens-llm-token,tokens.encoder=twinlens-encoder-token"),
    ),
    "check": ("--values", f"{ROOT}/tools/cluster_check/values.yaml", "--set", "autoscaling.kind=hpa"),
    "inference": ("--values", f"{CHART}/values-inference.yaml", "--set", "autoscaling.kind=hpa"),
}
Object = dict[str, Any]


def helm() -> str:
    """The program's path; a test is skipped where there is none."""
    found = shutil.which("helm") or shutil.which("helm", path=str(TOOLS))
    if found is None:
        pytest.skip("helm is not installed: make deploy-tools")
    return found


def run_helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([helm(), *arguments], capture_output=True, text=True, timeout=180, check=False)


def template(*arguments: str) -> str:
    """The manifests of a release `twinlens` in the name space `vision`."""
    done = run_helm("template", "twinlens", str(CHART), "--namespace", "vision", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


@functools.cache
def manifests(name: str) -> str:
    return template(*VALUES[name])


@functools.cache
def objects(text: str) -> list[Object]:
    return [each for each in yaml.load_all(text, yaml.CSafeLoader) if each]


def of_kind(text: str, kind: str) -> dict[str, Object]:
    """By name."""
    return {each["metadata"]["name"]: each for each in objects(text) if each["kind"] == kind}


def pods(text: str) -> dict[str, Object]:
    """Every pod's template by the name of its Deployment, or that name with `/leader` or `/worker` behind it."""
    found = {name: each["spec"]["template"] for name, each in of_kind(text, "Deployment").items()}
    for name, each in of_kind(text, "LeaderWorkerSet").items():
        group = each["spec"]["leaderWorkerTemplate"]
        found |= {f"{name}/leader": group["leaderTemplate"], f"{name}/worker": group["workerTemplate"]}
    return found


def installed(program: str) -> Path:
    """A program that `make deploy-tools` installs; a test is skipped where it is missing."""
    path = TOOLS / "python/bin" / program
    if not path.exists():
        pytest.skip(f"{program} is not installed: make deploy-tools")
    return path
