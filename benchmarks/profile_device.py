"""`python -m benchmarks.profile_device`: which kernels take the time on a GPU, by torch's profiler.

It profiles a replay of the decoder's graph, a step that samples with temperature, top-p and top-k, a prefill, and a
pass of the tower; with Qwen3-VL-8B's shapes, random weights, and the same input *repeated*. There are no caches and no
peers. It shows the longest kernels, their counts, and the GPU's idle time in between. Without a GPU it shows the CPU's
operators.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator

import msgspec
import torch
from torch.autograd.profiler_util import FunctionEventAvg
from torch.profiler import ProfilerActivity, profile

from benchmarks import vit
from benchmarks.device import Machine, add_options, head, line, machine, ms
from benchmarks.llm_device import Settings, config_of, make_runner, step
from benchmarks.shapes import TINY_TOWER, TOWER, patch_numbers
from common.media.item import Grid
from encoder_service.models.attention import BACKENDS
from encoder_service.worker.graphs import GraphedTower
from llm_service.worker.graphs import CaptureBounds

_SHOWN = 15
_WARM = 3


@torch.inference_mode()
def things(here: Machine) -> Iterator[tuple[str, Callable[[], object]]]:
    """What is profiled, by name."""
    shape, side, budget = (TINY_TOWER, 4, 64) if here.tiny else (TOWER, 64, 4096)
    tower, grids = vit.tower(shape, here.device, here.dtype), [Grid(1, side, side)]
    patches = torch.randn(side * side, patch_numbers(shape), device=here.device, dtype=here.dtype)
    tower.backend = BACKENDS["triton"]()
    tower.capturable = [tower.backend]
    yield "tower, eager", lambda: tower(patches, grids)
    if here.capture is not None and tower.backend.stable(budget, budget, here.device) is not None:
        capture = here.capture()
        graphed = GraphedTower(tower, [budget], capture, max_bytes=8 << 30, device=here.device, dtype=here.dtype)
        yield "tower, replayed", lambda: graphed(patches, grids)
    most, context, tokens = (2, 20, 16) if here.tiny else (8, 8192, 2048)
    blocks = max(most * -(-(context + 1) // 16), -(-tokens // 16))
    settings = Settings("auto" if here.device.type == "cuda" else "triton")
    runner = make_runner(config_of(1 if here.tiny else 48, experts=False, tiny=here.tiny), blocks, here, settings)
    plan, prefill = step([(context, 1)] * most), step([(0, tokens)])
    drawn = [msgspec.structs.replace(each, temperature=0.7, top_p=0.8, top_k=20, uniform=0.4) for each in plan.draws]
    yield "prefill, eager", lambda: runner.run(prefill)
    runner.run(plan)
    plan = msgspec.structs.replace(plan, appended=[])  # what runs on has its tables
    yield "decode, eager", lambda: runner.run(plan)
    if here.capture is not None:
        bounds = CaptureBounds(most, most, context + 1, 4)
        runner.capture(bounds, here.capture(), max_bytes=8 << 30, agree=lambda number: number)
    yield "decode, greedy", lambda: runner.run(plan)
    yield "decode, sampled", lambda: runner.run(msgspec.structs.replace(plan, draws=drawn))


@torch.inference_mode()
def rows(here: Machine) -> Iterator[str]:
    """The tables, line by line."""
    gpu = here.device.type == "cuda"
    for name, run in things(here):
        for _ in range(1 if here.tiny else _WARM):
            run()
        with profile(activities=[ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU]) as seen:
            began = time.perf_counter()
            run()
            if gpu:
                torch.cuda.synchronize(here.device)
            whole = time.perf_counter() - began
        spent = kernels(seen.key_averages(), gpu=gpu)
        busy, launches = sum(seconds for seconds, _ in spent.values()), sum(count for _, count in spent.values())
        most = sorted(spent.items(), key=lambda each: -each[1][0])[:_SHOWN]
        here.keep(table="profile_device", name=name, whole=whole, busy=busy, launches=launches, kernels=dict(most))
        yield f"\n{name}: {ms(whole)}, busy {ms(busy)}, {launches} kernels\n"
        yield head(["kernel", "times", "in all"])
        for kernel, (seconds, count) in most:
            yield line([kernel[:80].replace("|", "/"), count, ms(seconds)])


def kernels(averages: Iterable[FunctionEventAvg], *, gpu: bool) -> dict[str, tuple[float, int]]:
    """Seconds and how often, by name. What the profiler saw on the host beside a GPU, such as calls of CUDA's runtime,
    is none."""
    if not gpu:
        return {str(each.key): (each.self_cpu_time_total / 1e6, each.count) for each in averages}
    there = [each for each in averages if each.device_type.name == "CUDA"]
    return {str(each.key): (each.self_device_time_total / 1e6, each.count) for each in there}


def main() -> None:
    """Measures and prints the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile_device", description=__doc__)
    add_options(parser, None)
    here = machine(parser, parser.parse_args())
    for row in rows(here):
        print(row, flush=True)


if __name__ == "__main__":
    main()
