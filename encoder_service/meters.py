"""The encoder's Prometheus metrics, named `twinlens_encoder_…`; docs/operations/monitoring.md explains them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import Metric

from common.media.convert import by_transport
from common.telemetry.metrics import SHARES, Metrics, gauge, total
from encoder_service.engine.batch_history import BatchStats
from encoder_service.engine.encode import EncoderEngine
from encoder_service.engine.load import EncoderLoad
from encoder_service.transports.transports import Transports

_UNITS = (1, 2, 4, 8, 16, 32, 64)


class Meters:
    """Told of events as they happen; `watch` adds the state of an engine and its transports."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._stages = metrics.histogram("stage_seconds", "seconds of an item in a stage", ["stage"])
        self._errors = metrics.counter("errors", "items and calls that failed, by reason", ["reason"])
        self._fill = metrics.histogram(
            "batch_fill", "patches of a batch, as a share of the most it may have", buckets=SHARES
        )
        self._units = metrics.histogram("batch_units", "pictures and video parts in a batch", buckets=_UNITS)
        self._preprocess = metrics.histogram("preprocess_seconds", "seconds to make patches from pixels, per batch")
        self._vit = metrics.histogram("vit_seconds", "seconds of the vision tower, per batch")

    def describe(self, **labels: str) -> None:
        """Adds a metric that describes the service, for joins with other series."""
        about = "description of the service in labels; always 1"
        self._metrics.read(lambda: [gauge("info", about, {tuple(labels.values()): 1.0}, tuple(labels))])

    def watch_requests(self, inflight_bytes: Callable[[], int]) -> None:
        """Reads, at every scrape, the bytes that requests hold."""
        about = "bytes of requests received or in transit"
        self._metrics.read(lambda: [gauge("inflight_bytes", about, inflight_bytes())])

    def watch(self, encoder: EncoderEngine, transports: Transports) -> None:
        """Has every scrape read queues, totals and the store."""
        self._metrics.read(lambda: _state(encoder.load(), transports))

    def computed(self, batch: BatchStats) -> None:
        """A worker has computed a batch, or a part of one."""
        self._fill.observe(batch.fill)
        self._units.observe(batch.units)
        self._preprocess.observe(batch.preprocess_seconds)
        self._vit.observe(batch.vit_seconds)

    def served(self, timings: Mapping[str, float]) -> None:
        """An item was served; seconds by stage."""
        for stage, seconds in timings.items():
            self._stages.labels(stage).observe(seconds)

    def failed(self, reason: str) -> None:
        """An item got an error."""
        self._errors.labels(reason).inc()


def _state(load: EncoderLoad, transports: Transports) -> Iterator[Metric]:
    yield from _queues(load)
    yield from _work(load)
    yield from _rows(load, transports)


def _queues(load: EncoderLoad) -> Iterator[Metric]:
    items: dict[tuple[str, ...], float] = {("encoded",): load.items.encoded, ("failed",): load.items.failed}
    yield gauge("queued_items", "items waiting for a worker", load.queued_items)
    yield gauge("running_items", "items being computed", load.running_items)
    yield gauge("queued_patches", "patches waiting for a worker", load.queued_patches)
    yield gauge("running_patches", "patches being computed", load.running_patches)
    if load.estimated_seconds is not None:
        about = "estimated seconds to compute all of these, from recent batches or, if longer, from the running ones"
        yield gauge("estimated_seconds", about, load.estimated_seconds)
    yield total("items", "items encoded or failed", items, ["outcome"])


def _work(load: EncoderLoad) -> Iterator[Metric]:
    batches, busy = load.batches, load.worker_busy_seconds
    calls: dict[tuple[str, ...], float] = {
        ("graph",): batches.graph_calls,
        ("eager",): batches.vit_calls - batches.graph_calls,
    }
    yield gauge("workers_alive", "device workers ready to compute", load.workers_alive)
    yield total("worker_busy_seconds", "seconds that workers had a batch, summed over workers", busy)
    yield total("worker_deaths", "device workers that died, were killed or hung", batches.worker_deaths)
    yield total("decode_process_restarts", "decode processes replaced", load.decoder_restarts)
    yield total("vit_calls", "passes of the vision tower", calls, ["mode"])
    yield total("kernels_compiled_late", "kernels compiled while a pass waited on a GPU", batches.late_compiles)
    yield total("vit_patches", "patches computed by the vision tower", batches.vit_patches)


def _rows(load: EncoderLoad, transports: Transports) -> Iterator[Metric]:
    yield total("store_hits", "items whose rows were in a store or in flight", load.items.hits)
    yield total("store_misses", "items whose rows were computed", load.items.misses)
    yield gauge("store_bytes", "bytes of rows in the store", load.store_bytes)
    yield gauge("store_capacity_bytes", "the store's size limit", load.store_capacity_bytes)
    yield gauge("store_entries", "entries in the store", load.store_entries)
    if load.shared_store is not None:
        about = "events of the shared store for this replica"
        events = _by(load.shared_store, "hits", "errors", "garbage", "written", "dropped", "waits_in_vain")
        yield total("shared_store_events", about, events, ["event"])
    yield gauge("leases", "leases of readers on rows in shared or device memory", transports.leases)
    if pools := transports.pools:
        yield gauge("device_pool_bytes", "bytes of rows in workers' device pools", sum(each.used for each in pools))
        yield gauge(
            "device_pool_capacity_bytes",
            "size of the device pools in bytes",
            sum(pool.capacity for pool in transports.pools),
        )
    yield total("rows_out", "rows sent", by_transport(transports.sent.rows), ["transport"])
    yield total("bytes_out", "bytes of rows sent", by_transport(transports.sent.bytes), ["transport"])


def _by(counts: Mapping[str, int], *names: str) -> dict[tuple[str, ...], float]:
    return {(name,): counts[name] for name in names}
