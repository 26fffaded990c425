"""Runs a step plan on one device: embed, fuse, forward, sample."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from common.gpu.graphs import Capture
from common.gpu.transfer import ToHost
from common.process.core_share import CoreShare
from llm_service.families.chunk_rule import ChunkRule
from llm_service.models.model import Model
from llm_service.plan import Draw, Masks, StepPlan, StepResult, TokenLogprobs, no_masks, with_masks
from llm_service.worker import sampler
from llm_service.worker.caches import Caches
from llm_service.worker.capture_trial import what_waits
from llm_service.worker.fusion import fuse
from llm_service.worker.graphs import CaptureBounds, Graph, GraphRunner
from llm_service.worker.host_cache import HostCache
from llm_service.worker.input_batch import InputBatch, Inputs
from llm_service.worker.loaded_adapters import LoadedAdapters
from llm_service.worker.messages import AdapterOrder, AddAdapter
from llm_service.worker.row_arena import RowArena
from llm_service.worker.sampler import Drawn, prompt_logprobs


class Proposer(Protocol):
    """Proposes drafts with every step. `caches` are its own, in the same blocks as those of the model that verifies."""

    caches: Caches

    def propose(self, plan: StepPlan, chosen: list[int], hidden: Tensor, /) -> Callable[[], list[list[int]]]:
        """Begins to propose the drafts that `plan.proposals` asks for, to follow the tokens `chosen` by the step's
        draws. It also takes in the step's `hidden` states [n, hidden], or whatever the model `extracts`, of all places
        where the model keeps them. Returns a function that waits for the drafts of each chunk."""
        ...

    def warm_up(self) -> None:
        """As `ModelRunner.warm_up`."""
        ...

    def kernels(self) -> list[str]:
        """As `ModelRunner.kernels`."""
        ...

    def capture(self, bounds: CaptureBounds, capture: Capture, *, max_bytes: int) -> None:
        """Captures its own graphs where nothing prevents it, for the model's steps within `bounds`. All its graphs
        together hold at most `max_bytes`."""
        ...


class Launched:
    """A step that has begun: on a GPU its tokens are on their way to the host, on a CPU it is over."""

    def __init__(
        self,
        drawn: Drawn | None,
        logprobs: list[list[TokenLogprobs]],
        device: torch.device,
        *,
        began: float,
        replayed: bool,
        proposed: Callable[[], list[list[int]]] = list,
        pooled: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> None:
        self._drawn, self._prompt_logprobs, self._replayed, self._proposed = drawn, logprobs, replayed, proposed
        self._pooled = None if pooled is None else ToHost(pooled)
        self.hidden = hidden
        """Of a draft head: the hidden states [draws, hidden] that it continues from, until the next step."""
        self._began, self._ended = began, time.perf_counter()
        self._device = device
        self._over: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._over = torch.cuda.Event()
            self._over.record()

    def result(self) -> StepResult:
        """The step's results. Waits until the step is over, after which its rows may be overwritten. May be called from
        any thread."""
        if self._over is not None:
            torch.cuda.set_device(self._device)  # this thread's may be a GPU of another process
            self._over.synchronize()
            self._ended = time.perf_counter()
        drawn = StepResult([], []) if self._drawn is None else self._drawn.result()
        times = self._began, self._ended
        pooled = [] if self._pooled is None else [row.tobytes() for row in self._pooled.read().numpy()]
        return StepResult(
            drawn.tokens, drawn.logprobs, self._prompt_logprobs, self._replayed, *times, self._proposed(), pooled
        )


@dataclass(frozen=True, slots=True)
class _Forwarded:
    """The results of the model's forward pass."""

    hidden: Tensor
    """[n, hidden] of all places if anybody reads them; otherwise of those in `wanted`."""
    wanted: Tensor
    """[m, hidden] of the places that are wanted (`StepPlan.wanted`)."""
    prompt_logprobs: list[list[TokenLogprobs]]
    extracted: Tensor
    """[n, …]: what the decoder `extracts`; otherwise the same as `hidden`."""
    replayed: bool
    """A graph computed it."""


class ModelRunner:
    """Runs the model on one rank: its weights and the caches of its layers. Steps run eagerly until `capture` has made
    `graphs`. Where they are served, it has slots for `adapters` and a `host_cache` of KV blocks; where other processes
    may compute on its cores, a `core_share`. With a `proposer`, every step waits for its tokens, because drafts follow
    them; if the first rank's proposer is a draft head, each rank `keeps_hidden` states of all places."""

    def __init__(
        self,
        decoder: Model,
        arena: RowArena,
        caches: Caches,
        *,
        adapters: LoadedAdapters | None = None,
        host_cache: HostCache | None = None,
        proposer: Proposer | None = None,
        keeps_hidden: bool = False,
        core_share: CoreShare | None = None,
    ) -> None:
        self._decoder = decoder
        self.arena = arena
        self.caches = caches
        self.adapters = adapters
        self.host_cache = host_cache
        self.proposer = proposer
        self.core_share = core_share
        self.graphs: GraphRunner | None = None
        self._inputs = Inputs(decoder, caches, adapters, keeps_hidden=keeps_hidden)
        self._draw = _sampler_on(decoder.device)
        self._chosen = torch.empty(0, dtype=torch.int64, device=decoder.device)
        self._known = True  # on every rank: there are no tokens yet

    @property
    def row_bytes(self) -> int:
        """Bytes of one embedding row in the arena."""
        return self.arena.row_bytes

    @property
    def chunk_rule(self) -> ChunkRule:
        """Where a prompt may be cut into chunks."""
        return self._decoder.chunk_rule

    @property
    def forgets_answers(self) -> bool:
        """Whether the states computed for an answer differ from those that its tokens would have in a prompt."""
        return self._decoder.forgets_answers

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compiles the kernels of the back ends and of the sampler, so that no request waits for them."""
        self.caches.warm_up()
        if self._decoder.vocabulary is not None:
            logits = torch.zeros(1, self._decoder.vocabulary, device=self._decoder.device)
            draw = Draw(at=0, temperature=1.0, output=bytes(4), presence_penalty=1.0)
            self._draw(logits, [draw], self._chosen).result()
        if self.proposer is not None:
            self.proposer.warm_up()

    def kernels(self) -> list[str]:
        """Names of our kernels for CPUs that steps use, as `common.cpu.jit.find` takes them."""
        proposing = () if self.proposer is None else self.proposer.kernels()
        return sorted({*self.caches.kernels(), *self._decoder.kernels(), *proposing})

    def not_capturable(self) -> str:
        """The reason why graphs cannot be captured; empty if they can."""
        why = self.caches.not_capturable() or self._decoder.not_capturable()
        return why or (what_waits(self._decoder, self.caches) if self._decoder.may_wait else "")

    @torch.inference_mode()
    def capture(self, bounds: CaptureBounds, capture: Capture, *, max_bytes: int, agree: Callable[[int], int]) -> None:
        """Captures graphs of batches within bounds; see `GraphRunner`. Nothing may be in the way (`not_capturable`)."""
        adapters = None if self.adapters is None else self.adapters.for_graphs
        self.graphs = GraphRunner(
            self._decoder, self.caches, bounds, capture, max_bytes=max_bytes, agree=agree, adapters=adapters
        )

    def adapt(self, order: AdapterOrder) -> None:
        """Loads or unloads this rank's partition of an adapter. Requires slots for adapters."""
        assert self.adapters is not None, "adapters are turned on"
        if isinstance(order, AddAdapter):
            self.adapters.load(order.number, order.adapter)
        else:
            self.adapters.drop(order.number)

    def run(self, plan: StepPlan) -> StepResult:
        """Computes a step and waits for it."""
        return self.launch(plan).result()

    @torch.inference_mode()
    def launch(self, plan: StepPlan, masks: Masks = no_masks, *, previous: Tensor | None = None) -> Launched:
        """Launches a step: computes the KV of every token in the plan, samples one token for each draw, and computes
        prompt logprobs. The tokens that the plan carries over come from the step launched before, which may still be
        running. `masks` that arrive after the plan are awaited when the forward pass has been launched. The host waits
        for the device only for prompt logprobs, for drafts of a draft model, and where torch computes attention or
        samples. `previous` [n, hidden] are the hidden states that a draft head continues from."""
        began = time.perf_counter()
        proposed: Callable[[], list[list[int]]] = list
        with self.core_share.computing() if self.core_share is not None else nullcontext():
            forwarded = self._forward(plan, previous)
            drawn = self._drawn(plan, forwarded.wanted[: len(plan.draws)], masks) if plan.draws else None
            pooled = self._pool(plan, forwarded) if plan.pools else None
            if self.proposer is not None:
                chosen: list[int] = [] if drawn is None else drawn.tokens.tolist()
                proposed = self.proposer.propose(plan, chosen, forwarded.extracted)
        if drawn is not None:
            self._choose(drawn.tokens, known=plan.greedy)
        return Launched(
            drawn,
            forwarded.prompt_logprobs,
            self._decoder.device,
            began=began,
            replayed=forwarded.replayed,
            proposed=proposed,
            pooled=pooled,
            hidden=forwarded.hidden if previous is not None else None,
        )

    @torch.inference_mode()
    def follow(self, plan: StepPlan) -> None:
        """Runs the same step on a rank that does not sample. Where it cannot derive the sampled tokens, it receives
        them when a later plan carries them over."""
        wanted = self._forward(plan).wanted[: len(plan.draws)]
        if plan.greedy and plan.draws:
            self._choose(self._decoder.likeliest(wanted), known=True)
        elif plan.draws:
            self._decoder.logits(wanted)  # this rank's partition of the logits, which rank 0 samples from
            self._choose(self._chosen.new_empty(len(plan.draws)), known=False)

    def _drawn(self, plan: StepPlan, hidden: Tensor, masks: Masks) -> Drawn:
        """From hidden states [draws, hidden]."""
        if plan.greedy:
            return Drawn(self._decoder.likeliest(hidden))
        logits = self._decoder.logits(hidden)  # first: other ranks compute their part without masks
        return self._draw(logits, with_masks(plan.draws, masks), self._chosen)

    def _pool(self, plan: StepPlan, forwarded: _Forwarded) -> Tensor:
        """The pooled hidden states that the plan asks for, float32 [pools, hidden]."""
        hidden = forwarded.hidden
        if self._inputs.keeps_all(plan):
            return torch.stack([hidden[each.at : each.at + each.count].float().sum(0) for each in plan.pools])
        return forwarded.wanted[len(plan.draws) :].float()

    def offload(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies KV blocks to the host, as pairs (block, place), and waits for these copies and for everything launched
        before them."""
        if self.host_cache is not None:
            self.host_cache.offload(pairs)
            self.host_cache.synchronize()

    def _choose(self, tokens: Tensor, *, known: bool) -> None:
        """Records the tokens int64 [draws] that the step has sampled. If they are not `known`, ranks other than the
        first have only their number."""
        self._chosen, self._known = tokens, known

    def _forward(self, plan: StepPlan, previous: Tensor | None = None) -> _Forwarded:
        """The forward pass of a step, up to sampling or pooling."""
        deep = bool(plan.rows) and self.arena.levels > 1
        if self.adapters is not None:
            self.adapters.begin(plan)
        graph: Graph | None = None
        if self.graphs is not None and not self._inputs.spans(plan):
            graph = self.graphs.find(plan.chunks, deep=deep, adapted=bool(plan.adapters.slots))
        if self.host_cache is not None:
            self.host_cache.offload(plan.offloaded)
            self.host_cache.load(plan.loaded)
        batch = self._inputs.prepare(plan, graph)
        token_ids = self._token_ids(plan, batch)
        hidden = self._decoder.embed_tokens(token_ids)
        deepstack = fuse(hidden, plan.rows, self.arena, adds=self._decoder.adds_rows)
        if deepstack is not None and self._decoder.adds_first_level:
            deepstack = deepstack.taking_first(hidden)
        if previous is not None:
            hidden = self._decoder.join(hidden, previous)
        self.caches.copy_states(plan.states.before)
        ids = self._decoder.ids_of_layers(token_ids, [(row.at, row.at + row.count) for row in plan.rows])
        if graph is not None:
            assert self.graphs is not None
            assert batch.numbers is not None, "back ends of graphs follow metadata"
            longest = batch.numbers.longest
            out = self.graphs.replay(graph, hidden, batch.read, self._inputs.tables, longest, deepstack, ids)
            out = out if batch.places is None else out[batch.places]
        else:
            fewer = batch.places is not None and deepstack is None and self._decoder.shares_keys
            out = self._decoder(
                hidden,
                batch.positions,
                self.caches.layers,
                self._inputs.batches(plan, batch),
                deepstack,
                batch.places,
                token_ids=ids,
                at_places=self._inputs.at_places(plan) if fewer else None,
            )
        self.caches.copy_states(plan.states.after)
        extracted = out
        if out.shape[1] > (size := self._decoder.hidden_size):
            out, extracted = out[:, :size], out[:, size:]
        logprobs = prompt_logprobs(out, plan.prompt_logprobs, self._decoder.logits)
        wanted = out[batch.wanted] if self._inputs.keeps_all(plan) else out
        return _Forwarded(out, wanted, logprobs, extracted, replayed=graph is not None)

    def _token_ids(self, plan: StepPlan, batch: InputBatch) -> Tensor:
        """Token ids int [n], including those that the step before sampled, which never left the device."""
        if not plan.carried:
            return batch.token_ids
        if not self._known:
            self._choose(self._decoder.group.broadcast(self._chosen), known=True)
        if len(self._chosen) == plan.tokens and plan.carried == [(n, n) for n in range(plan.tokens)]:
            return self._chosen
        places, draws = batch.carried
        return batch.token_ids.index_copy_(0, places, self._chosen[draws].int())


def _sampler_on(device: torch.device) -> Callable[[Tensor, Sequence[Draw], Tensor], Drawn]:
    """The function that samples tokens on this device."""
    if device.type == "cuda":
        from llm_service.layers.gpu import row_kernels

        if row_kernels.run_on(device):
            from llm_service.worker import gpu_sampler

            return gpu_sampler.draw
    return sampler.draw
