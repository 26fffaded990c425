"""EAGLE-3 (Li et al. 2025, https://arxiv.org/abs/2503.01840): a head that is trained for one model, with words of its
own. At position p it is given the model's hidden states there, before three of its layers, and the embedding of token
p + 1. Where it goes on by itself its own hidden state is in their place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from llm_service.families.family import LayerKind
from llm_service.layers.cache_spec import LayerCache
from llm_service.layers.decoder_layer import DecoderLayer
from llm_service.layers.group import ALONE, TensorGroup
from llm_service.layers.linear import PackedLinear, VocabularyEmbedding
from llm_service.layers.mixer import Rotary
from llm_service.layers.ops import RMSNorm, norm_of
from llm_service.layers.rotaries import rotary_of
from llm_service.layers.self_attention import SelfAttention
from llm_service.models.config import TextConfig
from llm_service.models.decoder import Decoder, Deepstack
from llm_service.models.draft_head import DraftHead
from llm_service.models.eagle_config import EagleConfig


class JoinedAttention(SelfAttention):
    """Self-attention whose inputs are embeddings and hidden states side by side."""

    def _inputs(self, config: TextConfig) -> slice:
        return slice(0, 2 * config.hidden_size)


class JoiningLayer(DecoderLayer):
    """The first layer of a head: it is given embeddings and hidden states side by side, each of which it norms; what
    its parts give is added to the hidden states, normed ones where `adds_to_normed`."""

    def __init__(
        self, kind: LayerKind, config: TextConfig, group: TensorGroup, dtype: torch.dtype, *, adds_to_normed: bool
    ) -> None:
        super().__init__(kind, config, group, dtype)
        self.mixer = JoinedAttention(kind, config, group, dtype)
        self.hidden_norm = norm_of(config, dtype)
        self._adds_to_normed = adds_to_normed

    def before(self, x: Tensor, residual: Tensor | None, rotary: Rotary) -> tuple[Tensor, tuple[Tensor, ...]]:
        """[n, 2 · hidden], and nothing to be added to it → what parts are added to, and what is mixed."""
        assert residual is None, "nothing comes before it"
        embeddings, hidden = (half.contiguous() for half in x.chunk(2, -1))
        normed = self.hidden_norm(hidden)
        inputs = torch.cat([self.mixer_in_norm(embeddings), normed], -1)
        return normed if self._adds_to_normed else hidden, self.mixer.project(inputs, rotary)


class EagleDecoder(DraftHead):
    """A head beside the model that it was trained for. Embeddings, and logits, are the model's unless the head's
    checkpoint has its own."""

    def __init__(self, eagle: EagleConfig, target: Decoder, *, own_embeddings: bool, own_head: bool) -> None:
        nn.Module.__init__(self)
        self.config, self.reads = eagle.text, eagle.reads
        self.dtype, self.kv_dtype, self.group = target.dtype, target.kv_dtype, ALONE
        self._gives_normed, words = eagle.gives_normed, eagle.vocab_size
        size, width, eps = self.config.hidden_size, target.config.hidden_size, self.config.norm_eps
        read = len(self.reads) * width

        def norm(of: int) -> RMSNorm:
            return RMSNorm(of, eps, self.dtype)

        with target.device:
            self.input_norm = norm(read) if eagle.norms_before else None
            self.fc_norm = nn.ModuleList(norm(width) for _ in self.reads) if eagle.norms_each else None
            self.fc = PackedLinear(slice(0, read), {"fc": slice(0, size)}, bias=False, dtype=self.dtype)
            given = self.config, self.group, self.dtype
            kinds = [self.config.layer_kind(layer) for layer in range(self.config.layers)]
            first = JoiningLayer(kinds[0], *given, adds_to_normed=eagle.adds_to_normed)
            self.layers = nn.ModuleList([first, *(DecoderLayer(kind, *given) for kind in kinds[1:])])
            self.norm = norm(size)
            if own_embeddings:
                self.embed_tokens = VocabularyEmbedding(self.config.vocab_size, size, self.group, self.dtype)
            if own_head:
                head = {"lm_head": slice(0, words)}
                self.lm_head = PackedLinear(slice(0, size), head, bias=False, dtype=self.dtype)
            self._meanings = torch.arange(words)
            self.take_ends(target, embeddings=not own_embeddings, head=not own_head)
        self.rotary, local = rotary_of(self.config.rotary, target.device), self.config.window_rotary
        self.window_rotary = None if local is None else rotary_of(local, target.device)
        self.layer_inputs = self.streams_in = self.embed_positions = None

    def means(self, tokens: Tensor) -> None:
        """Its words are these tokens of the model, int64 [words]."""
        self._meanings = tokens.to(self._meanings.device)

    @property
    def entry_size(self) -> int:
        """See `Decoder.entry_size`."""
        return 2 * self.config.hidden_size

    @property
    def position_rows(self) -> int:
        """Of a head without sections for time, height and width a token's own number is the first."""
        return 3 if self.config.rotary.sections[1] else 4

    def enter(self, hidden: Tensor) -> Tensor:
        """See `DraftHead.enter`."""
        if self.input_norm is not None:
            hidden = self.input_norm(hidden)
        if self.fc_norm is not None:
            parts = hidden.chunk(len(self.fc_norm), -1)
            normed = [norm(part.contiguous()) for norm, part in zip(self.fc_norm, parts, strict=True)]
            hidden = torch.cat(normed, -1)
        out: Tensor = self.fc(hidden)
        return out

    def join(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """See `DraftHead.join`: [n, 2 · hidden]."""
        return torch.cat([embeddings, hidden], -1)

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        caches: Sequence[LayerCache] | Tensor,
        batches: Sequence[Any],
        deepstack: Deepstack | None,  # noqa: ARG002 - its layers take no levels
        places: Tensor | None = None,
        *,
        token_ids: Tensor | None = None,
        at_places: Sequence[Any] | None = None,
    ) -> Tensor:
        """See `Decoder.forward`; [n, hidden] is what its next step goes on from."""
        given = hidden, positions, caches, batches, None, places
        return super().forward(*given, token_ids=token_ids, at_places=at_places)

    def _ended(self, hidden: Tensor, residual: Tensor | None, taken: dict[int, Tensor]) -> Tensor:
        if self._gives_normed:
            return super()._ended(hidden, residual, taken)
        return hidden if residual is None else residual + hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Decoder.logits`: of tokens that its vocabulary lacks, −∞."""
        scores = self._scores(hidden).float()
        out = scores.new_full((len(scores), self.config.vocab_size), -torch.inf)
        return out.index_copy_(1, self._meanings, scores)

    def likeliest(self, hidden: Tensor) -> Tensor:
        """See `Decoder.likeliest`."""
        return self._meanings[self._scores(hidden).argmax(-1)]

    def _scores(self, hidden: Tensor) -> Tensor:
        scores: Tensor = self.lm_head(hidden if self._gives_normed else self.norm(hidden))
        return scores[:, : len(self._meanings)]
