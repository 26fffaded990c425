"""Runs a step plan on one device: embed, fuse, forward, sample. It keeps the weights and the KV cache, nothing else."""

from __future__ import annotations

import torch
from torch import Tensor

from llm_service.layers.attention.backend import AttentionBackend, CacheShape
from llm_service.models.decoder import Decoder
from llm_service.plan import StepPlan, StepResult
from llm_service.worker.fusion import RowArena, fuse
from llm_service.worker.sampler import sample


class Runner:
    """One rank: the weights, and the KV cache that `backend` reads."""

    def __init__(self, decoder: Decoder, arena: RowArena, shape: CacheShape, backend: AttentionBackend) -> None:
        self._decoder = decoder
        self._arena = arena
        self._backend = backend
        self.blocks = shape.blocks
        weight = decoder.norm.weight
        self._device = weight.device
        self._caches = shape.zeros(weight.dtype, weight.device)

    @property
    def row_bytes(self) -> int:
        """Bytes of one embedding row in the arena."""
        return self._arena.row_bytes

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Computes the KV of every token of the plan and one new token for each draw."""
        logits = self.forward(plan)
        return StepResult([], []) if logits is None else sample(logits, plan.draws)

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> Tensor | None:
        """Computes the KV of every token of the plan; float32 logits [draws, vocabulary], None where none are drawn."""
        token_ids = torch.frombuffer(bytearray(plan.token_ids), dtype=torch.int32).to(self._device)
        positions = torch.frombuffer(bytearray(plan.positions), dtype=torch.int32).view(3, -1).to(self._device)
        hidden = self._decoder.embed_tokens(token_ids)
        deepstack = fuse(hidden, plan.rows, self._arena)
        hidden = self._decoder(hidden, positions, self._caches, self._backend.batch(plan.chunks), deepstack)
        if not plan.draws:
            return None
        places = torch.tensor([draw.at for draw in plan.draws], device=self._device)
        return self._decoder.logits(hidden[places])
