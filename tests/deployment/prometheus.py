"""A real Prometheus, as Debian packages it, that scrapes services of a test."""

from __future__ import annotations

import json
import math
import shutil
import signal
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.launch import ROOT
from tests.waiting import until
from tests.with_parent import with_parent

CONFIG = ROOT / "deploy/observe/prometheus.yml"
RULE_FILES = [str(ROOT / "deploy/helm/twinlens/files" / name) for name in ("alerts.yaml", "vllm-names.yaml")]


def program(name: str) -> str:
    """`prometheus` or `promtool`; a test is skipped where it is not installed."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


@dataclass(frozen=True, slots=True)
class Prometheus:
    """One that runs."""

    address: str

    def get(self, path: str, **fields: str) -> Any:
        query = urllib.parse.urlencode(fields)
        try:
            with urllib.request.urlopen(f"http://{self.address}/api/v1/{path}?{query}", timeout=180) as answer:
                return json.loads(answer.read())["data"]
        except urllib.error.HTTPError as error:
            if error.code == 503:  # it is not ready yet
                raise
            raise AssertionError(f"{fields}: {error.read().decode()}") from None

    def values(self, query: str) -> list[float]:
        """What it has of this moment, numbers alone."""
        found = [float(each["value"][1]) for each in self.get("query", query=query)["result"]]
        return [value for value in found if not math.isnan(value)]


@contextmanager
def prometheus(folder: Path, port: int, **targets: str) -> Iterator[Prometheus]:
    """Scrapes the jobs of the configuration that is shipped, at these addresses in place of names."""
    config = yaml.safe_load(CONFIG.read_text())
    assert {each["job_name"] for each in config["scrape_configs"]} == set(targets)
    config["global"] = {"scrape_interval": "200ms", "evaluation_interval": "1s"}
    config["rule_files"] = RULE_FILES
    config["scrape_configs"] = [
        {"job_name": job, "static_configs": [{"targets": [address]}]} for job, address in targets.items()
    ]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            with_parent(
                program("prometheus"),
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address=127.0.0.1:{port}",
            ),
            stdout=log,
            stderr=log,
        )
    try:
        running = Prometheus(f"127.0.0.1:{port}")

        def scraped() -> bool:
            assert process.poll() is None, (folder / "log").read_text()
            try:
                found = running.get("targets")["activeTargets"]
            except (urllib.error.URLError, ConnectionError):
                return False
            return len(found) == len(targets) and all(each["health"] == "up" for each in found)

        until(scraped, "all targets are scraped")
        yield running
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(180)
