"""Tries whether a step of transformers' text model can be captured in a CUDA graph, since its Python code may read
values from the device."""

from __future__ import annotations

import torch

from llm_service.models.model import Model
from llm_service.worker.caches import Caches
from llm_service.worker.capture_watch import WaitWatch
from llm_service.worker.graphs import GraphNumbers

_TOKENS = 2


@torch.inference_mode(mode=False)  # this mode would hide reads of values by the host
@torch.no_grad()
def what_waits(decoder: Model, caches: Caches) -> str:
    """Why a decoder whose caches follow metadata has no graphs; empty if it can. Computes a step of padding, as a
    capture does."""
    null_slot = caches.null_block * caches.block_size
    numbers = GraphNumbers.padding(_TOKENS, _TOKENS, 0, caches.tiling, null_slot, decoder.device)
    table = torch.zeros(_TOKENS, 1, dtype=torch.int32, device=decoder.device)
    batches = caches.batches_over(numbers.metadata(table, longest_query=1, longest=caches.block_size), {})
    hidden = torch.zeros(_TOKENS, decoder.hidden_size, dtype=decoder.dtype, device=decoder.device)
    ids = torch.zeros(_TOKENS, dtype=torch.int32, device=decoder.device)
    watch = WaitWatch()
    with watch:
        decoder(hidden, numbers.positions, caches.layers, batches, None, token_ids=ids)
    return f"transformers waits for what the device has computed ({watch.waits})" if watch.waits else ""
