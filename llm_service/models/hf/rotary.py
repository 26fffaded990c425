"""LongRoPE (Ding et al. 2024): sequences longer than a bound use other frequencies, here each sequence by its own
length, whereas transformers chooses one set for a batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from common.checkpoints.checkpoint import CheckpointError
from llm_service.families.family import FAR

_TURNS = "longrope"


def turn_by_sequence(text: nn.Module) -> None:
    """Has a text's LongRoPE recognise long sequences by their positions, which are counted from `FAR`. Raises
    CheckpointError if transformers computes something else for a single sequence than is computed here."""
    for name, part in list(text.named_modules()):
        if getattr(part, "rope_type", None) == _TURNS:
            above, _, own = name.rpartition(".")
            setattr(text.get_submodule(above), own, LongRotary(part))


class LongRotary(nn.Module):
    """Cosines and sines [1, n, width] of positions int [1, n], as one of transformers' modules gives them."""

    short: Tensor
    long: Tensor

    def __init__(self, of: Any) -> None:
        super().__init__()
        long_rope_threshold = int(of.config.rope_parameters["original_max_position_embeddings"])
        example = torch.zeros(1, device=of.inv_freq.device)
        for name, longest in (("short", long_rope_threshold - 1), ("long", long_rope_threshold)):
            places = torch.tensor([[1, longest // 2, longest]], device=example.device)
            expected = of(example, places)
            self.register_buffer(name, of.inv_freq.clone(), persistent=False)
            self._scale = float(of.attention_scaling)
            if name == "long":
                found = self(example, places + FAR)
                if not all(torch.allclose(one, other) for one, other in zip(found, expected, strict=True)):
                    raise CheckpointError(f"{type(of).__name__} turns long sequences in a way that is not known here")

    def forward(self, like: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """With the type of `like`."""
        far = position_ids >= FAR
        turns = torch.where(far.unsqueeze(-1), self.long, self.short)
        angles = (position_ids - FAR * far).unsqueeze(-1).float() * turns
        whole = torch.cat((angles, angles), dim=-1)
        return (whole.cos() * self._scale).to(like.dtype), (whole.sin() * self._scale).to(like.dtype)
