"""Chunks of a gated delta net by the flash-linear-attention library, where it is installed. Half-precision types
alone.

Convolutions, gates, norms and single tokens stay ours: the library's step has no slots, so states would be copied out
and back for every token, and none of its functions convolves packed sequences in place.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from llm_service.layers.gdn.backend import GdnInput, GdnShape, GdnWeights
from llm_service.layers.gdn.torch_backend import gates

Rule = Callable[[Tensor, Tensor, GdnInput, GdnWeights, Tensor, Tensor], None]
"""(out, mixed, given, weights, recurrent, runs): reads mixed [n, channels], writes the runs' rows of out [n, values],
not yet normed, and their states. `runs` are those of `GdnMetadata`."""


def find(shape: GdnShape) -> Rule | None:
    """The library's rule; None where it is not there, or was built for another torch or Triton."""
    try:
        compute = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    except (ImportError, AttributeError):
        return None
    return _rule(shape, compute)


def _rule(shape: GdnShape, compute: Any) -> Rule:
    def by_value_head(x: Tensor) -> Tensor:  # older versions know no key heads that several value heads share
        heads: Tensor = x.unflatten(1, (shape.key_heads, shape.key_dim))
        return heads.repeat_interleave(shape.group, dim=1).unsqueeze(0)

    def rule(out: Tensor, mixed: Tensor, given: GdnInput, weights: GdnWeights, recurrent: Tensor, runs: Tensor) -> None:
        begins, ends, slots, fresh = runs.long()[:, :4].unbind(1)
        starts = functional.pad((ends - begins).cumsum(0), (1, 0))
        rows = torch.cat([torch.arange(begin, end, device=out.device) for begin, end in runs[:, :2].tolist()])
        g, beta = gates(given.a[rows], given.b[rows], weights)
        query, key, value = mixed[rows].split([shape.keys, shape.keys, shape.values], dim=1)
        read, states = compute(
            by_value_head(query),
            by_value_head(key),
            value.unflatten(1, (shape.value_heads, shape.value_dim)).unsqueeze(0),
            g=g.unsqueeze(0),
            beta=beta.to(out.dtype).unsqueeze(0),
            initial_state=recurrent[slots].masked_fill_(fresh.bool().view(-1, 1, 1, 1), 0),
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=starts,
        )
        out[rows] = read[0].flatten(1)
        recurrent[slots] = states

    return rule
