"""What a request says of its stages: each from the end of the one before, prefill beside them, chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from common.telemetry import tracing
from common.telemetry.stages import Stage
from llm_service.engine.messages import Prefilled
from llm_service.generation.request_stages import Stages


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    """Where this process's spans go."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.use(provider)
    yield exporter
    tracing.stop()


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def test_every_chunk_of_a_prompt_has_a_span_and_steps_count_once(spans: InMemorySpanExporter) -> None:
    stages = Stages()
    chunks = [
        Prefilled(id=1, choice=0, first=16, count=64, began=10.0, ended=10.5),
        Prefilled(id=1, choice=0, first=80, count=20, began=11.0, ended=11.25),
        Prefilled(id=1, choice=1, first=96, count=4, began=12.0, ended=12.125),
        Prefilled(id=1, choice=2, first=96, count=4, began=12.0, ended=12.125),
    ]
    with tracing.serving("Generate", ()):
        for chunk in chunks:
            stages.prefilled(chunk)
    *parts, root = spans.get_finished_spans()
    assert [part.name for part in parts] == ["prefill"] * 4
    assert [tuple((part.attributes or {}).values()) for part in parts] == [
        (0, 16, 64),
        (0, 80, 20),
        (1, 96, 4),
        (2, 96, 4),
    ]
    assert [seconds(part) for part in parts] == pytest.approx([0.5, 0.25, 0.125, 0.125], abs=1e-6)
    assert all(part.parent is not None and part.parent.span_id == root.context.span_id for part in parts)
    assert stages.all == {"prefill": Stage(0.875, 10.0, 12.125)}
    assert stages.in_turn == {}, "it is no stage after another: other stages have its time in them"


def test_a_stage_lasts_from_the_end_of_the_one_before_and_is_ended_once() -> None:
    stages = Stages()
    for stage in ("prompt", "queue", "prompt"):
        stages.mark(stage)
    assert list(stages.all) == ["prompt", "queue"]
    assert sum(stages.seconds.values()) == pytest.approx(stages._last - stages.begun)


def test_a_stage_that_ends_once_for_each_choice_lasts_until_the_last_one_s_end() -> None:
    stages = Stages()
    stages.mark("first_token")
    ends = []
    for _ in range(2):
        stages.extend("decode_tokens")
        ends.append(stages._last)
        assert sum(stages.seconds.values()) == pytest.approx(ends[-1] - stages.begun)
    assert ends[0] < ends[1]
