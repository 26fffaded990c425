"""Linear layers of a tower of transformers, computed from weights that are laid out as oneDNN wants them, with
activations behind them in the same pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor, nn

from common.cpu.linear import Linear, finalize_linears
from encoder_service.models.hf.activations import Watch


def lay_out(model: nn.Module, passes: Callable[[], object]) -> int:
    """Has our `Linear` in the place of each linear layer of a model of which the `passes` show that nobody but itself
    reads its weight; how many these are. Where they show that nothing but an activation takes what it computes, it
    computes that as well.

    What has its weight read, as a slice or in a product of somebody else's, stays as it is; so does what shares its
    weight or is no plain `nn.Linear` (as the last layer of `nn.MultiheadAttention`), and what no pass calls: of that
    nothing is known.
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
        """Its own, for whoever asks."""
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
    """Whether something is done before or behind its pass, which ours would leave out."""
    return bool(part._forward_hooks or part._forward_pre_hooks)


class _LaidOut(Linear):
    """Ours, with the sizes that some towers ask a linear layer for, and the activation behind it."""

    def __init__(self, of: nn.Linear, activation: nn.Module | None) -> None:
        with torch.device("meta"):
            super().__init__(of.in_features, of.out_features, bias=of.bias is not None, dtype=of.weight.dtype)
        self.in_features, self.out_features = of.in_features, of.out_features
        self.weight, self.bias, self._activation = of.weight, of.bias, activation

    def forward(self, x: Tensor, activation: nn.Module | None = None) -> Tensor:
        """See `Linear`."""
        return super().forward(x, activation or self._activation)
