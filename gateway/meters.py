"""The gateway's Prometheus metrics."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

from prometheus_client.core import Metric

from common.telemetry.metrics import Metrics, gauge
from gateway import kept_adapters
from gateway.generation import Outcome
from gateway.kept_adapters import KeptAdapters
from gateway.services import LlmServices
from twinlens.v1 import llm_pb2


@dataclass(frozen=True, slots=True)
class State:
    """What is in progress: requests, connections, bytes of bodies and of kept requests."""

    requests: int
    connections: int
    body_bytes: int
    kept_bytes: int


class Meters:
    """All metrics of one gateway."""

    def __init__(self) -> None:
        self.metrics = Metrics("twinlens_gateway")
        self._requests = self.metrics.counter("requests", "requests, by surface and HTTP status", ("surface", "status"))
        self._callers_requests = self.metrics.counter(
            "caller_requests",
            "requests of named callers, by surface and HTTP status",
            ("caller", "surface", "status"),
        )
        self._callers_tokens = self.metrics.counter(
            "caller_tokens", "tokens used by named callers, by kind", ("caller", "kind")
        )
        self._seconds = self.metrics.histogram("request_seconds", "seconds of a whole request", ("surface",))
        self._handovers = self.metrics.counter("handovers", "answers whose LLM service died, by outcome", ("outcome",))
        self._adapter_changes = self.metrics.counter(
            "late_adapter_changes",
            "attempts to load or unload a LoRA adapter at a service that joined later, by outcome",
            ("change", "outcome"),
        )
        for outcome in get_args(Outcome):
            self._handovers.labels(outcome)  # a rate sees the first one as well
        for change, came in itertools.product(("load", "unload"), get_args(kept_adapters.Outcome)):
            self._adapter_changes.labels(change, came)
        self._pauses = self.metrics.histogram("handover_seconds", "seconds until another LLM service continued")
        self._first = self.metrics.histogram("first_byte_seconds", "seconds to an answer's first byte", ("surface",))

    def watch(self, state: Callable[[], State], services: LlmServices, kept: KeptAdapters) -> None:
        """Reads, at every scrape, what is in progress."""
        self.metrics.read(
            lambda: [
                gauge("open_requests", "requests in flight", state().requests),
                gauge("open_connections", "open connections of callers", state().connections),
                gauge("body_bytes", "bytes of request bodies in memory", state().body_bytes),
                gauge("kept_request_bytes", "bytes of requests kept for a handover", state().kept_bytes),
                gauge("kept_adapters", "LoRA adapters to load at services that join later", kept.count),
                gauge("missing_adapters", "LoRA adapters missing at usable services", kept.missing),
                gauge("llm_services", "known LLM services", len(services.services)),
                gauge("llm_services_usable", "of these, usable services", len(services.usable)),
                gauge(
                    "llm_in_flight",
                    "requests in flight at an LLM service",
                    {(service.address,): service.in_flight for service in services.services},
                    ("address",),
                ),
                *_told(services),
            ]
        )

    def first_byte(self, surface: str, seconds: float) -> None:
        """An answer has begun."""
        self._first.labels(surface).observe(seconds)

    def handover(self, outcome: str, seconds: float) -> None:
        """An answer's LLM service has ended, and after so many seconds another one has continued it, or none."""
        self._handovers.labels(outcome).inc()
        if outcome == "taken_over":
            self._pauses.observe(seconds)

    def adapter_change(self, change: str, outcome: str) -> None:
        """A LoRA adapter was loaded or unloaded at a service that came later, or was not."""
        self._adapter_changes.labels(change, outcome).inc()

    def used(self, caller: str, usage: llm_pb2.Usage) -> None:
        """The usage of a prompt and its answer."""
        if caller:
            for kind, tokens in (
                ("prompt", usage.prompt_tokens),
                ("cached", usage.cached_tokens),
                ("completion", usage.completion_tokens),
            ):
                self._callers_tokens.labels(caller, kind).inc(tokens)

    def ended(self, surface: str, status: int, seconds: float, caller: str) -> None:
        """A request has ended; 499: its client has left. `caller` is its name, if it has one."""
        self._requests.labels(surface, str(status)).inc()
        if caller:
            self._callers_requests.labels(caller, surface, str(status)).inc()
        self._seconds.labels(surface).observe(seconds)


def _told(services: LlmServices) -> list[Metric]:
    """The services' load as of at most a second ago."""
    shares: dict[tuple[str, ...], float] = {}
    waiting: dict[tuple[str, ...], float] = {}
    running: dict[tuple[str, ...], float] = {}
    for service in services.usable:
        where, load = (service.address,), service.last_load
        shares[where] = load.kv_blocks_used / max(1, load.kv_blocks_total)
        waiting[where], running[where] = load.waiting, load.running
    return [
        gauge("llm_waiting", "choices and requests waiting at an LLM service", waiting, ("address",)),
        gauge("llm_running", "choices running at an LLM service", running, ("address",)),
        gauge(
            "llm_kv_cache_usage_ratio", "share of KV blocks that requests hold at an LLM service", shares, ("address",)
        ),
    ]
