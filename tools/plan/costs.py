"""Costs of a request's stages, as `python -m tools.plan measure` measures them on a running pair."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tools.plan.workload import Workload


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of one encoder's worker, one LLM service's engine, and of what lies around them.

    A worker takes `batch + patch * patches` for a batch, an engine `step + prefill * prompt tokens + decode *
    sequences` for a step, whose contexts are short enough for attention to be left out. `front` is a request's way
    through client, gateway and front, which takes one after the other; `picture` and `picture_patch` are what a new
    picture costs beside the worker: hashing, decoding, and the way of its rows.
    """

    batch: float
    patch: float
    picture: float
    picture_patch: float
    front: float
    step: float
    prefill: float
    decode: float
    batch_patches: int = 16_384
    step_tokens: int = 512
    running: int = 64
    start_seconds: float = 30.0
    """From a replica's being asked for to its serving."""

    def load(self, workload: Workload, rate: float) -> tuple[float, float]:
        """The least seconds a second that workers and engines compute, with the largest batches; never 0."""
        shown = workload.pictures * workload.patches
        tokens = workload.prompt_tokens + shown / workload.merge
        encoding = rate * shown * (1 - workload.repeats) * self.patch
        computing = rate * (self.prefill * tokens + self.decode * (workload.answer_tokens - 1))
        return max(encoding, 1e-9), max(computing, 1e-9)

    @classmethod
    def mean(cls, one: Costs, other: Costs) -> Costs:
        """Of two measurements of one pair; the limits are those of `one`."""
        measured = ("batch", "patch", "picture", "picture_patch", "front", "step", "prefill", "decode")
        return replace(one, **{name: (getattr(one, name) + getattr(other, name)) / 2 for name in measured})

    @classmethod
    def read(cls, path: Path) -> Costs:
        """Raises ValueError or TypeError where the file holds something else."""
        return cls(**json.loads(path.read_text()))

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")
