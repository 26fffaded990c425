"""What every transport can do on this side: prove to an encoder what it needs, and bring rows to where they land.

`encoder_service/transports/base.py` is the other side.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Protocol

from common.rows.frames import RowsFrame
from twinlens.v1 import encoder_pb2


@dataclass(frozen=True, slots=True)
class MirrorPlace:
    """Where rows go that land in the ranks' mirrors of the row arena: they begin at byte `offset` of it. `mirrored` is
    called before any of them may."""

    offset: int
    mirrored: Callable[[], None]


@dataclass(frozen=True, slots=True)
class ArrivedRows:
    """Rows [first, first + count) of an item, as the encoder announced them: their bytes, or where those are.

    `mirror` is their place in the ranks' mirrors, where rows may land there.
    """

    first: int
    count: int
    payload: RowsFrame | encoder_pb2.RowsHandle
    mirror: MirrorPlace | None = None


class Transport(Protocol):
    """One way for rows to come from one encoder, in all of its lives. `number` is its name in the contract.

    `splits` says that several streams at a time bring an item's rows faster; `after_break`, that rows may still come in
    this way when a stream of their item broke.
    """

    number: encoder_pb2.Transport
    splits: bool
    after_break: bool

    @property
    def usable(self) -> bool:
        """Whether rows can come in this way now."""
        ...

    async def on_info(self, info: encoder_pb2.EncoderServiceGetInfoResponse) -> None:
        """The encoder lives, and this is what it says of itself: opens what is not open yet, where that can be."""
        ...

    def close(self) -> None:
        """The encoder is gone, or no longer needed: lets go of all that is open."""
        ...

    def prove(self, host: encoder_pb2.HostProof) -> None:
        """Adds to what is told to the encoder what shows that rows can come in this way."""
        ...

    def takes(self, run: ArrivedRows) -> bool:
        """Whether a run has come in this way."""
        ...

    def receive(self, run: ArrivedRows, target: memoryview) -> AsyncGenerator[int, None]:
        """Copies a run to `target`, which has its size, or to the ranks' mirrors in place of it; yields the bytes that
        are there for good, piece by piece.

        Raises DataLoss, and yields nothing of it, for a piece that is damaged, that is gone, or that holds a number
        which is not finite, and Unavailable (LEASE_EXPIRED) for one that was read too late. When the generator is
        closed nobody writes to `target` any more.
        """
        ...
