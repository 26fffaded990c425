"""Runs a step plan on one device: embed, fuse, forward, sample. It keeps the weights and the KV cache, nothing else."""

from __future__ import annotations

import torch
from torch import Tensor

from llm_service.layers.attention import AttentionBatch
from llm_service.layers.group import TensorGroup
from llm_service.models.config import TextConfig
from llm_service.models.decoder import Decoder
from llm_service.plan import StepPlan, StepResult
from llm_service.worker.fusion import RowArena, fuse
from llm_service.worker.sampler import sample


class Runner:
    """One rank. `caches` is [layers, 2, this rank's KV heads, blocks · block_size, head_dim]."""

    def __init__(self, decoder: Decoder, arena: RowArena, blocks: int, block_size: int) -> None:
        self._decoder = decoder
        self._arena = arena
        self._block_size = block_size
        weight = decoder.embed_tokens.weight
        self._device = weight.device
        config = decoder.config
        shape = (config.layers, 2, decoder.kv_heads, blocks * block_size, config.head_dim)
        self._caches = torch.zeros(shape, dtype=weight.dtype, device=weight.device)

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
        chunks = [(chunk.context, chunk.count, chunk.blocks) for chunk in plan.chunks]
        batch = AttentionBatch.of(chunks, self._block_size, self._device)
        hidden = self._decoder.embed_tokens(token_ids)
        deepstack = fuse(hidden, plan.rows, self._arena)
        hidden = self._decoder(hidden, positions, self._caches, batch, deepstack)
        if not plan.draws:
            return None
        places = torch.tensor([draw.at for draw in plan.draws], device=self._device)
        return self._decoder.logits(hidden[places])


def block_bytes(config: TextConfig, group: TensorGroup, block_size: int, itemsize: int) -> int:
    """Bytes that one KV block takes over all layers on one rank."""
    share = group.kv_share(config.kv_heads)
    elements = 2 * config.layers * int(share.stop - share.start) * config.head_dim * block_size
    return elements * itemsize
