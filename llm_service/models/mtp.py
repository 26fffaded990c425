"""Multi-token prediction as in Qwen3-Next and Qwen3.5: one more layer, which predicts the token after the next.

At position p its input is the model's normed hidden state there and the embedding of token p + 1; when it continues by
itself, its own normed hidden state replaces that of p + 1. Embeddings and head are the model's.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor, nn

from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from llm_service.families.family import Mixer
from llm_service.layers.decoder_layer import DecoderLayer
from llm_service.layers.linear.parallel import PackedLinear
from llm_service.layers.norms import RMSNorm
from llm_service.layers.tensor_parallel import ALONE
from llm_service.models.decoder import Decoder
from llm_service.models.draft_head import DraftHead, check_target, ends_of, fill_head
from llm_service.models.loader import TextSide
from llm_service.models.quantized import load_weights

_PREFIX = "mtp."
"""The prefix of its weights."""


class MtpDecoder(DraftHead):
    """That layer, beside its model."""

    def __init__(self, target: Decoder) -> None:
        nn.Module.__init__(self)
        self.config = replace(target.config, mixers=(Mixer.ATTENTION,), windows=(), dense_layers=frozenset())
        self.dtype, self.kv_dtype, self.group = target.dtype, target.kv_dtype, ALONE
        size, eps = self.config.hidden_size, self.config.norm_eps
        zero_centred = self.config.family.norms.zero_centred

        def norm() -> RMSNorm:
            return RMSNorm(size, eps, self.dtype, zero_centred=zero_centred)

        with target.device:
            self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = norm(), norm(), norm()
            self.fc = PackedLinear(slice(0, 2 * size), {"fc": slice(0, size)}, bias=False, dtype=self.dtype)
            kind = self.config.layer_kind(0)
            self.layers = nn.ModuleList([DecoderLayer(kind, self.config, self.group, self.dtype)])
            self.take_ends(target)
        vars(self).update(rotary=target.rotary)
        self.window_rotary = self.layer_inputs = self.streams_in = self.embed_positions = None

    def join(self, embeddings: Tensor, hidden: Tensor, /) -> Tensor:
        """See `DraftHead.join`: [n, hidden]."""
        both = self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)
        out: Tensor = self.fc(torch.cat(both, -1))
        return out


def load_mtp(
    checkpoint: Checkpoint,
    target: Decoder,
    dtype: torch.dtype,
    *,
    weight_dtype: str = "",
    text: TextSide | None = None,
) -> MtpDecoder:
    """Loads the layer of a checkpoint beside its loaded decoder, with the types and `text` as in `load_decoder`. Raises
    CheckpointError if the checkpoint has none."""
    check_target(target, "multi-token prediction")
    settings = {**checkpoint.config, **(checkpoint.config.get("text_config") or {})}
    if settings.get("mtp_use_dedicated_embeddings"):
        raise CheckpointError("embeddings of its own for multi-token prediction are not supported")
    if not any(name.startswith(_PREFIX) for name in checkpoint.tensors):
        raise CheckpointError("the checkpoint has no layer for multi-token prediction: there are no weights mtp.*")
    try:
        decoder = MtpDecoder(target)
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    weights = load_weights(checkpoint, _own_name), ends_of(decoder, checkpoint, text)
    fill_head(decoder, chain(*weights), target, dtype, weight_dtype)
    return decoder.eval()


def _own_name(name: str) -> str | None:
    return name.removeprefix(_PREFIX) if name.startswith(_PREFIX) else None
