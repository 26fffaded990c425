"""Where pieces' pixels are, and where their rows go: the arenas that a worker shares with its service, and its pool."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from common.gpu.device_memory import Pool, check_row_bytes, driver, row_sum
from common.shm.arena import SharedBuffer
from encoder_service.worker.messages import Piece, PoolMade
from encoder_service.worker.row_ring import Event, Exit


class StagedPieces:
    """Decoded media in the staging arena, on the host."""

    def __init__(self, staging: SharedBuffer) -> None:
        self._staging = torch.frombuffer(staging.view, dtype=torch.uint8)

    def pixels(self, piece: Piece) -> Tensor:
        """A piece's frames [T, H, W, depth] uint8."""
        shape = (piece.frames, piece.height, piece.width, piece.depth)
        count = piece.frames * piece.height * piece.width * piece.depth
        return self._staging[piece.pixels : piece.pixels + count].view(shape)

    def sound(self, piece: Piece) -> Tensor:
        """The samples of a video's sound, float32 as bytes [4 · n]."""
        return self._staging[piece.sound : piece.sound + 4 * piece.samples]


class RowWriter:
    """Writes rows [tokens, levels, width] through `way_out` into the store arena, and on the device into its `pool`, if
    any, where others read them."""

    def __init__(self, store: SharedBuffer, way_out: Exit, pool: Pool | None) -> None:
        self._store = torch.frombuffer(store.view, dtype=torch.uint8)
        self._way_out = way_out
        self._pool = pool

    @property
    def pool_made(self) -> PoolMade | None:
        """The pool, for those who may read there."""
        return PoolMade(self._pool.device, self._pool.handle, self._pool.size) if self._pool else None

    def mark(self) -> Event:
        """When all that is begun by now is computed."""
        return self._way_out.mark()

    def write_to_pool(self, rows: Tensor, pieces: Sequence[Piece]) -> Tensor:
        """Copies rows that have a place in the pool there; returns their sums [pieces] int64, 0 for others.

        Rows that are not finite are copied as well: nobody is told of them, and checking first would mean waiting.
        """
        sums = torch.zeros(len(pieces), dtype=torch.int64, device=rows.device)
        if self._pool is not None:
            for index, (piece, part) in enumerate(_each(pieces, rows)):
                if piece.pool >= 0:
                    self._pool.write(piece.pool, _bytes(part))
                    sums[index] = row_sum(_bytes(part), part[0].nbytes)
        return sums

    def fetch(self, computed: Sequence[Tensor], after: Event) -> list[Tensor]:
        """The same on the host, once that has happened."""
        found = [torch.empty_like(each, device="cpu") for each in computed]
        self._way_out.fetch([(_bytes(each), _bytes(here)) for each, here in zip(computed, found, strict=True)], after)
        return found

    def write(self, rows: Tensor, pieces: Sequence[Piece], good: Sequence[bool], after: Event) -> None:
        """Writes the rows of good pieces into the store."""
        self._way_out.fetch(self._places(rows, pieces, good), after)

    def _places(self, rows: Tensor, pieces: Sequence[Piece], good: Sequence[bool]) -> Iterator[tuple[Tensor, Tensor]]:
        """Sources and targets of the copies."""
        for (piece, part), fine in zip(_each(pieces, rows), good, strict=True):
            if fine:
                yield _bytes(part), self._store[piece.rows : piece.rows + part.nbytes]


def pool_for(device: torch.device, size: int, row_bytes: int) -> Pool | None:
    """A pool of so many bytes of the device's memory, for rows of so many bytes; None for 0. Raises
    DeviceMemoryError."""
    if not size:
        return None
    check_row_bytes(row_bytes)
    return driver(device).create(device, size)


def _each(pieces: Sequence[Piece], rows: Tensor) -> Iterator[tuple[Piece, Tensor]]:
    """Each piece with its rows."""
    return zip(pieces, rows.split([piece.tokens for piece in pieces]), strict=True)


def _bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's bytes, uint8 [n]."""
    return tensor.view(-1).view(torch.uint8)
