"""Messages to ranks: steps, and all orders that there are (`RankOrder`). The deciding thread puts both into one
`StepQueue`. The computing thread, which is rank 0, takes them one by one, and sends each to the other ranks as a
`RankMessage` before it carries it out itself (`executor.carry_out`)."""

from __future__ import annotations

import enum

import msgspec

from llm_service.model_config.adapter_folder import Adapter
from llm_service.plan import StepPlan


class PullRows(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Copy rows from an encoder's pool of device memory to a rank's mirror of the row arena."""

    id: int
    """The id of the `PullEnded` that answers."""
    region: str
    """The name of the pool."""
    handle: bytes
    """Opens it."""
    source: int
    """Offset in the pool, in bytes."""
    target: int
    """Offset in the arena, in bytes."""
    size: int
    """Bytes, of whole rows."""
    row_sum: int
    """The value of `device_memory.row_sum` for them, unsigned."""


class InvalidateRows(msgspec.Struct, frozen=True, tag=True):
    """`size` bytes at `offset` of the arena now belong to other rows; the mirror's content there is invalid."""

    offset: int
    size: int


class UnmapPool(msgspec.Struct, frozen=True, tag=True):
    """An encoder's pool is gone: let go of its memory."""

    region: str


MirrorOrder = PullRows | InvalidateRows | UnmapPool
"""Orders for mirrors. The front sends them to the engine as rows arrive from encoders."""


class Pulled(enum.IntEnum):
    """The result of a `PullRows`, the worst first: over the ranks of a group, the minimum counts."""

    UNREACHABLE = 0
    DAMAGED = 1
    LANDED = 2


class AddAdapter(msgspec.Struct, frozen=True, tag=True):
    """Keep an adapter that has been read, under a number that no other has had."""

    number: int
    adapter: Adapter


class RemoveAdapter(msgspec.Struct, frozen=True, tag=True):
    """Let go of an adapter; no later plan names it."""

    number: int


AdapterOrder = AddAdapter | RemoveAdapter


class OffloadBlocks(msgspec.Struct, frozen=True, tag=True):
    """Copies KV blocks to host memory, (block, place) each, in this order. When every rank has done so, earlier reads
    from host places are over as well."""

    pairs: list[tuple[int, int]]


RankOrder = MirrorOrder | AdapterOrder | OffloadBlocks
"""Every rank carries out the same orders in the same sequence, between two steps."""


class RunStep(msgspec.Struct, frozen=True, tag=True):
    """Compute this rank's partition of a plan, whose draws have only their positions."""

    plan: StepPlan


class ChangeOver(msgspec.Struct, frozen=True, tag=True):
    """Ask each other whether all have our kernels by now, and compute with them if so."""


RankMessage = RunStep | ChangeOver | RankOrder
"""What rank 0 sends to the others."""
