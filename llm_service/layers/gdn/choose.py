"""Which back end computes gated delta nets: the best that is there."""

from __future__ import annotations

import importlib.util

import torch

from common import log
from llm_service.layers.cache_spec import Segment
from llm_service.layers.gdn.backend import GdnBackend, GdnInput, GdnShape, GdnWeights
from llm_service.layers.gdn.torch_backend import TorchBackend

_log = log.get("gdn")


def choose(shape: GdnShape, dtype: torch.dtype, device: torch.device) -> GdnBackend:
    """numba's kernel on a CPU; on a GPU Triton's, with chunks by flash-linear-attention where that is installed, if
    they pass a trial; else torch's operators."""
    if device.type == "cpu" and importlib.util.find_spec("numba") is not None:
        from llm_service.layers.cpu.gdn_backend import NumbaBackend

        return NumbaBackend(shape)
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from llm_service.layers.gdn import fla_rule
        from llm_service.layers.gdn.triton_backend import TritonBackend

        rules = (fla_rule.find(shape) if dtype != torch.float32 else None, None)
        for rule in dict.fromkeys(rules):
            backend = TritonBackend(shape, dtype, device, rule)
            if runs(backend, shape, dtype, device):
                return backend
    return TorchBackend(shape, device)


def runs(backend: GdnBackend, shape: GdnShape, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a back end gets through a token and through a prompt of two: a package, a driver or a compiler may be too
    old, or not be there."""
    heads, cache = shape.value_heads, shape.state(dtype).new_cache(2, device)

    def zeros(*size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    weights = GdnWeights(zeros(shape.channels, shape.width), zeros(heads), zeros(heads), zeros(shape.value_dim), 1e-6)
    given = GdnInput(zeros(3, shape.channels), zeros(3, shape.values), zeros(3, heads), zeros(3, heads))
    segments = [Segment(0, 1, 0, fresh=True), Segment(1, 3, 1, fresh=True)]
    try:
        backend.batch(segments).run(given, weights, cache).sum().item()
    except Exception as error:  # noqa: BLE001 - whatever it fails with, the next one may do
        _log.warning("a back end of gated delta nets does not run here", backend=backend.name, cause=str(error)[:500])
        return False
    return True
