"""Runs a step plan on one device: embed, fuse, forward, sample. It keeps the weights and the KV cache, nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from common.gpu import Capture
from llm_service.models.decoder import Decoder
from llm_service.models.generic import LibraryDecoder
from llm_service.models.served import Weights
from llm_service.plan import Draw, StepPlan, StepResult, TokenLogprobs
from llm_service.worker import sampler
from llm_service.worker.caches import Caches
from llm_service.worker.changeover import Changeover
from llm_service.worker.fusion import fuse
from llm_service.worker.graphs import CaptureBounds, GraphRunner
from llm_service.worker.row_arena import RowArena
from llm_service.worker.sampler import Drawn, score
from llm_service.worker.transfer import to_device


class Launched:
    """A step that has begun: on a GPU its tokens are on their way to the host, on a CPU it is over."""

    def __init__(
        self,
        drawn: Drawn | None,
        scores: list[list[TokenLogprobs]],
        device: torch.device,
        *,
        began: float,
        replayed: bool,
    ) -> None:
        self._drawn, self._scores, self._replayed = drawn, scores, replayed
        self._began, self._ended = began, time.perf_counter()
        self._over: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._over = torch.cuda.Event()
            self._over.record()

    def result(self) -> StepResult:
        """What came of it; waits until it is over, and its rows may be overwritten. For any thread."""
        if self._over is not None:
            self._over.synchronize()
            self._ended = time.perf_counter()
        drawn = StepResult([], []) if self._drawn is None else self._drawn.result()
        return StepResult(drawn.tokens, drawn.logprobs, self._scores, self._replayed, self._began, self._ended)


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
        self.weights = Weights()
        self._draw = _sampler_on(decoder.device)
        self._chosen = torch.empty(0, dtype=torch.int64, device=decoder.device)

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
            draw = Draw(at=0, temperature=1.0, output=bytes(4), presence_penalty=1.0)
            self._draw(logits, [draw], self._chosen).result()

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

    def run(self, plan: StepPlan) -> StepResult:
        """Computes a step and waits for it."""
        return self.launch(plan).result()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        """Begins to compute the KV of every token of the plan, one new token for each draw, and the scores. What the
        plan carries over are tokens of the step launched before it, which need not be over. Nothing waits for the
        device, but for scores, and where torch computes attention or draws."""
        began = time.perf_counter()
        logits, scores = self._forward(plan)
        drawn = None if logits is None else self._draw(logits, plan.draws, self._chosen)
        if drawn is not None:
            self._chosen = drawn.tokens
        return Launched(drawn, scores, self._decoder.device, began=began, replayed=self._replayed)

    @torch.inference_mode()
    def follow(self, plan: StepPlan) -> None:
        """The same on a rank that does not draw: it gets the tokens when a plan carries them over."""
        self._forward(plan)
        if plan.draws:
            self._chosen = self._chosen.new_empty(len(plan.draws))

    def _forward(self, plan: StepPlan) -> tuple[Tensor | None, list[list[TokenLogprobs]]]:
        """float32 logits [draws, vocabulary], None where none are drawn, and the plan's scores."""
        numbers = [
            np.frombuffer(plan.token_ids, np.int32),
            np.frombuffer(plan.positions, np.int32).reshape(3, -1),
            # Where no scores are asked for, only the places of draws are wanted; where there are none, any place.
            np.array([draw.at for draw in plan.draws] or [0]),
            np.array(plan.carried, np.int64).reshape(-1, 2).T,
        ]
        token_ids, positions, places, carried = to_device(numbers, self._decoder.device)
        if plan.carried:
            self._chosen = self._decoder.group.broadcast(self._chosen)
            token_ids.index_copy_(0, carried[0], self._chosen[carried[1]].int())
        hidden = self._hidden(plan, token_ids, positions, None if plan.scores else places)
        scores = score(hidden, plan.scores, self._decoder.logits)
        if not plan.draws:
            return None, scores
        return self._decoder.logits(hidden[places] if plan.scores else hidden), scores

    def _hidden(self, plan: StepPlan, token_ids: Tensor, positions: Tensor, places: Tensor | None) -> Tensor:
        """Hidden states [m, hidden] of some places of a plan's batch, or [n, hidden] of all."""
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
            out = self._decoder(hidden, positions, self.caches.layers, batches, deepstack, places)
        self.caches.copy_states(plan.kept)
        return out


def _sampler_on(device: torch.device) -> Callable[[Tensor, Sequence[Draw], Tensor], Drawn]:
    """What draws the tokens there."""
    if device.type == "cuda":
        from llm_service.layers.gpu import row_kernels

        if row_kernels.run_on(device):
            from llm_service.worker import gpu_sampler

            return gpu_sampler.draw
    return sampler.draw
