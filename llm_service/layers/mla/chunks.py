"""Latent attention by torch's operators, for each chunk in the form that takes fewer products: queries are absorbed and
multiplied with latents, or keys and values are expanded from all latents that a chunk sees."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from llm_service.layers.attention.one_head import attend_to_one
from llm_service.layers.attention.scored import softmax_with_sinks
from llm_service.layers.attention.torch_backend import TorchBatch
from llm_service.layers.mla.up_projections import KvUpProjections
from llm_service.model_config.latent import LatentHeads

_ROOM = 32 << 20
"""Bytes of one head's scores at once."""


def mix_chunks(
    query: Tensor,
    keys: Tensor,
    batch: TorchBatch,
    shape: LatentHeads,
    products: KvUpProjections,
    sinks: Tensor | None = None,
) -> Tensor:
    """Queries [n, heads, rotated + plain] of a batch, and all that the cache keeps [slots, rank + rotated], these
    tokens included → [n, heads · value]. `sinks` float32 [heads] are as in `attend_by_scores`."""
    out = query.new_empty(*query.shape[:2], shape.value)
    absorbed = []
    for segment in batch.segments:
        count = segment.end - segment.begin
        if shape.expands(count, segment.seen - count):
            here, seen = slice(segment.begin, segment.end), keys[segment.slots]
            attend_expanded(out[here], query[here], seen, segment.mask_of(seen), shape, products, sinks)
        else:
            absorbed.append(segment)
    if absorbed:  # their matrices are read once
        places = torch.cat([torch.arange(each.begin, each.end, device=query.device) for each in absorbed])
        queries = products.absorbed(query[places])
        mixed, at = queries.new_empty(*queries.shape[:2], shape.rank), 0
        for segment in absorbed:
            here, seen = slice(at, at + segment.end - segment.begin), keys[segment.slots]
            attend_to_one(mixed[here], queries[here], seen, segment.mask_of(seen), shape.scale, sinks=sinks)
            at = here.stop
        out[places] = products.values(mixed).view(-1, *out.shape[1:])
    return out.flatten(1)


def attend_expanded(
    out: Tensor,
    query: Tensor,
    keys: Tensor,
    mask: Tensor | None,
    shape: LatentHeads,
    products: KvUpProjections,
    sinks: Tensor | None = None,
) -> None:
    """Fills out [n, heads, value] for queries [n, heads, rotated + plain] and the cached latents of the tokens that
    they see, [m, rank + rotated], head by head; further arguments are as in `attend_to_one`."""
    latents, rotated = keys.split([shape.rank, shape.rotated], dim=1)
    latents, rotated = latents.to(query.dtype), rotated.float()
    for head in range(query.shape[1]):
        plain, values = (made.float() for made in products.expand(latents, head))
        for here in _stretches(len(query), len(keys)):
            own = query[here, head].float()
            scores = (own[:, : shape.rotated] @ rotated.t()).addmm_(own[:, shape.rotated :], plain.t())
            scores.mul_(shape.scale)
            if mask is not None:
                scores.masked_fill_(~mask[here], -torch.inf)
            out[here, head] = softmax_with_sinks(scores, None if sinks is None else sinks[head]) @ values


def _stretches(count: int, seen: int) -> Iterator[slice]:
    """The parts of so many tokens that are computed at once."""
    tokens = max(1, _ROOM // (4 * seen))
    return (slice(begin, begin + tokens) for begin in range(0, count, tokens))
