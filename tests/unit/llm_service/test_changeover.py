"""From torch's kernels to ours: all ranks at the same step, with the same tokens, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch.nn import functional

from common.cpu import compiling
from common.cpu.compiling import Compilation, Readiness
from common.cpu.jit import find
from llm_service.layers.cpu import panels, selection
from llm_service.layers.cpu.numba_backend import NumbaBackend
from llm_service.layers.cpu.panels import PanelWeight
from llm_service.layers.tensor_parallel import ALONE, TensorGroup
from llm_service.plan import Masks, StepPlan, no_masks
from llm_service.request import SamplingParams
from llm_service.worker import changeover, load
from llm_service.worker.changeover import Changeover
from llm_service.worker.executor import GroupExecutor, LoneExecutor, follow
from llm_service.worker.messages import ChangeOver, RankMessage
from testkit.checkpoints import Family
from testkit.local_engine import LocalEngine, Outcome, make_prompt
from tests import pictures, row_cases
from tests.full_disk import no_room_for_files
from tests.waiting import until

FAILED, WAITING, THERE = Readiness.FAILED, Readiness.WAITING, Readiness.THERE
NOTHING = StepPlan(b"", b"", [], [], [])
WIDE = selection.wide_vectors()
"""Panels are right on any processor; packed chunks on those with wide vectors alone."""
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture(autouse=True)
def ours_again() -> Iterator[None]:
    yield
    selection.select(numba=True)


class Rank:
    """One rank, as far as executors know it: `steps` says for each whether our kernels computed."""

    arena = None

    def __init__(self, readiness: Readiness, now: Callable[[], float] = lambda: 5.0) -> None:
        self.compiling = SimpleNamespace(readiness=readiness)
        self.changeover = Changeover(self.compiling, now)
        self.steps: list[bool] = []

    def launch(self, _: StepPlan, masks: Masks = no_masks) -> str:
        self.steps.append(selection.is_numba())
        return "done"

    follow = launch


class Wire:
    """What rank 0 has told; heard by another rank when it is over."""

    def __init__(self, *readiness: Readiness) -> None:
        self.told: list[bytes] = []
        self.group = SimpleNamespace(all_reduce_min=lambda number: min(number, *readiness))
        self.tell = self.told.append

    def broadcast_rows(self, *_: Any) -> None: ...

    def hear(self) -> bytes:
        if not self.told:
            raise RuntimeError("rank 0 is gone")
        return self.told.pop(0)


def test_one_rank_changes_over_before_the_step_after_its_kernels_are_there() -> None:
    selection.select(numba=False)
    rank: Any = Rank(WAITING)
    executor = LoneExecutor(rank, rank.changeover)
    executor.launch(NOTHING)
    rank.compiling.readiness = THERE
    executor.launch(NOTHING)
    executor.launch(NOTHING)
    assert rank.steps == [False, True, True]
    assert rank.changeover.over


def test_all_ranks_change_over_before_the_same_step() -> None:
    """Rank 0 is the first that has its kernels; it asks again after a second."""
    selection.select(numba=False)
    now = 5.0
    first: Any = Rank(WAITING, lambda: now)
    other: Any = Rank(WAITING, lambda: now)
    readiness = [WAITING]
    wire: Any = Wire()
    wire.group.all_reduce_min = lambda number: min(number, *readiness)
    executor = GroupExecutor(first, wire, first.changeover)
    executor.launch(NOTHING)
    first.compiling.readiness = THERE
    for ready, passed in ((WAITING, 0.0), (THERE, 0.5), (THERE, 0.6), (THERE, 2.0)):
        readiness[0], now = ready, now + passed
        executor.launch(NOTHING)
    assert first.steps == [False, False, False, True, True]
    turns = [isinstance(msgspec.msgpack.decode(told, type=RankMessage), ChangeOver) for told in wire.told]
    assert turns == [False, True, False, False, True, False, False]

    selection.select(numba=False)
    answers = iter([WAITING, THERE])
    wire.group.all_reduce_min = lambda _: next(answers)
    with pytest.raises(RuntimeError, match="rank 0 is gone"):
        follow(other, wire, other.changeover)
    assert other.steps == first.steps


def test_an_idle_group_changes_over_too() -> None:
    selection.select(numba=False)
    rank: Any = Rank(THERE)
    wire: Any = Wire(THERE)
    GroupExecutor(rank, wire, rank.changeover).beat()
    assert selection.is_numba()
    assert wire.told[-1] == b"", "the others hear that nothing is to be done"


def test_where_one_rank_fails_torch_goes_on_and_that_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    selection.select(numba=False)
    said: list[str] = []
    monkeypatch.setattr(changeover, "_log", SimpleNamespace(warning=lambda text, **_: said.append(text)))
    rank: Any = Rank(THERE)
    wire: Any = Wire(FAILED)
    executor = GroupExecutor(rank, wire, rank.changeover)
    for _ in range(3):
        executor.launch(NOTHING)
    assert rank.steps == [False] * 3
    assert said == ["torch continues to compute, more slowly, since a rank lacks our kernels"]
    assert sum(isinstance(msgspec.msgpack.decode(told, type=RankMessage), ChangeOver) for told in wire.told) == 1


def test_what_cannot_be_compiled_is_told_with_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(compiling, "_log", SimpleNamespace(warning=lambda _, cause: said.append(cause)))
    process = Compilation(["llm_service.layers.cpu.nowhere:kernel"])
    until(lambda: process.readiness is not WAITING, "the process has ended")
    assert process.readiness is FAILED
    assert said == ["ModuleNotFoundError: No module named 'llm_service.layers.cpu.nowhere'"]


@pytest.mark.soak  # three processes import all
def test_several_processes_compile_each_kernel_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = [f"llm_service.layers.cpu.row_kernels:{each}" for each in ("rms_norm_few", "silu_and_mul_few")]
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path))
    process = Compilation(names, 3)
    until(lambda: process.readiness is not WAITING, "the processes have ended")
    kept = sorted(file.name.partition(".")[2].split("-")[0] for file in tmp_path.rglob("*.nbc"))
    assert [name.rpartition("_serial")[0] for name in kept] == ["_rms_norm", "_silu_and_mul"]


def test_what_cannot_be_kept_is_told_with_its_cause(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said: list[str] = []
    monkeypatch.setattr(compiling, "_log", SimpleNamespace(warning=lambda _, cause: said.append(cause)))
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    with no_room_for_files():
        process = Compilation(["llm_service.layers.cpu.row_kernels:rms_norm_few"])
    until(lambda: process.readiness is not WAITING, "the process has ended")
    assert process.readiness is FAILED
    assert said[0].startswith(str(tmp_path))
    assert said[0].endswith(": File too large")


def test_ranks_begin_alike_and_one_that_has_all_kernels_waits_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "not_kept", lambda _: [])
    others = [0]
    monkeypatch.setattr(TensorGroup, "all_reduce_min", lambda _, number: min(number, *others))
    begun = load._choose_kernels(["a"], ALONE, wait=False)
    assert not selection.is_numba()
    assert begun is not None
    assert begun.due
    others[0] = 1
    assert load._choose_kernels(["a"], ALONE, wait=False) is None
    assert selection.is_numba()


def test_where_nothing_can_be_kept_kernels_are_compiled_before_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(load, "not_kept", lambda names: names)

    def compile_it() -> bool:
        compiled.append("it")
        return True

    kernel = SimpleNamespace(folder=None, compile_unless_another_does=compile_it)
    monkeypatch.setattr("common.cpu.jit.find", lambda _: kernel)
    assert load._choose_kernels(["a"], ALONE, wait=False) is None
    assert compiled == ["it"]
    assert selection.is_numba()
    kernel.folder = Path("/kept/here")
    assert load._choose_kernels(["a"], ALONE, wait=True) is None, "it may be told to wait"


def test_a_rank_that_has_its_kernels_waits_for_nothing_and_says_that_it_has_them() -> None:
    changeover = Changeover(None)
    assert not changeover.waits
    changeover.ask(lambda own: own)
    assert changeover.over
    assert selection.is_numba()


def spoken(folder: Path, ours: Callable[[int], bool], weight_dtype: str = "") -> list[Outcome]:
    """Two answers side by side, with our kernels in the steps that are named."""
    attention = partial(NumbaBackend, packs=WIDE)
    engine, steps = LocalEngine(folder, weight_dtype=weight_dtype, attention=attention), 0
    run = engine.runner.run

    def counted(plan: StepPlan) -> Any:
        nonlocal steps
        selection.select(numba=ours(steps))
        steps += 1
        return run(plan)

    engine.runner.run = counted  # type: ignore[method-assign]
    picture = pictures.photograph("coffee").resize((90, 60))
    return engine.run([make_prompt(folder, [picture, "What is it?"]), make_prompt(folder, ["Hello"])], GREEDY)


@pytest.mark.parametrize("wide", [False, True], ids=["blocked", "panels"])
@pytest.mark.parametrize(
    ("family", "weights"),
    [
        ("qwen3_vl", ""),
        pytest.param("qwen3_vl", "int8", marks=pytest.mark.soak),
        ("qwen2_5_vl", ""),
        ("qwen3_vl_moe", ""),
    ],
)
def test_tokens_are_the_same_before_after_and_across_the_change(
    family: Family, weights: str, *, wide: bool, checkpoints: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(panels, "wide_vectors", lambda: wide)
    monkeypatch.setattr(panels, "fused_vectors", lambda: wide)
    folder = checkpoints(family)
    ours = spoken(folder, lambda _: True, weights)
    assert spoken(folder, lambda _: False, weights) == ours
    assert spoken(folder, lambda step: step >= 5, weights) == ours


@pytest.mark.parametrize("weights", ["", "int8"])
def test_what_is_compiled_ahead_is_what_steps_call(checkpoint: Path, weights: str) -> None:
    names = LocalEngine(checkpoint, weight_dtype=weights).runner.kernels()
    kernels = [find(name) for name in names]
    for kernel in kernels:
        kernel.compile()
    known = [list(kernel.kernel.signatures) for kernel in kernels]
    row_cases.greedy_tokens(checkpoint, weights)
    assert [list(kernel.kernel.signatures) for kernel in kernels] == known
    assert names


def test_torch_for_good_has_weights_as_it_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(panels, "wide_vectors", lambda: True)
    monkeypatch.setattr(panels, "fused_vectors", lambda: True)
    monkeypatch.setattr(selection, "_state", selection._State())
    selection.leave_to_torch()
    assert PanelWeight.of(torch.ones(64, 64)) is None
    assert PanelWeight.rounded(torch.ones(64, 64)) is None


@pytest.mark.parametrize("outputs", [64, 130, 4500])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int8])
def test_torch_multiplies_with_panels(dtype: torch.dtype, outputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(panels, "wide_vectors", lambda: True)
    monkeypatch.setattr(panels, "fused_vectors", lambda: True)
    drawn = torch.Generator().manual_seed(0)
    weight, x = torch.randn(outputs, 33, generator=drawn), torch.randn(2, 5, 33, generator=drawn)
    bias = torch.randn(outputs, generator=drawn)
    if dtype is torch.int8:
        laid_out = PanelWeight.rounded(weight)
    else:
        weight = weight.to(dtype).float()
        laid_out = PanelWeight.of(weight)
    assert laid_out is not None
    selection.select(numba=False)
    given = laid_out.product(x, bias)
    near = 0.2 if dtype is torch.int8 else 1e-4
    torch.testing.assert_close(given, functional.linear(x, weight, bias), rtol=near, atol=near)
