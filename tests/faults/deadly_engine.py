"""An LLM service whose engines, run by this module as well, die of one request: `-m tests.faults.deadly_engine`."""

from __future__ import annotations

import os
import signal
import sys

from llm_service.__main__ import main
from llm_service.engine.process import Loaded, serve
from llm_service.engine.step_queue import StepUnderWay
from llm_service.plan import Masks, StepMemoryError, StepPlan, StepResult
from llm_service.settings import EngineSettings
from testkit.light import engine

DEADLY = 13
"""Whoever has a bias for this token, and penalties, kills the engine at its sixth token."""

HANGING = 14
"""Whoever has a bias for this one has it hang."""


LARGE = 15
"""Whoever has a bias for this one has too little memory for steps of more tokens than the bias says."""


BROKEN = 16
"""Whoever has a bias for this one has the thread that decides find a defect."""


class Broken:
    """A step under way of which nothing can be told."""

    def result(self) -> StepResult:
        raise ValueError("broken")


def _load(settings: EngineSettings, arena_fd: int) -> Loaded:
    loaded = engine.load(settings, arena_fd)
    launch = loaded.executor.launch

    def launch_or_die(plan: StepPlan, masks: Masks) -> StepUnderWay:
        if any(DEADLY in draw.logit_bias and len(draw.output) == 5 * 4 for draw in plan.draws):
            os.kill(os.getpid(), signal.SIGKILL)
        if any(HANGING in draw.logit_bias for draw in plan.draws):
            signal.pause()
        if any(BROKEN in draw.logit_bias for draw in plan.draws):
            return Broken()
        if any(plan.tokens > draw.logit_bias.get(LARGE, plan.tokens) for draw in plan.draws):
            raise StepMemoryError("too little")
        return launch(plan, masks)

    loaded.executor.launch = launch_or_die
    return loaded


if __name__ == "__main__":
    if sys.argv[1].isdecimal():
        serve(_load)
    else:
        main(engine="tests.faults.deadly_engine")
