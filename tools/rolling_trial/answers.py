"""Shared by deployment trials under load: the outcome of requests, and whether all parts have found each other."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field

READY_SECONDS = 300.0
"""For a replica to serve, and for the others to know it."""
SCRAPE = (
    "import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:{}/metrics', timeout=10).read().decode())"
)
METRICS = {
    "llm": (9400, "twinlens_llm_encoders_usable"),
    "gateway": (8000, "twinlens_gateway_llm_services_usable"),
}


class TrialError(Exception):
    """Something other than a request went wrong."""


def measured(page: str) -> dict[str, float]:
    """A page of metrics, by series."""
    pairs = (line.rsplit(" ", 1) for line in page.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def sees(service: str, page: str, others: int) -> bool:
    """Whether a replica, by its metrics, has as many others behind it, and answers as it always will."""
    values = measured(page)
    if values.get("twinlens_llm_kernels_compiling"):
        return False  # answers are compared: ours and torch's kernels differ in the last digits
    return values[METRICS[service][1]] == others


def until(holds: Callable[[], bool], what: str) -> None:
    """Waits, and looks twice a second. TrialError where it never comes to hold."""
    end = time.monotonic() + READY_SECONDS
    while not holds():
        if time.monotonic() > end:
            raise TrialError(f"never: {what}")
        time.sleep(0.5)


@dataclass
class Answers:
    """What became of requests, since it was last asked."""

    lines: list[dict[str, object]] = field(default_factory=list)
    failures: int = 0

    def read(self, load: subprocess.Popen[str]) -> None:
        """Takes the load's lines until it ends."""
        assert load.stdout
        for line in load.stdout:
            self.lines.append(json.loads(line))

    def go_on(self) -> None:
        """Waits until 20 more are answered."""
        enough = len(self.lines) + 20
        until(lambda: len(self.lines) >= enough, "requests are answered")

    def tell(self, phase: str, began: float) -> None:
        """A line about a phase, and one for each failure in it."""
        lines, self.lines = self.lines, []
        for way in ("http", "grpc"):
            of = [line for line in lines if line["way"] == way]
            failed = [line for line in of if line["failure"]]
            self.failures += len(failed)
            slowest = max((float(str(line["seconds"])) for line in of), default=0.0)
            again = sum(int(str(line["again"])) for line in of)
            print(
                f"{phase:28} {time.monotonic() - began:5.0f} s  {way}: {len(of):4} answered, {len(failed)} failed,"
                f" {again} sent again, slowest {slowest:.1f} s",
                flush=True,
            )
            for line in failed[:5]:
                print(f"    {line['failure']}", flush=True)
