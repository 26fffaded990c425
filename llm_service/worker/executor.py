"""Runs plans on one rank, or on all ranks of a group; the engine's core cannot tell which."""

from __future__ import annotations

import msgspec
import torch

from common.gpu import release_memory
from llm_service.layers.group import ALONE
from llm_service.plan import Draw, Masks, StepMemoryError, StepPlan, no_masks
from llm_service.worker.changeover import Changeover
from llm_service.worker.messages import (
    AdapterOrder,
    AddAdapter,
    ChangeOver,
    InvalidateRows,
    MirrorOrder,
    OffloadBlocks,
    Pulled,
    PullRows,
    RankMessage,
    RemoveAdapter,
    RunStep,
    UnmapPool,
)
from llm_service.worker.model_runner import Launched, ModelRunner
from llm_service.worker.ranks import Ranks

BEAT_SECONDS = 1.0
"""An idle group hears from rank 0 this often."""


_encode = msgspec.msgpack.Encoder().encode


def message_of(plan: StepPlan) -> bytes:
    """What other ranks are told of a plan: all but how tokens are chosen. Those that they do not find themselves they
    are told with the next one."""
    return _encode(RunStep(msgspec.structs.replace(plan, draws=[Draw(at=draw.at) for draw in plan.draws])))


class LoneExecutor:
    """One rank. It has a `changeover` where torch's kernels have begun, and ours are to go on."""

    beat_seconds: float | None = None

    def __init__(self, runner: ModelRunner, changeover: Changeover | None = None) -> None:
        self._runner = runner
        self._changeover = changeover

    def launch(self, plan: StepPlan, masks: Masks = no_masks) -> Launched:
        """Begins a step. Raises StepMemoryError where there is too little memory, once what it held is free and nothing
        of it is computed any more."""
        if self._changeover is not None and self._changeover.due:
            self._changeover.ask(ALONE.all_reduce_min)
        try:
            return self._runner.launch(plan, masks)
        except torch.OutOfMemoryError as error:
            why = str(error).partition("\n")[0]
        # Only now is what the step held free: the error had its frames.
        release_memory()
        raise StepMemoryError(why)

    def obey(self, order: MirrorOrder) -> Pulled:
        """Does something to the mirror."""
        return self._runner.arena.the_mirror.obey(order, ALONE.all_reduce_min)

    def adapt(self, order: AdapterOrder) -> None:
        """Keeps an adapter, or lets go of one."""
        self._runner.adapt(order)

    def offload(self, order: OffloadBlocks) -> None:
        """Copies KV blocks to the host, and waits for that."""
        self._runner.offload(order.pairs)

    def beat(self) -> None:
        """There is no one to keep company."""


class GroupExecutor:
    """Rank 0 of a group: every rank computes its partition of a plan; this one draws the tokens. `changeover` as in
    `LoneExecutor`: all ranks have one, or none."""

    beat_seconds: float | None = BEAT_SECONDS

    def __init__(self, runner: ModelRunner, ranks: Ranks, changeover: Changeover | None = None) -> None:
        self._runner = runner
        self._ranks = ranks
        self._changeover = changeover

    def launch(self, plan: StepPlan, masks: Masks = no_masks) -> Launched:
        """Begins a step on all ranks; raises RuntimeError where one is gone."""
        self._change_over()
        greedy = all(draw.plain and draw.logprobs < 0 for draw in plan.draws)
        plan = msgspec.structs.replace(plan, greedy=greedy)
        self._ranks.tell(message_of(plan))
        self._ranks.broadcast_rows(plan.rows, self._runner.arena)
        return self._runner.launch(plan, masks)

    def obey(self, order: MirrorOrder) -> Pulled:
        """Has all ranks do something to their mirrors; raises RuntimeError where one is gone."""
        self._ranks.tell(_encode(order))
        return self._runner.arena.the_mirror.obey(order, self._ranks.group.all_reduce_min)

    def adapt(self, order: AdapterOrder) -> None:
        """Has all ranks keep an adapter, or let go of one; raises RuntimeError where one is gone."""
        self._ranks.tell(_encode(order))
        self._runner.adapt(order)

    def offload(self, order: OffloadBlocks) -> None:
        """Has all ranks copy KV blocks to the host, and waits for them; raises RuntimeError where one is gone."""
        self._ranks.tell(_encode(order))
        self._runner.offload(order.pairs)
        self._ranks.group.all_reduce_min(0)

    def beat(self) -> None:
        """Finds out at once, while there is nothing to compute, whether a rank has ended."""
        self._change_over()
        self._ranks.tell(b"")

    def _change_over(self) -> None:
        if self._changeover is not None and self._changeover.due:
            self._ranks.tell(_encode(ChangeOver()))
            self._changeover.ask(self._ranks.group.all_reduce_min)


def follow(runner: ModelRunner, ranks: Ranks, changeover: Changeover | None = None) -> None:
    """Another rank: computes its partition of every plan, and obeys every order, until rank 0 is gone, which raises
    RuntimeError."""
    decode = msgspec.msgpack.Decoder(RankMessage).decode
    while True:
        if not (heard := ranks.hear()):
            continue  # rank 0 is there
        match decode(heard):
            case RunStep(plan):
                ranks.broadcast_rows(plan.rows, runner.arena)
                runner.follow(plan)
            case ChangeOver():
                assert changeover is not None, "ranks begin alike"
                changeover.ask(ranks.group.all_reduce_min)
            case AddAdapter() | RemoveAdapter() as order:
                runner.adapt(order)
            case PullRows() | InvalidateRows() | UnmapPool() as order:
                runner.arena.the_mirror.obey(order, ranks.group.all_reduce_min)
            case OffloadBlocks(pairs):
                runner.offload(pairs)
                ranks.group.all_reduce_min(0)
