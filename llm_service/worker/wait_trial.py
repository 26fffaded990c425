"""Tries at start whether the host waits for the GPU while it launches steps of one token, since each such wait leaves
the device idle once a token."""

from __future__ import annotations

import msgspec

from common.gpu.device import told_waits
from common.telemetry import log
from llm_service.plan import Draw
from llm_service.worker.dummy_plans import prompt_plan
from llm_service.worker.model_runner import ModelRunner

_DRAWS = Draw(at=0), Draw(at=0, temperature=1.0, top_p=0.9, top_k=20, output=bytes(4), presence_penalty=1.0)
_log = log.get("steps")


def unmeant_waits(runner: ModelRunner) -> list[str]:
    """The lines of code that wait, except for the wait for tokens that a draft model needs. Whatever these steps leave
    in the runner is overwritten by the first plans."""
    plan, _ = prompt_plan(1, runner.caches.block_size)
    found: list[str] = []
    for draw in _DRAWS:
        step = msgspec.structs.replace(plan, draws=[draw])
        runner.run(step)  # set-up in the first call may wait
        with told_waits() as told:
            launched = runner.launch(step)
        launched.result()
        found += told if runner.proposer is None else told[1:]
    for line in found:
        _log.warning("a step waits for the GPU while it is launched", at=line)
    return found
