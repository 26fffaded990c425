"""Events of a stream are of one line each, whoever splits it."""

from __future__ import annotations

import json

import pytest

from gateway.stream import Chunks, event

TEXT = "one\u2028two\u2029three\x85four\x1cfive\x0b\x0csix\r\nseven \u2018\u00c5\U0001f30d\\\u2028"


@pytest.mark.parametrize(
    "told",
    [
        event({"said": TEXT}),
        event({"said": TEXT}, "response.done"),
        Chunks({"id": "a"}).chunk({"said": TEXT}),
        Chunks({"said": TEXT}).chunk({"id": "a"}),
    ],
    ids=["event", "named event", "chunk", "head of chunks"],
)
def test_no_text_of_an_event_ends_a_line(told: bytes) -> None:
    *_, line = told.decode().removesuffix("\n\n").splitlines()
    assert json.loads(line.removeprefix("data: "))["said"] == TEXT
