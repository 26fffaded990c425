"""What the shared store holds, byte by byte."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoder_service.engine import shared_store_format
from encoder_service.engine.shared_store_format import Garbage
from tests.unit.encoder_service.shared_stores import HEADER, LAYOUT


@given(st.binary(max_size=200))
def test_no_bytes_are_read_as_a_header_or_a_chunk_that_were_not_written_as_one(data):
    with pytest.raises(Garbage):
        shared_store_format.read_header(data, HEADER.key, "", LAYOUT)
    with pytest.raises(Garbage):
        shared_store_format.read_chunk(data, HEADER.key, 0, memoryview(bytearray(max(0, len(data) - 4))))
