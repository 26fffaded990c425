"""One trace for each request: spans of both services reach a collector, under the caller's own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from common import tracing
from tests import pictures
from tests.rpc.pairs import about, answer, asked, pair
from twinlens.v1.llm_pb2_grpc import LlmServiceStub

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@dataclass
class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Takes spans in; `spans` has each with the name of its service."""

    spans: list[tuple[str, Span]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def Export(self, request: Any, context: Any) -> trace_service_pb2.ExportTraceServiceResponse:
        with self._lock:
            for resource in request.resource_spans:
                named = {each.key: each.value.string_value for each in resource.resource.attributes}
                for scope in resource.scope_spans:
                    self.spans += [(named["service.name"], span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """A collector that services started by the test are told of by the standard variables."""
    collector = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    yield collector
    server.stop(None).wait()


def test_a_request_is_one_trace_over_both_services(collector: Collector, checkpoints: Callable[..., Path]) -> None:
    file = pictures.encoded(pictures.noise(96, 96, 9_900))
    with pair(checkpoints("qwen3_vl")) as both, grpc.insecure_channel(both.llm.address) as channel:
        metadata = (("traceparent", f"00-{TRACE}-{PARENT}-01"),)
        *_, last = LlmServiceStub(channel).Generate(asked(about(file)), metadata=metadata, timeout=60)
        answer(both.text, asked(about(file, "another question, and a trace of its own")))
    # Both services have ended, and have sent everything.
    ours = [(service, span) for service, span in collector.spans if span.trace_id.hex() == TRACE]
    names = {(service, span.name) for service, span in ours}
    assert names >= {("twinlens-llm", name) for name in ("Generate", "prompt", "header", "landing", "queue")}
    assert names >= {("twinlens-llm", name) for name in ("first_token", "decode_tokens")}
    assert names >= {("twinlens-encoder", name) for name in ("Encode", "hash", "decode", "queue", "vit", "transfer")}
    by_id = {span.span_id: span for _, span in ours}
    (root,) = (span for _, span in ours if span.name == "Generate")
    assert root.parent_span_id.hex() == PARENT
    for _, span in ours:
        assert span.end_time_unix_nano >= span.start_time_unix_nano
        while span.span_id != root.span_id:
            span = by_id[span.parent_span_id]
    told = {timing.stage: timing.seconds for timing in last.finished.timings}
    for stage in ("prompt", "queue", "first_token"):
        (span,) = (span for service, span in ours if (service, span.name) == ("twinlens-llm", stage))
        assert (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9 == pytest.approx(told[stage], abs=1e-5)
    others = {span.trace_id for _, span in collector.spans} - {bytes.fromhex(TRACE)}
    assert len(others) == 1, "housekeeping makes no traces"


def test_nothing_is_traced_unless_the_environment_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    assert not tracing.wanted()
    with tracing.serving("Encode", [("traceparent", f"00-{TRACE}-{PARENT}-01")]), tracing.span("inner"):
        assert tracing.outgoing() == ()
        tracing.in_turn({"stage": 1.0}, 0.0)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    assert tracing.wanted()
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert not tracing.wanted()


def test_what_goes_out_continues_what_came_in() -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    tracing.use(provider)
    try:
        with tracing.serving("Generate", [("traceparent", f"00-{TRACE}-{PARENT}-01")], request_id="name"):
            ((key, value),) = tracing.outgoing()
            tracing.in_turn({"one": 0.5, "two": 0.25}, 100.0)
    finally:
        tracing.stop()
    assert key == "traceparent"
    assert value.startswith(f"00-{TRACE}-")
    assert PARENT not in value
    one, two, call = spans.get_finished_spans()
    assert (one.name, two.name, call.name) == ("one", "two", "Generate")
    assert two.start_time == one.end_time
    assert one.end_time - one.start_time == 500_000_000
    assert call.attributes["request_id"] == "name"
    assert tracing.outgoing() == ()
