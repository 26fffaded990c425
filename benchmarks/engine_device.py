"""`python -m benchmarks.engine_device`: the whole engine on a GPU: scheduler, step queue, decoder, sampler.

Sequences decode together after prompts of random tokens, greedily and with the usual sampling settings (temperature
0.7, top-p 0.8, top-k 20). The decoder has Qwen3-VL-8B's shape and random weights. A step's time is what a caller waits
for a token; *graph alone* is the replay of the same batch, so the rest is the cost of planning, launching and
sampling. Prompts are new in every row. The prefix cache is queried for each, its hits are shown, and a hit ends the
run. A peer's engine is measured with its services: `python -m benchmarks`.
"""

from __future__ import annotations

import argparse
import random
import statistics
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from msgspec import structs

from benchmarks.device import Machine, add_options, head, line, machine, ms, timed
from benchmarks.hits import PREFIX, Hits, check_new, no_wrong_figures, told
from benchmarks.llm_device import Settings, config_of, make_runner, step
from llm_service.engine.batch import Step
from llm_service.engine.block_manager import BlockManager
from llm_service.engine.limits import SchedulerLimits
from llm_service.engine.messages import Add
from llm_service.engine.scheduler import Scheduler
from llm_service.engine.step_queue import StepQueue
from llm_service.request import SamplingParams
from llm_service.worker.executor import LoneExecutor
from llm_service.worker.graphs import CaptureBounds
from llm_service.worker.model_runner import ModelRunner

_BLOCK = 16
_DEPTH = 2
"""Steps under way, as in the engine with `--overlap`."""
KINDS = {
    "greedy": SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
    "sampled": SamplingParams(max_tokens=1, temperature=0.7, top_p=0.8, top_k=20, seed=1, ignore_eos=True),
}
"""By name; how many tokens an answer has is said where it is asked for."""


def scheduler(
    running: int, context: int, tokens: int, step_tokens: int, vocabulary: int, sampling: SamplingParams
) -> Scheduler:
    """With `running` requests of `context` tokens, all new, for `tokens` each; its cache holds them to their end."""
    whole = context + tokens + 1
    blocks = BlockManager(running * (-(-whole // _BLOCK) + 1), _BLOCK)
    made = Scheduler(blocks, SchedulerLimits(running, max(step_tokens, running), whole), frozenset({-1}), 64)
    sampling = structs.replace(sampling, max_tokens=tokens)
    positions = np.tile(np.arange(context, dtype=np.int32), (3, 1)).tobytes()
    for id in range(running):
        made.add(
            Add(
                id=id,
                token_ids=array("i", (random.randrange(1, vocabulary) for _ in range(context))).tobytes(),
                positions=positions,
                mrope_delta=0,
                items=[],
                sampling=sampling,
                salt="",
                priority=0,
                deadline=None,
            )
        )
    return made


def steps(engine: Scheduler, runner: ModelRunner, running: int) -> list[float]:
    """Seconds of each step in which all decode, from one result to the next; runs until all have ended."""
    queue = StepQueue(LoneExecutor(runner))
    decider = threading.Thread(target=_decide, args=(engine, queue, running, found := list[float]()), name="decider")
    decider.start()
    queue.work()
    decider.join()
    return found


def _decide(engine: Scheduler, queue: StepQueue, running: int, found: list[float]) -> None:
    """As `EngineCore` does it, without messages."""
    under_way: deque[Step] = deque()
    try:
        last = time.perf_counter()
        while True:
            planned, _ = engine.schedule()
            if planned is not None:
                queue.submit(planned.plan)
                under_way.append(planned)
                if len(under_way) < _DEPTH:
                    continue
            if not under_way:
                return
            result, done = queue.collect(), under_way.popleft()
            engine.finish(done, result)
            now = time.perf_counter()
            if len(done.drawing) == done.plan.tokens == running:
                found.append(now - last)
            last = now
    finally:
        queue.close()


def rows(here: Machine, sequences: Sequence[int], context: int, tokens: int, step_tokens: int) -> Iterator[str]:
    """The table's rows."""
    most, whole = max(sequences), context + tokens + 1
    blocks = most * (-(-whole // _BLOCK) + 1)
    config = config_of(1 if here.tiny else 48, experts=False, tiny=here.tiny)
    runner = make_runner(config, blocks, here, Settings("auto" if here.device.type == "cuda" else "triton"))
    if here.capture is not None and not runner.not_capturable():
        bounds = CaptureBounds(most, max(step_tokens, most), whole, 4)
        runner.capture(bounds, here.capture(), max_bytes=8 << 30, agree=lambda number: number)
    for running in sequences:
        alone = _replay_seconds(runner, here, running, whole)
        for name, sampling in KINDS.items():
            engine = scheduler(running, context, tokens, step_tokens, config.vocab_size, sampling)
            taken = statistics.median(steps(engine, runner, running))
            hits: Hits = {PREFIX: engine.counters.prefix_hit_tokens}
            check_new(f"{running} running", hits)
            here.keep(table="engine_device", running=running, context=context, sampling=name, step=taken, alone=alone)
            yield line([running, name, ms(taken), ms(alone), ms(taken - alone), f"{running / taken:.0f}", told(hits)])


@torch.inference_mode()
def _replay_seconds(runner: ModelRunner, here: Machine, running: int, whole: int) -> float:
    """Of the graph of such a batch; nan where there are none."""
    plan = step([(whole - 1, 1)] * running)
    runner.run(plan)
    graph = runner.graphs.find(plan.chunks, deep=False) if runner.graphs is not None else None
    return timed({"replay": graph.replay}, here.runs, here.device)["replay"][0] if graph else float("nan")


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine_device", description=__doc__)
    add_options(parser, 20)
    parser.add_argument("--sequences", type=int, nargs="+", default=(1, 8, 64), help="numbers of decoding sequences")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--step-tokens", type=int, default=2048, help="the service's --max-step-tokens")
    given = parser.parse_args()
    here = machine(parser, given)
    asked = ((1, 2), 20, 4, 16) if given.tiny else (given.sequences, given.context, given.tokens, given.step_tokens)
    print("\n" + head(["running", "sampling", "a step", "graph alone", "the rest", "tokens/s", "in caches"]))
    with no_wrong_figures():
        for row in rows(here, *asked):
            print(row, flush=True)


if __name__ == "__main__":
    main()
