"""The lease board: a number stands in its slot for as long as the lease holds, and no longer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from common.shm.arena import ReaderView
from common.shm.lease_board import BoardReader, LeaseBoard


@pytest.fixture
def board() -> Iterator[LeaseBoard]:
    board = LeaseBoard(2)
    yield board
    board.close()


@pytest.fixture
def reader(board: LeaseBoard) -> Iterator[BoardReader]:
    view = ReaderView(board.buffer.open_reader())
    reader = BoardReader(view)
    yield reader
    reader.close()
    view.close()


def test_a_reader_sees_a_lease_until_it_is_cleared(board: LeaseBoard, reader: BoardReader) -> None:
    posted = board.post()
    assert posted is not None
    assert reader.holds(*posted)
    board.clear(posted[0])
    assert not reader.holds(*posted)


def test_a_slot_that_is_used_again_has_another_number(board: LeaseBoard, reader: BoardReader) -> None:
    first, kept = board.post(), board.post()
    assert first is not None
    assert kept is not None
    board.clear(first[0])
    again = board.post()
    assert again is not None
    assert again[0] == first[0]
    assert reader.holds(*again)
    assert not reader.holds(*first)
    assert reader.holds(*kept)


def test_a_full_board_says_so(board: LeaseBoard) -> None:
    assert board.room
    board.post(), board.post()
    assert not board.room
    assert board.post() is None
    assert board.held == 2


def test_no_lease_holds_in_a_slot_that_is_free_or_does_not_exist(reader: BoardReader) -> None:
    assert not reader.holds(0, 0)
    assert not reader.holds(2, 1)
    assert not reader.holds(-1, 1)
