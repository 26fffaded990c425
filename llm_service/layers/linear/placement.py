"""Which part of a checkpoint's tensor belongs to a rank: so the loader reads only what a rank needs, and does not know
models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from llm_service.layers.linear.quantized_weight import QuantizedWeight
from llm_service.layers.linear.weight_dtype import EXACT, Rounded


class Stored(Protocol):
    """A tensor in a file: indexing reads that part alone. A quantised weight comes as `QuantizedWeight`."""

    def __getitem__(self, index: Any) -> Any: ...

    def get_shape(self) -> list[int]: ...


@runtime_checkable
class StoredStack(Stored, Protocol):
    """Quantised weights of several experts in one tensor of a file, which are read one by one."""

    def of_expert(self, number: int, *, inputs_first: bool) -> Stored:
        """One expert's, [outputs, inputs], whichever dimension is first in the file. Raises ValueError if that does not
        match the storage."""
        ...


Place = Callable[[Stored], None]
"""Reads what this rank needs of a stored tensor; raises ValueError for a wrong shape."""


def elsewhere(_: Stored) -> None:
    """The `Place` of a tensor that only other ranks need: nothing is read."""


@runtime_checkable
class Placed(Protocol):
    """A module that knows which of a checkpoint's tensors are its weights, and which part of them this rank holds."""

    def targets(self, own: str, /) -> dict[str, Place]:
        """The tensors that it needs, by their names in the module that has this one as `own`."""
        ...


def path_within(path: str, attribute: str, child: nn.Module) -> str:
    """What the names of a child's tensors begin with in a checkpoint, of one in a module whose names begin with `path`:
    they stand below the child's own, or beside it where it is stored as nothing.

    >>> path_within("layers.0.", "mlp", nn.Module())
    'layers.0.mlp.'
    """
    own = getattr(child, "stored_as", attribute)
    return f"{path}{own}." if own else path


@runtime_checkable
class Finalized(Protocol):
    """A module whose weights are converted once all have been read."""

    def whole(self) -> bool:
        """Whether all have been."""
        ...

    def finalize(self, *, rounded: Rounded = EXACT) -> None:
        """Called when they are final, to be rounded."""
        ...


def fill(parameter: Tensor, source: Tensor | QuantizedWeight) -> None:
    """Copies a weight, dequantised if need be; raises ValueError for another shape."""
    if isinstance(source, QuantizedWeight):
        source = source.wide()
    if parameter.shape != source.shape:
        raise ValueError(f"it is {tuple(source.shape)}, expected {tuple(parameter.shape)}")
    parameter.copy_(source)


def length(part: slice) -> int:
    """The length of a range."""
    return int(part.stop - part.start)
