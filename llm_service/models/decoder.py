"""A text decoder of the layers that its family describes, with deepstack rows added between them.

It knows nothing of requests: it maps input embeddings and each layer's batch to hidden states.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property, partial
from itertools import count
from typing import Any, cast

import torch
from torch import Tensor, nn

from common.cpu.linear import Linear
from llm_service.families.chunk_rule import ChunkRule
from llm_service.families.family import FeedForwardKind, Mixer
from llm_service.families.sight import SpanRule
from llm_service.layers.attention.backend import NumbaCompiled
from llm_service.layers.cache_spec import LayerCache
from llm_service.layers.cpu import selection
from llm_service.layers.decoder_layer import DecoderLayer, Layer, make_layer
from llm_service.layers.embeddings.learned_positions import PositionEmbedding
from llm_service.layers.embeddings.media_marks import MarkedEmbedding
from llm_service.layers.embeddings.per_layer import PerLayerEmbeddings
from llm_service.layers.linear.parallel import PackedLinear, VocabParallelEmbedding
from llm_service.layers.mixer import CachedPart, HandedOn, Rotary
from llm_service.layers.moe.experts import Experts
from llm_service.layers.moe.modality_layer import ModalityLayer
from llm_service.layers.norms import RMSNorm, norm_of
from llm_service.layers.one_part_layers import MixerLayer
from llm_service.layers.ops import TORCH, use_ops
from llm_service.layers.residual.altup import AltUpLayer, StreamsIn, StreamsOut
from llm_service.layers.residual.gated_hyper_connections import GatedStreamsLayer, JoinedStreams
from llm_service.layers.residual.gated_residual import GatedResidualLayer
from llm_service.layers.residual.hyper_connected_layer import HyperConnectedLayer
from llm_service.layers.residual.hyper_connections import StreamMix
from llm_service.layers.residual.manifold_hyper_connections import ManifoldLayer, MeanNorm
from llm_service.layers.rotary.tables import rotary_of
from llm_service.layers.tensor_parallel import TensorGroup
from llm_service.model_config.text import TextConfig
from llm_service.models.model import Deepstack

_GROUPED = (9, 10)
"""Compute capabilities (major) for which torch has its own kernel of grouped products."""
_FORMS = 64
"""How often torch compiles a part of layers: by kind, for one token and for more, and for the first layer. Behind its
own limit of 8 it would run the rest as it is."""


class Decoder(nn.Module):
    """One rank's part of a decoder: embeddings in, hidden states out, and logits on demand. For a draft head it also
    `extracts` the hidden states before these layers, counted from 0; the number of layers stands for the states after
    the last."""

    extracts: tuple[int, ...] = ()
    layers: nn.ModuleList
    decodes_alone = may_wait = False
    keeps_small_cache = True

    def __init__(self, config: TextConfig, group: TensorGroup, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.kv_dtype = dtype
        """The type of keys and values."""
        self.group = group
        layers = range(config.layers)
        with device:  # weights are allocated there, not on the host
            self.embed_tokens = embeddings_of(config, group, dtype)
            places = config.max_position, config.hidden_size, dtype
            self.embed_positions = PositionEmbedding(*places) if config.family.vocabulary.position_embeddings else None
            self.layers = nn.ModuleList(_layer(index, config, group, dtype) for index in layers)
            own = config.layer_inputs
            self.layer_inputs = None if own is None else PerLayerEmbeddings(own, config, group, dtype)
            self.streams_in = None if config.alternating is None else StreamsIn(config, dtype)
            if config.alternating is not None:
                self.norm: RMSNorm | StreamMix | StreamsOut | JoinedStreams = StreamsOut(config, dtype)
            elif config.balanced is not None:
                self.norm = MeanNorm(config, dtype)
            elif config.opened is not None:
                self.norm = JoinedStreams(config, dtype)
            elif config.streams is not None:
                self.norm = StreamMix(config, dtype, "hyper_connection_mixer", injects=False)
            else:
                self.norm = norm_of(config, dtype, eps=config.residual_eps, last=True)
            self.lm_head = head_of(config, group, dtype)
        if config.tied:
            self.lm_head.weight = self.embed_tokens.weight
        said = group.vocab_partition(config.vocab_size)
        unsaid = [token - said.start for token in config.unsaid if said.start <= token < said.stop]
        self._unsaid = torch.tensor(unsaid, dtype=torch.int64, device=device)
        self.rotary = rotary_of(config.rotary, device)
        self._media_tokens = torch.tensor(config.media_tokens, dtype=torch.int32, device=device)
        local = config.window_rotary
        self.window_rotary = None if local is None else rotary_of(local, device)

    @property
    def device(self) -> torch.device:
        """The device of its weights."""
        return self.embed_tokens.weight.device

    @property
    def hidden_size(self) -> int:
        """Width of hidden states between layers."""
        return self.config.hidden_size

    @property
    def entry_size(self) -> int:
        """Width of a token's input to `forward`."""
        return self.config.hidden_size

    @property
    def exit_size(self) -> int:
        """Width of a token's output of `forward`."""
        return self.config.hidden_size * (1 + len(self.extracts))

    @property
    def position_rows(self) -> int:
        """Number of rows of positions: one for each axis; of four, the first is a token's own number."""
        return 4 if self.config.rotary.own_sections else 3

    @property
    def vocabulary(self) -> int:
        """See `Model`."""
        return self.config.vocab_size

    @property
    def adds_first_level(self) -> bool:
        """See `Model`."""
        return bool(self.config.level_layers)

    @property
    def shares_keys(self) -> bool:
        """See `Model`."""
        return self.config.shared_layers > 0

    @property
    def spans(self) -> SpanRule:
        """The layers in which rows of one run see each other."""
        return self.config.spans

    @property
    def chunk_rule(self) -> ChunkRule:
        """Where a prompt may be cut, given what its tokens see."""
        return ChunkRule.of(self.spans, self.together)

    @property
    def forgets_answers(self) -> bool:
        """A token of an answer sees other tokens than it would in a prompt."""
        return any(self.config.layer_kind(layer).sight.answer_window > 0 for layer in range(self.config.layers))

    @property
    def together(self) -> tuple[int, ...]:
        """Media tokens, if all media of a prompt see each other."""
        return self.config.together

    @property
    def adds_rows(self) -> bool:
        """Whether rows are added to the token embeddings at their positions."""
        return self.config.adds_rows

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        caches: Sequence[LayerCache] | Tensor,
        batches: Sequence[Any],
        deepstack: Deepstack | None,
        places: Tensor | None = None,
        *,
        token_ids: Tensor | None = None,
        at_places: Sequence[Any] | None = None,
    ) -> Tensor:
        """hidden [n, hidden], positions int [position_rows, n], and a cache and a batch for each layer with a mixer,
        followed by those of companions → [n, hidden], followed, side by side, by as many numbers for each of
        `extracts`. `token_ids` int [n] are those of `ids_of_layers`.

        With `places` int64 [m], m > 0, only these positions are returned, [m, hidden]: the last layer, whose keys no
        other layer needs more of, then computes little else. With batches for these alone, `at_places`, all layers that
        share earlier keys and values compute only these as well.
        """
        config, angles = self.config, self._angles(positions, hidden.dtype)
        levels = {} if deepstack is None else config.levels_behind(len(deepstack.values))
        hidden, given = self._entered(hidden, positions, deepstack, levels.get(-1), token_ids)
        kept = HandedOn() if config.shared_layers or config.shared_choices else None
        first_sharing, last = config.layers - config.shared_layers, config.layers - 1
        residual: Tensor | None = None
        taken: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            if index in self.extracts:
                taken[index] = _total(hidden, residual)
            if index == first_sharing and places is not None and at_places is not None:
                hidden, residual, given = _narrowed(hidden, residual, given, kept, places)
                angles, batches, places = self._angles(positions[:, places], hidden.dtype), at_places, None
            at, beside = self._caches_of[index]
            own = (None, None) if at is None else (caches[at], batches[at])
            companion = None if beside is None else (caches[beside], batches[beside])
            cut = places if index == last and index not in levels else None
            here = hidden, residual, angles[bool(layer.is_local)], *own, cut
            hidden, residual = layer(*here, given=given[index], kept=kept, beside=companion)
            if deepstack is not None and index in levels:
                hidden, residual = _total(hidden, residual), None
                deepstack.add_to(hidden, levels[index], 1 / config.residual_multiplier)
        if places is not None and last in levels:
            hidden = hidden[places]
        return self._ended(hidden, residual, taken)

    def _entered(
        self,
        hidden: Tensor,
        positions: Tensor,
        deepstack: Deepstack | None,
        level: int | None,
        token_ids: Tensor | None,
    ) -> tuple[Tensor, Sequence[Tensor | None] | Tensor]:
        """The first layer's input, from embeddings [n, hidden] and the `level` of rows that is added before all layers,
        if any; and what each layer is given besides."""
        config = self.config
        if config.entry_scale != 1:
            hidden = hidden * config.entry_scale
        if self.embed_positions is not None:
            hidden = hidden + self.embed_positions(positions[0])
        if deepstack is not None and level is not None:
            deepstack.add_to(hidden, level, 1 / config.residual_multiplier)
        given: Sequence[Tensor | None] | Tensor = [None] * config.layers
        if self.layer_inputs is not None:
            assert token_ids is not None, "layers have inputs of their own"
            given = self.layer_inputs(hidden, token_ids)
        if config.ngrams is not None or config.media_tokens:
            given = [token_ids] * config.layers
        if config.stream_count > 1:
            hidden = hidden.repeat(1, config.stream_count)
        elif self.streams_in is not None:
            hidden = self.streams_in(hidden)
        return hidden, given

    @cached_property
    def _caches_of(self) -> list[tuple[int | None, int | None]]:
        """Where the cache and the batch of each layer's mixer are among those of `mixers`, and those of its companion;
        None if it has none."""
        mixes = [mixer is not Mixer.NONE for mixer in self.config.mixers]
        own, companions = count(), count(sum(mixes))
        return [
            (next(own) if mixing else None, None if cast(Layer, layer).companion is None else next(companions))
            for mixing, layer in zip(mixes, self.layers, strict=True)
        ]

    def _ended(self, hidden: Tensor, residual: Tensor | None, taken: dict[int, Tensor]) -> Tensor:
        """The output of `forward`, from that of the last layer [n, hidden] and the residual to add; `taken` are the
        states before layers."""
        whole, normed = self.norm.after_adding(hidden, residual)
        if not self.extracts:
            return normed
        taken[self.config.layers] = whole
        states = torch.cat([taken[layer] for layer in self.extracts], -1)
        if (kept := self.config.residual_multiplier) != 1:
            states = states * kept
        return torch.cat([normed, states], -1)

    def _angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Rotary, Rotary]:
        """The rotary tables of layers whose tokens see all before them, and of local layers."""
        rotary = self.rotary.tables(positions, dtype)
        return rotary, rotary if self.window_rotary is None else self.window_rotary.tables(positions, dtype)

    def ids_of_layers(self, token_ids: Tensor, rows: Iterable[tuple[int, int]]) -> Tensor | None:
        """What layers look up per-layer inputs by, for tokens int [n]: the padding token at media positions [begin,
        end), unless they use the tokens there, except for n-grams; if experts are chosen by modality, 1 for media
        tokens and their marks, else 0; None if layers need none."""
        if self.config.media_tokens:
            return torch.isin(token_ids, self._media_tokens).to(token_ids.dtype)
        if self.layer_inputs is None:
            return None if self.config.ngrams is None else token_ids
        if self.layer_inputs.padding is None:
            return token_ids
        token_ids = token_ids.clone()
        for begin, end in rows:
            token_ids[begin:end] = self.layer_inputs.padding
        return token_ids

    def weights(self) -> nn.Module:
        """See `Model`."""
        return self

    def attention(self, asked: str) -> str:
        """See `Model`."""
        return asked

    def join(self, embeddings: Tensor, _: Tensor, /) -> Tensor:
        """See `Model`: none goes on from hidden states but a draft head."""
        return embeddings

    def mixers(self) -> list[CachedPart]:
        """The mixers of layers that have one, in order, followed by layers' companions."""
        layers = [cast(DecoderLayer | MixerLayer, layer) for layer in self.layers if hasattr(layer, "mixer")]
        companions = [layer.companion for layer in layers if layer.companion is not None]
        return [*(layer.mixer for layer in layers), *companions]

    def finalize(self) -> None:
        """Called when weights are final: uses our kernels, if the device has any."""
        if self.lm_head.weight is not self.embed_tokens.weight:
            self.embed_tokens.finalize()
        if self.layer_inputs is not None:
            self.layer_inputs.finalize()
        self.use_kernels()

    def use_kernels(self) -> None:
        """Uses our kernels for the work between products, if the device has any."""
        if self.device.type == "cuda":
            from llm_service.layers.gpu import row_kernels, row_ops

            if row_kernels.run_on(self.device):
                use_ops(self, row_ops)
        elif self.dtype == torch.float32 and selection.allows_panels():
            from llm_service.layers.cpu import layer  # numba takes its time

            layer.finalize(self, self.config.activation)

    def kernels(self) -> set[str]:
        """Names of our kernels for CPUs that this needs, as `common.cpu.jit.find` takes them."""
        own: object = next(part for part in self.norm.modules() if isinstance(part, RMSNorm)).ops
        return kernels_of(self).union(own.kernels if isinstance(own, NumbaCompiled) else ())

    def compile_layers(self) -> None:
        """Has torch compile the parts before and after attention in each layer, at their next use.

        Layers share compiled code, since weights are its arguments.
        """
        import torch._dynamo  # takes a second

        torch._dynamo.config.recompile_limit = _FORMS
        for layer in self.layers:
            use_ops(layer, TORCH)  # torch makes kernels from these
            for name in cast(Layer, layer).compiled:
                setattr(layer, name, torch.compile(getattr(layer, name), dynamic=True))

    def not_capturable(self) -> str:
        """Why this decoder cannot be captured in a CUDA graph; empty if it can. The grouped product of experts reads
        its groups' sizes back from the device, except in torch's kernel for some GPUs."""
        if not self.config.experts:
            return ""
        if self.dtype == torch.bfloat16 and torch.cuda.get_device_capability(self.device)[0] in _GROUPED:
            return ""
        return "experts can be captured in bfloat16, on GPUs of compute capability 9 and 10"

    def logits(self, hidden: Tensor) -> Tensor:
        """[m, hidden] → float32 [m, vocabulary], on every rank."""
        logits, cap = self.group.join(self._scores(hidden), self.config.vocab_size).float(), self.config.logit_cap
        if self.config.logit_scale != 1:
            logits = logits * self.config.logit_scale
        return logits if cap is None else (logits / cap).tanh() * cap

    def likeliest(self, hidden: Tensor) -> Tensor:
        """[m, hidden] → int64 [m], the tokens with the highest logits (the first of equal ones), on every rank: each
        searches its part, and no logits are exchanged. Scale and cap do not change the order."""
        return self.group.first_of_highest(self._scores(hidden).float(), self.config.vocab_size)

    def _scores(self, hidden: Tensor) -> Tensor:
        """[m, hidden] → logits of this rank's part of the vocabulary [m, part], before scale and cap; tokens that are
        never generated get the lowest number."""
        scores: Tensor = self.lm_head(hidden)
        if self.config.unsaid:
            scores.index_fill_(1, self._unsaid, torch.finfo(scores.dtype).min)
        return scores


def embeddings_of(config: TextConfig, group: TensorGroup, dtype: torch.dtype) -> VocabParallelEmbedding:
    """A rank's partition of the table of tokens."""
    scale = config.hidden_size**0.5 if config.family.vocabulary.scaled_embeddings else None
    given = config.table_rows or config.vocab_size, config.hidden_size, group, dtype
    embed = partial(MarkedEmbedding, config.mark_tables) if config.mark_tables else VocabParallelEmbedding
    return embed(*given, scale=scale, norm_eps=config.embedding_eps)


def head_of(config: TextConfig, group: TensorGroup, dtype: torch.dtype) -> PackedLinear:
    """A rank's partition of the logit matrix, which is kept precise because logits are sensitive to the precision of
    its inputs."""
    words = {"lm_head": group.vocab_partition(config.vocab_size)}
    return PackedLinear(slice(0, config.hidden_size), words, bias=False, dtype=dtype, rounds_inputs=False)


def _total(hidden: Tensor, residual: Tensor | None) -> Tensor:
    """Hidden states, of which a layer leaves a part to the next one to add."""
    return hidden if residual is None else residual + hidden


def _narrowed(
    hidden: Tensor,
    residual: Tensor | None,
    given: Sequence[Tensor | None] | Tensor,
    kept: HandedOn | None,
    places: Tensor,
) -> tuple[Tensor, Tensor | None, Sequence[Tensor | None] | Tensor]:
    """What goes through layers, at these positions alone, int64 [m]; what is `kept` changes."""
    if kept is not None:
        kept.narrow(places)
    given = given[:, places] if isinstance(given, Tensor) else given
    return hidden[places], None if residual is None else residual[places], given


def _layer(index: int, config: TextConfig, group: TensorGroup, dtype: torch.dtype) -> Layer:
    """One of a decoder's, counted from 0."""
    kind, own = config.layer_kind(index), () if config.ngrams is None else config.ngrams.layers
    if kind.feed_forward is FeedForwardKind.BY_MODALITY:
        return ModalityLayer(kind, config, group, dtype)
    if config.family.layers.gated_residual:
        return GatedResidualLayer(kind, config, group, dtype)
    if config.alternating is not None:
        return AltUpLayer(kind, config, group, dtype)
    if config.balanced is not None:
        return ManifoldLayer(kind, config, group, dtype)
    if config.opened is not None:
        return GatedStreamsLayer(kind, config, group, dtype)
    if config.streams is not None:
        return HyperConnectedLayer(kind, config, group, dtype, own.index(index) if index in own else None)
    return make_layer(kind, config, group, dtype)


def kernels_of(model: nn.Module) -> set[str]:
    """Names of our kernels for CPUs that a model's weights need, as `common.cpu.jit.find` takes them."""
    forms: list[object] = [part.laid_out for part in model.modules() if isinstance(part, Linear)]
    for part in model.modules():
        forms += [form for both in part.laid_out for form in both] if isinstance(part, Experts) else []
        forms += [part.arrays] if isinstance(part, DecoderLayer) else []
    return set[str]().union(*(form.kernels for form in forms if isinstance(form, NumbaCompiled)))
