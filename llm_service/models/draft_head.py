"""A decoder that proposes drafts from the hidden states of the model that verifies."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import torch
from torch import Tensor

from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from llm_service.layers.linear.placement import Stored
from llm_service.layers.linear.weight_dtype import Rounded
from llm_service.layers.tensor_parallel import ALONE
from llm_service.models.decoder import Decoder, embeddings_of, head_of
from llm_service.models.filling import fill_decoder, targets
from llm_service.models.loader import HEAD, TABLE, TextSide
from llm_service.models.quantized import load_weights


class DraftHead(Decoder):
    """The input of `forward` is the result of `join`, not embeddings. It gets hidden states of the model that verifies:
    if `reads` is empty, the normed ones after its last layer, else those before each of these layers, counted from 0,
    side by side; and its own when it continues by itself."""

    reads: tuple[int, ...] = ()

    def take_ends(self, target: Decoder, *, embeddings: bool = True, head: bool = True) -> None:
        """Uses the model's token table and logit matrix. If that model's ranks have parts of these, it gets both,
        whole, to be filled."""
        if target.group.size == 1:
            # Not registered as modules of this one: the model has finalized them.
            given = {"embed_tokens": target.embed_tokens} if embeddings else {}
            vars(self).update({**given, "lm_head": target.lm_head} if head else given)
            return
        if embeddings:
            self.embed_tokens = embeddings_of(target.config, ALONE, self.dtype)
        if head:
            self.lm_head = head_of(target.config, ALONE, self.dtype)
        if embeddings and head and self.config.tied:
            self.lm_head.weight = self.embed_tokens.weight

    def finalize(self) -> None:
        """As `Decoder.finalize`, except for modules of the model."""
        tied = "lm_head" in self._modules and self.lm_head.weight is self.embed_tokens.weight
        if "embed_tokens" in self._modules and not tied:
            self.embed_tokens.finalize()
        self.use_kernels()

    def enter(self, hidden: Tensor) -> Tensor:
        """The model's output [n, width] → [n, hidden], in the form of its own hidden states."""
        return hidden

    def join(self, embeddings: Tensor, hidden: Tensor, /) -> Tensor:
        """Embeddings of the next tokens and hidden states, [n, hidden] each → the input of the first layer."""
        raise NotImplementedError


def check_target(target: Decoder, what: str) -> None:
    """Raises CheckpointError if heads are not supported for a model."""
    shape = target.config
    if any(several is not None for several in (shape.streams, shape.balanced, shape.opened, shape.alternating)):
        raise CheckpointError(f"{what} is not known for texts with several streams between layers")


def fill_head(
    head: DraftHead, weights: Iterable[tuple[str, Stored]], target: Decoder, dtype: torch.dtype, weight_dtype: str
) -> None:
    """As `fill_decoder`, on the model's device, with the types that `load_decoder` got for it."""
    bfloat16 = dtype == torch.bfloat16 and target.dtype == torch.float32
    fill_decoder(head, weights, target.device, Rounded.of(weight_dtype, bfloat16=bfloat16))


def ends_of(
    head: DraftHead, checkpoint: Checkpoint, text: TextSide | None, *, but: Collection[str] = ()
) -> Iterator[tuple[str, Stored]]:
    """What a head needs of the model's token table and logit matrix; `checkpoint` is the model's, `but` names what it
    has already, and `text` is as in `load_decoder`."""
    wanted = {TABLE, HEAD}.intersection(name for name, _ in targets(head, tied=head.config.tied)).difference(but)
    if not wanted:
        return
    text = text or TextSide.of(checkpoint)
    for name, stored in text.parted.pieces(load_weights(checkpoint, text.own_name)):
        if name in wanted:
            yield name, stored
        if name == TABLE and text.config.tied and HEAD in wanted:
            yield HEAD, stored
