"""`python -m benchmarks.decode`: one decoding step by our decoder and by transformers, by the number of sequences.

The figure is the CPU time of one thread, the shortest of several steps, so it holds on a busy machine; `python -m
benchmarks` shows the effect of two threads and of other programs. Each sequence has its own context of random tokens,
the same on both sides. A step is *repeated* over the same context: nothing below the services caches tokens, so there
are no hits to count, and a step's weights, about a gigabyte, evict everything else from the processor's caches. With
`--adapter-rank`, steps in which each sequence has its own LoRA adapter, stored in float32 or bfloat16, alternate with
steps without. With `--drafts`, steps of one sequence verify from none up to that many drafts, in turns, which gives
the time of a copied token.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from msgspec import structs
from torch import Tensor

from benchmarks.adapters import write_adapters
from benchmarks.checkpoint import add_model_options, chosen_model, ordinary_tokens
from common.checkpoints.checkpoint import Checkpoint
from common.cpu.jit import use_threads
from common.hardware import default_dtype
from common.shm.arena import SharedBuffer
from llm_service.layers.cpu import selection
from llm_service.layers.linear.weight_dtype import W8A8
from llm_service.model_config.adapter_folder import Adaptable, Adapter, read
from llm_service.model_config.text import TextConfig
from llm_service.models.loader import load_decoder
from llm_service.models.quantization_config import Scheme
from llm_service.plan import Chunk, Draw, StateCopies, StepAdapters, StepPlan
from llm_service.worker.adapters import RankAdapters, shapes_of
from llm_service.worker.caches import Caches
from llm_service.worker.dummy_plans import appended
from llm_service.worker.model_runner import ModelRunner
from llm_service.worker.row_arena import RowArena
from testkit import reference

_BATCHES = (1, 4, 8, 16)
_CPU = torch.device("cpu")
_BLOCK = 16


def main() -> None:
    """Measures all and prints a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode", description=__doc__)
    add_model_options(parser)
    parser.add_argument("--context", type=int, default=230, help="tokens in the cache of each sequence")
    parser.add_argument("--steps", type=int, default=10, help="steps; the shortest time is shown")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="type of both; by default the services' default"
    )
    parser.add_argument(
        "--adapter-rank", type=int, default=0, help="measure only steps with and without adapters of this rank"
    )
    parser.add_argument(
        "--drafts", type=int, default=0, help="measure only steps of one sequence with up to this many drafts"
    )
    given = parser.parse_args()
    folder = chosen_model(given)
    dtype: torch.dtype = getattr(torch, given.dtype or default_dtype("cpu", Checkpoint(folder)))
    print(f"computed in {str(dtype).removeprefix('torch.')}\n")
    torch.set_num_threads(1)
    use_threads(1)
    words = torch.tensor(ordinary_tokens(Checkpoint(folder)), dtype=torch.int32)
    contexts = words[torch.randint(len(words), (max(_BATCHES), given.context))]
    if given.adapter_rank:
        _print_adapters(folder, contexts, dtype, given)
        return
    if given.drafts:
        _print_drafts(folder, contexts[0], dtype, given)
        return
    peer = [_least(step, given.steps) for step in _peer(folder, contexts, dtype)]
    print("| | " + " | ".join(f"{batch} sequences" for batch in _BATCHES) + " |\n" + "|---" * (1 + len(_BATCHES)) + "|")
    print("| transformers | " + " | ".join(f"{1e3 * seconds:.1f} ms" for seconds in peer) + " |")
    short = ["int8", W8A8] if selection.computes_bytes() else ["int8"]
    if Scheme.of(Checkpoint(folder).config) is not None:
        short = []  # the checkpoint's own weights are quantised already
    for attention, weights in (("torch", ""), ("numba", ""), *(("numba", each) for each in short)):
        ours = [_least(step, given.steps) for step in _ours(folder, contexts, attention, weights, dtype)]
        cells = [f"{1e3 * mine:.1f} ms ({mine / other:.2f})" for mine, other in zip(ours, peer, strict=True)]
        print(f"| {attention}{f', {weights} weights' if weights else ''} | " + " | ".join(cells) + " |")


def _print_adapters(folder: Path, contexts: Tensor, dtype: torch.dtype, given: argparse.Namespace) -> None:
    """A step's time with an adapter for each sequence, and its part of a step's without."""
    kinds, count = ("float32", "bfloat16"), len(contexts)
    adaptable = Adaptable(shapes_of(TextConfig.of(Checkpoint(folder).config)), given.adapter_rank)
    with tempfile.TemporaryDirectory() as root:
        made = (write_adapters(folder, Path(root), count, adaptable.max_rank, getattr(torch, kind)) for kind in kinds)
        adapters = [read(root, name, adaptable) for names in made for name in names]
    rows: dict[str, list[str]] = {name: [] for name in ("none", *kinds)}
    for runner, plan in _steps(folder, contexts, "numba", "", dtype, adapters, adaptable.max_rank):
        slots = [list(range(first, first + len(plan.chunks))) for first in range(0, len(adapters), count)]
        plans = [plan, *(structs.replace(plan, adapters=StepAdapters(slots=each)) for each in slots)]
        alone, *others = _least_in_turns([partial(runner.run, each) for each in plans], given.steps)
        rows["none"].append(f"{1e3 * alone:.1f} ms")
        for kind, seconds in zip(kinds, others, strict=True):
            rows[kind].append(f"{1e3 * seconds:.1f} ms ({seconds / alone:.3f})")
    print(f"| adapters of rank {adaptable.max_rank} | " + " | ".join(f"{batch} sequences" for batch in _BATCHES) + " |")
    print("|---" * (1 + len(_BATCHES)) + "|")
    for name, cells in rows.items():
        print(f"| {name} | " + " | ".join(cells) + " |")


def _print_drafts(folder: Path, context: Tensor, dtype: torch.dtype, given: argparse.Namespace) -> None:
    """A step's time by the tokens that it computes, as a part of one token's, and that for each, if all are right. The
    copy of states that drafts begin with is part of it."""
    table = list(range(-(-(len(context) + 1 + given.drafts) // _BLOCK)))
    runner = _runner(folder, len(table), "numba", "", dtype)
    slots = [0] if runner.caches.state_slots else []
    runner.run(_prompt(context, table, slots))
    plans = []
    for count in range(1, given.drafts + 2):
        ids, places = array("i", [5] * count), array("i", [*range(len(context), len(context) + count)] * 3)
        chunks, draws = [Chunk(len(context), count, 0, decodes=True)], [Draw(at=n) for n in range(count)]
        plan = StepPlan(ids.tobytes(), places.tobytes(), chunks, [], draws, slots=slots)
        if slots and count > 1:  # it goes on from a copy, as where drafts may be wrong
            plan = structs.replace(plan, slots=[1], states=StateCopies(before=[(0, 1)]))
        plans.append(plan)
    took = _least_in_turns([partial(runner.run, plan) for plan in plans], given.steps)
    print("| tokens of a step | ms | of one token's | each |\n|---:|---:|---:|---:|")
    for count, seconds in enumerate(took, 1):
        print(f"| {count} | {1e3 * seconds:.1f} | {seconds / took[0]:.2f} | {seconds / took[0] / count:.3f} |")


def _least_in_turns(steps: Sequence[Callable[[], object]], turns: int) -> list[float]:
    found = [[_least(step, 1) for step in steps] for _ in range(turns)]
    return [min(each) for each in zip(*found, strict=True)]


def _least(step: Callable[[], object], steps: int) -> float:
    step()
    best = float("inf")
    for _ in range(steps):
        started = time.thread_time()
        step()
        best = min(best, time.thread_time() - started)
    return best


def _ours(
    folder: Path, contexts: Tensor, attention: str, weights: str, dtype: torch.dtype
) -> Iterator[Callable[[], object]]:
    for runner, plan in _steps(folder, contexts, attention, weights, dtype):
        yield partial(runner.run, plan)


def _steps(
    folder: Path,
    contexts: Tensor,
    attention: str,
    weights: str,
    dtype: torch.dtype,
    adapters: Sequence[Adapter] = (),
    rank: int = 0,
) -> Iterator[tuple[ModelRunner, StepPlan]]:
    """Blocks of the sequences alternate, as they do when sequences have grown side by side; adapters are in slots of
    their numbers."""
    context = contexts.shape[1]
    each = -(-(context + 1) // _BLOCK)
    runner = _runner(folder, max(_BATCHES) * each, attention, weights, dtype, len(adapters), rank)
    if runner.adapters is not None:
        for number, adapter in enumerate(adapters):
            runner.adapters.load(number, adapter)
        filled = StepAdapters(filled=[(slot, slot) for slot in range(len(adapters))])
        runner.adapters.begin(StepPlan(b"", b"", [], [], [], adapters=filled))
    for batch in _BATCHES:
        tables = [list(range(n, batch * each, batch)) for n in range(batch)]
        slots = [[row] if runner.caches.state_slots else [] for row in range(batch)]
        for row, (ids, table) in enumerate(zip(contexts[:batch], tables, strict=True)):
            # Memory that nobody has written to is one page, which is read faster than others.
            runner.run(_prompt(ids, table, slots[row]))
        chunks = [Chunk(context, 1, row) for row in range(batch)]
        told = [appended(row, table) for row, table in enumerate(tables)]
        last, places = array("i", [5] * batch), array("i", [context] * 3 * batch)
        draws = [Draw(at=n) for n in range(batch)]
        plan = StepPlan(last.tobytes(), places.tobytes(), chunks, [], draws, appended=told)
        yield runner, structs.replace(plan, slots=list(chain(*slots)))


def _runner(
    folder: Path, blocks: int, attention: str, weights: str, dtype: torch.dtype, adapters: int = 0, rank: int = 0
) -> ModelRunner:
    """What runs steps of a checkpoint, over a cache of so many blocks, with slots for adapters up to a rank."""
    decoder = load_decoder(Checkpoint(folder), dtype, _CPU, weight_dtype=weights)
    given = decoder.mixers(), blocks, _BLOCK, decoder.kv_dtype, _CPU
    caches = Caches(*given, attention=attention, state_slots=max(_BATCHES))
    arena = RowArena(SharedBuffer.create("bench", 1 << 16).view, 1, decoder.config.hidden_size, decoder.dtype)
    slots = RankAdapters(decoder, adapters, rank) if adapters else None
    return ModelRunner(decoder, arena, caches, adapters=slots)


def _prompt(ids: Tensor, table: list[int], slots: list[int]) -> StepPlan:
    """`slots`: where its states are, of a model that has any."""
    count = len(ids)
    places = array("i", [*range(count)] * 3)
    plan = StepPlan(ids.numpy().tobytes(), places.tobytes(), [Chunk(0, count, 0)], [], [])
    return structs.replace(plan, slots=slots, appended=[appended(0, table)])


def _peer(folder: Path, contexts: Tensor, dtype: torch.dtype) -> Iterator[Callable[[], object]]:
    """Its cache grows by each step; steps are few."""
    model = reference.model(folder, dtype)
    for batch in _BATCHES:
        with torch.inference_mode():
            cache = getattr(model(input_ids=contexts[:batch].long(), use_cache=True), reference.CACHE)

        @torch.inference_mode()
        def step(batch: int = batch, cache: object = cache) -> list[int]:
            given = {"input_ids": torch.full((batch, 1), 5), reference.CACHE: cache}
            logits = model(**given, use_cache=True).logits
            tokens: list[int] = logits[:, -1].argmax(-1).tolist()
            return tokens

        yield step


if __name__ == "__main__":
    main()
