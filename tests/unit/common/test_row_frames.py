"""Rows on the wire, written and read by hand, against what protobuf makes of the same message."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from common.rows.frames import RowsFrame, pack, unpack
from common.rows.wire import crc32c
from twinlens import v1

NUMBERS = st.integers(0, 2**31 - 1)
BYTES = st.binary(max_size=300)


@given(item=NUMBERS, first=NUMBERS, count=NUMBERS, data=BYTES)
def test_what_is_packed_is_what_protobuf_reads(item: int, first: int, count: int, data: bytes) -> None:
    message = v1.EncodeResponse.FromString(pack(item, first, count, memoryview(data)))
    rows = v1.EncodeRows(item=item, first_row=first, count=count, data=data, crc32c=crc32c(data))
    assert message == v1.EncodeResponse(rows=rows)


@given(item=NUMBERS, first=NUMBERS, count=NUMBERS, data=BYTES)
def test_what_protobuf_writes_is_read_alike(item: int, first: int, count: int, data: bytes) -> None:
    rows = v1.EncodeRows(item=item, first_row=first, count=count, data=data, crc32c=7)
    frame = unpack(v1.EncodeResponse(rows=rows).SerializeToString())
    assert frame == RowsFrame(item, first, count, data, 7)


def test_other_events_are_left_to_protobuf() -> None:
    handle = v1.RowsHandle(transport=v1.TRANSPORT_SHARED_MEMORY, region="x")
    for event in (
        v1.EncodeResponse(),
        v1.EncodeResponse(header=v1.EncodeHeader(tokens=3)),
        v1.EncodeResponse(done=v1.EncodeDone()),
        v1.EncodeResponse(rows=v1.EncodeRows(count=1, handle=handle)),
        v1.EncodeResponse(rows=v1.EncodeRows(count=1)),
    ):
        assert unpack(event.SerializeToString()) is None


@given(data=BYTES, at=st.integers(0, 400), flip=st.integers(1, 255))
def test_a_damaged_message_is_never_taken_for_the_rows_that_were_sent(data: bytes, at: int, flip: int) -> None:
    message = bytearray(pack(0, 1, 2, memoryview(data)))
    message[at % len(message)] ^= flip
    frame = unpack(bytes(message))
    assert frame is None or crc32c(frame.data) != frame.crc or frame != RowsFrame(0, 1, 2, data, crc32c(data))


@given(st.binary(max_size=60))
def test_noise_is_read_without_an_error(noise: bytes) -> None:
    unpack(noise)
    unpack(b"\x12" + bytes([len(noise)]) + noise)


@given(data=BYTES, cut=st.integers(0, 400))
def test_a_message_that_is_cut_short_is_no_rows(data: bytes, cut: int) -> None:
    message = pack(3, 1, 2, memoryview(data))
    assert unpack(message[: cut % len(message)]) is None
