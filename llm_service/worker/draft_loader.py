"""Loads what proposes drafts; `worker/load` loads the rest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from llm_service.families.registry import FAMILIES
from llm_service.layers.attention.backend import MakesBackend
from llm_service.layers.cache_spec import block_bytes, slot_bytes
from llm_service.model_config.eagle import is_eagle3
from llm_service.model_config.served import ServedModel
from llm_service.models.decoder import Decoder
from llm_service.models.draft_head import DraftHead
from llm_service.models.eagle import load_eagle
from llm_service.models.loader import TextSide, load_decoder
from llm_service.models.mtp import load_mtp
from llm_service.worker.caches import Caches
from llm_service.worker.draft_model import DraftModel, HeadProposer
from llm_service.worker.model_runner import ModelRunner
from llm_service.worker.row_arena import RowArena


@dataclass(frozen=True, slots=True)
class Drafting:
    """The weights of what proposes drafts for a model with `vocab_size` words."""

    decoder: Decoder
    vocab_size: int
    takes_rows: bool

    def block_bytes(self, block_size: int) -> int:
        """Additional bytes of a KV block."""
        specs = [mixer.cache_spec() for mixer in self.decoder.mixers()]
        return block_bytes(specs, block_size, self.decoder.kv_dtype)

    def proposer(self, arena: RowArena, blocks: int, block_size: int, attention: str | MakesBackend) -> DraftModel:
        """The proposer, with so many blocks; `attention` as in `Caches`."""
        decoder = self.decoder
        caches = Caches(decoder.mixers(), blocks, block_size, decoder.kv_dtype, decoder.device, attention=attention)
        runner = ModelRunner(decoder, arena, caches)
        words = decoder.config.vocab_size, self.vocab_size
        if isinstance(decoder, DraftHead):
            return HeadProposer(runner, decoder, *words, takes_rows=self.takes_rows)
        return DraftModel(runner, *words, takes_rows=self.takes_rows)


def load_draft_model(
    checkpoint: Checkpoint, served: ServedModel, dtype: torch.dtype, device: torch.device, *, weight_dtype: str = ""
) -> Drafting:
    """Loads the model of `--draft-model`, whole, on one rank; `served` is the model that verifies. Raises
    CheckpointError if it cannot be used."""
    if is_eagle3(checkpoint.config):
        raise CheckpointError("--draft-model: an EAGLE-3 head is for --speculative-method eagle3")
    try:
        decoder = load_decoder(checkpoint, dtype, device, weight_dtype=weight_dtype)
    except CheckpointError as error:
        raise CheckpointError(f"--draft-model: {error}") from error
    if slot_bytes([mixer.cache_spec() for mixer in decoder.mixers()]):
        raise CheckpointError("--draft-model: a model whose layers keep states cannot undo wrong drafts")
    takes_rows = False
    if checkpoint.config.get("model_type") in FAMILIES:
        own = ServedModel.of(checkpoint)
        takes_rows = (own.hidden_size, own.levels) == (served.hidden_size, served.levels)
    return Drafting(decoder, served.vocab_size, takes_rows)


def load_mtp_layer(
    checkpoint: Checkpoint, target: Decoder, dtype: torch.dtype, *, weight_dtype: str = "", text: TextSide | None = None
) -> Drafting:
    """Loads the layer of `--speculative-method mtp` beside the model that verifies, whose `text` is as in
    `load_decoder`. Raises CheckpointError if there is none, or it cannot be used."""
    with _refusing("mtp"):
        return _beside(target, load_mtp(checkpoint, target, text=text, dtype=dtype, weight_dtype=weight_dtype))


def load_eagle_head(
    checkpoint: Checkpoint,
    target: Decoder,
    of: Checkpoint,
    dtype: torch.dtype,
    *,
    weight_dtype: str = "",
    text: TextSide | None = None,
) -> Drafting:
    """Loads the head of `--speculative-method eagle3`, and has the model that verifies extract the states that it
    reads; `of` is that model's checkpoint, and `text` as in `load_decoder`. Raises CheckpointError if it cannot be
    used."""
    with _refusing("eagle3"):
        head = load_eagle(checkpoint, target, of=of, text=text, dtype=dtype, weight_dtype=weight_dtype)
    target.extracts = head.reads
    return _beside(target, head)


@contextmanager
def _refusing(method: str) -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"--speculative-method {method}: {error}") from error


def _beside(target: Decoder, head: DraftHead) -> Drafting:
    as_wide = head.config.hidden_size == target.config.hidden_size
    return Drafting(head, target.config.vocab_size, takes_rows=as_wide)
