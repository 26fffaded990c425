"""What every transport can do on this side: prove its requirements to an encoder, and bring rows to their place.

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
    """The place of rows in the ranks' mirrors of the row arena: they begin at byte `offset`. `mirrored` is called
    before any are written."""

    offset: int
    mirrored: Callable[[], None]


@dataclass(frozen=True, slots=True)
class ArrivedRows:
    """Rows [first, first + count) of an item, as the encoder announced them: their bytes, or where these are.

    `mirror` is their place in the ranks' mirrors, if rows may go there.
    """

    first: int
    count: int
    payload: RowsFrame | encoder_pb2.RowsHandle
    mirror: MirrorPlace | None = None


class Transport(Protocol):
    """One way for rows to come from one encoder, in all of its lives. `number` is its name in the contract.

    `splits` says that several streams at a time bring an item's rows faster; `after_break`, that rows may still come in
    this way when a stream of their item broke; `leased`, that they are read under a lease, which may end too soon.
    """

    number: encoder_pb2.Transport
    splits: bool
    after_break: bool
    leased: bool

    @property
    def usable(self) -> bool:
        """Whether rows can come in this way now."""
        ...

    async def on_info(self, info: encoder_pb2.EncoderServiceGetInfoResponse) -> None:
        """The encoder is up, with this description: opens what is not open yet, if possible."""
        ...

    def close(self) -> None:
        """The encoder is gone, or not needed any more: closes everything."""
        ...

    def prove(self, host: encoder_pb2.HostProof) -> None:
        """Adds the proof that rows can come by this transport to a request."""
        ...

    def takes(self, run: ArrivedRows) -> bool:
        """Whether a run has come in this way."""
        ...

    def receive(self, run: ArrivedRows, target: memoryview) -> AsyncGenerator[int, None]:
        """Copies a run to `target`, which has its size, or into the ranks' mirrors instead; yields the bytes that are
        final, piece by piece.

        Raises DataLoss, without yielding it, for a piece that is damaged, gone, or not finite, and Unavailable
        (LEASE_EXPIRED) for one that was read too late. Once the generator is closed, nobody writes to `target` any
        more.
        """
        ...
