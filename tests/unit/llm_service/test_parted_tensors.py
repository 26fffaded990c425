"""Tensors that a checkpoint has in other pieces than the decoder."""

from __future__ import annotations

import torch

from llm_service.models.filling import InMemory
from llm_service.models.parted_tensors import JoinedRows, PartedTensors, RowsOf


def test_tensors_come_in_the_decoder_s_pieces_and_what_is_joined_once_all_of_it_is_there() -> None:
    whole, one, other = torch.arange(24.0).view(6, 4), torch.ones(2, 3), torch.zeros(1, 3)
    parted = PartedTensors({"qkv": [("q", slice(0, 3)), ("k", slice(3, 6))]}, {"table": ["first", "second"]})
    stored = {"second": other, "qkv": whole, "norm": one, "first": one}
    found = dict(parted.pieces((name, InMemory(tensor)) for name, tensor in stored.items()))
    assert list(found) == ["q", "k", "norm", "table"]
    assert torch.equal(found["k"][:], whole[3:])
    assert torch.equal(found["table"][:], torch.cat([one, other]))


def test_a_part_of_a_piece_is_read_alone() -> None:
    whole = torch.arange(24.0).view(6, 4)
    rows = RowsOf(InMemory(whole), slice(2, 5))
    assert rows.get_shape() == [3, 4]
    assert torch.equal(rows[1:3, 2:], whole[3:5, 2:])
    assert torch.equal(RowsOf(InMemory(whole[:, 0]), slice(2, 5))[:2], whole[2:4, 0])


def test_rows_of_what_is_joined_come_from_the_pieces_that_have_them() -> None:
    whole = torch.arange(24.0).view(8, 3)
    joined = JoinedRows([InMemory(part) for part in whole.split([3, 1, 4])])
    assert joined.get_shape() == [8, 3]
    for first in range(9):
        for last in range(first, 9):
            assert torch.equal(joined[first:last], whole[first:last])
