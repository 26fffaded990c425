"""Attention in transformers' towers, computed by a back end of ours instead of torch's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from encoder_service.models.attention import AttentionUnavailable, Backend, Sdpa, Segments, candidates, choose

_HEAD = 64
"""Numbers of a head in a back end's trial: heads of a tower may have several sizes."""


class AttendingBy(TorchFunctionMode):
    """While entered, for one pass of a tower, a back end computes full attention; torch computes attention that has a
    mask, is causal, has dropout or another scale, or keys of other tokens or another width."""

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self._backend = backend
        self._segments: dict[tuple[int, int], Segments] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Of each operator that is called: the result."""
        given = kwargs or {}
        if func is functional.scaled_dot_product_attention and _is_full(*args, **given):
            query, key, value = (*args, *(given[name] for name in ("query", "key", "value") if name in given))[:3]
            return self._attend(query, key, value)
        return func(*args, **given)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[b, heads, n, d] each, of key and value maybe fewer heads → [b, heads, n, d]."""
        count, _, length, _ = query.shape
        if (segments := self._segments.get((count, length))) is None:
            segments = self._backend.over([length] * count, query.device)
            self._segments[count, length] = segments
        out = segments(*(each.transpose(1, 2).flatten(0, 1) for each in (query, key, value)))
        return out.view(count, length, *out.shape[1:]).transpose(1, 2)


def _is_full(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: ARG001 - heads are counted
) -> bool:
    """Whether each token of a segment sees all of its others, as back ends compute it."""
    if query.dim() != 4 or attn_mask is not None or dropout_p or is_causal or query.dtype != torch.bfloat16:
        return False
    dim = query.shape[3]
    alike = key.shape == value.shape and key.shape[2:] == query.shape[2:] and len(key) == len(query)
    usual = scale is None or math.isclose(scale, dim**-0.5, rel_tol=1e-6)
    return alike and usual and dim % 2 == 0 and query.shape[1] % key.shape[1] == 0


def hf_backend(name: str, device: torch.device, dtype: torch.dtype, kernels: str = "auto") -> Backend:
    """The back end of a transformers tower: our kernel on CPUs that support it, else torch; `kernels` as in `choose`.
    Raises AttentionUnavailable for an unknown back end, or one that cannot run."""
    if name not in ("auto", "numba", "sdpa"):
        raise AttentionUnavailable(f"--attention {name}: this model's tower has torch's attention, or numba's")
    if name == "sdpa" or (name == "auto" and "numba" not in candidates(device, dtype)):
        return Sdpa()
    return choose(name, device, dtype, _HEAD, kernels)
