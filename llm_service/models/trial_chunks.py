"""Computes a prompt in chunks beside those of another, by our decoder or by transformers' text over our cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from llm_service.families.sight import SpanRule
from llm_service.layers.attention.backend import CacheShape, PagedChunk, Span
from llm_service.layers.attention.choose import choose
from llm_service.layers.attention.torch_backend import TorchBackend
from llm_service.layers.cache_spec import PagedKV, Segment, cache_shapes, layer_caches, read_by
from llm_service.layers.mixer import CachedPart, IndexPart
from llm_service.models.model import Deepstack, Model
from llm_service.models.trial_prompts import TrialPrompt

_CPU = torch.device("cpu")
_BLOCK = 16


def logits_in_chunks(
    decoder: Model,
    prompt: TrialPrompt,
    positions: Tensor,
    cuts: list[tuple[int, int]],
    runs: list[tuple[int, int]],
    *,
    answer: int | None = None,
) -> Tensor:
    """[n, vocabulary] of a prompt in these parts, each beside one of another prompt; from `answer` on, where a part
    begins, tokens belong to an answer."""
    blocks = -(-len(prompt.ids) // _BLOCK)
    mixers: Sequence[CachedPart] = decoder.mixers()
    own = [mixer.cache_spec() for mixer in mixers]
    specs, shapes = read_by(own), cache_shapes(own, 2 * blocks, _BLOCK)
    paged = {spec: shape.new_cache(torch.float32, decoder.device) for spec, shape in shapes.items()}
    layers = layer_caches(own, shapes, paged, 2, _CPU)
    embedded = decoder.embed_tokens(prompt.ids)
    rows = prompt.rows[0].to(embedded)
    embedded[prompt.places] = embedded[prompt.places] + rows if decoder.adds_rows else rows
    other = embedded.flip(0)
    found: list[Tensor] = []
    for begin, end in cuts:
        tables = [list(range(blocks, 2 * blocks)), list(range(blocks))[::-1]]
        decodes = answer is not None and begin >= answer
        count = end - begin
        answered = max(0, end - answer) if answer is not None else 0
        chunks = [PagedChunk(begin, count, table, decodes, count * decodes, answered) for table in tables]
        here = [(count + first - begin, count + last - begin) for first, last in runs if begin <= first < last <= end]
        segments = Segment.of(chunks, (1, 0))
        batches = [
            _paged_batch(decoder, mixer, shapes[spec], chunks, here)
            if isinstance(spec, PagedKV)
            else mixer.state_backend().batch(segments)
            for mixer, spec in zip(mixers, specs, strict=True)
        ]
        placed = positions[:, begin:end].repeat(1, 2)
        if decoder.position_rows > len(placed):
            placed = torch.cat([torch.arange(begin, end).repeat(2).unsqueeze(0), placed])
        packed = torch.cat([other[begin:end], embedded[begin:end]])
        deepstack = _deepstack(prompt, begin, end)
        if deepstack is not None and decoder.adds_first_level:
            deepstack = deepstack.taking_first(packed)
        given = packed, placed, layers, batches, deepstack
        ids = torch.cat([prompt.ids.flip(0)[begin:end], prompt.ids[begin:end]])
        there = [count + place - begin for place in prompt.places.tolist() if begin <= place < end]
        out = decoder(*given, token_ids=decoder.ids_of_layers(ids, [(row, row + 1) for row in there]))
        found.append(decoder.logits(out[count:]))
    return torch.cat(found)


def _paged_batch(
    decoder: Model,
    mixer: CachedPart,
    shape: CacheShape,
    chunks: list[PagedChunk],
    spans: list[Span],
) -> Any:
    """A mixer's batch of attention, and of its index, if it has one."""
    backend = choose(decoder.attention("torch"), shape, torch.float32, _CPU)
    batch = backend.batch(chunks, () if shape.kind.sight.spans is SpanRule.NOWHERE else spans)
    if not isinstance(mixer, IndexPart):
        return batch
    return batch, mixer.index_backend(TorchBackend(shape, _CPU), shape.blocks, _BLOCK).batch(chunks)


def _deepstack(prompt: TrialPrompt, begin: int, end: int) -> Deepstack | None:
    """The levels beyond the first of the second of two chunks, the prompt's tokens from `begin` to `end`."""
    here = (prompt.places >= begin) & (prompt.places < end)
    if len(prompt.rows) == 1 or not here.any():
        return None
    return Deepstack(prompt.places[here] - begin + end - begin, prompt.rows[1:, here])
