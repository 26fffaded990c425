"""Prometheus metrics of one service, on a port of their own.

The asyncio front process owns all of them; what a worker knows reaches it in messages. Two kinds:

- *events* (a request ended, a stage took so long) are counters and histograms that are told when it happens;
- *state* (a queue's length, the totals that `GetLoad` gives as well) has one owner elsewhere, and is read when somebody
  scrapes: `read` takes a function that returns families made by `gauge` and `total`. It is called on the event loop,
  so it sees the service between two steps and needs no lock.

    metrics = Metrics("twinlens_encoder")
    seconds = metrics.histogram("vit_seconds", "time of one pass of the vision tower")
    metrics.read(lambda: [gauge("queued_items", "items that wait", len(queue))])
    async with metrics.serve("127.0.0.1:0") as address: ...
"""

from __future__ import annotations

import asyncio
import socket
import socketserver
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from common.aio import tasks

SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
"""Bounds of latency histograms. A hit or a small pass takes milliseconds; a long video on a CPU, or a long answer,
minutes. Steps of about 2.5 keep the error of an interpolated quantile below that factor, with few series."""

SHARES = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
"""Bounds of histograms of fractions, such as how full a batch is."""

Values = float | Mapping[tuple[str, ...], float]
"""One value, or a value for each tuple of label values."""

_SCRAPE_SECONDS = 10.0
"""A scrape whose client, or whose event loop, does nothing for longer is given up."""
_MAX_SCRAPES = 8
"""Scrapes at once; further ones are closed unanswered."""


def gauge(name: str, about: str, values: Values, labels: Sequence[str] = ()) -> Metric:
    """A value of this moment."""
    return _filled(GaugeMetricFamily(name, about, labels=labels), values)


def total(name: str, about: str, values: Values, labels: Sequence[str] = ()) -> Metric:
    """A total since the start; its series is called `name` + `_total`."""
    return _filled(CounterMetricFamily(name, about, labels=labels), values)


class Metrics:
    """All metrics of one service; every name gets `namespace` and an underscore in front."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._events = CollectorRegistry()
        self._readers: list[Callable[[], Iterable[Metric]]] = []

    def counter(self, name: str, about: str, labels: Sequence[str] = ()) -> Counter:
        """A total that is told of each event; its series is called `name` + `_total`."""
        return Counter(name, about, labels, namespace=self._namespace, registry=self._events)

    def histogram(
        self, name: str, about: str, labels: Sequence[str] = (), buckets: Sequence[float] = SECONDS
    ) -> Histogram:
        """A distribution that is told of each event."""
        return Histogram(name, about, labels, namespace=self._namespace, registry=self._events, buckets=buckets)

    def read(self, reader: Callable[[], Iterable[Metric]]) -> None:
        """Adds a function that gives the state at each scrape; it is called on the event loop and must be quick."""
        self._readers.append(reader)

    @asynccontextmanager
    async def serve(self, listen: str) -> AsyncIterator[str]:
        """Answers scrapes at `http://HOST:PORT/metrics` for the length of the block, which gets `HOST:PORT`.

        Nothing is served for an empty `listen`, and the address is empty. Raises OSError where the port cannot be had.
        """
        if not listen:
            yield ""
            return
        host, _, port = listen.rpartition(":")
        scraped = CollectorRegistry()
        scraped.register(_OnLoop(self._collect, asyncio.get_running_loop()))
        ProcessCollector(registry=scraped)
        # In a thread, since it may look a name up.
        try:
            server = await tasks.to_thread(_Server, (host.strip("[]"), int(port)), scraped)
        except OSError as error:
            raise OSError(f"cannot serve metrics on {listen} (--metrics-listen): {error.strerror or error}") from error
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, name="metrics")
        thread.start()
        try:
            yield f"{host}:{server.server_port}"
        finally:
            await tasks.to_thread(server.shutdown)
            server.server_close()
            thread.join()

    async def exposition(self) -> bytes:
        """All of it as a scrape gets it, for a service that answers scrapes itself."""
        scraped, families = CollectorRegistry(), await self._collect()
        scraped.register(_Collected(families))
        ProcessCollector(registry=scraped)
        return generate_latest(scraped)

    async def _collect(self) -> list[Metric]:
        state = [family for reader in self._readers for family in reader()]
        for family in state:  # made anew by each reader, so they may be changed
            family.name = f"{self._namespace}_{family.name}"
            family.samples = [each._replace(name=f"{self._namespace}_{each.name}") for each in family.samples]
        return [*state, *self._events.collect()]


class _OnLoop(Collector):
    """Has the event loop collect, for a thread that answers a scrape."""

    def __init__(
        self, collect: Callable[[], Coroutine[Any, Any, list[Metric]]], loop: asyncio.AbstractEventLoop
    ) -> None:
        self._collect = collect
        self._loop = loop

    def collect(self) -> Iterable[Metric]:
        return asyncio.run_coroutine_threadsafe(self._collect(), self._loop).result(_SCRAPE_SECONDS)

    def describe(self) -> Iterable[Metric]:
        """Names are checked where metrics are made, not here."""
        return ()


class _Collected(Collector):
    """What was collected a moment ago."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families

    def describe(self) -> Iterable[Metric]:
        """Names are checked where metrics are made, not here."""
        return ()


class _Handler(WSGIRequestHandler):
    """Answers one scrape in bounded time. Scrapes come every few seconds and are not logged."""

    timeout = _SCRAPE_SECONDS

    def log_message(self, *_: object) -> None:
        pass


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    """A thread for each scrape, up to a bound; one that hangs does not keep the process alive."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], registry: CollectorRegistry) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._slots = threading.BoundedSemaphore(_MAX_SCRAPES)
        super().__init__(address, _Handler)
        self.set_app(make_wsgi_app(registry))

    def verify_request(self, *_: object) -> bool:
        """Takes a slot, or has the connection closed."""
        return self._slots.acquire(blocking=False)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Starts its thread. Raises RuntimeError, and the slot is free again, where none can be had."""
        try:
            super().process_request(request, client_address)
        except RuntimeError:
            self._slots.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, *_: object) -> None:
        """A client that goes away or sends nothing is its own affair."""


def _filled(family: GaugeMetricFamily | CounterMetricFamily, values: Values) -> Metric:
    if isinstance(values, Mapping):
        for labels, value in values.items():
            family.add_metric(labels, value)
    else:
        family.add_metric((), values)
    return family
