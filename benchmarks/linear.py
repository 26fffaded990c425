"""`python -m benchmarks.linear`: a linear layer by torch, by oneDNN, and in panels, as in a decoder on a CPU.

*oneDNN bf16* computes in bfloat16, if the processor has such products; all others compute in float32. *float32*,
*bfloat16*, *int8*, *fp8* (blocks of 128) and *awq* (4 bits, groups of 128 with zeros) are the panels' types: the first
two need AVX-512, the others AVX2. *pairs* are bfloat16 panels multiplied with bfloat16 rows, and the same for 8 and 4
bits, if the processor has AVX512-BF16; with AMX by tiles, and then also *by vectors*.

Prints GB/s of weights read, as if all were float32, the best of many passes over more weights than the cache holds;
for many rows, which are bound by arithmetic, GFLOP/s. The same rows are *repeated* in every pass and go through every
weight; nothing caches them, so there are no hits to count.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch.nn import functional

from benchmarks.quantized import awq, fp8
from common.cpu.jit import use_threads
from common.cpu.linear import BlockedWeight, LaidOut, Linear
from llm_service.layers.cpu.pair_panels import PairPanels
from llm_service.layers.cpu.selection import computes_bfloat16, computes_tiles, fused_vectors
from llm_service.layers.linear.layout import quantized
from llm_service.layers.linear.parallel import PackedLinear
from llm_service.layers.linear.quantized_weight import QuantizedWeight
from llm_service.layers.linear.weight_dtype import EXACT, Rounded

_SHAPES = ((6144, 1024), (1024, 3072))
_ROWS = (1, 2, 4, 8, 16, 32, 64, 216, 512)
_MANY = 64
_Work = Callable[[torch.Tensor], None]
"""What multiplies rows with all weights."""
_Side = Callable[[list[torch.Tensor]], _Work]
"""What lays weights out, and gives their products."""


def _best(works: Sequence[Callable[[], object]], passes: int, clock: Callable[[], float]) -> list[float]:
    """Of each, the least of some passes that they take in turns."""
    best = [float("inf")] * len(works)
    for _ in range(passes):
        for index, work in enumerate(works):
            started = clock()
            work()
            best[index] = min(best[index], clock() - started)
    return best


def _by_torch(weights: list[torch.Tensor]) -> _Work:
    def work(x: torch.Tensor) -> None:
        for weight in weights:
            functional.linear(x, weight)

    return work


def _through(layers: list[Linear]) -> _Work:
    def work(x: torch.Tensor) -> None:
        for layer in layers:
            layer(x)

    return work


def _by_onednn(weights: list[torch.Tensor]) -> _Work:
    return _through([_finalized(weight, panels=False) for weight in weights])


def _blocked(weights: list[torch.Tensor]) -> _Work:
    """In bfloat16, as oneDNN wants it."""
    blocked = [BlockedWeight.of(weight.bfloat16()) for weight in weights]

    def work(x: torch.Tensor) -> None:
        short = x.bfloat16()
        for weight in blocked:
            assert weight is not None
            weight.product(short)

    return work


def _products(weights: list[LaidOut]) -> _Work:
    def work(x: torch.Tensor) -> None:
        for weight in weights:
            weight.product(x)

    return work


def _rounded(rounded: Rounded) -> _Side:
    return lambda weights: _through([_finalized(weight, rounded=rounded) for weight in weights])


def _in_16_bits(weights: list[torch.Tensor]) -> _Work:
    return _rounded(EXACT)([weight.bfloat16().float() for weight in weights])


def _quantized(form: Callable[[torch.Tensor], QuantizedWeight], rounded: Rounded = EXACT) -> _Side:
    return lambda weights: _products([quantized([form(weight)], rounded=rounded) for weight in weights])


def _by_vectors(weights: list[torch.Tensor]) -> _Work:
    """Pairs on a processor without tiles; inputs of these shapes need no padding for either."""
    panels = [PairPanels.of(weight) for weight in weights]
    return _products([replace(each, tiles=False) for each in panels if each is not None])


def _finalized(weight: torch.Tensor, *, panels: bool = True, rounded: Rounded = EXACT) -> Linear:
    outputs, inputs = weight.shape
    layer = PackedLinear(slice(0, inputs), {"all": slice(0, outputs)}, bias=False, dtype=weight.dtype)
    layer.weight.data.copy_(weight)
    if panels:
        layer.finalize(rounded=rounded)
    else:
        Linear.finalize(layer)
    return layer


def _kinds() -> dict[str, _Side]:
    """What is measured here, by its name."""
    panels: dict[str, _Side] = {"int8": _rounded(Rounded(int8=True)), "fp8": _quantized(fp8), "awq": _quantized(awq)}
    if fused_vectors():
        panels = {"float32": _rounded(EXACT), "bfloat16": _in_16_bits, **panels}
    if computes_bfloat16():
        pairs = Rounded(bfloat16=True)
        forms = {"int8": QuantizedWeight.rounded, "fp8": fp8, "awq": awq}
        panels["pairs"] = _rounded(pairs)
        panels |= {f"{name} pairs": _quantized(form, pairs) for name, form in forms.items()}
    if computes_tiles():
        panels["pairs by vectors"] = _by_vectors
    bf16 = {"oneDNN bf16": _blocked} if torch.ops.mkldnn._is_mkldnn_bf16_supported() else {}
    return {"torch": _by_torch, "oneDNN": _by_onednn, **bf16, **panels}


@torch.inference_mode()
def main() -> None:
    """Measures and prints a table."""
    kinds = _kinds()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.linear", description=__doc__)
    parser.add_argument("--cpu-time", action="store_true", help="CPU time of one thread, for a busy machine")
    parser.add_argument("--rows", type=int, nargs="+", default=_ROWS, help="numbers of rows")
    parser.add_argument("--passes", type=int, default=10, help="passes; the best is shown")
    parser.add_argument("--megabytes", type=int, default=200, help="size of float32 weights: more than the cache")
    parser.add_argument("--kinds", nargs="+", choices=list(kinds), default=list(kinds), help="what to measure")
    given, clock = parser.parse_args(), time.perf_counter
    if given.cpu_time:
        clock = time.thread_time
        torch.set_num_threads(1)
        use_threads(1)
    base = next((name for name in ("oneDNN bf16", "oneDNN") if name in given.kinds), given.kinds[0])
    others = [name for name in given.kinds if name not in ("torch", "oneDNN", base)]
    titles = "outputs × inputs", "rows", *given.kinds, *(f"{name} ÷ {base}" for name in others)
    print("| " + " | ".join(titles) + " |\n|---|" + "---:|" * (len(titles) - 1))
    for outputs, inputs in _SHAPES:
        weights = [torch.randn(outputs, inputs) for _ in range(given.megabytes * 1_000_000 // (outputs * inputs * 4))]
        sides = [kinds[name](weights) for name in given.kinds]
        for rows in given.rows:
            x = torch.randn(rows, inputs)
            best = dict(zip(given.kinds, _best([partial(side, x) for side in sides], given.passes, clock), strict=True))
            size = outputs * inputs * len(weights)
            work, unit = (2 * rows * size, "GFLOP/s") if rows >= _MANY else (4 * size, "GB/s")
            cells = [f"{work / seconds / 1e9:.1f} {unit}" for seconds in best.values()]
            cells += [f"{best[name] / best[base]:.2f}" for name in others]
            print(f"| {outputs} × {inputs} | {rows} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
