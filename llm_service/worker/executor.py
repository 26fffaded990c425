"""Runs plans on one rank or on all ranks of a group; the engine's core does not know which."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch

from common.gpu.device import release_memory
from llm_service.layers.tensor_parallel import ALONE
from llm_service.plan import Draw, Masks, StepMemoryError, StepPlan, no_masks
from llm_service.worker.changeover import Changeover
from llm_service.worker.messages import (
    AddAdapter,
    ChangeOver,
    OffloadBlocks,
    Pulled,
    RankMessage,
    RankOrder,
    RemoveAdapter,
    RunStep,
)
from llm_service.worker.model_runner import Launched, ModelRunner
from llm_service.worker.ranks import Ranks

BEAT_SECONDS = 1.0
"""An idle group hears from rank 0 this often."""


_encode = msgspec.msgpack.Encoder().encode


def message_of(plan: StepPlan) -> bytes:
    """A plan as other ranks get it: without how tokens are chosen. Tokens that they do not compute themselves come with
    the next plan."""
    return _encode(RunStep(msgspec.structs.replace(plan, draws=[Draw(at=draw.at) for draw in plan.draws])))


def carry_out(order: RankOrder, runner: ModelRunner, all_reduce_min: Callable[[int], int]) -> Pulled:
    """Carries out an order on this rank. `all_reduce_min` returns the minimum of a number over all ranks, each of which
    carries out the same order. Returns what became of a `PullRows` on all ranks; LANDED for other orders. Raises
    RuntimeError if a rank is gone."""
    match order:
        case AddAdapter() | RemoveAdapter():
            runner.adapt(order)
        case OffloadBlocks(pairs):
            runner.offload(pairs)
            all_reduce_min(0)  # returns when every rank has made its copies
        case _:
            return runner.arena.the_mirror.obey(order, all_reduce_min)
    return Pulled.LANDED


class LoneExecutor:
    """One rank. It has a `changeover` if torch's kernels have begun and ours will continue."""

    beat_seconds: float | None = None

    def __init__(self, runner: ModelRunner, changeover: Changeover | None = None) -> None:
        self._runner = runner
        self._changeover = changeover

    def launch(self, plan: StepPlan, masks: Masks = no_masks) -> Launched:
        """Begins a step. Raises StepMemoryError if memory is short, once the step has freed what it held and is no
        longer running."""
        if self._changeover is not None and self._changeover.due:
            self._changeover.ask(ALONE.all_reduce_min)
        try:
            return self._runner.launch(plan, masks)
        except torch.OutOfMemoryError as error:
            why = str(error).partition("\n")[0]
        # Only now is the step's memory free: the error's frames held it.
        release_memory()
        raise StepMemoryError(why)

    def obey(self, order: RankOrder) -> Pulled:
        """Carries out an order; returns what became of a `PullRows`."""
        return carry_out(order, self._runner, ALONE.all_reduce_min)

    def beat(self) -> None:
        """There are no other ranks."""


class GroupExecutor:
    """Rank 0 of a group: every rank computes its partition of a plan; this one draws the tokens. `changeover` as in
    `LoneExecutor`: all ranks have one, or none."""

    beat_seconds: float | None = BEAT_SECONDS

    def __init__(self, runner: ModelRunner, ranks: Ranks, changeover: Changeover | None = None) -> None:
        self._runner = runner
        self._ranks = ranks
        self._changeover = changeover

    def launch(self, plan: StepPlan, masks: Masks = no_masks) -> Launched:
        """Begins a step on all ranks; raises RuntimeError if one is gone."""
        self._change_over()
        greedy = all(draw.plain and draw.logprobs < 0 for draw in plan.draws)
        plan = msgspec.structs.replace(plan, greedy=greedy)
        self._ranks.tell(message_of(plan))
        self._ranks.broadcast_rows(plan.rows, self._runner.arena)
        return self._runner.launch(plan, masks)

    def obey(self, order: RankOrder) -> Pulled:
        """Has all ranks carry out an order; returns what became of a `PullRows`. Raises RuntimeError if one is gone."""
        self._ranks.tell(_encode(order))
        return carry_out(order, self._runner, self._ranks.group.all_reduce_min)

    def beat(self) -> None:
        """Checks, while there is nothing to compute, whether a rank has ended."""
        self._change_over()
        self._ranks.tell(b"")

    def _change_over(self) -> None:
        if self._changeover is not None and self._changeover.due:
            self._ranks.tell(_encode(ChangeOver()))
            self._changeover.ask(self._ranks.group.all_reduce_min)


def follow(runner: ModelRunner, ranks: Ranks, changeover: Changeover | None = None) -> None:
    """The loop of other ranks: computes this rank's partition of every plan, and carries out every order, until rank 0
    is gone, which raises RuntimeError."""
    decode = msgspec.msgpack.Decoder(RankMessage).decode
    while True:
        if not (heard := ranks.hear()):
            continue  # an empty message: rank 0 is alive
        match decode(heard):
            case RunStep(plan):
                ranks.broadcast_rows(plan.rows, runner.arena)
                runner.follow(plan)
            case ChangeOver():
                assert changeover is not None, "ranks begin alike"
                changeover.ask(ranks.group.all_reduce_min)
            case order:
                carry_out(order, runner, ranks.group.all_reduce_min)
