"""Experts by modality, as in ERNIE 4.5: text tokens use some, media tokens and the marks around them others, and all
use shared ones."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from llm_service.layers.linear.placement import Place, Stored, fill
from llm_service.layers.linear.weight_dtype import EXACT, Rounded
from llm_service.layers.mlp import MLP
from llm_service.layers.moe.experts import Experts
from llm_service.layers.moe.sparse_mlp import Routed
from llm_service.layers.ops import Pair
from llm_service.layers.tensor_parallel import TensorGroup
from llm_service.model_config.text import TextConfig

_OF = "text_moe", "vision_moe"
"""transformers' names of those for text and for media; published checkpoints number all experts consecutively, and have
a router's matrix transposed."""
_BIAS = "moe_statics.e_score_correction_bias"


class ModalityRouters(nn.Module):
    """Choose the likeliest experts by probabilities plus a correction for each, and weight them by the probabilities
    alone, normalised. In float32, whatever the type of other weights."""

    def __init__(self, experts: int, per_token: int, hidden: int, least: float) -> None:
        super().__init__()
        self._per_token, self._least = per_token, least
        self.weight = nn.Parameter(torch.empty(2, experts, hidden), requires_grad=False)
        self.correction = nn.Parameter(torch.empty(2, experts), requires_grad=False)
        self._missing = {(kind, of) for kind in ("weight", "correction") for of in range(2)}

    def targets(self, _: str) -> dict[str, Place]:
        """See `Placed`: the names of transformers, or those of a published checkpoint."""
        named = {f"{name}.gate.weight": partial(self._place, of) for of, name in enumerate(_OF)}
        named |= {f"{name}.gate.{_BIAS}": partial(self._place_correction, of) for of, name in enumerate(_OF)}
        both = {"gate.weight": partial(self._place_published, 0), "gate.weight_1": partial(self._place_published, 1)}
        return {**named, **both, _BIAS: self._place_corrections}

    def _place(self, of: int, stored: Stored) -> None:
        fill(self.weight[of], stored[:])
        self._missing.discard(("weight", of))

    def _place_published(self, of: int, stored: Stored) -> None:
        fill(self.weight[of], stored[:].t())
        self._missing.discard(("weight", of))

    def _place_correction(self, of: int, stored: Stored) -> None:
        fill(self.correction[of : of + 1], stored[:])
        self._missing.discard(("correction", of))

    def _place_corrections(self, stored: Stored) -> None:
        fill(self.correction, stored[:])
        self._missing -= {("correction", of) for of in range(2)}

    def whole(self) -> bool:
        """Whether all have been read."""
        return not self._missing

    def finalize(self, *, rounded: Rounded = EXACT) -> None:
        """They stay as they are."""

    def forward(self, x: Tensor, of: int) -> Pair:
        """[n, hidden] → weights, of the same type, and numbers of experts int64, [n, per_token] each."""
        probabilities = functional.linear(x.float(), self.weight[of]).softmax(-1)
        chosen = (probabilities + self.correction[of]).topk(self._per_token, dim=-1).indices
        weights = probabilities.gather(1, chosen)
        return (weights / weights.sum(-1, keepdim=True).clamp(min=self._least)).to(x.dtype), chosen


class ModalityStack(Experts):
    """The experts for text (`of` 0) or for media (1)."""

    def __init__(
        self, of: int, count: int, hidden: int, inner: int, group: TensorGroup, dtype: torch.dtype, config: TextConfig
    ) -> None:
        super().__init__(count, hidden, inner, group, dtype, activation=config.activation, inputs_first=False)
        self._of = of

    def targets(self, own: str) -> dict[str, Place]:
        """See `Placed`."""
        first, beside = self._of * self.count, f"{_OF[self._of]}.{own}"
        stacked: dict[str, Place] = {
            f"{beside}.{kind}": partial(self._place, kind) for kind in ("gate_up_proj", "down_proj")
        }
        return stacked | {
            f"{own}.{first + expert}.{kind}.weight": place for kind, expert, place in self._places_apart()
        }


class ModalitySet(Routed):
    """Experts for one kind of tokens; in a checkpoint they are beside those for the other."""

    stored_as: ClassVar[str] = ""

    def __init__(self, experts: ModalityStack) -> None:
        super().__init__()
        self.experts = experts


class ModalityExperts(nn.Module):
    """The feed-forward part of such a layer."""

    def __init__(self, config: TextConfig, group: TensorGroup, dtype: torch.dtype) -> None:
        super().__init__()
        self._group = group
        count, hidden = config.experts, config.hidden_size
        self.routers = ModalityRouters(count, config.experts_per_token, hidden, config.least_weight)
        sizes = config.expert_size, config.media_expert_size
        self.text, self.media = (
            ModalitySet(ModalityStack(of, count, hidden, inner, group, dtype, config)) for of, inner in enumerate(sizes)
        )
        self.shared_experts: MLP | None = None
        if config.shared_expert_size:
            given = hidden, config.shared_expert_size, group, dtype
            self.shared_experts = MLP(*given, activation=config.activation)

    def forward(self, x: Tensor, media: Tensor) -> Tensor:
        """x [n, hidden], and which tokens are media, bool [n] → [n, hidden]."""
        out = (self._apart if x.device.type == "cpu" else self._both)(x, media)
        if self.shared_experts is not None:
            out = out + self.shared_experts.run(x)
        return self._group.sum(out)

    def _apart(self, x: Tensor, media: Tensor) -> Tensor:
        """Each kind of tokens by its own experts."""
        out = torch.empty_like(x)
        for of, (part, here) in enumerate(((self.text, ~media), (self.media, media))):
            rows = x[here]
            if len(rows):
                out[here] = part.mixture(rows, *self.routers(rows, of))
        return out

    def _both(self, x: Tensor, media: Tensor) -> Tensor:
        """All by both, so that nothing is asked of the device."""
        first, other = (part.mixture(x, *self.routers(x, of)) for of, part in enumerate((self.text, self.media)))
        return torch.where(media.unsqueeze(1), other, first)
