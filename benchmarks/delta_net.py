"""`python -m benchmarks.delta_net`: a gated delta net without its projections on a CPU, by transformers and by us.

Shapes are Qwen3.5's: 16 key heads of 128, and 16 value heads (0.8B, 2B) or 32 (4B, 9B). *step* is a token of each
sequence, which transformers computes as a batch; *prefill* is 512 tokens of one. They take turns; the shortest CPU
time of each on one thread is shown, with the bytes of states that are read and written. All get the same random
numbers, *repeated* in every round; there is no cache of content, so there are no hits to count.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from common.cpu.jit import use_threads
from common.hf.classes import declare_operators
from common.process import malloc
from llm_service.layers.cache_spec import Segment
from llm_service.layers.gdn.backend import GdnInput, GdnShape, GdnWeights
from llm_service.layers.gdn.choose import choose

declare_operators()

from transformers.models.qwen3_5 import modeling_qwen3_5 as reference  # noqa: E402

_SEQUENCES = (1, 4, 8, 16)
_PREFILL = 512
_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@torch.inference_mode()
def main() -> None:
    """Measures all shapes and prints a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.delta_net", description=__doc__)
    parser.add_argument(
        "--rounds", type=int, default=15, help="rounds; the shortest time is shown; at most three for prefills"
    )
    given = parser.parse_args()
    malloc.keep_large_blocks()
    use_threads(1)
    print("| value heads | type | | transformers | ours | ratio | states |\n|---:|---|---|---:|---:|---:|---:|")
    for heads in (16, 32):
        for name, dtype in _TYPES.items():
            for sequences, count in (*((each, 1) for each in _SEQUENCES), (1, _PREFILL)):
                ways = _ways(GdnShape(16, heads, 128, 128), dtype, sequences, count)
                theirs, ours = _best(ways, given.rounds if count == 1 else min(3, given.rounds))
                what = f"prefill {count}" if count > 1 else f"step {sequences}"
                moved = f"{2 * sequences * heads * 128 * 128 * 4 / 1e6:.0f} MB"
                row = f"{1e3 * theirs:.2f} ms | {1e3 * ours:.2f} ms | {ours / theirs:.2f} | {moved}"
                print(f"| {heads} | {name} | {what} | {row} |", flush=True)


def _best(ways: tuple[Callable[[], object], ...], rounds: int) -> list[float]:
    best = [float("inf")] * len(ways)
    for _ in range(rounds):
        for index, way in enumerate(ways):
            started = time.process_time()
            way()
            best[index] = min(best[index], time.process_time() - started)
    return best


def _ways(
    shape: GdnShape, dtype: torch.dtype, sequences: int, count: int
) -> tuple[Callable[[], object], Callable[[], object]]:
    tokens, heads = sequences * count, shape.value_heads

    def normal(*size: int) -> Tensor:
        return torch.randn(size).to(dtype)

    gain = torch.ones(shape.value_dim, dtype=dtype)
    weights = GdnWeights(normal(shape.channels, shape.width), normal(heads), normal(heads), gain, 1e-6)
    given = GdnInput(normal(tokens, shape.channels), normal(tokens, shape.values), *normal(2, tokens, heads))
    cache = shape.state(dtype).new_cache(sequences, torch.device("cpu"))
    for each in cache.tensors:
        each.zero_()
    segments = [Segment(n * count, (n + 1) * count, n, fresh=False) for n in range(sequences)]
    batch = choose(shape, dtype, torch.device("cpu")).batch(segments)
    return _theirs(shape, given, weights, sequences), lambda: batch.run(given, weights, cache)


def _theirs(shape: GdnShape, given: GdnInput, weights: GdnWeights, sequences: int) -> Callable[[], object]:
    """As Qwen3_5GatedDeltaNet does it, on a batch [sequences, tokens, …]."""
    heads, norm = shape.value_heads, reference.Qwen3_5RMSNormGated(shape.value_dim)
    norm.weight.data = weights.gain
    convolution = torch.zeros(sequences, shape.channels, shape.width - 1, dtype=given.qkv.dtype)
    recurrent = torch.zeros(sequences, heads, shape.key_dim, shape.value_dim)
    count = len(given.qkv) // sequences
    rule = reference.torch_chunk_gated_delta_rule if count > 1 else reference.torch_recurrent_gated_delta_rule

    def run() -> object:
        inputs = given.qkv.view(sequences, count, -1).transpose(1, 2)
        mixed = reference.causal_conv1d_update(inputs, convolution, weights.conv, activation="silu").transpose(1, 2)
        query, key, value = mixed.split([shape.keys, shape.keys, shape.values], dim=-1)
        g = -weights.a_log.float().exp() * torch.nn.functional.softplus(given.a.float() + weights.dt_bias)
        read, _ = rule(
            query.reshape(sequences, count, -1, shape.key_dim),
            key.reshape(sequences, count, -1, shape.key_dim),
            value.reshape(sequences, count, -1, shape.value_dim),
            g=g.view(sequences, count, heads),
            beta=given.b.sigmoid().view(sequences, count, heads),
            initial_state=recurrent,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        return norm(read.reshape(-1, shape.value_dim), given.z.reshape(-1, shape.value_dim))

    return run


if __name__ == "__main__":
    main()
