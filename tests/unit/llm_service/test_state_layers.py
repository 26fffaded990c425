"""A layer that keeps a state of each sequence, in the real scheduler, plan and model runner: tokens are those of the
whole sequence computed at once, whatever it is cut into and whoever had its slot before."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from common.shm.arena import SharedBuffer
from llm_service.engine.batch import Step, uniform
from llm_service.engine.block_manager import BlockManager, BlockTable
from llm_service.engine.limits import SchedulerLimits
from llm_service.engine.messages import Add
from llm_service.engine.scheduler import Scheduler
from llm_service.layers.cache_spec import (
    PagedKV,
    Segment,
    SequenceState,
    StateCache,
    block_bytes,
    slot_bytes,
)
from llm_service.layers.tensor_parallel import ALONE
from llm_service.models.decoder import Decoder
from llm_service.models.loader import load_decoder
from llm_service.plan import Chunk, Draw, StepPlan
from llm_service.request import SamplingParams
from llm_service.settings import EngineSettings
from llm_service.worker import load
from llm_service.worker.dummy_plans import appended
from llm_service.worker.memory import Gauge
from llm_service.worker.model_runner import Launched, ModelRunner
from tests.unit.llm_service.test_load import SETTINGS

BLOCK = 4
CHUNK = 4
FREE = 8 << 20
SEED = 5
PROMPTS = [array("i", range(7 + length, 7 + 2 * length)) for length in (21, 3, 9, 14)]


class RunningSum(nn.Module):
    """Gives each token the direction of the sum of all inputs so far, which is its state."""

    stored_as = "running_sum"

    def __init__(self, width: int, heads: int = 1) -> None:
        super().__init__()
        self.width, self.heads = width, heads

    def cache_spec(self) -> SequenceState:
        return SequenceState((((self.heads, self.width // self.heads), torch.float64),), chunk=CHUNK)

    def state_backend(self) -> RunningSum:
        return self

    def batch(self, segments: Sequence[Segment]) -> Sequence[Segment]:
        return segments

    def project(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        return (x,)

    def mix(self, inputs: tuple[Tensor, ...], cache: StateCache, batch: Sequence[Segment]) -> Tensor:
        (x,) = inputs
        out = torch.empty_like(x)
        for segment in batch:
            (total,) = cache.read(segment)
            sums = total.flatten() + x[segment.begin : segment.end].double().cumsum(0)
            cache.write(segment, [sums[-1].unflatten(0, (self.heads, -1))])
            out[segment.begin : segment.end] = self.width**0.5 * nn.functional.normalize(sums)
        return out

    def join(self, mixed: Tensor) -> Tensor:
        return mixed


@pytest.fixture
def runner(checkpoints: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    """A model whose second and last layers mix with toys of two kinds, loaded as a service loads it; whatever is in
    their slots is not a number."""

    def with_state(*given: object, **options: object) -> Decoder:
        decoder: Decoder = load_decoder(*given, **options)  # type: ignore[arg-type]
        for layer, heads in ((decoder.layers[1], 1), (decoder.layers[3], 4)):
            layer.mixer = RunningSum(decoder.config.hidden_size, heads)
            for half in ("before", "after"):  # what is laid out for self-attention
                vars(layer).pop(half, None)
        return decoder

    monkeypatch.setattr(load, "load_decoder", with_state)
    monkeypatch.setattr(Gauge, "free", lambda _: FREE)
    made = load.load_rank(settings(checkpoints("qwen3_vl")), torch.device("cpu"), ALONE, memory().fd).runner
    fill_states(made, torch.nan)
    return made


def fill_states(runner: ModelRunner, value: float) -> None:
    for cache in runner.caches.layers:
        if isinstance(cache, StateCache):
            cache.tensors[0].fill_(value)


def memory() -> SharedBuffer:
    return SharedBuffer.create("test-rows", 1 << 20)


def settings(folder: Path) -> EngineSettings:
    sizes = {"block_size": BLOCK, "max_running": 8, "max_step_tokens": 64, "row_arena_bytes": 1 << 20, "row_levels": 3}
    given = {"model": str(folder), "device": "cpu", "dtype": "float32", "attention": "torch", "graphs": "off"}
    rest = {"kv_memory_share": 0.5, "threads": 1, "prefix_cache": True, "snapshot_share": 0.2}
    return msgspec.structs.replace(SETTINGS, **given, **sizes, **rest)


def whole(runner: ModelRunner, prompt: array[int], sampling: SamplingParams, choice: int) -> list[int]:
    """What a choice says when each of its tokens is computed from all before it, in one step."""
    tokens = array("i", prompt)
    for count in range(sampling.max_tokens):
        end, table = len(tokens), appended(0, range(-(-len(tokens) // BLOCK)))
        shared = uniform(SEED, choice, count) if sampling.temperature else 0.0
        draw = Draw(at=end - 1, temperature=sampling.temperature, uniform=shared)
        positions = array("i", [*range(end)] * 3).tobytes()
        plan = StepPlan(tokens.tobytes(), positions, [Chunk(0, end, 0)], [], [draw], slots=[0], appended=[table])
        fill_states(runner, 0.0)
        tokens.append(runner.run(plan).tokens[0])
    return tokens[len(prompt) :].tolist()


class Engine:
    """Scheduler and runner; `depth` 2 plans a step while the one before it is computed."""

    def __init__(self, runner: ModelRunner, *, blocks: int, running: int, step_tokens: int, depth: int) -> None:
        states = runner.caches
        slots = states.state_slots + states.snapshot_slots
        self.manager = BlockManager(blocks, BLOCK, state_slots=slots, state_chunk=states.state_chunk)
        self.scheduler = Scheduler(self.manager, SchedulerLimits(running, step_tokens, blocks * BLOCK), frozenset(), 1)
        self._runner = runner
        self.cached: list[int] = []
        self._depth = depth

    def serve(self, prompts: Sequence[array[int]], sampling: SamplingParams) -> list[list[list[int]]]:
        """The tokens of each choice of each prompt, all served together."""
        said: list[list[list[int]]] = [[[] for _ in range(sampling.n)] for _ in prompts]
        for id, prompt in enumerate(prompts):
            positions = array("i", [*range(len(prompt))] * 3).tobytes()
            fields: dict[str, Any] = dict.fromkeys(Add.__struct_fields__, 0)
            fields |= {"items": [], "salt": "", "deadline": None, "resume": [], "pooling": None, "identities": b""}
            fields |= {"id": id, "token_ids": prompt.tobytes(), "positions": positions, "sampling": sampling}
            self.scheduler.add(Add(**fields))
        under_way: deque[tuple[Step, Launched]] = deque()
        while True:
            step, started = self.scheduler.schedule()
            self.cached += [event.cached for event in started]
            if step is not None:
                under_way.append((step, self._runner.launch(step.plan)))
                if len(under_way) < self._depth:
                    continue
            if not under_way:
                break
            step, launched = under_way.popleft()
            for token in self.scheduler.finish(step, launched.result()).tokens:
                said[token.id][token.choice].append(token.token)
        self.scheduler.check_integrity()
        assert self.manager.used == 0
        return said


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    ("sizes", "sampling", "preempts"),
    [
        ({"blocks": 64, "running": 8, "step_tokens": 64}, SamplingParams(max_tokens=6, temperature=0.0), False),
        ({"blocks": 64, "running": 4, "step_tokens": 5}, SamplingParams(max_tokens=6, temperature=0.0), False),
        ({"blocks": 64, "running": 2, "step_tokens": 7}, SamplingParams(max_tokens=6, temperature=0.0), False),
        ({"blocks": 14, "running": 4, "step_tokens": 16}, SamplingParams(max_tokens=14, temperature=0.0), True),
        (
            {"blocks": 64, "running": 3, "step_tokens": 9},
            SamplingParams(n=3, max_tokens=4, temperature=1.0, seed=SEED),
            False,
        ),
    ],
    ids=["at once", "in chunks", "two slots", "few blocks", "choices"],
)
def test_tokens_are_those_of_the_whole(
    runner: ModelRunner, sizes: dict[str, int], sampling: SamplingParams, preempts: bool, depth: int
) -> None:
    engine = Engine(runner, **sizes, depth=depth)
    said = engine.serve(PROMPTS, sampling)
    assert said == [[whole(runner, prompt, sampling, n) for n in range(sampling.n)] for prompt in PROMPTS]
    assert (engine.scheduler.counters.preemptions > 0) == preempts


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("end", range(2, 22))
def test_a_prompt_that_is_known_up_to_any_place_goes_on_from_there(runner: ModelRunner, end: int, depth: int) -> None:
    engine = Engine(runner, blocks=64, running=4, step_tokens=64, depth=depth)
    sampling = SamplingParams(max_tokens=6, temperature=0.0)
    known = PROMPTS[0][:end]
    engine.serve([known, known], sampling)
    fill_states_that_nobody_has(engine, runner)
    said = engine.serve([PROMPTS[0], *PROMPTS], sampling)
    assert said == [[whole(runner, prompt, sampling, 0)] for prompt in (PROMPTS[0], *PROMPTS)]
    assert engine.cached[2] >= (end - 1) // CHUNK * CHUNK


def fill_states_that_nobody_has(engine: Engine, runner: ModelRunner) -> None:
    """What is no number comes into every token that reads it."""
    kept = [each.slot for each in engine.manager._states._snapshots.values()]
    for cache in runner.caches.layers:
        if isinstance(cache, StateCache):
            gone = [slot for slot in range(len(cache.tensors[0])) if slot not in kept]
            cache.tensors[0][gone] = torch.nan


def test_slots_and_blocks_share_one_budget(runner: ModelRunner) -> None:
    (kind,) = runner.caches.paged.values()
    slot = 2 * 8 * runner._decoder.config.hidden_size
    assert kind.shape.layers == runner._decoder.config.layers - 2
    assert runner.caches.state_slots == 8
    left = FREE // 2 - 8 * slot
    assert runner.caches.snapshot_slots == min(16 * 8, int(0.2 * left) // slot)
    left -= runner.caches.snapshot_slots * slot
    assert runner.caches.blocks == left // (kind.shape.block_bytes(torch.float32))


def test_a_model_without_states_has_no_slots(checkpoints: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gauge, "free", lambda _: FREE)
    plain = load.load_rank(settings(checkpoints("qwen3_vl")), torch.device("cpu"), ALONE, memory().fd).runner
    assert plain.caches.state_slots == 0
    assert not any(isinstance(cache, StateCache) for cache in plain.caches.layers)


def test_a_slot_goes_back_with_the_blocks_and_has_one_owner() -> None:
    manager = BlockManager(8, BLOCK, state_slots=2)
    first, second = BlockTable(), BlockTable()
    for table in (first, second):
        manager.adopt(table, [])
    assert {first.slot, second.slot} == {0, 1}
    manager.check_integrity([first, second])
    manager.free(first)
    assert first.slot == -1
    manager.adopt(third := BlockTable(), [])
    manager.check_integrity([second, third])
    second.slot = third.slot
    with pytest.raises(AssertionError, match="two owners"):
        manager.check_integrity([second, third])


def test_a_block_counts_in_layers_of_every_shape() -> None:
    alike, other, state = (
        PagedKV(4, 2, 64),
        PagedKV(4, 2, 128),
        SequenceState((((3, 2), torch.float32), ((4,), torch.half))),
    )
    assert block_bytes([alike, state, alike], BLOCK, torch.float32) == 4 * 2 * 2 * BLOCK * 2 * 64
    assert block_bytes([alike, state, other], BLOCK, torch.float32) == 4 * 2 * BLOCK * 2 * (64 + 128)
    assert slot_bytes([alike, state, state]) == 2 * (24 + 8)
    with pytest.raises(ValueError, match="no layer has keys"):
        block_bytes([state], BLOCK, torch.float32)
