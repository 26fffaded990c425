"""`python -m benchmarks.step_host`: the host's time for a step of decodes, on a machine without kernels to wait for.

The scheduler, the plan, the graph runner and the GPU sampler are real; what a graph would compute is left out, and so
are the sampler's kernels. *plan* is making the plan, *first launch* a rank's work until the graph starts, *behind it*
the rest, up to the draw, *take in* processing the tokens. A GPU waits for none of it as long as the sum is shorter
than its own step; an idle one waits for *first launch*. *message* is the time to pack the plan for other ranks, and
its bytes.

Prompts are new, of random tokens. The prefix cache is queried for each, its hits are shown, and a hit ends the run.
Peers do this inside their engines, where it cannot be measured separately.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.device import Machine, Peaks
from benchmarks.engine_device import KINDS, scheduler
from benchmarks.hits import PREFIX, Hits, check_new, no_wrong_figures, told
from benchmarks.llm_device import Settings, config_of, make_runner
from llm_service.engine.batch import Step
from llm_service.engine.scheduler import Scheduler
from llm_service.layers.attention.backend import AttentionBatch, PagedChunk, Span
from llm_service.layers.attention.metadata import AttentionMetadata, Tiling
from llm_service.models.decoder import Decoder
from llm_service.request import SamplingParams
from llm_service.worker import gpu_sampler
from llm_service.worker.caches import PagedLayers
from llm_service.worker.executor import message_of
from llm_service.worker.graphs import CaptureBounds
from llm_service.worker.model_runner import ModelRunner

_STEP_TOKENS = 1 << 16
_BLOCK = 16
_CPU = torch.device("cpu")
COLUMNS = ["plan", "first launch", "behind it", "take in", "message"]


class NoAttention:
    """Makes batches that nobody computes."""

    name = "none"
    tiling = Tiling(66, 16)  # of an H100 with eight KV heads and four times as many query heads

    def batch(self, chunks: Sequence[PagedChunk], spans: Sequence[Span] = ()) -> AttentionBatch:
        """Of a prefill, which no graph fits."""
        raise NotImplementedError

    def over(self, metadata: AttentionMetadata) -> AttentionBatch:
        """Of a graph, which is never run."""
        return _NoBatch()


class _NoBatch:
    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor) -> Tensor:
        raise NotImplementedError


class NoGraph:
    """Captures nothing; `started` is when the last replay would have begun."""

    held = 0

    def __init__(self) -> None:
        self.started = 0.0

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        return self._start

    def _start(self) -> None:
        self.started = time.perf_counter()


class _NoKernel:
    """Whatever should be drawn, token 5 is."""

    def __getitem__(self, _: object) -> Callable[..., object]:
        return lambda tokens, *_, **__: tokens.fill_(5)


def runner_of(running: int, context: int, capture: NoGraph) -> ModelRunner:
    """A rank that computes nothing, for `running` sequences of so many tokens."""
    blocks = running * (-(-context // _BLOCK) + 1)
    here = Machine(_CPU, torch.float32, Peaks(1e9, 1e9), Peaks(1e9, 1e9), runs=1)
    runner = make_runner(config_of(1, experts=False, tiny=True), 1, here, Settings("torch"))
    runner.caches.blocks = runner.caches.null_block = blocks
    for kind, layers in runner.caches.paged.items():
        runner.caches.paged[kind] = PagedLayers(layers.shape, layers.cache, NoAttention())

    def same(hidden: Tensor, *given: Any) -> Tensor:
        places: Tensor | None = given[-1]
        return hidden if places is None else hidden[places]

    assert isinstance(runner._decoder, Decoder)
    runner._decoder.forward = same  # type: ignore[method-assign, assignment]
    bounds = CaptureBounds(running, _STEP_TOKENS, context, 1)
    runner.capture(bounds, capture, max_bytes=1, agree=lambda number: number)
    gpu_sampler.draw_kernel = _NoKernel()  # type: ignore[attr-defined]  # which it imports, and calls by this name
    runner._draw = gpu_sampler.draw
    return runner


def measure(running: int, context: int, steps: int, sampling: SamplingParams) -> tuple[list[float], int, Hits]:
    """Median seconds of the columns over the steps in which all decode, bytes of the message, and what the prefix cache
    gave, which is nothing."""
    capture = NoGraph()
    tokens = steps + running * context // _STEP_TOKENS  # the first one decodes while the others' prompts are computed
    runner = runner_of(running, context + tokens + 1, capture)
    engine = scheduler(running, context, tokens, _STEP_TOKENS, 90, sampling)
    gc.collect()
    gc.freeze()  # as the engine process does
    found, sizes = list[tuple[float, ...]](), list[int]()
    for step, times, size in _steps(engine, runner, capture):
        if len(step.drawing) == step.plan.tokens == running:
            found.append(times)
            sizes.append(size)
    hits = {PREFIX: engine.counters.prefix_hit_tokens}
    check_new(f"{running} running", hits)
    return [statistics.median(column) for column in zip(*found, strict=True)], int(statistics.median(sizes)), hits


def _steps(engine: Scheduler, runner: ModelRunner, capture: NoGraph) -> Iterator[tuple[Step, tuple[float, ...], int]]:
    while True:
        begun = time.perf_counter()
        step, _ = engine.schedule()
        planned = time.perf_counter()
        if step is None:
            return
        launched = time.perf_counter()
        under_way = runner.launch(step.plan)
        drawn = time.perf_counter()
        result = under_way.result()
        computed = time.perf_counter()
        engine.finish(step, result)
        taken = time.perf_counter()
        size = len(message_of(step.plan))
        packed = time.perf_counter()
        started = capture.started
        yield step, (planned - begun, started - launched, drawn - started, taken - computed, packed - taken), size


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_host", description=__doc__)
    parser.add_argument("--sequences", type=int, nargs="+", default=(64, 256), help="numbers of decoding sequences")
    parser.add_argument("--context", type=int, nargs="+", default=(8192, 16384), help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=60, help="steps of each kind; the median is shown")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print("| running | context | sampling | " + " | ".join(COLUMNS) + " | bytes | in caches |")
    print("|---:|---:|---|" + "---:|" * len(COLUMNS) + "---:|---|")
    for running, context in zip(given.sequences, given.context, strict=True):
        for name, sampling in KINDS.items():
            with no_wrong_figures():
                times, size, hits = measure(running, context, given.steps, sampling)
            figures = " | ".join(f"{seconds * 1e3:.3f} ms" for seconds in times)
            print(f"| {running} | {context} | {name} | {figures} | {size} | {told(hits)} |", flush=True)


if __name__ == "__main__":
    main()
