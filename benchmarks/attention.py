"""`python -m benchmarks.attention`: attention of a prefill chunk on a CPU, by torch's operator and by our kernel.

They take turns; the shortest time of each is shown. There are 16 query heads and 8 KV heads of 128, as in the other
benchmarks' checkpoint, in float32 or, with `--dtype bfloat16`, in bfloat16. Both get the same random numbers,
*repeated* in every round, since a real step's inputs are in the processor's cache too; there is no cache of content,
so there are no hits to count. With `--softcap` scores are capped; torch's operator does not support that, so its
products are used.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from common.cpu.jit import use_threads
from common.hardware import usable_cores
from common.process import malloc
from llm_service.layers.attention.scored import attend_by_scores
from llm_service.layers.cpu.numba_backend import in_pairs
from llm_service.layers.cpu.prefill_attention import PrefillAttention, PrefillMetadata
from llm_service.layers.cpu.selection import computes_bfloat16, wide_vectors

_SHAPES = ((16, 2048), (215, 215), (512, 512), (256, 1280), (512, 4096))
"""Tokens of a chunk, and all that it sees."""
_HEADS, _KV_HEADS, _DIM = 16, 8, 128
_OFF = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""By how much both may differ."""


@torch.inference_mode()
def main() -> None:
    """Measures all shapes and prints a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention", description=__doc__)
    parser.add_argument("--threads", type=int, default=usable_cores(), help="threads of both")
    parser.add_argument("--rounds", type=int, default=20, help="rounds; the shortest time is shown")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="type of keys and values")
    parser.add_argument("--softcap", type=float, help="soft cap of scores; by default none")
    given = parser.parse_args()
    dtype: torch.dtype = getattr(torch, given.dtype)
    if not wide_vectors():
        parser.error("this processor lacks AVX-512, which our kernel needs")
    if dtype == torch.bfloat16 and not computes_bfloat16():
        parser.error("this processor lacks AVX512-BF16, which our kernel for bfloat16 needs")
    malloc.keep_large_blocks()
    use_threads(given.threads)
    print("| tokens | of | torch | ours | ratio | GFLOP/s |\n|---:|---:|---:|---:|---:|---:|")
    for count, known in _SHAPES:
        theirs, ours = _ways(count, known, dtype, given.softcap)
        torch.testing.assert_close(ours(), theirs().float(), rtol=_OFF[dtype], atol=_OFF[dtype])
        best = [float("inf"), float("inf")]
        for _ in range(given.rounds):
            best = [min(least, _seconds(way)) for least, way in zip(best, (theirs, ours), strict=True)]
        seen = count * (known - count) + count * (count + 1) / 2
        rate = 4 * _HEADS * _DIM * seen / best[1] / 1e9
        ratio = best[1] / best[0]
        print(f"| {count} | {known} | {1e3 * best[0]:.2f} ms | {1e3 * best[1]:.2f} ms | {ratio:.2f} | {rate:.0f} |")


def _ways(
    count: int, known: int, dtype: torch.dtype, softcap: float | None
) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    query, keys, values = torch.randn(count, _HEADS, _DIM), *torch.randn(2, known, _KV_HEADS, _DIM, dtype=dtype)
    mask = torch.ones(count, known, dtype=torch.bool).tril(known - count) if known > count else None
    kind = in_pairs() if dtype == torch.bfloat16 else PrefillAttention
    ours = kind(PrefillMetadata.of([count], [known]), np.arange(known), _KV_HEADS, _DIM, softcap=softcap)

    def theirs() -> Tensor:
        if softcap is not None:
            seen = torch.ones(count, known, dtype=torch.bool).tril(known - count)
            return attend_by_scores(query, keys, values, seen, scale=_DIM**-0.5, softcap=softcap)
        q, k, v = (each.transpose(0, 1).unsqueeze(0) for each in (query.to(dtype), keys, values))
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
        return out.squeeze(0).transpose(0, 1)

    return theirs, lambda: ours.attend(query, keys, values)


def _seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
