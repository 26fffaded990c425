"""Rows into the prompt: level 0 takes the place of a placeholder's embedding, deepstack levels go to their layers."""

from __future__ import annotations

import torch
from torch import Tensor

from llm_service.models.model import Deepstack
from llm_service.plan import RowSlice
from llm_service.worker.row_arena import RowArena


def fuse(hidden: Tensor, rows: list[RowSlice], arena: RowArena, *, adds: bool = False) -> Deepstack | None:
    """Writes level 0 of the rows into `hidden` [n, hidden] in place, or `adds` it; returns the other levels, if there
    are any.

    A chunk may have any part of an item: each slice says which rows, and where they go.
    """
    if not rows:
        return None
    blocks: list[Tensor] = []
    for piece in rows:
        at = piece.at
        for part in arena.read(piece):
            blocks.append(part.to(hidden.device, hidden.dtype, non_blocking=True))
            there = hidden[at : at + len(part)]
            there.copy_(there + blocks[-1][:, 0] if adds else blocks[-1][:, 0])
            at += len(part)
    if arena.levels == 1:
        return None
    index = torch.cat([torch.arange(piece.at, piece.at + piece.count, device=hidden.device) for piece in rows])
    return Deepstack(index, torch.cat(blocks)[:, 1:].transpose(0, 1).contiguous())
