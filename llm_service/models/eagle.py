"""EAGLE-3 (Li et al. 2025, https://arxiv.org/abs/2503.01840): a head trained for one model, with a vocabulary of its
own. At position p its input is the model's hidden states there, before three of its layers, and the embedding of token
p + 1. When it continues by itself, its own hidden state replaces those."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from common.checkpoints.tensors import SliceReader
from llm_service.families.family import LayerKind
from llm_service.layers.cache_spec import LayerCache
from llm_service.layers.decoder_layer import DecoderLayer
from llm_service.layers.linear.parallel import PackedLinear, VocabParallelEmbedding
from llm_service.layers.linear.placement import Stored
from llm_service.layers.mixer import Rotary
from llm_service.layers.norms import RMSNorm, norm_of
from llm_service.layers.rotary.tables import rotary_of
from llm_service.layers.self_attention.layer import SelfAttention
from llm_service.layers.tensor_parallel import ALONE, TensorGroup
from llm_service.model_config.eagle import EagleConfig
from llm_service.model_config.text import TextConfig
from llm_service.models.decoder import Decoder
from llm_service.models.draft_head import DraftHead, check_target, ends_of, fill_head
from llm_service.models.loader import HEAD, TABLE, TextSide
from llm_service.models.model import Deepstack
from llm_service.models.quantized import load_weights

_MIDDLE = "midlayer."
"""The prefix of the layer in heads with one layer."""


class JoinedAttention(SelfAttention):
    """Self-attention whose input is embeddings and hidden states side by side."""

    def _inputs(self, config: TextConfig) -> slice:
        return slice(0, 2 * config.hidden_size)


class JoiningLayer(DecoderLayer):
    """The first layer of a head: its input is embeddings and hidden states side by side, each of which it norms; its
    parts add to the hidden states, after their norm if `adds_to_normed`."""

    def __init__(
        self, kind: LayerKind, config: TextConfig, group: TensorGroup, dtype: torch.dtype, *, adds_to_normed: bool
    ) -> None:
        super().__init__(kind, config, group, dtype)
        self.mixer = JoinedAttention(kind, config, group, dtype)
        self.hidden_norm = norm_of(config, dtype)
        self._adds_to_normed = adds_to_normed

    def before(self, x: Tensor, residual: Tensor | None, rotary: Rotary) -> tuple[Tensor, tuple[Tensor, ...]]:
        """[n, 2 · hidden] and no residual → what parts add to, and the input of the mixer."""
        assert residual is None, "nothing comes before it"
        embeddings, hidden = (half.contiguous() for half in x.chunk(2, -1))
        normed = self.hidden_norm(hidden)
        inputs = torch.cat([self.mixer_in_norm(embeddings), normed], -1)
        return normed if self._adds_to_normed else hidden, self.mixer.project(inputs, rotary)


class EagleDecoder(DraftHead):
    """A head beside the model that it was trained for. It uses the model's embeddings and logits unless the head's
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
                self.embed_tokens = VocabParallelEmbedding(self.config.vocab_size, size, self.group, self.dtype)
            if own_head:
                own = slice(0, size), {"lm_head": slice(0, words)}
                self.lm_head = PackedLinear(*own, bias=False, dtype=self.dtype, rounds_inputs=False)
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

    def join(self, embeddings: Tensor, hidden: Tensor, /) -> Tensor:
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
        """See `Decoder.forward`; the output [n, hidden] is what its next step continues from."""
        return super().forward(
            hidden, positions, caches, batches, None, places, token_ids=token_ids, at_places=at_places
        )

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


def load_eagle(
    checkpoint: Checkpoint,
    target: Decoder,
    of: Checkpoint,
    dtype: torch.dtype,
    *,
    weight_dtype: str = "",
    text: TextSide | None = None,
) -> EagleDecoder:
    """Loads a head beside its decoder, which is loaded; `of` is that one's checkpoint; types and `text` are as in
    `load_decoder`. Raises CheckpointError if it is not a head, or not for that model."""
    check_target(target, "a head")
    stored = {own: name for name in checkpoint.tensors if (own := _own_name(name)) is not None}
    eagle, shape = _fitted(checkpoint, stored, target.config), target.config
    try:
        decoder = EagleDecoder(eagle, target, own_embeddings=TABLE in stored, own_head=HEAD in stored or eagle.ties)
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    if tokens := [name for name in checkpoint.tensors if name.rpartition(".")[2] == "d2t"]:
        known = min(shape.vocab_size, eagle.text.vocab_size)
        decoder.means(_meanings(checkpoint, tokens[0], eagle.vocab_size, known))
    elif eagle.vocab_size != shape.vocab_size:
        raise CheckpointError("it has no d2t, which says what tokens its words are")
    weights = load_weights(checkpoint, _own_name)
    has = {*stored, HEAD} if eagle.ties else set(stored)
    both = _with_head(weights) if eagle.ties else weights, ends_of(decoder, of, text, but=has)
    fill_head(decoder, chain(*both), target, dtype, weight_dtype)
    return decoder.eval()


def _fitted(checkpoint: Checkpoint, stored: Collection[str], shape: TextConfig) -> EagleConfig:
    """The configuration of a head whose tensors are named in `stored`, for a model of this shape; config.json may leave
    settings open, or contradict them. Raises CheckpointError as `load_eagle`."""
    config = checkpoint.config
    if any(name.removeprefix("model.").startswith(_MIDDLE) for name in checkpoint.tensors):
        config = {**config, "num_hidden_layers": 1}  # one; some configurations state the model's number
    eagle = EagleConfig.of(config, shape.layers)
    text, words, table = eagle.text, eagle.vocab_size, TABLE in stored
    ties = eagle.ties and table and HEAD not in stored and words == text.vocab_size
    if not table and text.hidden_size != shape.hidden_size:
        raise CheckpointError("it has no embeddings, and those of the model have another width")
    if not (HEAD in stored or ties) and (words, text.hidden_size) != (shape.vocab_size, shape.hidden_size):
        raise CheckpointError(f"it has no {HEAD}, and that of the model is for other words or another width")
    if not table:
        text = replace(text, vocab_size=shape.vocab_size)
    known = min(shape.vocab_size, text.vocab_size)
    if words > known:
        raise CheckpointError(f"it says {words} words, and is given {known}")
    if "layers.0.self_attn.o_proj.bias" in stored:
        text = replace(text, family=replace(text.family, layers=replace(text.family.layers, output_biases=True)))
    return replace(eagle, text=text, ties=ties)


def _with_head(weights: Iterable[tuple[str, Stored]]) -> Iterator[tuple[str, Stored]]:
    """The same, and the table of tokens as matrix of logits."""
    for name, stored in weights:
        yield name, stored
        if name == TABLE:
            yield HEAD, stored


def _meanings(checkpoint: Checkpoint, name: str, words: int, tokens: int) -> Tensor:
    """The token of each of a head's words, int64 [words]; the checkpoint stores the difference from the word's own
    number."""
    found: Tensor | None = None
    if tuple(checkpoint.tensors[name].shape) == (words,):
        with SliceReader(checkpoint) as reader:
            found = torch.arange(words) + reader[name][:].to(torch.int64)
    if found is None or int(found.min()) < 0 or int(found.max()) >= tokens:
        raise CheckpointError(f"{name} does not say what tokens of the model its {words} words are")
    return found


def _own_name(name: str) -> str | None:
    """The decoder's name for a tensor of a head; None for the tables that map words."""
    name = name.removeprefix("model.")
    if name in ("d2t", "t2d", "verifier_lm_head.weight", "verifier_norm.weight"):
        return None
    return f"layers.0.{name.removeprefix(_MIDDLE)}" if name.startswith(_MIDDLE) else name
