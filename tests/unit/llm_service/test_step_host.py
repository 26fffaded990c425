"""What a step asks of the device beside its graph: how many operators and copies, and that long contexts add none."""

from __future__ import annotations

import gc
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from benchmarks.llm_device import step
from benchmarks.step_host import COLUMNS, NoGraph, measure, runner_of
from llm_service.layers.attention.backend import PagedChunk
from llm_service.plan import Appended, Chunk, Draw, StepPlan
from llm_service.request import SamplingParams
from llm_service.worker import gpu_sampler, input_batch, sampler
from llm_service.worker.device_tables import DeviceTables
from llm_service.worker.executor import message_of
from llm_service.worker.model_runner import ModelRunner

RUNNING, BLOCK = 4, 16


class Watch(TorchDispatchMode):
    """The operators that would start something on a device: all but views, and memory without contents."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, given = func.__name__.partition(".")[0], kwargs or {}
        made = func(*args, **given)
        first = made[0] if isinstance(made, (list, tuple)) else made
        changes = name.endswith("_") or "out" in given
        view = not changes and args and isinstance(args[0], torch.Tensor) and _same_memory(first, args[0])
        if not view and not name.startswith(("empty", "new_empty")):
            self.seen.append(name)
        return made


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Bytes of each copy to the device."""
    found: list[int] = []

    def counted(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
        found.append(sum(each.nbytes for each in arrays))
        return to_device(arrays, device)

    to_device = input_batch.to_device
    for module in (input_batch, gpu_sampler):
        monkeypatch.setattr(module, "to_device", counted)
    kernel = gpu_sampler.draw_kernel
    yield found
    gpu_sampler.draw_kernel = kernel


def launched(runner: ModelRunner, plan: StepPlan) -> list[str]:
    with Watch() as watch:
        runner.launch(plan)
    return watch.seen


def decodes(runner: ModelRunner, context: int) -> tuple[StepPlan, StepPlan]:
    """Two steps of sequences whose tables are there: the second one follows the first, and has its tokens."""
    first = step([(context, 1)] * RUNNING, BLOCK)
    runner.launch(first)
    first = msgspec.structs.replace(first, appended=[])
    chunks = [msgspec.structs.replace(chunk, context=context + 1) for chunk in first.chunks]
    return first, msgspec.structs.replace(first, chunks=chunks, carried=[(n, n) for n in range(RUNNING)])


def test_a_step_of_decodes_is_few_operators_and_one_copy_however_long_the_contexts_are(sizes: list[int]) -> None:
    runner, found = runner_of(RUNNING, 4000, NoGraph()), []
    for context in (40, 3600):
        first, following = decodes(runner, context)
        launched(runner, first)
        sizes.clear()
        found.append(launched(runner, following))
        assert len(sizes) == 1, "a copy for all that there is to say"
        assert sizes[0] < 1000
    assert runner.graphs is not None
    assert runner.graphs.replays == 6
    before = ["copy_", "embedding", "copy_", "copy_", "index_select"]
    assert found[0] == found[1]
    assert found[0][: len(before)] == before, "numbers, tokens, and what the graph reads: embeddings, numbers, tables"
    assert len(found[0]) <= len(before) + 4, "the words' product, and the likeliest"


def test_masks_are_waited_for_when_all_but_the_draws_has_been_launched(sizes: list[int]) -> None:
    """As they are made of tokens of the step before, which is computed meanwhile."""
    runner = runner_of(RUNNING, 4000, NoGraph())
    first, following = decodes(runner, 40)
    following = msgspec.structs.replace(following, draws=[Draw(at=0, mask_follows=True), *following.draws[1:]])
    plain = launched(runner, first)
    replays, seen = runner.graphs.replays if runner.graphs is not None else 0, list[str]()

    def masks() -> list[bytes]:
        assert runner.graphs is not None
        assert runner.graphs.replays == replays + 1, "the model's part is launched"
        seen.extend(watch.seen)
        sizes.clear()
        return [array("I", [1 << 5] + [0] * 4747).tobytes()]

    with Watch() as watch:
        drawn = runner.launch(following, masks)
    assert seen == plain[: len(seen)]
    assert len(seen) >= len(plain) - 2, "all but the likeliest, and its copy"
    assert len(sizes) == 1, "the masks, with all else that draws say"
    assert drawn.result().tokens[0] == 5
    assert len(message_of(following)) == len(message_of(msgspec.structs.replace(following, draws=first.draws)))


def test_blocks_that_are_appended_are_all_that_is_told_of_tables(sizes: list[int]) -> None:
    runner = runner_of(RUNNING, 4000, NoGraph())
    first, following = decodes(runner, 3600)
    without = launched(runner, following)
    sizes.clear()
    more = msgspec.structs.replace(following, appended=[Appended(2, 226, array("i", [9]).tobytes())])
    told = launched(runner, more)
    assert sorted(told) == sorted([*without, "index_copy_"])
    assert len(message_of(more)) - len(message_of(following)) < 20
    assert len(message_of(first)) < 500
    assert runner._inputs.tables._there[2, 226] == 9


def test_places_of_log_probabilities_go_over_as_all_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor made of a list on a GPU is copied from ordinary memory, and waits for all that was begun before."""
    moved: list[list[int]] = []

    def counted(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
        moved.extend(each.tolist() for each in arrays)
        return to_device(arrays, device)

    to_device = sampler.to_device
    monkeypatch.setattr(sampler, "to_device", counted)
    draws = [Draw(at=0), Draw(at=1, logprobs=2)]
    found = sampler.Drawn(torch.tensor([3, 5]), torch.randn(2, 9), draws).result().logprobs
    assert moved == [[1]]
    assert found[0] is None
    assert found[1] is not None


@pytest.mark.usefixtures("sizes")
def test_the_benchmark_times_steps_in_which_all_decode() -> None:
    try:
        times, size, hits = measure(3, 40, 4, SamplingParams(max_tokens=1, temperature=0.7, top_k=5, ignore_eos=True))
    finally:
        gc.unfreeze()
    assert len(times) == len(COLUMNS)
    assert min(times) > 0
    assert size > 0
    assert not any(hits.values())


def test_other_ranks_are_not_told_how_tokens_are_chosen() -> None:
    plan = step([(20, 1)])
    draw = msgspec.structs.replace(plan.draws[0], temperature=1.0, output=bytes(4000), allowed_mask=bytes(20_000))
    assert message_of(msgspec.structs.replace(plan, draws=[draw])) == message_of(plan)


def test_tables_on_the_device_are_those_that_plans_have_told_of() -> None:
    """Of sequences that grow, end, and leave their rows to others, as the tables themselves are made larger; and though
    some steps do not come as far as the device."""
    tables, numbers = DeviceTables(4, torch.device("cpu")), np.random.default_rng(0)
    known: dict[int, list[int]] = {}
    for _ in range(60):
        appended = []
        for row in numbers.choice(9, 3, replace=False).tolist():
            before = known.get(row, []) if numbers.random() < 0.8 else []
            blocks = numbers.integers(0, 1000, numbers.integers(1, 9)).tolist()
            known[row] = [*before, *blocks]
            appended.append(Appended(row, len(before), array("i", blocks).tobytes()))
        moved = [torch.from_numpy(each) for each in tables.append(appended)]
        if numbers.random() < 0.2:
            continue
        tables.update(moved)
        rows = torch.tensor(list(known))
        longest = max(map(len, known.values()))
        there = tables.gather(rows, 4 * longest)
        for chunk, row, (key, blocks) in zip(
            tables.chunks([Chunk(4 * len(blocks) - 1, 1, key) for key, blocks in known.items()]),
            there.tolist(),
            known.items(),
            strict=True,
        ):
            assert isinstance(chunk, PagedChunk)
            assert list(chunk.blocks) == blocks == row[: len(blocks)], key
