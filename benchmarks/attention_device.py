"""`python -m benchmarks.attention_device`: attention of one layer over a paged cache on a GPU, by each back end.

32 query heads and 8 KV heads of 128, as in Qwen3-VL-8B, or with `--latents` 64 query heads over latents of 512 numbers
and rotated keys of 64, as in Kimi K2.5. *Of a copy* is the rate at which decoding reads keys and values, relative to a
copy on this device. Prefills are compared with the data sheet's arithmetic. A graph of several layers over one batch
is timed, so launches do not count; the batch is *repeated*, over a cache of random numbers. Results are not cached, so
there are no hits to count; the back ends are each other's peers.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from benchmarks.device import Machine, add_options, head, line, machine, ms, timed
from benchmarks.llm_device import Case, batch, cases
from common.checkpoints.checkpoint import CheckpointError
from llm_service.layers.attention.backend import AttentionBackend, AttentionBatch, CacheShape
from llm_service.layers.attention.choose import choose
from llm_service.layers.attention.triton_backend import TritonBackend

_LAYERS = 8
_BACKENDS = ("flash", "triton")
_VERIFIED = 5
"""A token and its drafts."""


def backends(shape: CacheShape, here: Machine, stages: Sequence[int]) -> Iterator[tuple[str, AttentionBackend]]:
    """Those that can be here, by name; our kernel of decodes once more for each number of stages, and with the tiles of
    few rows in which graphs have drafts verified."""
    for name in _BACKENDS:
        try:
            backend = choose(name, shape, here.dtype, here.device)
        except CheckpointError as error:
            print(f"left out: {error}")
            continue
        yield name, backend
        if isinstance(backend, TritonBackend):
            usual = backend.compiled
            for count in stages:
                if count != usual.decode_stages:
                    backend.compiled = replace(usual, decode_stages=count)
                    yield f"{name}, {count} stages", backend
            backend.compiled = usual
            backend.tiling = replace(backend.tiling, tile=_VERIFIED, singles=False)
            yield f"{name}, tiles of {_VERIFIED}", backend


@torch.inference_mode()
def rows(here: Machine, wanted: Sequence[Case], shape: CacheShape, stages: Sequence[int] = ()) -> Iterator[str]:
    """The table's rows; each case fits into the shape's blocks."""
    cache = shape.new_cache(here.dtype, here.device)[0].normal_()
    layers = 1 if here.tiny else _LAYERS
    assert here.capture is not None
    for name, backend in backends(shape, here, stages):
        for case in wanted:
            heads = [part.normal_() for part in shape.zeros(case.tokens, here.dtype, here.device)]
            replay = here.capture()(
                partial(_attend, layers, backend.batch(batch(case.chunks, shape.block_size)), heads, cache)
            )
            seconds = timed({"replay": replay}, here.runs, here.device)["replay"][0] / layers
            kept = shape.tensors * shape.kv_heads * shape.head_dim * here.dtype.itemsize
            read = kept * sum(map(sum, case.chunks))
            seen = sum(context * count + count * (count + 1) / 2 for context, count in case.chunks)
            of_copy = read / seconds / here.here.bandwidth
            of_peak = 2 * shape.heads * (shape.head_dim + shape.value_dim) * seen / seconds / here.peaks.operations
            here.keep(
                table="attention_device",
                backend=name,
                block_size=shape.block_size,
                step=case.name,
                sequences=len(case.chunks),
                context=case.context,
                tokens=case.tokens,
                seconds=seconds,
                of_copy=of_copy,
                of_peak=of_peak,
            )
            told = [name, shape.block_size, case.name, len(case.chunks), case.context, case.tokens, ms(seconds)]
            yield line([*told, f"{of_copy:.0%}", f"{of_peak:.0%}"])


def _attend(layers: int, batch: AttentionBatch, heads: Sequence[torch.Tensor], cache: torch.Tensor) -> None:
    query, key, value = heads
    for _ in range(layers):
        batch.attend(query, key, value, cache)


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention_device", description=__doc__)
    add_options(parser, 10)
    parser.add_argument(
        "--sequences", type=int, nargs="+", default=(1, 8, 24, 64), help="numbers of decoding sequences"
    )
    parser.add_argument("--context", type=int, nargs="+", default=(1024, 8192, 32_768), help="tokens of each sequence")
    parser.add_argument("--tokens", type=int, nargs="+", default=(512, 2048, 8192), help="tokens of a prefill")
    parser.add_argument("--block-size", type=int, nargs="+", default=(16, 64, 256), help="tokens of a block")
    parser.add_argument(
        "--stages",
        type=int,
        nargs="*",
        default=(3, 5),
        help="pipeline stages of our decode kernel, at the first block size",
    )
    parser.add_argument("--latents", action="store_true", help="heads that share latents")
    given = parser.parse_args()
    here = machine(parser, given)
    asked = ((1, 3), (20,), (16,)) if given.tiny else (given.sequences, given.context, given.tokens)
    sizes, counts = ((16,), (4, 2, 16)) if given.tiny else (given.block_size, (32, 8, 128))
    drafted = [Case("verify", ((context, _VERIFIED),) * many) for context in asked[1] for many in asked[0]]
    wanted = [*cases(*asked), *drafted]
    names = ["back end", "block", "step", "sequences", "context", "tokens", "a layer", "of a copy", "of peak"]
    print("\n" + head(names))
    for size in sizes:
        blocks = max(case.blocks(size) for case in wanted)
        shape = CacheShape(1, blocks, size, *counts)
        if given.latents:
            heads, width, rank = (8, 24, 16) if given.tiny else (64, 576, 512)
            shape = CacheShape(1, blocks, size, heads, 1, width, values_in_keys=rank)
        for row in rows(here, wanted, shape, given.stages if size == sizes[0] else ()):
            print(row, flush=True)


if __name__ == "__main__":
    main()
