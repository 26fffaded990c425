"""One trace for each request, over both services: OpenTelemetry, with W3C trace context in the calls' metadata. Off
unless its standard variables say where spans go, which govern all else too; then everything here costs a comparison.
The packages are an extra, `twinlens[tracing]`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from common.aio.tasks import in_daemon_thread
from common.config import boolean
from common.requirements import install

LAST_SECONDS = 2.0
"""What a process waits for its last spans to be taken."""

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_CONTEXT = ("traceparent", "tracestate")


class _Sink:
    """Where this process's spans go; both are None while tracing is off."""

    def __init__(self) -> None:
        self.provider: Any = None
        self.tracer: Any = None


_sink = _Sink()


def wanted() -> bool:
    """Whether the environment asks for traces."""
    disabled = boolean(os.environ.get("OTEL_SDK_DISABLED") or "false")
    return not disabled and any(os.environ.get(name) for name in _ENDPOINTS)


def start(service: str) -> None:
    """Begins to trace in this process where the environment asks for it. `OTEL_SERVICE_NAME` wins over `service`.

    Raises OSError where the packages are missing: what is configured is not ignored.
    """
    if not wanted():
        return
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise OSError(f"OTEL_ variables ask for traces, whose packages are missing: {install('tracing')}") from error
    name = os.environ.get("OTEL_SERVICE_NAME") or service
    provider = TracerProvider(resource=Resource.create({SERVICE_NAME: name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    use(provider)


def use(provider: Any) -> None:
    """Traces with a provider of one's own; None ends that. For tests, and for programs that embed a service."""
    _sink.provider = provider
    _sink.tracer = None if provider is None else provider.get_tracer("twinlens")


def stop(seconds: float = LAST_SECONDS) -> None:
    """Sends what has not been sent yet, for so many seconds; a collector that does not answer takes no longer."""
    if _sink.provider is not None:
        with suppress(TimeoutError):
            in_daemon_thread(_sink.provider.shutdown).result(seconds)
        use(None)


@contextmanager
def serving(name: str, metadata: Iterable[tuple[str, str | bytes]], **attributes: str) -> Iterator[None]:
    """The span of a call that is answered, under the caller's; the tasks that the block starts are in it."""
    if _sink.tracer is None:
        yield
        return
    from opentelemetry.trace import SpanKind
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier = {key: value for key, value in metadata if key in _CONTEXT and isinstance(value, str)}
    parent = TraceContextTextMapPropagator().extract(carrier)
    with _sink.tracer.start_as_current_span(name, context=parent, kind=SpanKind.SERVER, attributes=attributes):
        yield


def trace_id() -> str:
    """The trace that the current span belongs to, as 32 digits; empty where there is none."""
    if _sink.tracer is None:
        return ""
    from opentelemetry.trace import format_trace_id, get_current_span

    context = get_current_span().get_span_context()
    return format_trace_id(context.trace_id) if context.is_valid else ""


def describe(**attributes: str) -> None:
    """Attributes of the current span, over those of the same names."""
    if _sink.tracer is None:
        return
    from opentelemetry.trace import get_current_span

    get_current_span().set_attributes(attributes)


def failed(reason: str) -> None:
    """The current span is of something that failed, though no exception leaves it."""
    if _sink.tracer is None:
        return
    from opentelemetry.trace import StatusCode, get_current_span

    get_current_span().set_status(StatusCode.ERROR, reason)


@contextmanager
def span(name: str, **attributes: str | int) -> Iterator[None]:
    """A span of its own for the length of the block, under the one that the block is in."""
    if _sink.tracer is None:
        yield
        return
    with _sink.tracer.start_as_current_span(name, attributes=attributes):
        yield


def outgoing() -> Sequence[tuple[str, str]]:
    """What a call carries so that the other service's spans come under ours."""
    if _sink.tracer is None:
        return ()
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return tuple(carrier.items())


def in_turn(stages: Mapping[str, float], begun: float) -> None:
    """Spans, under the current one, for stages that followed on each other: seconds by name, from `begun` on.

    Times of this module are those of `time.perf_counter`, as everything that is measured here.
    """
    spans, at = [], begun
    for name, seconds in stages.items():
        spans.append((name, at, at + seconds))
        at += seconds
    record(spans)


def record(spans: Iterable[tuple[str, float, float]], **attributes: str | int) -> None:
    """Spans, under the current one, for what was measured: (name, when it began, when it ended)."""
    if _sink.tracer is None:
        return
    zero = time.time_ns() - round(time.perf_counter() * 1e9)
    for name, begun, ended in spans:
        span = _sink.tracer.start_span(name, start_time=zero + round(begun * 1e9), attributes=attributes)
        span.end(zero + round(ended * 1e9))
