"""A decoder that proposes drafts from what the model that verifies has made of the tokens before."""

from __future__ import annotations

from torch import Tensor

from llm_service.models.decoder import Decoder


class DraftHead(Decoder):
    """What is told to `Decoder.forward` are not embeddings, but what `join` makes of them. It is given hidden states of
    the model that verifies: where `reads` is empty normed ones, behind its last layer, else those before each of these
    layers, counted from 0, side by side; its own where it goes on by itself."""

    reads: tuple[int, ...] = ()

    def enter(self, hidden: Tensor) -> Tensor:
        """What that model gives, [n, width] → [n, hidden], as its own hidden states are."""
        return hidden

    def join(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """Embeddings of the next tokens and hidden states, [n, hidden] each → what the first layer takes."""
        raise NotImplementedError
