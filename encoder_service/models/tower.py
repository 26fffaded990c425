"""Vision towers: their interface, how towers built from blocks run, and how weights are loaded."""

from __future__ import annotations

import importlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from common.checkpoints.bitsandbytes import load_dense
from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from common.cpu.linear import finalize_linears
from common.gpu.transfer import tensors_to_device
from common.media.item import Grid
from encoder_service.families.family import ModelConfig
from encoder_service.models.attention import (
    AttentionUnavailable,
    Backend,
    Lengths,
    Sdpa,
    Segments,
    capturable,
    choose,
)


class Tower(Protocol):
    """Patches [N, channels · temporal · patch²] of a packed batch, and its grids → rows [tokens, levels, width].

    This is all that the worker needs of a model. An item's rows must not depend on the rest of the batch, nor those of
    one frame group on another: `engine.batching.cut` gives these to different workers.

    For a tower with tiles, a picture's grid has them one below the other, and a video has one in each frame group. Of a
    pruned video all rows are computed, and some dropped afterwards (`engine.pruning`).
    """

    def __call__(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Rotary:
    """Cosines and sines [N, 1, head_dim / 2] float32 of each patch's row and column; of a tower of transformers
    [N, 1, head_dim], of the first half of a head and of the second."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True)
class Granularity:
    """The unit of every batch, a square or a tile: its patches, its places in the packed sequence, and its rows."""

    patches: int
    places: int
    rows: int


@dataclass(frozen=True, slots=True)
class Packing:
    """The layout of a packed batch.

    `lengths` are the segments of each kind that the tower attends in (whole frame groups; windows; tiles). `order` [N /
    merge²] int64 is the square at each place of the packed sequence; None: in the order of arrival. `corners` are
    entries [4, N] int64 of a learned table of positions, and their weights [4, N, 1] float32; None: the tower has no
    such table.
    """

    lengths: tuple[Lengths, ...]
    rotary: Rotary
    order: Tensor | None = None
    corners: tuple[Tensor, Tensor] | None = None

    @property
    def places(self) -> int:
        """Of the packed sequence."""
        return sum(self.lengths[0])


@dataclass(frozen=True, slots=True)
class Pass:
    """Everything that an eager pass needs besides patches."""

    packing: Packing
    segments: tuple[Segments, ...]


def patch_positions(grid: Grid, merge: int) -> Tensor:
    """The (row, column) of each patch of one frame group, [h·w, 2], in the order that patches come in.

    Patches of one merge × merge square stand together. A 2 × 4 grid with merge 2 gives
    (0,0) (0,1) (1,0) (1,1) (0,2) (0,3) (1,2) (1,3).
    """
    rows = torch.arange(grid.h).view(grid.h // merge, 1, merge, 1)
    columns = torch.arange(grid.w).view(1, grid.w // merge, 1, merge)
    shape = (grid.h // merge, grid.w // merge, merge, merge)
    return torch.stack([rows.expand(shape).flatten(), columns.expand(shape).flatten()], dim=-1)


def rotary(grids: Sequence[Grid], merge: int, head_dim: int, theta: float, device: torch.device) -> Rotary:
    """Rotary tables of a packed batch: a head's first quarter turns by the patch's row, its second by the column."""
    return rotary_by(*tensors_to_device(rotary_numbers(grids, merge, head_dim, theta), device))


def rotary_numbers(grids: Sequence[Grid], merge: int, head_dim: int, theta: float) -> list[Tensor]:
    """The input of `rotary_by`: the position [N, 2] of each patch, and frequencies."""
    half = head_dim // 2
    frequencies = 1.0 / theta ** (torch.arange(0, half, 2, dtype=torch.float32) / half)
    return [torch.cat([patch_positions(grid, merge).repeat(grid.t, 1) for grid in grids]), frequencies]


def rotary_by(positions: Tensor, frequencies: Tensor) -> Rotary:
    """The tables, on the device of the input."""
    angles = (positions[:, :, None].float() * frequencies).flatten(1)[:, None]
    return Rotary(angles.cos(), angles.sin())


def frame_groups(grids: Sequence[Grid]) -> list[int]:
    """Patches of each frame group of each item; each is a segment."""
    return [grid.h * grid.w for grid in grids for _ in range(grid.t)]


class AttendingTower(nn.Module):
    """A tower that attends inside of segments of a packed batch. The back end is chosen when it is loaded."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.backend: Backend = Sdpa()


class PackedTower(AttendingTower):
    """A tower built from blocks. A family sets these numbers and implements four steps: `pack` computes the layout on
    the host, `embed` turns patches into hidden states, `encode` is all that is expensive and independent of the mix of
    items, and `unpack` restores the order of rows. Only `encode` goes into a CUDA graph.

    `width` is that of hidden states, `out` that of rows, `longest` the most places of a segment of each kind (None:
    bounded by the batch), `rotary_pairs` the rotated pairs of a head (0: the tower has no rotary positions).
    """

    width: int
    out: int
    levels: int
    longest: tuple[int | None, ...] = (None,)
    rotary_pairs: int = 0

    def __init__(self, width: int, heads: int, granularity: Granularity) -> None:
        super().__init__(width // heads)
        self.width = width
        self.granularity = granularity
        if self.head_dim * heads != width:
            raise CheckpointError(f"{heads} heads do not share {width} numbers")
        self.capturable: Sequence[Backend] = [self.backend]
        """The back ends that CUDA graphs may have (`attention.capturable`)."""

    @abstractmethod
    def pack(self, grids: Sequence[Grid], device: torch.device) -> Packing:
        """Segments, positions and order of a batch."""

    @abstractmethod
    def embed(self, patches: Tensor, packing: Packing) -> Tensor:
        """Hidden states [places, width] in packed order."""

    @abstractmethod
    def encode(self, x: Tensor, rotary: Rotary, segments: Sequence[Segments]) -> Tensor:
        """Hidden states [places, width] → rows [tokens, levels, out], in packed order."""

    def unpack(self, rows: Tensor, packing: Packing) -> Tensor:
        """Rows in the order of the items."""
        if packing.order is None:
            return rows
        ordered = torch.empty_like(rows)
        ordered[packing.order] = rows
        return ordered

    def prepare(self, grids: Sequence[Grid], device: torch.device) -> Pass:
        """Everything that an eager pass needs besides patches."""
        return self.eagerly(self.pack(grids, device), device)

    def eagerly(self, packing: Packing, device: torch.device) -> Pass:
        """As `prepare`, for a packed batch."""
        return Pass(packing, tuple(self.backend.over(lengths, device) for lengths in packing.lengths))

    def run(self, patches: Tensor, ready: Pass) -> Tensor:
        """Patches [N, dim] of the batch that was prepared → rows [tokens, levels, out]."""
        packing = ready.packing
        return self.unpack(self.encode(self.embed(patches, packing), packing.rotary, ready.segments), packing)

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        return self.run(patches, self.prepare(grids, patches.device))


class RotaryTower(PackedTower):
    """A tower with rotary positions by rows and columns, built from `vision_config`; a row is a square of `merge`²
    patches, each of which has a place."""

    def __init__(self, config: Mapping[str, Any], width: int) -> None:
        heads, merge = config["num_heads"], config["spatial_merge_size"]
        if width % heads or width // heads % 4:
            raise CheckpointError(f"{heads} heads of rows and columns do not share {width} numbers")
        super().__init__(width, heads, Granularity(merge**2, merge**2, 1))
        self.merge: int = merge
        self.rotary_pairs = self.head_dim // 2
        rope = config.get("rope_parameters") or {}
        self.theta: float = rope.get("rope_theta", 10000.0)
        if rope.get("rope_type", "axial") not in ("axial", "default"):
            raise CheckpointError(f"rotary scaling {rope['rope_type']} of a tower is not supported")

    def pack(self, grids: Sequence[Grid], device: torch.device) -> Packing:
        """By default frame groups, with squares in the order of arrival."""
        return self.pack_beside(grids, device, [])[0]

    def pack_beside(
        self, grids: Sequence[Grid], device: torch.device, numbers: Sequence[Tensor]
    ) -> tuple[Packing, list[Tensor]]:
        """The same, and further numbers that go to the device in the same copy."""
        own = rotary_numbers(grids, self.merge, self.head_dim, self.theta)
        positions, frequencies, *there = tensors_to_device([*own, *numbers], device)
        return Packing((frame_groups(grids),), rotary_by(positions, frequencies)), there


_SCALES = ("weight_scale", "weight_scale_inv", ".scales")
"""How the tensors end that only quantised weights have."""


def load_tower(
    checkpoint: Checkpoint,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    attention: str = "auto",
    kernels: str = "auto",
) -> nn.Module:
    """Builds the tower (`tower.Tower`) and reads only its weights, onto `device`.

    `attention` names a back end, or "auto", which is the only choice for a tower with its own attention; `kernels` is
    as in `choose`. Raises CheckpointError if a setting is not supported, or a weight is missing, superfluous or has
    another shape, and AttentionUnavailable if the back end cannot run.
    """
    module, _, name = config.family.tower.partition(":")
    with torch.device("meta"):
        tower: nn.Module = getattr(importlib.import_module(module), name)(config.tower)
    prefixes = config.family.parts.tensors
    state = {
        name: (tensor.flatten(1) if tensor.dim() > 2 else tensor).to(device=device, dtype=dtype)
        for name, tensor in load_dense(checkpoint.part(prefixes), partial(tower_name, prefixes))
    }
    if any(name.endswith(_SCALES) for name in state):
        raise CheckpointError("the vision weights are quantised in a way that is not served")
    try:
        tower.load_state_dict(state, strict=True, assign=True)
    except RuntimeError as error:
        raise CheckpointError(f"the vision weights do not fit the configuration: {error}") from error
    tower.eval().requires_grad_(requires_grad=False)
    if not multiplies_as_stored(device):
        finalize_linears(tower)
    if isinstance(tower, AttendingTower):
        tower.backend = choose(attention, device, dtype, tower.head_dim, kernels)
        if isinstance(tower, PackedTower):
            tower.capturable = capturable(attention, device, dtype, tower.head_dim, kernels)
    elif attention != "auto":
        raise AttentionUnavailable(f"--attention {attention}: this model's tower has its own")
    return tower


def multiplies_as_stored(device: torch.device) -> bool:
    """Whether weights stay as torch's own products take them: without AVX-512, these are faster than oneDNN's for the
    rows of a picture (docs/design/cpu-kernels.md)."""
    return device.type == "cpu" and not torch.backends.cpu.get_cpu_capability().startswith("AVX512")


def tower_name(prefixes: Sequence[str], name: str) -> str | None:
    """A checkpoint's tensor name without the tower's prefix; None for a tensor of another part."""
    return next((name[len(prefix) :] for prefix in prefixes if name.startswith(prefix)), None)
