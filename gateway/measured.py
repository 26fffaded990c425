"""Measurements of services as JSON: where a request's time went, and load."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import Message

from twinlens.v1 import llm_pb2


def timings(started: llm_pb2.GenerateStarted, finished: llm_pb2.GenerateFinished) -> dict[str, Any]:
    """Where the time went until the last choice ended; and for each medium, by its place in the request, its rows and
    whether an encoder had them."""
    spans = sorted(started.spans, key=lambda span: span.item)
    return {
        "stages": [fields_of(stage) for stage in finished.timings],
        "media": [{"rows": span.rows, "cached": span.cached} for span in spans],
    }


def fields_of(message: Message) -> dict[str, Any]:
    """A message of numbers, texts and lists of such messages, with the contract's names; None if it is unknown."""

    fields: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        found = getattr(message, field.name)
        if field.message_type is not None:
            fields[field.name] = [fields_of(each) for each in found]
        else:
            fields[field.name] = found if not field.has_presence or message.HasField(field.name) else None
    return fields
