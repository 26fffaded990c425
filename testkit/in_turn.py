"""For engines without a model: steps that are computed one after the other, each when all its tokens are known."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from llm_service.plan import Masks, StepPlan, StepResult, no_masks, with_masks
from llm_service.worker.messages import AddAdapter, OffloadBlocks, Pulled, RankOrder, RemoveAdapter


def filled(plan: StepPlan, chosen: Sequence[int], masks: Masks = no_masks) -> StepPlan:
    """The plan with nothing left to carry over, when the plan before it chose these tokens, one for each draw, and with
    the masks that follow it."""
    if not plan.carried:
        return plan
    ids = array("i", plan.token_ids)
    for place, draw in plan.carried:
        ids[place] = chosen[draw]
    draws = [draw if draw.carried < 0 else draw.with_last(chosen[draw.carried]) for draw in plan.draws]
    return msgspec.structs.replace(plan, token_ids=ids.tobytes(), draws=with_masks(draws, masks), carried=[])


@dataclass(frozen=True)
class Known:
    """A step that is over."""

    known: StepResult

    def result(self) -> StepResult:
        return self.known


class InTurn:
    """An executor for `run`, which computes a plan that carries nothing over."""

    beat_seconds: float | None = None

    def __init__(
        self, run: Callable[[StepPlan], StepResult], offload: Callable[[list[tuple[int, int]]], None] | None = None
    ) -> None:
        self._run = run
        self._offload = offload
        self._chosen: list[int] = []
        self.adapters: dict[int, bytes] = {}

    def launch(self, plan: StepPlan, masks: Masks = no_masks) -> Known:
        began = time.perf_counter()
        result = self._run(filled(plan, self._chosen, masks))
        self._chosen = result.tokens
        return Known(msgspec.structs.replace(result, began=began, ended=time.perf_counter()))

    def beat(self) -> None:
        """There is no one to keep company."""

    def obey(self, order: RankOrder) -> Pulled:
        """Keeps what an adapter is, and has blocks copied to the host. There is no mirror."""
        match order:
            case AddAdapter(number, adapter):
                assert number not in self.adapters
                self.adapters[number] = adapter.digest
            case RemoveAdapter(number):
                self.adapters.pop(number, None)  # it may be let go of before it has been read
            case OffloadBlocks(pairs) if self._offload is not None:
                self._offload(pairs)
            case _:
                raise AssertionError(order)
        return Pulled.LANDED
