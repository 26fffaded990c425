"""`python -m benchmarks.linear`: a linear layer by torch, by oneDNN, and in panels, as a decoder's are on a CPU.

*oneDNN bf16* computes in bfloat16, where the processor has products for it; all others in float32. *float32*,
*bfloat16*, *int8*, *fp8* (blocks of 128) and *awq* (4 bits, groups of 128 with zeros) are what panels are stored in:
the first two need AVX-512, the others AVX2. *pairs* are panels of bfloat16 that rows of bfloat16 are multiplied with,
and the same of 8 and 4 bits, where the processor has AVX512-BF16.

Prints GB/s of weights read, as if all were float32, the best of many passes over more weights than the cache holds; for
many rows, where arithmetic decides, GFLOP/s. The same rows are *repeated* in every pass and go through every weight;
nothing remembers them, so there are no hits to count.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.nn import functional

from benchmarks.quantized import awq, fp8
from common.cpu.jit import use_threads
from common.linear import BlockedWeight, LaidOut, Linear
from llm_service.layers.cpu.selection import computes_bfloat16, fused_vectors
from llm_service.layers.linear import PackedLinear, quantized
from llm_service.layers.quantized_weight import QuantizedWeight
from llm_service.layers.weight_dtype import EXACT, Rounded

_SHAPES = ((6144, 1024), (1024, 3072))
_ROWS = (1, 2, 4, 8, 16, 32, 64, 216, 512)
_MANY = 64
_BYTES = 200_000_000


def _best(works: Sequence[Callable[[], object]], passes: int, clock: Callable[[], float]) -> list[float]:
    """Of each, the least of some passes that they take in turns."""
    best = [float("inf")] * len(works)
    for _ in range(passes):
        for index, work in enumerate(works):
            started = clock()
            work()
            best[index] = min(best[index], clock() - started)
    return best


def _plain(x: torch.Tensor, weights: list[torch.Tensor]) -> None:
    for weight in weights:
        functional.linear(x, weight)


def _through(x: torch.Tensor, layers: list[Linear]) -> None:
    for layer in layers:
        layer(x)


def _blocked(weight: torch.Tensor) -> LaidOut:
    """In bfloat16, as oneDNN wants it."""
    blocked = BlockedWeight.of(weight.bfloat16())
    assert blocked is not None
    return blocked


def _products(x: torch.Tensor, weights: list[LaidOut]) -> None:
    for weight in weights:
        weight.product(x)


def _in_bfloat16(x: torch.Tensor, weights: list[LaidOut]) -> None:
    _products(x.bfloat16(), weights)


def _finalized(weight: torch.Tensor, *, panels: bool = True, rounded: Rounded = EXACT) -> Linear:
    outputs, inputs = weight.shape
    layer = PackedLinear(slice(0, inputs), {"all": slice(0, outputs)}, bias=False, dtype=weight.dtype)
    layer.weight.data.copy_(weight)
    if panels:
        layer.finalize(rounded=rounded)
    else:
        Linear.finalize(layer)
    return layer


@torch.inference_mode()
def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.linear", description=__doc__)
    parser.add_argument("--cpu-time", action="store_true", help="CPU time of one thread: for a machine that is busy")
    parser.add_argument("--rows", type=int, nargs="+", default=_ROWS, help="that are multiplied at once")
    given, clock = parser.parse_args(), time.perf_counter
    if given.cpu_time:
        clock = time.thread_time
        torch.set_num_threads(1)
        use_threads(1)
    bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    names = (
        *("torch", "oneDNN"),
        *(("oneDNN bf16",) if bf16 else ()),
        *(("float32", "bfloat16") if fused_vectors() else ()),
        *("int8", "fp8", "awq"),
        *(("pairs", "int8 pairs", "fp8 pairs", "awq pairs") if computes_bfloat16() else ()),
    )
    ratios = [f"{name} ÷ oneDNN" for name in names[2:]]
    print(
        "| outputs × inputs | rows | "
        + " | ".join((*names, *ratios))
        + " |\n|---|"
        + "---:|" * (len(names) + 1 + len(ratios))
    )
    for outputs, inputs in _SHAPES:
        weights = [torch.randn(outputs, inputs) for _ in range(_BYTES // (outputs * inputs * 4))]
        rounded = [weight.bfloat16().float() for weight in weights]
        sides: list[Callable[[torch.Tensor], None]] = [
            partial(_through, layers=[_finalized(weight, panels=False) for weight in weights]),
        ]
        if bf16:
            sides.append(partial(_in_bfloat16, weights=[_blocked(weight) for weight in weights]))
        if fused_vectors():
            kinds = (weights, rounded)
            sides += [partial(_through, layers=[_finalized(each) for each in kind]) for kind in kinds]
        sides.append(partial(_through, layers=[_finalized(weight, rounded=Rounded(int8=True)) for weight in weights]))
        forms: tuple[Callable[[torch.Tensor], QuantizedWeight], ...] = (fp8, awq)
        sides += [partial(_products, weights=[quantized([form(weight)]) for weight in weights]) for form in forms]
        if computes_bfloat16():
            pairs = Rounded(bfloat16=True)
            sides.append(partial(_through, layers=[_finalized(weight, rounded=pairs) for weight in weights]))
            for form in (QuantizedWeight.rounded, *forms):
                short = [quantized([form(weight)], rounded=pairs) for weight in weights]
                sides.append(partial(_products, weights=short))
        for rows in given.rows:
            x = torch.randn(rows, inputs)
            passes = 10 if rows < _MANY else 4
            works = [partial(_plain, x, weights), *(partial(side, x) for side in sides)]
            best = _best(works, passes, clock)
            size = outputs * inputs * len(weights)
            work, unit = (2 * rows * size, "GFLOP/s") if rows >= _MANY else (4 * size, "GB/s")
            cells = [f"{work / seconds / 1e9:.1f} {unit}" for seconds in best]
            cells += [f"{seconds / best[1]:.2f}" for seconds in best[2:]]
            print(f"| {outputs} × {inputs} | {rows} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
