"""Tensors that a checkpoint has in other pieces than the decoder: several as one, or one as several, by their rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

from llm_service.layers.linear.placement import Stored


@dataclass(frozen=True, slots=True)
class PartedTensors:
    """By name: the pieces that a tensor is split into, each with its rows, and the tensors that one is joined from, in
    order."""

    cut: dict[str, list[tuple[str, slice]]] = field(default_factory=dict)
    joined: dict[str, list[str]] = field(default_factory=dict)

    def pieces(self, weights: Iterable[tuple[str, Stored]]) -> Iterator[tuple[str, Stored]]:
        """The same weights as the decoder's pieces; a joined one is yielded once all of it is there."""
        wholes = {piece: whole for whole, pieces in self.joined.items() for piece in pieces}
        there: dict[str, Stored] = {}
        for name, stored in weights:
            if name in self.cut:
                yield from ((piece, RowsOf(stored, rows)) for piece, rows in self.cut[name])
            elif name not in wholes:
                yield name, stored
            else:
                there[name] = stored
                pieces = self.joined[wholes[name]]
                if all(piece in there for piece in pieces):
                    yield wholes[name], JoinedRows([there[piece] for piece in pieces])


class RowsOf:
    """Some rows of a tensor as one of their own."""

    def __init__(self, stored: Stored, rows: slice) -> None:
        self._stored, self._rows = stored, rows

    def get_shape(self) -> list[int]:
        """See `Stored`."""
        return [self._rows.stop - self._rows.start, *self._stored.get_shape()[1:]]

    def __getitem__(self, index: Any) -> Any:
        rows, *others = index if isinstance(index, tuple) else (index,)
        begin, end, _ = rows.indices(self.get_shape()[0])
        here = slice(self._rows.start + begin, self._rows.start + end)
        return self._stored[(here, *others)]


class JoinedRows:
    """Tensors joined by rows."""

    def __init__(self, pieces: Sequence[Stored]) -> None:
        self._pieces = pieces
        self._ends = list(accumulate(int(piece.get_shape()[0]) for piece in pieces))

    def get_shape(self) -> list[int]:
        """See `Stored`."""
        return [self._ends[-1], *self._pieces[0].get_shape()[1:]]

    def __getitem__(self, rows: slice) -> torch.Tensor:
        begin, end, _ = rows.indices(self._ends[-1])
        read = []
        for piece, last in zip(self._pieces, self._ends, strict=True):
            first = last - int(piece.get_shape()[0])
            if begin < last and end > first:
                read.append(piece[max(begin, first) - first : min(end, last) - first])
        return torch.cat(read) if read else self._pieces[0][:0]
