"""Runs a step plan on one device: embed, fuse, forward, sample. It keeps the weights and the KV cache, nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from common.gpu import Capture
from llm_service.models.decoder import Decoder
from llm_service.models.generic import LibraryDecoder
from llm_service.plan import Draw, StepPlan, StepResult, TokenLogprobs
from llm_service.worker import sampler
from llm_service.worker.caches import Caches
from llm_service.worker.changeover import Changeover
from llm_service.worker.fusion import fuse
from llm_service.worker.graphs import CaptureBounds, GraphRunner
from llm_service.worker.row_arena import RowArena
from llm_service.worker.sampler import Drawn, score


class ModelRunner:
    """One rank: the weights, and what layers keep of sequences. It has a `changeover` where it began with torch's
    kernels and is to go on with ours."""

    def __init__(self, decoder: Decoder | LibraryDecoder, arena: RowArena, caches: Caches) -> None:
        self._decoder = decoder
        self.arena = arena
        self.caches = caches
        self._replayed = False
        self.graphs: GraphRunner | None = None
        self.changeover: Changeover | None = None
        self._draw = _sampler_on(decoder.device)

    @property
    def row_bytes(self) -> int:
        """Bytes of one embedding row in the arena."""
        return self.arena.row_bytes

    @property
    def whole_media(self) -> bool:
        """Rows of one run see each other, so that no chunk may end within one."""
        return isinstance(self._decoder, LibraryDecoder) and self._decoder.spans

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Has the back ends' and the sampler's kernels compiled, where they compile any, so that no request waits."""
        self.caches.warm_up()
        if isinstance(self._decoder, Decoder):  # the library's does not say how many words it has
            logits = torch.zeros(1, self._decoder.config.vocab_size, device=self._decoder.device)
            self._draw(logits, [Draw(at=0, temperature=1.0, output=bytes(4), presence_penalty=1.0)]).result()

    def kernels(self) -> list[str]:
        """Names of our kernels for CPUs that steps use, as `llm_service.layers.cpu.jit.find` takes them."""
        return sorted(self.caches.kernels() | self._decoder.kernels())

    def not_capturable(self) -> str:
        """Why there can be no graphs; empty where there can."""
        return self.caches.not_capturable() or self._decoder.not_capturable()

    @torch.inference_mode()
    def capture(self, bounds: CaptureBounds, capture: Capture, *, max_bytes: int, agree: Callable[[int], int]) -> None:
        """Captures graphs of batches within bounds; see `GraphRunner`. Nothing may be in the way (`not_capturable`)."""
        assert isinstance(self._decoder, Decoder), "the library's are not captured"
        self.graphs = GraphRunner(self._decoder, self.caches, bounds, capture, max_bytes=max_bytes, agree=agree)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Computes the KV of every token of the plan, one new token for each draw, and the scores."""
        logits, scores = self.forward(plan)
        drawn = StepResult([], []) if logits is None else self._draw(logits, plan.draws).result()
        return StepResult(drawn.tokens, drawn.logprobs, scores, self._replayed)

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> tuple[Tensor | None, list[list[TokenLogprobs]]]:
        """Computes the KV of every token of the plan; when it returns, the plan's rows may be overwritten.

        Gives float32 logits [draws, vocabulary], None where none are drawn, and the plan's scores.
        """
        # Where no scores are asked for, only the places of draws are wanted; where there are none either, any place.
        places = torch.tensor([draw.at for draw in plan.draws] or [0], device=self._decoder.device)
        hidden = self._hidden(plan, None if plan.scores else places)
        scores = score(hidden, plan.scores, self._decoder.logits)
        self.arena.synchronize()
        if not plan.draws:
            return None, scores
        return self._decoder.logits(hidden[places] if plan.scores else hidden), scores

    def _hidden(self, plan: StepPlan, places: Tensor | None) -> Tensor:
        """Hidden states [m, hidden] of some places of a plan's batch, or [n, hidden] of all."""
        token_ids = torch.frombuffer(bytearray(plan.token_ids), dtype=torch.int32).to(self._decoder.device)
        positions = torch.frombuffer(bytearray(plan.positions), dtype=torch.int32).view(3, -1)
        hidden = self._decoder.embed_tokens(token_ids)
        deepstack = fuse(hidden, plan.rows, self.arena)
        self.caches.copy_states(plan.restored)
        self._replayed = self.graphs is not None and self.graphs.can_replay(plan.chunks, deep=deepstack is not None)
        out: Tensor
        if self.graphs is not None and self._replayed:
            out = self.graphs.replay(hidden, positions, plan, deepstack)
            out = out if places is None else out[places]
        else:
            spans = [(rows.at, rows.at + rows.count) for rows in plan.rows] if self.whole_media else []
            batches = self.caches.batches(plan.chunks, plan.slots, plan.passed, spans)
            placed = positions.to(self._decoder.device)
            out = self._decoder(hidden, placed, self.caches.layers, batches, deepstack, places)
        self.caches.copy_states(plan.kept)
        return out


def _sampler_on(device: torch.device) -> Callable[[Tensor, Sequence[Draw]], Drawn]:
    """What draws the tokens there."""
    if device.type == "cuda":
        from llm_service.layers.gpu import row_kernels

        if row_kernels.run_on(device):
            from llm_service.worker import gpu_sampler

            return gpu_sampler.draw
    return sampler.draw
