"""A text decoder's shape, read from config.json in any of the layouts that checkpoints have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from common.checkpoints.checkpoint import CheckpointError
from llm_service.families.family import (
    CHUNKED,
    EXPERTS_ALONE,
    OF_ANSWERS,
    SLIDING,
    Family,
    FeedForwardKind,
    LayerKind,
    Mixer,
)
from llm_service.families.gates import Gates
from llm_service.families.registry import family_of
from llm_service.families.sight import Sight, SpanRule
from llm_service.model_config.attention import HeadShape, attention_cap, attention_scale, local_heads, mixer_with
from llm_service.model_config.experts import (
    GroupedExperts,
    dense_layers,
    dense_size,
    expert_scale,
    expert_size,
    expert_sizes,
    experts_of,
    first_of,
    grouped_experts,
    shared_size,
)
from llm_service.model_config.feed_forward import (
    Activation,
    activation_of,
    cut_shares,
    gates_of,
    inner_size,
    inner_sizes,
)
from llm_service.model_config.index import BlockIndexShape, IndexShape, TokenIndexShape, shared_choices, token_index_of
from llm_service.model_config.latent import LatentHeads, latent_heads, latent_sources, unrotated_layers
from llm_service.model_config.layer_shapes import (
    AlternatingShape,
    BalancedShape,
    LayerInputs,
    MarkTable,
    NgramShape,
    OpenedShape,
    StreamShape,
)
from llm_service.model_config.layer_types import (
    check_reach,
    check_rotated,
    chunk_length,
    chunk_lengths,
    layer_types,
    window_length,
    window_lengths,
)
from llm_service.model_config.rotary import RotaryConfig, rotary_settings
from llm_service.model_config.state import (
    DeltaNetConfig,
    GateActivation,
    KimiDeltaConfig,
    Mamba2Config,
    convolution_width_of,
    delta_gates_of,
    delta_net_of,
    kimi_delta_of,
    mamba2_of,
)
from llm_service.model_config.unknown_settings import check_settings
from llm_service.model_config.vocabulary import logit_scale, multiplier, table_rows, tied_of, unsaid_tokens


@dataclass(frozen=True, slots=True)
class TextConfig:
    """Shape of a decoder. Sizes count elements."""

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    mixers: tuple[Mixer, ...]
    """One for each layer."""
    heads: int
    """Of queries."""
    kv_heads: int
    """Of keys and values."""
    head_dim: int
    norm_eps: float
    rotary: RotaryConfig
    """How heads are rotated."""
    tied: bool
    """The head's matrix is the table of tokens."""
    max_position: int
    """Tokens of the longest context."""
    experts: int = 0
    """Number of experts in every `sparse_step`-th layer, except the `dense_layers`; 0: no experts."""
    experts_per_token: int = 0
    expert_size: int = 0
    shared_expert_size: int = 0
    """Inner size of the shared expert; 0: none."""
    latent_size: int = 0
    """Numbers made of a token that experts get; 0: all that it has."""
    sparse_step: int = 1
    dense_layers: frozenset[int] = frozenset()
    grouped: GroupedExperts | None = None
    """The groups of experts, if any."""
    expert_scale: float | None = None
    """Chosen experts count by their probabilities among all, times this; None: by these over their sum."""
    delta_net: DeltaNetConfig | None = None
    mamba2: Mamba2Config | None = None
    convolution_width: int = 0
    """Tokens that short convolutions see."""
    activation: Activation = Activation.SILU
    windows: tuple[int, ...] = ()
    """By layer, the tokens of its window, 0: no window; empty: no layer has one."""
    chunks: tuple[int, ...] = ()
    """By layer, the tokens of the chunks that sequences are cut into, 0: none; empty: no layer has any."""
    qk_norm: bool = False
    """Heads of queries and keys are normed."""
    out_eps: float | None = None
    """The eps of norms behind parts of layers; None: the usual one."""
    gates: tuple[Gates | None, ...] = ()
    """By layer, `LayerKind.gates`; empty: none has any."""
    expert_gates: tuple[Gates | None, ...] = ()
    """By layer, `LayerKind.expert_gates`; empty: none has any."""
    window_rotary: RotaryConfig | None = None
    """How heads are rotated in layers with windows or chunks; None: as in others."""
    spans: SpanRule = SpanRule.NOWHERE
    """The layers in which rows of one run see each other."""
    attention_scale: float | None = None
    """The factor of products of queries and keys; None: head_dim^-0.5."""
    attention_cap: float | None = None
    """The soft cap of attention scores."""
    full_heads: HeadShape | None = None
    """Heads of keys and values of layers without a window, if they differ."""
    local_heads: int | None = None
    """Heads of queries of layers with a window, if they differ."""
    shared_layers: int = 0
    """The last so many layers use the keys and values of the last layer before them with the same window."""
    wide_shared: bool = False
    """Their feed-forward parts are twice as wide."""
    latent: LatentHeads | None = None
    """Heads of layers with latent attention."""
    local_latent: LatentHeads | None = None
    """The latent heads of layers with a window, if they differ."""
    layer_inputs: LayerInputs | None = None
    """Layers have inputs of their own."""
    embedding_multiplier: float = 1.0
    """For all that enters the first layer, rows of media as well."""
    residual_multiplier: float = 1.0
    """The factor of what each part of a layer adds."""
    logit_scale: float = 1.0
    """For logits."""
    logit_cap: float | None = None
    """The soft cap of logits: cap · tanh(x / cap)."""
    level_layers: tuple[int, ...] = ()
    """Layers before which levels of rows are added, the first level included, as transformers configures it; empty: the
    first level is among the embeddings, and the others are added behind the first layers."""
    media_expert_size: int = 0
    """If experts are chosen by modality: the inner size of those for media and the marks around them."""
    least_weight: float = 0.0
    """The least value that the sum of the chosen experts' probabilities counts as."""
    media_tokens: tuple[int, ...] = ()
    """Tokens of media's experts, of transformers' configurations."""
    pooled_size: int = 0
    """Width of the input of experts that are narrower than the layer; 0: there are none."""
    router_multiplier: float = 1.0
    """The factor of the router's output for these."""
    gate_temperature: float = 1.0
    """The divisor of layers' gates."""
    index: IndexShape | None = None
    token_index: TokenIndexShape | None = None
    block_index: BlockIndexShape | None = None
    streams: StreamShape | None = None
    ngrams: NgramShape | None = None
    delta_gates: GateActivation = GateActivation.SILU
    table_rows: int = 0
    """Rows of the token table; 0: as many as the head has."""
    together: tuple[int, ...] = ()
    """Media tokens that all see each other within a prompt."""
    adds_rows: bool = False
    """Rows are added to the token embeddings at their positions."""
    alternating: AlternatingShape | None = None
    """AltUp: there are several streams, and layers compute one."""
    cut_shares: tuple[float, ...] = ()
    """By layer, `LayerKind.cut_share`; empty: none has any."""
    inner_sizes: tuple[int, ...] = ()
    """By layer, `LayerKind.inner`; empty: all are alike."""
    mark_tables: tuple[MarkTable, ...] = ()
    """Tables of marks, of transformers' models."""
    latent_sources: tuple[int, ...] = ()
    """By layer, the layer whose latents it uses; empty: its own."""
    unrotated_layers: frozenset[int] = frozenset()
    """Layers whose latents have no rotated numbers."""
    shared_choices: frozenset[int] = frozenset()
    """Layers that attend to what the last layer before them chose by its index."""
    kimi_delta: KimiDeltaConfig | None = None
    balanced: BalancedShape | None = None
    """There are several streams, mixed by balanced matrices."""
    opened: OpenedShape | None = None
    """There are several streams with gates."""
    unsaid: tuple[int, ...] = ()
    """Tokens that are in prompts alone."""

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.mixers)

    @property
    def entry_scale(self) -> float:
        """The factor of embeddings and rows. The residual is kept divided by the residual multiplier, so that nothing
        that is added needs to be multiplied; norms do not notice, except for `residual_eps`."""
        return self.embedding_multiplier / self.residual_multiplier

    @property
    def residual_eps(self) -> float:
        """The eps of norms of that sum."""
        return self.norm_eps / self.residual_multiplier**2

    def levels_behind(self, count: int) -> dict[int, int]:
        """The layer behind which each level is added, -1: before all, of so many levels. A layer takes the last of the
        levels for it."""
        return {layer - 1: level for level, layer in enumerate(self.level_layers or range(1, count + 1))}

    def layer_kind(self, layer: int) -> LayerKind:
        """The parts of a layer, counted from 0."""
        sparse = self.experts > 0 and layer not in self.dense_layers and (layer + 1) % self.sparse_step == 0
        keys_of = self._keys_of(layer)
        feed_forward = self.family.moe.kind if sparse else FeedForwardKind.DENSE
        if self.family.layers.single_parts and self.mixers[layer] is not Mixer.NONE:
            feed_forward = FeedForwardKind.NONE
        return LayerKind(
            self.mixers[layer],
            feed_forward,
            self._sight_of(layer),
            keys_of=keys_of,
            wide=self.wide_shared and keys_of is not None,
            gates=self.gates[layer] if self.gates else None,
            expert_gates=self.expert_gates[layer] if self.expert_gates else None,
            cut_share=self.cut_shares[layer] if self.cut_shares else 0.0,
            inner=self.inner_sizes[layer] if self.inner_sizes else 0,
            rotated=layer not in self.unrotated_layers,
            chooses=layer not in self.shared_choices,
        )

    @property
    def stream_count(self) -> int:
        """Number of streams between layers."""
        shape = self.streams or self.balanced or self.opened
        return 1 if shape is None else shape.count

    def norms_heads(self, kind: LayerKind) -> bool:
        """Whether a layer's heads of queries and keys are normed."""
        rule = self.family.attention.qk_norm
        return self.qk_norm and (kind.sight.is_local or rule is None or not rule.local_only)

    def _sight_of(self, layer: int) -> Sight:
        window, chunk = self._window_of(layer), self.chunks[layer] if self.chunks else 0
        of_answers = self.family.windowed == OF_ANSWERS
        sight = Sight(answer_window=window, chunk=chunk) if of_answers else Sight(window, chunk=chunk)
        return sight.with_spans(self.spans)

    def _window_of(self, layer: int) -> int:
        return self.windows[layer] if self.windows else 0

    def _keys_of(self, layer: int) -> int | None:
        """The layer whose keys and values, or latents, this one uses; None: its own. Raises CheckpointError if there is
        none."""
        if self.latent_sources:
            source = self.latent_sources[layer]
            return None if source == layer else source
        first = self.layers - self.shared_layers
        if layer < first:
            return None
        alike = [each for each in range(first) if self._window_of(each) == self._window_of(layer)]
        if not alike:
            raise CheckpointError("no layer has the keys and values that others of its kind share")
        return alike[-1]

    def heads_of(self, kind: LayerKind) -> int:
        """Heads of a layer's queries."""
        return self.local_heads if kind.sight.reach and self.local_heads is not None else self.heads

    @property
    def embedding_eps(self) -> float | None:
        """The eps of the norm of embeddings; None if they are not normed."""
        return self.norm_eps if self.family.vocabulary.normed_embeddings else None

    def head_shape(self, kind: LayerKind) -> HeadShape:
        """Of a layer's keys and values."""
        own = None if kind.sight.reach else self.full_heads
        return HeadShape(self.kv_heads, self.head_dim) if own is None else own

    def latent_heads(self, kind: LayerKind) -> LatentHeads:
        """Of a layer with latent attention."""
        found = self.latent if self.local_latent is None or not kind.sight.reach else self.local_latent
        assert found is not None, "the configuration has the heads' shape"
        return found if kind.rotated else found.unrotated

    def max_context(self, allowed: int) -> int:
        """Tokens of the longest context, if the operator allows `allowed`; 0: the model's own bound."""
        return min(allowed or self.max_position, self.max_position)

    @classmethod
    def of(cls, config: dict[str, Any], max_context: int = 0) -> TextConfig:
        """Reads config.json. Qwen2-VL's text settings are at the top level in published files, and under `text_config`
        in newer ones; rotary settings are `rope_scaling` with `rope_theta` beside it, or `rope_parameters` with it
        inside, of which layers with a window may have their own. `max_context` bounds the context, 0: the model's own
        bound.

        Raises CheckpointError if the family is not served, or a field is missing or asks for something unsupported, in
        a context of that length.
        """
        try:
            return cls._read(config, family_of(config), max_context)
        except CheckpointError:
            raise
        except KeyError as error:
            raise CheckpointError(f"config.json has no {error.args[0]}") from error
        except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
            what = f"config.json has a setting that is of another kind than it has to be: {error}"
            raise CheckpointError(what[:200]) from error

    @classmethod
    def _read(cls, config: dict[str, Any], family: Family, max_context: int) -> TextConfig:
        text = {**family.checkpoint.text_defaults, **config, **(config.get("text_config") or {})}
        check_settings(text)
        if text.get("swin_norm"):
            family = replace(family, norms=replace(family.norms, names=family.norms.names.behind))
        if types := text.get("layers_block_type"):
            text |= {"layer_types": types, "num_hidden_layers": len(types)}
        max_position = int(text.get("max_position_embeddings", 32768))
        types = layer_types(text, family)
        heads = _Heads.of(text, family, types, max_position, max_context)
        usual = heads.usual
        activation = activation_of(text, family)
        experts = _experts(text, family, types)
        mixers = tuple(mixer_with(family.mixers[each], heads.rotary_of(each)) for each in types)
        token_index = token_index_of(text, mixers)
        cap = text.get("final_logit_softcapping")
        return cls(
            family=family,
            vocab_size=int(text["vocab_size"]),
            hidden_size=int(text["hidden_size"]),
            intermediate_size=dense_size(text) if experts else inner_size(text),
            mixers=mixers,
            heads=heads.count,
            kv_heads=usual.kv_heads,
            head_dim=usual.head_dim,
            norm_eps=_norm_eps(text),
            rotary=heads.rotary,
            tied=tied_of(config, text, family),
            max_position=max_position,
            experts=experts,
            experts_per_token=int(first_of(text, "num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k") or 0),
            expert_size=expert_size(text) if experts else 0,
            media_expert_size=expert_sizes(text)[1] if experts else 0,
            pooled_size=int(text.get("moe_hidden_size") or 0),
            router_multiplier=multiplier(text, family.vocabulary.logit_scale) if text.get("moe_hidden_size") else 1.0,
            gate_temperature=float(text.get("residual_gate_temperature") or 1.0),
            least_weight=float(text.get("moe_norm_min") or 0.0),
            shared_expert_size=shared_size(text),
            latent_size=int(text.get("moe_latent_size") or 0),
            sparse_step=int(text.get("decoder_sparse_step", 1)),
            dense_layers=dense_layers(text, types if family.layers.single_parts else ()),
            grouped=_grouped(text, family) if experts else None,
            expert_scale=expert_scale(text) if family.moe.unnormalised and experts else None,
            delta_net=delta_net_of(text) if Mixer.GATED_DELTA_NET in mixers else None,
            kimi_delta=kimi_delta_of(text) if Mixer.KIMI_DELTA_ATTENTION in mixers else None,
            mamba2=mamba2_of(text) if Mixer.MAMBA2 in mixers else None,
            convolution_width=convolution_width_of(text) if Mixer.SHORT_CONVOLUTION in mixers else 0,
            activation=activation,
            windows=window_lengths(text, types),
            chunks=chunk_lengths(text, family, types),
            qk_norm=family.attention.qk_norm is not None and bool(text.get("use_qk_norm", True)),
            window_rotary=heads.window_rotary,
            attention_scale=attention_scale(text, usual.head_dim),
            attention_cap=attention_cap(text, mixers),
            full_heads=heads.full,
            local_heads=local_heads(text, types),
            out_eps=None if (eps := text.get("post_norm_eps")) is None else float(eps),
            gates=gates_of(text, "swiglu_limits_shared", cut=not family.moe.limited_experts),
            expert_gates=gates_of(text, "swiglu_limits"),
            shared_layers=int(text.get("num_kv_shared_layers") or 0),
            wide_shared=bool(text.get("use_double_wide_mlp")),
            latent=heads.latent,
            local_latent=heads.local_latent,
            layer_inputs=LayerInputs.of(text, padded=not family.vocabulary.media_by_token),
            alternating=AlternatingShape.of(text),
            cut_shares=cut_shares(text),
            inner_sizes=inner_sizes(text),
            embedding_multiplier=multiplier(text, "embedding_multiplier"),
            residual_multiplier=multiplier(text, "residual_multiplier"),
            logit_scale=logit_scale(text, family),
            logit_cap=None if cap is None else float(cap),
            index=IndexShape.of(text) if Mixer.INDEXED_ATTENTION in mixers else None,
            token_index=token_index,
            block_index=BlockIndexShape.of(text, usual.kv_heads) if Mixer.BLOCK_INDEXED_ATTENTION in mixers else None,
            streams=StreamShape.of(text),
            balanced=BalancedShape.of(text),
            opened=OpenedShape.of(text),
            ngrams=NgramShape.of(text),
            delta_gates=delta_gates_of(text),
            table_rows=table_rows(text),
            unsaid=unsaid_tokens(text, family),
            latent_sources=latent_sources(text) if heads.latent is not None else (),
            unrotated_layers=unrotated_layers(text) if heads.latent is not None else frozenset(),
            shared_choices=shared_choices(text, types) if token_index is not None else frozenset(),
        )


@dataclass(frozen=True, slots=True)
class _Heads:
    """Heads of a decoder's attention, and how they are rotated, as `TextConfig` has them."""

    count: int
    usual: HeadShape
    full: HeadShape | None
    latent: LatentHeads | None
    local_latent: LatentHeads | None
    rotary: RotaryConfig
    window_rotary: RotaryConfig | None

    @classmethod
    def of(
        cls, text: Mapping[str, Any], family: Family, types: Sequence[str], max_position: int, max_context: int
    ) -> _Heads:
        """The heads of layers of these types, in contexts of up to `max_context` tokens, 0: `max_position`."""
        rope, window_rope = rotary_settings(text, family, local=window_length(text) + chunk_length(text, family) > 0)
        longest = min(max_context or max_position, max_position)
        check_reach(text, family, longest)
        check_rotated(text, family, types)
        count = int(text["num_attention_heads"])
        latent, local_latent = latent_heads(text, types, rope, window_rope, family, _norm_eps(text))
        if latent is not None:
            rope = {**rope, **_WHOLLY_ROTATED}
        if local_latent is not None:
            window_rope = {**(window_rope or rope), **_WHOLLY_ROTATED}
        head_dim = int(text.get("head_dim") or text["hidden_size"] // count) if latent is None else latent.rotated
        usual = HeadShape(int(text.get("num_key_value_heads") or count), head_dim)
        full = HeadShape.of_full(text, types, usual) if latent is None else None

        def rotary(settings: Mapping[str, Any], size: int) -> RotaryConfig:
            return RotaryConfig.of(settings, text, family, size, max_position, longest)

        local_dim = usual.head_dim if local_latent is None else local_latent.rotated
        return cls(
            count,
            usual,
            full,
            latent,
            local_latent,
            rotary=rotary(rope, (full or usual).head_dim),
            window_rotary=None if window_rope is None else rotary(window_rope, local_dim),
        )

    def rotary_of(self, type_: str) -> RotaryConfig:
        """How heads are rotated in layers of a type."""
        return self.window_rotary or self.rotary if type_ in (SLIDING, CHUNKED) else self.rotary


def _experts(text: Mapping[str, Any], family: Family, types: Sequence[str]) -> int:
    """Number of experts; 0 if no layer has any. Raises CheckpointError if the weights of chosen experts are computed in
    an unsupported way."""
    if not (family.moe.unnormalised or text.get("norm_topk_prob", True)):
        raise CheckpointError("experts whose weights do not sum up to 1 are not supported")
    return 0 if family.layers.single_parts and EXPERTS_ALONE not in types else experts_of(text)


def _grouped(text: Mapping[str, Any], family: Family) -> GroupedExperts | None:
    return grouped_experts(text, probabilities=family.moe.softmax_scores) if family.moe.grouped else None


_WHOLLY_ROTATED = {"partial_rotary_factor": 1.0}
"""Settings of the rotated numbers of latents and their queries, which are counted apart from others."""


def _norm_eps(text: Mapping[str, Any]) -> float:
    names = "rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon"
    return float(next((text[name] for name in names if name in text), 1e-6))
