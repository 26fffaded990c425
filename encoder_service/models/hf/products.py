"""Linear layers of transformers' towers, with weights in oneDNN's layout and their activations in the same pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor, nn

from common.cpu.linear import Linear, finalize_linears
from encoder_service.models.hf.activations import Watch


def lay_out(model: nn.Module, passes: Callable[[], object]) -> int:
    """Replaces each linear layer of a model by our `Linear`, if the `passes` show that only the layer itself reads its
    weight; returns how many. If they show that only an activation uses its output, it computes that as well.

    A layer stays if its weight is read otherwise, as a slice or in another product, if it shares its weight or is not a
    plain `nn.Linear` (such as the last layer of `nn.MultiheadAttention`), or if no pass calls it.
    """
    owners = Counter(id(own) for part in model.modules() for own in part.parameters(recurse=False))
    watched = [
        part
        for part in model.modules()
        if type(part) is nn.Linear and owners[id(part.weight)] == 1 and not _hooked(part)
    ]
    for part in watched:
        part.__class__ = _Watched
    try:
        with Watch(model, watched) as watch:
            passes()
        alone = {id(part) for part in watched if isinstance(part, _Watched) and part.__dict__.pop(_READ, None) is False}
    finally:
        for part in watched:
            part.__dict__.pop(_READ, None)
            part.__class__ = nn.Linear
    behind = watch.activations(alone)
    made: dict[int, nn.Module] = {
        id(part): _LaidOut(part, behind.get(id(part))) for part in watched if id(part) in alone
    }
    laid_out = len(made)
    made |= {id(part): nn.Identity() for part in watch.left_out(behind)}
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):  # one that stands at two places is replaced at both
            if id(child) in made:
                setattr(module, name, made[id(child)])
    finalize_linears(model)
    return laid_out


_READ = "read_by_others"


class _Watched(nn.Linear):
    """A linear layer that, from its first pass on, knows whether anybody else has read its weight."""

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The original weight, for other readers."""
        self.__dict__[_READ] = True
        found = self._parameters["weight"]
        assert found is not None, "a linear layer has one"
        return found

    def forward(self, x: Tensor) -> Tensor:
        """As that of a plain one."""
        self.__dict__.setdefault(_READ, False)
        weight = self._parameters["weight"]
        assert weight is not None, "a linear layer has one"
        return nn.functional.linear(x, weight, self.bias)


def _hooked(part: nn.Module) -> bool:
    """Whether it has hooks, which ours would skip."""
    return bool(part._forward_hooks or part._forward_pre_hooks)


class _LaidOut(Linear):
    """Our layer, with the sizes that some towers read of a linear layer, and its activation."""

    def __init__(self, of: nn.Linear, activation: nn.Module | None) -> None:
        with torch.device("meta"):
            super().__init__(of.in_features, of.out_features, bias=of.bias is not None, dtype=of.weight.dtype)
        self.in_features, self.out_features = of.in_features, of.out_features
        self.weight, self.bias, self._activation = of.weight, of.bias, activation

    def forward(self, x: Tensor, activation: nn.Module | None = None) -> Tensor:
        """See `Linear`."""
        return super().forward(x, activation or self._activation)
