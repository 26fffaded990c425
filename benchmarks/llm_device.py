"""`python -m benchmarks.llm_device`: the decoder of Qwen3-VL-8B, random weights, on a GPU: decoding and prefill.

A step is all that a rank does with a plan, from token ids to the tokens that are chosen. *Least* is the time in which
memory gives all weights, and the keys and values of all sequences, once, by the data sheet. Weights are made on the
device, so no checkpoint is needed. Ways take turns; where no graph fits, as above 1024 tokens, a step of that way runs
eagerly, too. *Replay* is the graph alone, without what a step does before it and after it. A step is *repeated* over
the same tokens and the same cache, which is full of noise: nothing below the services remembers tokens, so there are no
hits to count. The data sheet stands for a peer.
"""

from __future__ import annotations

import argparse
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.device import Peaks, about, measured, sheet, timed
from benchmarks.shapes import MODEL, cache_bytes, prefill_operations, weight_bytes
from common.arena import SharedBuffer
from common.gpu import Capture, CudaCapture
from llm_service.layers.group import ALONE
from llm_service.models.config import TextConfig
from llm_service.models.decoder import Decoder
from llm_service.plan import Chunk, Draw, StepPlan
from llm_service.worker.caches import Caches
from llm_service.worker.graphs import CaptureBounds
from llm_service.worker.model_runner import ModelRunner
from llm_service.worker.row_arena import RowArena

_BLOCK = 16
_LEVELS = 4
_GRAPH_BYTES = 8 << 30

Times = dict[str, float]
"""Seconds of a step, by the way."""
Found = dict[str, list[tuple[int, Times]]]
"""Times by the number of sequences ("decode") and of tokens ("prefill")."""
Step = Callable[[StepPlan], object]

_REPLAY = "replay"


@dataclass(frozen=True, slots=True)
class Machine:
    """Where it runs, and what that could do at best; `capture` None: without graphs."""

    device: torch.device
    dtype: torch.dtype
    peaks: Peaks
    runs: int
    capture: Callable[[], Capture] | None = None


def make_runner(config: TextConfig, blocks: int, machine: Machine, attention: str = "auto") -> ModelRunner:
    """A rank with weights whose sums stay around 1, and a cache full of noise."""
    decoder = Decoder(config, ALONE, machine.dtype, machine.device)
    for parameter in decoder.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, parameter.shape[1] ** -0.5)
        else:
            parameter.fill_(1.0)
    decoder.finalize()
    caches = Caches(decoder.mixers(), blocks, _BLOCK, machine.dtype, machine.device, attention=attention)
    arena = RowArena(SharedBuffer.create("bench", 1 << 16).view, _LEVELS, config.hidden_size, machine.dtype)
    runner = ModelRunner(decoder.eval(), arena, caches)
    for kind in caches.paged.values():
        kind.cache.normal_()
    runner.warm_up()
    return runner


def decodes(sequences: int, context: int) -> StepPlan:
    """One token for each sequence. Their blocks alternate, as they do when sequences have grown side by side."""
    each = -(-(context + 1) // _BLOCK)
    chunks = [Chunk(context, 1, list(range(n, sequences * each, sequences))) for n in range(sequences)]
    ids, places = array("i", [5] * sequences), array("i", [context] * 3 * sequences)
    return StepPlan(ids.tobytes(), places.tobytes(), chunks, [], [Draw(at=n) for n in range(sequences)])


def prefill(tokens: int) -> StepPlan:
    """A prompt's first tokens, and one token drawn."""
    ids, places = array("i", [5] * tokens), array("i", list(range(tokens)) * 3)
    chunk = Chunk(0, tokens, list(range(-(-tokens // _BLOCK))))
    return StepPlan(ids.tobytes(), places.tobytes(), [chunk], [], [Draw(at=tokens - 1)])


def measure(
    config: TextConfig,
    machine: Machine,
    *,
    sequences: Sequence[int],
    context: int,
    tokens: Sequence[int],
    attention: str = "auto",
    compiled: bool = False,
) -> Found:
    """Times every step in every way; where layers are `compiled`, once more so."""
    blocks = max(max(sequences) * -(-(context + 1) // _BLOCK), -(-max(tokens) // _BLOCK))
    runner = make_runner(config, blocks, machine, attention)
    bounds = CaptureBounds(max(sequences), max(*tokens, *sequences), blocks * _BLOCK, _LEVELS)
    found = _round(runner, machine, bounds, sequences, context, tokens)
    if compiled:
        runner._decoder.compile_layers()
        again = _round(runner, machine, bounds, sequences, context, tokens)
        for kind, rows in again.items():
            for (_, times), (_, more) in zip(found[kind], rows, strict=True):
                times.update({f"{name}, compiled": seconds for name, seconds in more.items()})
    return found


def _round(
    runner: ModelRunner,
    machine: Machine,
    bounds: CaptureBounds,
    sequences: Sequence[int],
    context: int,
    tokens: Sequence[int],
) -> Found:
    ways = _ways(runner, machine, bounds)

    def times(plan: StepPlan) -> Times:
        passes: dict[str, Callable[[], object]] = {name: partial(way, plan) for name, way in ways.items()}
        return {name: whole for name, (whole, _) in timed(passes, machine.runs, machine.device).items()}

    return {
        "decode": [(many, times(decodes(many, context))) for many in sequences],
        "prefill": [(many, times(prefill(many))) for many in tokens],
    }


def _ways(runner: ModelRunner, machine: Machine, bounds: CaptureBounds) -> dict[str, Step]:
    """What there is to compare, by name."""
    if machine.capture is None:
        return {"eager": runner.run}
    runner.capture(bounds, machine.capture(), max_bytes=_GRAPH_BYTES, agree=lambda number: number)
    captured = runner.graphs
    assert captured is not None

    def step(plan: StepPlan, *, graphs: bool) -> object:
        runner.graphs = captured if graphs else None
        return runner.run(plan)

    @torch.inference_mode()
    def replay(plan: StepPlan) -> None:
        """Over the metadata that the step before has filled."""
        if (graph := captured._fitting(plan.chunks, deep=False)) is not None:
            graph.replay()

    return {
        "eager": lambda plan: step(plan, graphs=False),
        "graph": lambda plan: step(plan, graphs=True),
        _REPLAY: replay,
    }


def report(config: TextConfig, machine: Machine, context: int, found: Found) -> str:
    """Two metadata."""
    element, peaks = machine.dtype.itemsize, machine.peaks
    names = list(found["decode"][0][1])
    lines = _head(["sequences", "least", *names, "fastest ÷ least", "tokens/s"])
    for many, times in found["decode"]:
        least = (weight_bytes(config, element) + cache_bytes(config, element, many, context)) / peaks.bandwidth
        best = _best(times)
        lines.append(_row([many, *map(_ms, (least, *times.values())), f"{best / least:.2f}", f"{many / best:.0f}"]))
    lines += ["", *_head(["tokens of a prefill", *names, "tokens/s", "of peak"])]
    for many, times in found["prefill"]:
        best = _best(times)
        share = prefill_operations(config, many) / best / peaks.operations
        lines.append(_row([many, *map(_ms, times.values()), f"{many / best:.0f}", f"{share:.0%}"]))
    return "\n".join(lines)


def _best(times: Times) -> float:
    return min(seconds for name, seconds in times.items() if not name.startswith(_REPLAY))


def _head(cells: Sequence[str]) -> list[str]:
    return [_row(cells), "|---:" * len(cells) + "|"]


def _row(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.llm_device", description=__doc__)
    parser.add_argument("--runs", type=int, default=20, help="steps of each kind; the median is shown")
    parser.add_argument("--sequences", type=int, nargs="+", default=(1, 4, 16, 64), help="that decode side by side")
    parser.add_argument("--context", type=int, default=1024, help="tokens in the cache of each of them")
    parser.add_argument("--tokens", type=int, nargs="+", default=(512, 1024, 2048, 8192), help="of a prefill")
    parser.add_argument("--layers", type=int, default=36, help="fewer, for a GPU with less memory")
    parser.add_argument("--attention", default="auto", help="as the service's option")
    parser.add_argument("--compile", action="store_true", help="once more with layers compiled by torch: minutes more")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no GPU here")
    device, dtype = torch.device("cuda:0"), torch.bfloat16
    here = measured(device, dtype)
    peaks = sheet(torch.cuda.get_device_name(device)) or here
    config = TextConfig.of({**MODEL, "text_config": {**MODEL["text_config"], "num_hidden_layers": given.layers}})
    machine = Machine(device, dtype, peaks, given.runs, lambda: CudaCapture(device))
    print(f"{about(device)}; {given.context} tokens in the cache of each sequence")
    for name, each in (("data sheet", peaks), ("a copy and a product here", here)):
        print(f"{name}: {each.bandwidth / 1e12:.2f} TB/s, {each.operations / 1e12:.0f} TFLOP/s")
    found = measure(
        config,
        machine,
        sequences=given.sequences,
        context=given.context,
        tokens=given.tokens,
        attention=given.attention,
        compiled=given.compile,
    )
    print("\n" + report(config, machine, given.context, found))


if __name__ == "__main__":
    main()
