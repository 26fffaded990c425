"""Places that an encoder hands over: a message that was damaged on the way points nowhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest
from google.protobuf.message import DecodeError

from common.errors import DataLoss
from common.rows.frames import RowsFrame
from common.rows.wire import crc32c
from encoder_service.delivery import Event
from llm_service.encoders.stream import _run, read_event
from llm_service.encoders.transports.base import ArrivedRows
from tests.unit.encoder_service.fakes import turns
from tests.unit.encoder_service.test_delivery import opened
from twinlens.v1 import encoder_pb2


async def handed_over(events: AsyncGenerator[Event, None]) -> bytes:
    """The first event of a stream that says where rows are."""
    async for event in events:
        if isinstance(event, encoder_pb2.EncodeResponse) and event.HasField("rows"):
            return event.SerializeToString()
    raise AssertionError("the stream ended")


def read(message: bytes) -> ArrivedRows | None:
    """The run of rows that a reader would copy; None where it would copy none."""
    try:
        run = _run(read_event(message))
    except (DataLoss, DecodeError):
        return None
    if run is None or run.count < 1:  # `EncodeStream.rows` refuses a run of no rows
        return None
    if isinstance(run.payload, RowsFrame) and crc32c(run.payload.data) != run.payload.crc:
        return None
    return run


async def test_no_flipped_bit_makes_a_reader_copy_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(monkeypatch, shared=True) as bench, aclosing(bench.events()) as events:
        coming = asyncio.create_task(handed_over(events))
        await turns(10)
        await bench.compute()
        message = await coming
        right = read(message)
        assert right is not None
        assert isinstance(right.payload, encoder_pb2.RowsHandle)
        for bit in range(8 * len(message)):
            spoilt = bytearray(message)
            spoilt[bit // 8] ^= 1 << bit % 8
            assert read(bytes(spoilt)) in (None, right), f"bit {bit}"
        await bench.read(right)
        await bench.finish()
