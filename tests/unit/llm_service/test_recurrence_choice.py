"""Back ends of layers with states are chosen where they compute what plain operators do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from llm_service.layers.cache_spec import Segment
from llm_service.layers.gdn import choose as gdn
from llm_service.layers.gdn.backend import GdnShape
from llm_service.layers.gdn.triton_backend import TritonBackend as GdnBackend
from llm_service.layers.kda import choose as kda
from llm_service.layers.kda.backend import KdaShape
from llm_service.layers.kda.triton_backend import TritonBackend as KdaBackend
from llm_service.layers.mamba2 import choose as mamba2
from llm_service.layers.mamba2.backend import Mamba2Shape
from llm_service.layers.mamba2.triton_backend import TritonBackend as Mamba2Backend

CPU = torch.device("cpu")
KINDS: dict[str, tuple[Any, Any, Callable[..., bool]]] = {
    "gdn": (GdnShape(2, 4, 32, 16), GdnBackend, gdn.runs),
    "kda": (KdaShape(2, 32), KdaBackend, kda.runs),
    "mamba2": (Mamba2Shape(1, 3, 32, 16), Mamba2Backend, mamba2.runs),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_that_are_right_are_chosen_and_wrong_ones_are_not(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a compiler makes wrong code of a kernel for one kind of GPU."""
    shape, make, runs = KINDS[kind]
    backend = make(shape, torch.float32, CPU)
    assert runs(backend, shape, torch.float32, CPU)
    batch = type(backend.batch([Segment(0, 1, 0, fresh=True)]))
    run = batch.run

    def wrong_states(self: Any, given: Any, weights: Any, cache: Any) -> torch.Tensor:
        out: torch.Tensor = run(self, given, weights, cache)
        cache.tensors[-1][1] *= 2.0
        return out

    monkeypatch.setattr(batch, "run", wrong_states)
    assert not runs(backend, shape, torch.float32, CPU)

    def full(*_: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(batch, "run", full)
    with pytest.raises(torch.OutOfMemoryError):
        runs(backend, shape, torch.float32, CPU)
