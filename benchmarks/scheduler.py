"""`python -m benchmarks.scheduler`: the engine's time for planning, for each step, without a model.

Requests with prompts of 256 tokens decode together; the executor answers at once. *plan* is making the step's plan,
*take in* processing its result, *messages* packing the tokens for the front. Every prompt is new, of random tokens.
The prefix cache is queried for each, its hits are shown, and a hit ends the run. Peers plan inside their engines,
where it cannot be measured separately.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from array import array

import msgspec
import numpy as np

from benchmarks.hits import PREFIX, Hits, check_new, no_wrong_figures, told
from llm_service.engine.batch import Step
from llm_service.engine.block_manager import BlockManager
from llm_service.engine.limits import SchedulerLimits
from llm_service.engine.messages import Add, Tokens
from llm_service.engine.scheduler import Scheduler
from llm_service.plan import StepResult
from llm_service.request import SamplingParams

_PROMPT = 256
_TOKENS = 400
_BLOCK = 16
_WORDS = 150_000


def scheduler(running: int, sampling: SamplingParams) -> Scheduler:
    """A scheduler with `running` requests, whose cache holds all of them to their end."""
    blocks = BlockManager(running * (-(-(_PROMPT + _TOKENS) // _BLOCK) + 1), _BLOCK)
    made = Scheduler(blocks, SchedulerLimits(running, max(512, running), _PROMPT + _TOKENS + 1), frozenset({0}), 64)
    positions = np.tile(np.arange(_PROMPT, dtype=np.int32), (3, 1)).tobytes()
    for id in range(running):
        prompt = array("i", (random.randrange(1, _WORDS) for _ in range(_PROMPT)))
        made.add(
            Add(
                id=id,
                token_ids=prompt.tobytes(),
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


def measure(running: int, sampling: SamplingParams) -> tuple[tuple[float, float, float], Hits]:
    """Median seconds of planning, taking in and packing, over the steps in which all decode, and what the prefix cache
    gave, which is nothing."""
    engine, encode = scheduler(running, sampling), msgspec.msgpack.Encoder().encode
    gc.collect()
    gc.freeze()  # as the engine process does
    times: list[tuple[float, float, float]] = []
    while True:
        begun = time.perf_counter()
        step, _ = engine.schedule()
        planned = time.perf_counter()
        if step is None:
            break
        result = _result(step)
        computed = time.perf_counter()
        output = engine.finish(step, result)
        taken = time.perf_counter()
        encode(Tokens(output.tokens, 0.0))
        packed = time.perf_counter()
        if len(step.drawing) == step.plan.tokens == running:
            times.append((planned - begun, taken - computed, packed - taken))
    hits = {PREFIX: engine.counters.prefix_hit_tokens}
    check_new(f"{running} running", hits)
    plan, take, pack = (statistics.median(column) for column in zip(*times, strict=True))
    return (plan, take, pack), hits


def _result(step: Step) -> StepResult:
    return StepResult([5] * len(step.drawing), [None] * len(step.drawing))


def main() -> None:
    """Measures and prints a table."""
    argparse.ArgumentParser(prog="python -m benchmarks.scheduler", description=__doc__).parse_args()
    kinds = {
        "greedy": SamplingParams(max_tokens=_TOKENS, temperature=0.0),
        "sampled": SamplingParams(max_tokens=_TOKENS, temperature=0.8, top_p=0.9, seed=1),
    }
    print("| running | sampling | plan | take in | messages | a step in all | in caches |")
    print("|---:|---|---:|---:|---:|---:|---|")
    for running in (1, 64, 256):
        for name, sampling in kinds.items():
            with no_wrong_figures():
                parts, hits = measure(running, sampling)
            figures = " | ".join(f"{seconds * 1e3:.3f} ms" for seconds in (*parts, sum(parts)))
            print(f"| {running} | {name} | {figures} | {told(hits)} |", flush=True)


if __name__ == "__main__":
    main()
