"""One trace for each request: spans of both services reach a collector, under the caller's own."""

from __future__ import annotations

import base64
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from common.telemetry import tracing
from tests import pictures
from tests.rpc.pairs import about, answer, asked, pair
from tests.waiting import until
from twinlens import user, v1
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


def _parent(span: Span, spans: dict[bytes, tuple[str, Span]]) -> str:
    """The name of the span that one is under."""
    return spans[span.parent_span_id][1].name


def _seconds(span: Span) -> float:
    assert span.end_time_unix_nano >= span.start_time_unix_nano
    return (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9


def _numbers(span: Span) -> dict[str, int]:
    return {each.key: each.value.int_value for each in span.attributes}


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
    file = pictures.encoded(pictures.noise(256, 256, 9_900))
    address = v1.Media(modality=v1.MODALITY_IMAGE, url=f"data:image/png;base64,{base64.b64encode(file).decode()}")
    chunks = {"max_step_tokens": 40, "max_running": 8}
    with pair(checkpoints("qwen3_vl"), **chunks) as both, grpc.insecure_channel(both.llm.address) as channel:
        metadata = (("traceparent", f"00-{TRACE}-{PARENT}-01"),)
        first, *_, last = LlmServiceStub(channel).Generate(
            asked(user(address, "What is it?")), metadata=metadata, timeout=180
        )
        answer(both.text, asked(about(file, "another question, and a trace of its own")))
        last_ones = Counter({"Generate": 2, "Encode": 1})  # of each process; at its end it has a moment for the rest
        until(lambda: Counter(span.name for _, span in collector.spans) >= last_ones, "the last spans are here")
    # Both services have ended, and have sent everything.
    ours = {span.span_id: (service, span) for service, span in collector.spans if span.trace_id.hex() == TRACE}
    (root,) = (span for _, span in ours.values() if span.name == "Generate")
    assert root.parent_span_id.hex() == PARENT
    found = {(service, span.name, _parent(span, ours)) for service, span in ours.values() if span is not root}
    assert found == {
        *(("twinlens-llm", name, "Generate") for name in ("prompt", "hash", "header", "encode_header", "landing")),
        *(("twinlens-llm", name, "Generate") for name in ("rows", "queue", "prefill", "first_token", "decode_tokens")),
        ("twinlens-encoder", "Encode", "header"),
        *(("twinlens-encoder", name, "Encode") for name in ("fetch", "hash", "inspect", "decode", "room")),
        *(("twinlens-encoder", name, "Encode") for name in ("queue", "preprocess", "vit", "transfer")),
    }
    told = {timing.stage: timing.seconds for timing in last.finished.timings}
    for service, name, _ in found - {("twinlens-encoder", "Encode", "header"), ("twinlens-llm", "header", "Generate")}:
        spent = sum(_seconds(span) for where, span in ours.values() if (where, span.name) == (service, name))
        stage = f"encoder_{name}" if service == "twinlens-encoder" else name
        assert spent == pytest.approx(told[stage], abs=2e-3), stage
    prefilled = [span for _, span in ours.values() if span.name == "prefill"]
    parts = sorted((_numbers(span)["first_token"], _numbers(span)["tokens"]) for span in prefilled)
    assert len(parts) >= first.started.prompt_tokens // 40
    assert parts[0][0] == 0
    assert [begin + count for begin, count in parts] == [
        *(begin for begin, _ in parts[1:]),
        first.started.prompt_tokens,
    ]
    others = {span.trace_id for _, span in collector.spans} - {bytes.fromhex(TRACE)}
    assert len(others) == 1, "housekeeping makes no traces"


def test_nothing_is_traced_unless_the_environment_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    assert not tracing.wanted()
    with tracing.serving("Encode", [("traceparent", f"00-{TRACE}-{PARENT}-01")]), tracing.span("inner"):
        assert tracing.outgoing() == ()
        tracing.in_turn({"stage": 1.0}, 0.0)
        tracing.describe(request_id="name")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    assert tracing.wanted()
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert not tracing.wanted()


def test_a_collector_that_does_not_answer_holds_up_the_end_for_a_moment() -> None:
    go_on, ended = threading.Event(), list[bool]()

    def shutdown() -> None:
        ended.append(go_on.wait(180))

    tracing.use(SimpleNamespace(get_tracer=lambda _: None, shutdown=shutdown))
    tracing.stop(0.01)
    assert ended == []
    go_on.set()


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
            tracing.describe(request_id="another")
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
    assert call.attributes["request_id"] == "another"
    assert tracing.outgoing() == ()
