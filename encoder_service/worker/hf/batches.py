"""Items of a model that transformers computes: several in one pass of its tower if a trial shows that each gets the
same rows as alone."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from common.hf.classes import first_line
from common.media.item import Grid
from encoder_service.models.hf.tower import in_turns


@dataclass(frozen=True, slots=True)
class Made:
    """The processor's output for an item of a modality; for a video with its sound, for each of these, and their
    `turns` (`Plan`). Items of one `shape` differ only in the floats of their inputs; None: unknown."""

    kind: str
    inputs: Mapping[str, Any]
    sound: Mapping[str, Any] = field(default_factory=dict)
    turns: Sequence[int] = ()
    shape: Hashable = None


class ItemTower(Protocol):
    """As `HfTower`."""

    def rows(self, inputs: Mapping[str, Any], tokens: int, modality: str = "image") -> Tensor:
        """The processor's output for items of a modality → [tokens, levels, width]."""
        ...


class Replays(Protocol):
    """Graphs of a tower by shape, as `worker.hf.graphs.ShapeGraphs`."""

    def most(self, shape: Hashable) -> int:
        """Most items of a shape in one graph, 0: there is none."""
        ...

    def rows(self, items: Sequence[Made]) -> Tensor:
        """Rows of no more items of one shape than its largest graph has, one after the other."""
        ...


_PATCH = 3 * 14 * 14
"""Numbers of a patch, of the smallest that towers usually have."""


class ByShape:
    """A tower that computes items of one shape together, if their modality is one of `together`, up to `most_patches`;
    other items one by one (`StagedTower`). Passes that `graphs` have are replayed."""

    def __init__(
        self,
        tower: ItemTower,
        together: Collection[str] = (),
        most_patches: int = 0,
        graphs: Replays | None = None,
    ) -> None:
        self._tower, self._together, self._most, self._graphs = tower, together, most_patches, graphs

    def prepare(self, grids: Sequence[Grid], device: torch.device) -> list[int]:  # noqa: ARG002
        """The rows of each item, which are its grid."""
        return [grid.patches for grid in grids]

    def run(self, patches: Sequence[Made], ready: Sequence[int]) -> Tensor:
        """The processor's output for each item → [tokens, levels, width]."""
        rows: dict[int, Tensor] = {}
        for places in self.groups(zip(patches, ready, strict=True)):
            items, tokens = [patches[place] for place in places], ready[places[0]]
            rows |= zip(places, self._rows(items, tokens).split(tokens), strict=True)
        return torch.cat([rows[place] for place in range(len(patches))])

    def groups(
        self, items: Iterable[tuple[Made, int]], hungry: Callable[[], bool] = lambda: False
    ) -> Iterator[list[int]]:
        """The indices of the items of each pass, from what was made of each item and its number of rows. A pass is
        yielded when no other item fits, and the one that has been open longest when somebody is hungry, waiting for
        any."""
        waiting: dict[Hashable, list[int]] = {}
        for place, (made, tokens) in enumerate(items):
            room = self._room(made)
            key = (made.shape, tokens) if room > 1 else place
            waiting.setdefault(key, []).append(place)
            if len(waiting[key]) == room:
                yield waiting.pop(key)
            elif hungry():
                yield waiting.pop(next(iter(waiting)))
        yield from waiting.values()

    def _room(self, made: Made) -> int:
        """How many items of its shape go into one pass."""
        if made.shape is None or made.kind not in self._together:
            return 1
        held = self._graphs.most(made.shape) if self._graphs is not None else 0
        return max(1, held or self._most // patches_of(made.inputs))

    def _rows(self, items: Sequence[Made], tokens: int) -> Tensor:
        first = items[0]
        if self._graphs is not None and first.shape is not None and self._graphs.most(first.shape):
            return self._graphs.rows(items)
        if not first.turns:
            return self._tower.rows(joined([made.inputs for made in items]), tokens * len(items), first.kind)
        frames = self._tower.rows(first.inputs, sum(first.turns[::2]), first.kind)
        return in_turns(frames, self._tower.rows(first.sound, sum(first.turns[1::2]), "audio"), first.turns)


def shape_of(kind: str, inputs: Mapping[str, Any]) -> Hashable:
    """What items have in common that differ only in their floats, from the processor's output for one; None if that has
    something other than tensors and numbers."""
    try:
        return (kind, *((name, _likeness(inputs[name])) for name in sorted(inputs)))
    except TypeError:
        return None


def _likeness(value: Any) -> Hashable:
    """Raises TypeError for anything but a tensor, a number, a text or a list of these."""
    if isinstance(value, Tensor):
        about = (tuple(value.shape), str(value.dtype))
        if value.is_floating_point() and value.dim():
            return about
        return (*about, hashlib.sha256(value.contiguous().cpu().numpy().tobytes()).digest())
    if isinstance(value, list | tuple):
        return tuple(map(_likeness, value))
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{type(value).__name__} has no shape")


def patches_of(inputs: Mapping[str, Any]) -> int:
    """Approximately the patches of an item for a tower: as many as have its floats, at least one."""
    floats = (value for value in inputs.values() if isinstance(value, Tensor) and value.is_floating_point())
    return max(1, sum(value.numel() for value in floats) // _PATCH)


def joined(items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the processor would make of items of one shape at once: tensors along their first axis, lists one behind the
    other, and what is the same in all of them once.

    >>> one, other = ({"pixel_values": torch.zeros(1, 3, 4, 4), "counts": [2]} for _ in range(2))
    >>> made = joined([one, other])
    >>> made["pixel_values"].shape, made["counts"]
    (torch.Size([2, 3, 4, 4]), [2, 2])
    """
    if len(items) == 1:
        return dict(items[0])
    return {name: _joined([each[name] for each in items]) for name in items[0]}


def _joined(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, Tensor) and first.dim():
        return torch.cat(list(values))
    return [each for value in values for each in value] if isinstance(first, list) else first


_NEAR = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}
"""How much rows of several items may differ from those of single ones, relative to their length, if sums are made in
another order."""


def why_apart(tower: ItemTower, items: Sequence[Made], tokens: int, *, exact: bool) -> str:
    """Why items of a modality are computed one by one, tried with three of one shape; empty if they need not be.

    An item's rows must be equal to the bit in any company, and close to what they are alone; equal to the bit as well
    if `exact`, as on CPUs.
    """
    if len({made.shape for made in items}) != 1 or items[0].shape is None:
        return "nothing says which items are of one shape"
    one, other, third = (made.inputs for made in items)
    kind, what = items[0].kind, "one"
    try:
        alone = [tower.rows(inputs, tokens, kind) for inputs in (one, other, third)]
        what = "several at once"
        both = tower.rows(joined([one, other, third]), 3 * tokens, kind).split(tokens)
        swapped = tower.rows(joined([one, third, other]), 3 * tokens, kind).split(tokens)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        return f"transformers does not compute {what}: {first_line(error)}"[:200]
    if any(torch.equal(alone[0], each) for each in alone[1:]):
        return "rows of different items are the same, which shows nothing"
    if not torch.equal(both[0], swapped[0]):
        return "an item's rows depend on those beside it"
    same = torch.equal if exact else are_near
    if not all(same(found, expected) for found, expected in zip(both, alone, strict=True)):
        return "an item's rows are not those that it gets alone"
    return ""


def are_near(rows: Tensor, expected: Tensor) -> bool:
    """Whether they differ as other orders of sums make them differ."""
    return bool((rows - expected).float().norm() <= _NEAR[expected.dtype] * expected.float().norm())
