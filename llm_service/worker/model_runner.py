"""Runs a step plan on one device: embed, fuse, forward, sample. It keeps the weights and the KV cache, nothing else."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from common.gpu import Capture
from llm_service.layers.attention.backend import AttentionBackend, CacheShape, NumbaCompiled, WarmBackend
from llm_service.layers.attention.cache_spec import HybridBatch, new_caches, slot_bytes
from llm_service.models.decoder import Decoder
from llm_service.plan import StepPlan, StepResult, TokenLogprobs
from llm_service.worker.changeover import Changeover
from llm_service.worker.fusion import RowArena, fuse
from llm_service.worker.graphs import Bounds, GraphRunner, StableBackend
from llm_service.worker.sampler import sample, score


class ModelRunner:
    """One rank: the weights, the KV cache that `backend` reads, and where layers keep states those of `state_slots`
    sequences. It has a `changeover` where it began with torch's kernels and is to go on with ours."""

    def __init__(
        self, decoder: Decoder, arena: RowArena, shape: CacheShape, backend: AttentionBackend, state_slots: int = 0
    ) -> None:
        self._decoder = decoder
        self.arena = arena
        self._backend = backend
        self.blocks = shape.blocks
        weight = decoder.norm.weight
        self._device = weight.device
        self._replayed = False
        self.kv_cache = shape.new_cache(weight.dtype, weight.device)
        specs = decoder.cache_specs()
        self._has_states = slot_bytes(specs) > 0
        self.state_slots = state_slots if self._has_states else 0
        self.caches = new_caches(specs, self.kv_cache, self.state_slots)
        self._shape = shape
        self.graphs: GraphRunner | None = None
        self.changeover: Changeover | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of one embedding row in the arena."""
        return self.arena.row_bytes

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Has the back end's kernels compiled, where it compiles any, so that no request waits for that."""
        if isinstance(self._backend, WarmBackend):
            self._backend.warm_up(self.kv_cache[0])

    def kernels(self) -> list[str]:
        """Names of our kernels for CPUs that steps use, as `llm_service.layers.cpu.jit.find` takes them."""
        attention = self._backend.kernels if isinstance(self._backend, NumbaCompiled) else frozenset()
        return sorted(attention | self._decoder.kernels())

    def not_capturable(self) -> str:
        """Why there can be no graphs; empty where there can."""
        if not isinstance(self._backend, StableBackend):
            return f"--attention {self._backend.name} launches other kernels for other lengths"
        if self._has_states:
            return "layers with states are not captured yet"
        return self._decoder.not_capturable()

    @torch.inference_mode()
    def capture(self, bounds: Bounds, capture: Capture, *, max_bytes: int, agree: Callable[[int], int]) -> None:
        """Captures graphs of batches within bounds; see `GraphRunner`. Nothing may be in the way (`not_capturable`)."""
        assert isinstance(self._backend, StableBackend), "a back end that does not follow tables"
        self.graphs = GraphRunner(
            self._decoder, self._backend, self.caches, self._shape, bounds, capture, max_bytes=max_bytes, agree=agree
        )

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Computes the KV of every token of the plan, one new token for each draw, and the scores."""
        logits, scores = self.forward(plan)
        drawn = StepResult([], []) if logits is None else sample(logits, plan.draws)
        return StepResult(drawn.tokens, drawn.logprobs, scores, self._replayed)

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> tuple[Tensor | None, list[list[TokenLogprobs]]]:
        """Computes the KV of every token of the plan; when it returns, the plan's rows may be overwritten.

        Gives float32 logits [draws, vocabulary], None where none are drawn, and the plan's scores.
        """
        # Where no scores are asked for, only the places of draws are wanted; where there are none either, any place.
        places = torch.tensor([draw.at for draw in plan.draws] or [0], device=self._device)
        hidden = self._hidden(plan, None if plan.scores else places)
        scores = score(hidden, plan.scores, self._decoder.logits)
        self.arena.synchronize()
        if not plan.draws:
            return None, scores
        return self._decoder.logits(hidden[places] if plan.scores else hidden), scores

    def _hidden(self, plan: StepPlan, places: Tensor | None) -> Tensor:
        """Hidden states [m, hidden] of some places of a plan's batch, or [n, hidden] of all."""
        token_ids = torch.frombuffer(bytearray(plan.token_ids), dtype=torch.int32).to(self._device)
        positions = torch.frombuffer(bytearray(plan.positions), dtype=torch.int32).view(3, -1)
        hidden = self._decoder.embed_tokens(token_ids)
        deepstack = fuse(hidden, plan.rows, self.arena)
        if self.graphs is not None and self.graphs.can_replay(plan.chunks, deep=deepstack is not None):
            self._replayed = True
            replayed = self.graphs.replay(hidden, positions, plan.chunks, deepstack)
            return replayed if places is None else replayed[places]
        self._replayed = False
        batch = self._backend.batch(plan.chunks)
        if self._has_states:
            batch = HybridBatch.of(plan, batch)
        out: Tensor = self._decoder(hidden, positions.to(self._device), self.caches, batch, deepstack, places)
        return out
