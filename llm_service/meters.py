"""The LLM service's Prometheus metrics. Names begin with `twinlens_llm_`; docs/operations/monitoring.md explains them.

Names follow those of other engines where these have the same metric.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from prometheus_client.core import Metric

from common.media.convert import by_transport
from common.telemetry.metrics import Metrics, gauge, total
from llm_service.encoders.encoder_cache import EncoderCache
from llm_service.encoders.pool import EncoderPool
from llm_service.encoders.receiver import RowReceiver
from llm_service.engine_client.client import EngineClient
from llm_service.generation.adapters import Adapters
from llm_service.generation.admission import Admission
from llm_service.prefill.services import PrefillCounters, PrefillServices

_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16_384, 65_536, 262_144)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 10.0)


class Meters:
    """Told of events as they happen; `watch` adds the state of the parts that have one."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.first_token = metrics.histogram(
            "time_to_first_token_seconds", "seconds from a request's arrival to its first token"
        )
        self.between_tokens = metrics.histogram(
            "inter_token_latency_seconds", "seconds between two tokens of a choice", buckets=_TOKEN_SECONDS
        )
        self.queue = metrics.histogram("request_queue_time_seconds", "seconds that a request waits in the engine")
        self.whole = metrics.histogram("e2e_request_latency_seconds", "seconds from a request's arrival to its end")
        self.stages = metrics.histogram("stage_seconds", "seconds of a request in a stage", ["stage"])
        self.prompt_tokens = metrics.histogram("request_prompt_tokens", "tokens of a prompt", buckets=_TOKENS)
        self.answer_tokens = metrics.histogram("request_generation_tokens", "tokens of a choice", buckets=_TOKENS)
        self.ends = metrics.counter("request_success", "choices that finished, by reason", ["finished_reason"])
        self.outcomes = metrics.counter("requests", "requests that ended, by outcome", ["outcome"])
        for outcome in ("finished", "failed", "cancelled"):
            self.outcomes.labels(outcome)  # a rate sees the first one as well
        self._errors = metrics.counter("errors", "calls that failed, by reason", ["reason"])

    def describe(self, **labels: str) -> None:
        """Adds a metric that describes the service, for joins with other series."""
        about = "description of the service in labels; always 1"
        self._metrics.read(lambda: [gauge("info", about, {tuple(labels.values()): 1.0}, tuple(labels))])

    def request(self) -> RequestMeter:
        """For a request that has just come."""
        return RequestMeter(self)

    def failed(self, reason: str) -> None:
        """A call got an error."""
        self._errors.labels(reason).inc()

    def watch_requests(self, inflight_bytes: Callable[[], int]) -> None:
        """Reads, at every scrape, the bytes that requests hold."""
        about = "bytes of requests received or in transit"
        self._metrics.read(lambda: [gauge("inflight_bytes", about, inflight_bytes())])

    def watch(
        self,
        admission: Admission,
        engine: EngineClient,
        encoder_cache: EncoderCache,
        receiver: RowReceiver,
        pool: EncoderPool,
    ) -> None:
        """Has every scrape read queues, totals and caches."""
        self._metrics.read(lambda: _engine(engine))
        self._metrics.read(lambda: _requests(admission))
        self._metrics.read(lambda: _media(encoder_cache, receiver, pool))

    def watch_adapters(self, adapters: Adapters, engine: EngineClient) -> None:
        """Reads, at every scrape, the requests of each adapter."""

        def read() -> Iterator[Metric]:
            each: dict[tuple[str, ...], float] = {(adapter.name,): adapter.in_flight for adapter in adapters.all}
            yield gauge("adapter_requests", "running requests of a LoRA adapter", each, ["adapter"])
            yield _adapter_lists(adapters, engine)

        self._metrics.read(read)

    def watch_kv_events(self, counts: Callable[[], tuple[int, int]] | None) -> None:
        """Reads, at every scrape, the numbers of batches published and dropped, if events are published."""

        def read() -> Iterator[Metric]:
            published, dropped = counts() if counts is not None else (0, 0)
            yield total("kv_event_batches", "published batches of KV events", published)
            yield total(
                "kv_event_batches_dropped", "batches of KV events dropped because sending took too long", dropped
            )

        self._metrics.read(read)

    def watch_prefills(self, prefills: PrefillServices | None) -> None:
        """Reads, at every scrape, the counters of other services that compute prompts, if there are any."""

        def read() -> Iterator[Metric]:
            counters = PrefillCounters() if prefills is None else prefills.counters
            yield total("prefills_elsewhere", "prompts sent to another service for prefill", counters.prompts)
            yield total("prefills_failed", "of these, prompts that failed there", counters.failed)

        self._metrics.read(read)


class RequestMeter:
    """Follows one request."""

    def __init__(self, meters: Meters) -> None:
        self._meters = meters
        self._begun = time.perf_counter()
        self._last: dict[int, float] = {}

    def prompt(self, tokens: int) -> None:
        """Its prompt is laid out and computing has begun."""
        self._meters.prompt_tokens.observe(tokens)

    def tokens(self, choice: int, came: Sequence[float]) -> None:
        """A choice has new tokens, which its caller gets now; `came` are the times at which steps had them. Tokens of
        one step, such as accepted drafts, share the time since the step before."""
        if not self._last:
            self._meters.first_token.observe(time.perf_counter() - self._begun)
        for at, step in groupby(came):
            count = len(list(step))
            if (before := self._last.get(choice)) is not None:
                for _ in range(count):
                    self._meters.between_tokens.observe((at - before) / count)
            self._last[choice] = at

    def choice(self, reason: str, tokens: int) -> None:
        """A choice has ended by itself."""
        self._meters.ends.labels(reason).inc()
        self._meters.answer_tokens.observe(tokens)

    def end(self, outcome: str, stages: dict[str, float]) -> None:
        """It is over: finished, failed or cancelled; seconds by stage."""
        self._meters.outcomes.labels(outcome).inc()
        self._meters.whole.observe(time.perf_counter() - self._begun)
        for stage, seconds in stages.items():
            self._meters.stages.labels(stage).observe(seconds)
        if "queue" in stages:
            self._meters.queue.observe(stages["queue"])


def _adapter_lists(adapters: Adapters, engine: EngineClient) -> Metric:
    """Adapter names by state, in the form that endpoint pickers read: labels with commas between names."""
    state, named = engine.latest, {adapter.number: adapter.name for adapter in adapters.all if "," not in adapter.name}
    running, waiting = (
        ",".join(sorted(named[number] for number in numbers if number in named))
        for numbers in (state.running_adapters, state.waiting_adapters)
    )
    about = "LoRA adapters of running and waiting choices in labels; the time of the scrape"
    labels = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
    return gauge("lora_requests_info", about, {(str(engine.max_loras), running, waiting): time.time()}, labels)


def _engine(engine: EngineClient) -> Iterator[Metric]:
    """As of the engine's last beat, at most a second ago; its totals restart with it."""
    state, counters = engine.latest, engine.latest.counters
    share = state.kv_blocks_used / state.kv_blocks_total if state.kv_blocks_total else 0.0
    yield gauge("engine_up", "1 while the engine serves", float(engine.ready is not None))
    if engine.ready is not None:
        weights = engine.ready.weights
        held: dict[tuple[str, ...], float] = {(weights.quantization,): float(weights.bytes)}
        yield gauge("step_tokens", "most tokens of a step", engine.ready.step_tokens)
        cache = (str(engine.block_size), str(engine.ready.kv_blocks), str(state.kv_host_blocks_total))
        sizes = ("block_size", "num_gpu_blocks", "num_cpu_blocks")
        about = "block size and numbers of KV blocks on device and host in labels; always 1"
        yield gauge("cache_config_info", about, {cache: 1.0}, sizes)
        waits = engine.ready.waits
        yield gauge("step_waits", "unexpected waits for the GPU in a decode step, from the trial at start-up", waits)
        yield gauge("weight_bytes", "bytes of the decoder's weights on the first rank", held, ["quantization"])
    compiling = float(engine.compiling)
    yield gauge("kernels_compiling", "1 while kernels are compiled and torch computes instead", compiling)
    yield total("kernels_compiled_late", "kernels compiled while a step waited on a GPU", engine.late_compiles)
    yield gauge("num_sequences_running", "choices in prefill or decode", state.running)
    yield gauge("num_sequences_waiting", "choices not begun or preempted", state.waiting)
    yield gauge("kv_cache_usage_ratio", "share of KV blocks that requests hold", share)
    yield gauge("kv_blocks", "total KV blocks", state.kv_blocks_total)
    yield gauge("kv_blocks_used", "KV blocks that requests hold", state.kv_blocks_used)
    yield gauge("kv_blocks_cached", "KV blocks that no request holds and a prompt can reuse", state.kv_blocks_cached)
    yield gauge("kv_host_blocks", "KV blocks that fit into host memory", state.kv_host_blocks_total)
    yield gauge("kv_host_blocks_used", "of these, blocks in use", state.kv_host_blocks_used)
    yield total("kv_blocks_offloaded", "KV blocks copied to host memory", state.kv_blocks_offloaded)
    yield total("kv_blocks_loaded", "KV blocks copied back from host memory for a prompt", state.kv_blocks_loaded)
    received, lent = (engine.blocks.received_blocks, engine.blocks.lent_blocks) if engine.blocks is not None else (0, 0)
    yield total("kv_blocks_received", "KV blocks received from other services", received)
    yield total("kv_blocks_lent", "KV blocks sent to other services", lent)
    yield gauge("state_slots", "slots for states of sequences and snapshots", state.state_slots)
    yield gauge("state_slots_used", "of these, slots of running choices", state.state_slots_used)
    yield gauge("state_snapshots", "of these, slots with a snapshot", state.state_snapshots)
    yield total("prefix_cache_queries", "prompt tokens looked up in the prefix cache", counters.prefix_query_tokens)
    yield total("prefix_cache_hits", "prompt tokens found in the prefix cache", counters.prefix_hit_tokens)
    yield total("engine_deaths", "engines that died, froze, hung or did not start", engine.deaths)
    about = "requests continued by another engine after theirs died"
    yield total("requests_handed_over", about, engine.handed_over)
    yield total("num_preemptions", "choices preempted because KV blocks ran out", counters.preemptions)
    yield total("prompt_tokens", "prompt tokens admitted", counters.prompt_tokens)
    yield total("generation_tokens", "tokens generated", counters.generated_tokens)
    yield total("engine_steps", "steps of the engine", counters.steps)
    yield total("engine_graph_steps", "steps computed by a captured graph", counters.graph_steps)
    yield total("adapter_fills", "LoRA adapters loaded into a slot", state.adapter_fills)
    method = (engine.speculative_method,)
    drafted: dict[tuple[str, ...], float] = {method: counters.draft_tokens} if any(method) else {}
    accepted: dict[tuple[str, ...], float] = {method: counters.accepted_draft_tokens} if any(method) else {}
    yield total("spec_decode_num_draft_tokens", "draft tokens verified", drafted, ["method"])
    yield total("spec_decode_num_accepted_tokens", "draft tokens accepted", accepted, ["method"])


def _requests(admission: Admission) -> Iterator[Metric]:
    yield gauge("num_requests_running", "requests being computed", admission.running)
    yield gauge("num_requests_waiting", "requests waiting, including for media", admission.waiting)
    about = "of these, requests waiting for rows from encoders or for room"
    yield gauge("num_requests_waiting_for_media", about, admission.for_media.requests)
    yield gauge("waiting_prompt_tokens", "prompt tokens of waiting requests", admission.waiting_tokens)
    yield total("requests_refused", "requests refused at once because the service was full", admission.refused)


def _media(encoder_cache: EncoderCache, receiver: RowReceiver, pool: EncoderPool) -> Iterator[Metric]:
    yield gauge("row_cache_bytes", "bytes of embedding rows held", encoder_cache.used_bytes)
    yield gauge("row_cache_capacity_bytes", "size limit of the row cache", encoder_cache.capacity_bytes)
    yield total("row_cache_hits", "items whose rows were in the row cache", encoder_cache.counters.hits)
    received = by_transport(encoder_cache.counters.by_transport)
    yield total("rows_received", "embedding rows received", received, ["transport"])
    yield total("encode_attempts", "streams opened at encoders", receiver.counters.attempts)
    yield total("encode_retries", "streams that replaced a broken one", receiver.counters.retries)
    known = receiver.counters.headers_known
    yield total("headers_known", "items whose header was known without asking an encoder", known)
    waiting = len(pool.wait_queue)
    yield gauge("items_waiting_for_encoders", "items waiting because every encoder is full", waiting)
    yield gauge(
        "encoders_usable",
        "encoders that answer and have the right digest",
        sum(replica.usable for replica in pool.replicas),
    )
