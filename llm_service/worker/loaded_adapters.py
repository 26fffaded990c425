"""What steps ask of a rank's LoRA adapters, whoever computes them: our layers (`RankAdapters`), or transformers'
(`HfAdapters`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

from llm_service.model_config.adapter_folder import Adapter
from llm_service.plan import StepPlan
from llm_service.worker.adapters import RankAdapters


class LoadedAdapters(Protocol):
    """Adapters in memory, by number, and the slots from which layers compute."""

    @property
    def for_graphs(self) -> RankAdapters | None:
        """What graphs compute from; None if steps with adapters are not captured."""
        ...

    def load(self, number: int, adapter: Adapter, /) -> None:
        """Keeps this rank's partition of an adapter, which was checked, under a number that is not reused."""
        ...

    def drop(self, number: int, /) -> None:
        """Drops an adapter; no later plan names it."""
        ...

    def begin(self, plan: StepPlan, /) -> None:
        """Fills the slots that a plan fills, and routes its rows through their slots."""
        ...

    def numbers(self) -> list[np.ndarray]:
        """What must be on the device for the plan's rows, if no graph computes them."""
        ...

    def put(self, numbers: Sequence[Tensor], /) -> None:
        """Takes `numbers`, copied to the device."""
        ...

    def kernels(self) -> set[str]:
        """Names of our kernels for CPUs that these need, as `common.cpu.jit.find` takes them."""
        ...

    def warm_up(self) -> None:
        """Compiles kernels, so that no request waits."""
        ...
