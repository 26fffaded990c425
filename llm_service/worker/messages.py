"""What ranks are told. The front sends the engine `MirrorOrder`s, as rows arrive from encoders; the engine's thread
that decides puts these, plans and all other orders into one `StepQueue`; the thread that computes, rank 0, takes them
from there one by one, and tells the other ranks each as a `RankMessage` before it does the same itself."""

from __future__ import annotations

import enum

import msgspec

from llm_service.model_config.adapter_folder import Adapter
from llm_service.plan import StepPlan


class PullRows(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Copy rows from an encoder's pool of device memory to a rank's mirror of the row arena."""

    id: int
    """What a `PullEnded` answers."""
    region: str
    """What the pool is called."""
    handle: bytes
    """Opens it."""
    source: int
    """Offset in the pool, in bytes."""
    target: int
    """Offset in the arena, in bytes."""
    size: int
    """Bytes, of whole rows."""
    row_sum: int
    """What `device_memory.row_sum` gives for them, as an unsigned number."""


class InvalidateRows(msgspec.Struct, frozen=True, tag=True):
    """`size` bytes at `offset` of the arena are given to other rows: what the mirror has there counts no more."""

    offset: int
    size: int


class UnmapPool(msgspec.Struct, frozen=True, tag=True):
    """An encoder's pool is gone: let go of its memory."""

    region: str


MirrorOrder = PullRows | InvalidateRows | UnmapPool
"""What ranks do to their mirrors: all of them the same, in the same order, between two steps."""


class Pulled(enum.IntEnum):
    """What came of a `PullRows`, the worst first: of a group's ranks, the least one counts."""

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
"""What ranks do about adapters: all of them the same, in the same order, between two steps."""


class OffloadBlocks(msgspec.Struct, frozen=True, tag=True):
    """Copy KV blocks to the host's memory, (block, place) each, in this order. Once every rank has, whatever was to be
    read from places of the host before is read as well."""

    pairs: list[tuple[int, int]]


class RunStep(msgspec.Struct, frozen=True, tag=True):
    """Compute this rank's partition of a plan, whose draws say no more than their places."""

    plan: StepPlan


class ChangeOver(msgspec.Struct, frozen=True, tag=True):
    """Ask each other whether all have our kernels by now, and compute with them if so."""


RankMessage = RunStep | PullRows | InvalidateRows | UnmapPool | AddAdapter | RemoveAdapter | OffloadBlocks | ChangeOver
