"""The description of a family of models."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from common.hf.description import PromptFrame
from common.media.encoder_digest import VISION, EncoderParts
from common.media.item import Header, Modality
from llm_service.families.gates import Gates
from llm_service.families.sight import ALL_BEFORE, Sight


class Mixer(Enum):
    """What mixes the tokens of a sequence in a layer."""

    ATTENTION = "attention"
    LATENT_ATTENTION = "latent attention"
    INDEXED_ATTENTION = "attention to what an index chooses"
    BLOCK_INDEXED_ATTENTION = "attention to blocks that an index chooses"
    INDEXED_LATENT_ATTENTION = "latent attention to what an index chooses"
    POOLED_LATENT_ATTENTION = "latent attention to pools that an index chooses"
    OWN_NORMED_ATTENTION = "attention each of whose heads is normed by weights of its own"
    LATE_NORMED_ATTENTION = "attention whose heads are normed once they are rotated"
    NORMED_OUTPUT_ATTENTION = "attention whose heads are normed before their gates open them"
    TEMPERED_ATTENTION = "attention whose queries grow with their places"
    GATED_DELTA_NET = "gated delta net"
    KIMI_DELTA_ATTENTION = "Kimi Delta Attention"
    SHORT_CONVOLUTION = "short convolution"
    MAMBA2 = "Mamba-2"
    NONE = "none: the layer is a feed-forward part alone"


class FeedForwardKind(Enum):
    """The feed-forward part of a layer, which works on each token alone."""

    DENSE = "dense"
    EXPERTS = "experts"
    SCALED_EXPERTS = "experts whose inputs are scaled"
    BY_MODALITY = "experts by modality"
    LATENT_EXPERTS = "experts of narrower rows"
    BOTH = "dense, and experts beside it"
    NONE = "none: the layer is a mixer alone"


@dataclass(frozen=True, slots=True)
class LayerKind:
    """The parts of one decoder layer."""

    mixer: Mixer
    feed_forward: FeedForwardKind
    sight: Sight = ALL_BEFORE
    """The tokens that a token sees, if the mixer is attention."""
    keys_of: int | None = None
    """The layer, counted from 0, whose keys and values this one uses; None: its own."""
    wide: bool = False
    """Its dense feed-forward part is twice as wide as others."""
    gates: Gates | None = None
    """The gates of the dense part and of shared experts; None: the configuration's activation."""
    expert_gates: Gates | None = None
    """The gates of routed experts; None: the configuration's activation."""
    cut_share: float = 0.0
    """Share of a dense part's numbers that is cut off between its products."""
    inner: int = 0
    """The inner size of the dense part; 0: the usual one."""
    rotated: bool = True
    """Its latent attention has rotated numbers, as that of other layers."""
    chooses: bool = True
    """It attends to the tokens that its own index chooses; else to those that the last layer before it chose."""


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """The names of a layer's norms in checkpoints, empty if there is none: of the inputs of its mixer and feed-forward
    part, and of their outputs before these are added."""

    mixer_in: str = "input_layernorm"
    feed_forward_in: str = "post_attention_layernorm"
    mixer_out: str = ""
    feed_forward_out: str = ""

    @property
    def behind(self) -> LayerNorms:
        """The same norms for the parts' outputs instead of their inputs."""
        return LayerNorms("", "", self.mixer_in, self.feed_forward_in)


@dataclass(frozen=True, slots=True)
class Rows:
    """The next `count` rows of an item, each with a placeholder, or with the token of this id, or of this name among
    the family's `marks`. Pruned rows are left out."""

    count: int
    token: int | str | None = None


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A special token, by the name of its id in config.json, or of the token in tokenizer_config.json."""

    name: str


def in_one_run(header: Header) -> Iterable[str | SpecialToken | Rows]:
    """All rows, one after the other, and nothing else."""
    return (Rows(header.all_rows),)


@dataclass(frozen=True, slots=True)
class InPrompt:
    """How a family lays out items of one modality in a prompt.

    `token` names the placeholder in the checkpoint, as a `SpecialToken`, or is its id. `expand` returns what replaces
    it: texts, special tokens, which `marks` names, and all of the item's rows, in order. With `timed_frames`, positions
    in time count seconds · tokens_per_second, otherwise groups of frames. `counted`: rows have no height and width, and
    count on as text does.
    """

    token: str | int
    expand: Callable[[Header], Iterable[str | SpecialToken | Rows]] = in_one_run
    marks: tuple[str, ...] = ()
    timed_frames: bool = False
    counted: bool = False


FAR = 1 << 20
"""Positions of sequences that turn by other frequencies, since they are long, are counted from here."""
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
"""config.json's names for layers whose tokens see all tokens before them, a window, or their chunk."""
OF_ANSWERS = "reference_sliding_attention"
"""Its name for layers whose tokens see all of the prompt, and a window of the answer."""
INDEXED = "indexed_attention"
"""Its name for layers that score all earlier tokens and attend to the best ones."""
MLP_ALONE, EXPERTS_ALONE = "mlp", "moe"
"""Its names for layers that consist of a feed-forward part alone."""
WINDOWED: Mapping[str, Mixer] = {FULL: Mixer.ATTENTION, SLIDING: Mixer.ATTENTION}


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRules:
    """How media are laid out in a prompt, besides the `InPrompt` of each modality."""

    layout_from_encoder: bool = False
    """The item's header says which tokens stand for it; they do not follow from its grid."""
    alone: Collection[Modality] = ()
    """Items of these modalities must be alone in a prompt: their rows depend on it."""
    duration_mark: str = ""
    """The text in a template that stands for a sound's seconds."""
    seam: str = ""
    """A mark beside items: two adjacent ones become one, and a space follows what is behind it."""
    number_mark: str = ""
    """An item's text may begin with this, followed by the item's number among those of its modality."""
    placeholder_run: int = 0
    """An item is so many adjacent placeholders, or one; 0: each placeholder is an item."""
    long_rope_threshold: int = 0
    """Sequences that are longer turn by other frequencies (LongRoPE): their places are counted from `FAR`; 0: none."""
    pinned_tokens: Collection[int] = ()
    """Tokens that keep the time of the item right before them."""
    frame: PromptFrame | None = None
    """Further tokens of a prompt with items, unless they are what the tokenizer puts before any text."""


class OutputGate(Enum):
    """A gate on the output of attention: for each number of each head, projected with the queries or apart, or one for
    each head."""

    NONE = "none"
    FUSED = "projected with the queries"
    SEPARATE = "projected apart"
    PER_HEAD = "one for each head"


@dataclass(frozen=True, slots=True, kw_only=True)
class QkNorm:
    """Norms of queries and keys; `local_only`: in layers with a window or chunks alone."""

    weights: bool = True
    local_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRules:
    """The parts of attention."""

    bias: bool = False
    """Queries, keys and values have biases."""
    fused_qkv: bool = False
    """Checkpoints have queries, keys and values as one matrix."""
    qk_norm: QkNorm | None = None
    """How each head of queries and keys is normed before it is rotated; None: it is not."""
    value_norm: bool = False
    """Each head of values is normed, without a weight."""
    output_gate: OutputGate = OutputGate.NONE
    """The gate that the output of a head is multiplied by."""
    sinks: bool = False
    """Each head has a score for a sink, which has no value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentRules:
    """The parts that multi-head latent attention has besides."""

    norm_eps: float | None = None
    """That of the latents' norms; None: the decoder's."""
    scaled: bool = False
    """Latents are multiplied by the root of how many times as wide the decoder is."""
    normed_rope_key: bool = False
    """The rotated key that heads share is normed first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerRules:
    """The parts of the indexer of sparse attention."""

    norm_eps: float | None = 1e-6
    """That of its norms; None: the decoder's."""
    rope_last: bool = False
    """The last numbers of its heads are rotated, in the stead of the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NormRules:
    """Which norms there are, and their kind."""

    names: LayerNorms = LayerNorms()
    """The names of a layer's norms."""
    zero_centred: bool = False
    """Norms of layers and heads scale by 1 + weight."""
    plain_final: bool = False
    """The final norm scales by its weight alone."""
    float32_weights: bool = False
    """Weights stay in float32."""
    layer_norm: bool = False
    """Norms take the mean off first, as LayerNorm does."""
    biases: bool = False
    """Norms with means (LayerNorm) have biases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeRules:
    """How heads are rotated by their places, unless a checkpoint says otherwise."""

    none: bool = False
    """They are not."""
    local_only: bool = False
    """Only local layers (with a window or chunks) rotate, if there are any."""
    partial_factor: float = 1.0
    """So much of a head is rotated."""
    interleaved: bool = False
    """The two numbers of a pair are neighbours in checkpoints."""
    learned: bool = False
    """Checkpoints have how fast pairs turn, and by how much queries grow with their places."""
    mrope_interleaved: bool = False
    """Pairs are dealt out to time, height and width in turns."""
    mrope_space_first: bool = False
    """Pairs of height and width alternate, before those of time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpRules:
    """The parts of feed-forward parts, including experts."""

    ungated: bool = False
    """No gates, and a ReLU or its square between two products."""
    fused_gate_up: bool = False
    """Checkpoints store gates and up projections in one matrix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeRules:
    """The parts of layers with experts, and how experts are chosen."""

    kind: FeedForwardKind = FeedForwardKind.EXPERTS
    """The feed-forward part of such a layer."""
    grouped: bool = False
    """Each expert has its own score, and the best are chosen from the best groups."""
    softmax_scores: bool = False
    """That score is its probability among all experts."""
    unnormalised: bool = False
    """Experts are weighted by their probabilities among all experts, which do not sum to 1."""
    ungated_shared: bool = False
    """The shared expert has no gate."""
    limited_experts: bool = False
    """The limit for gates that a checkpoint states applies to experts only."""
    inputs_first: bool = False
    """Stacked matrices of experts have the input dimension first, whatever their shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRules:
    """How the parts of a decoder layer are put together."""

    output_biases: bool = False
    """The output projection of attention and both products of a feed-forward part have biases."""
    parallel_residual: bool = False
    """The feed-forward part gets the same input as the mixer."""
    gated_residual: bool = False
    """Outputs of parts are added by gates of the layer's own."""
    scalars: bool = False
    """A layer's output is multiplied by a learned number."""
    single_parts: bool = False
    """A layer is a mixer or a feed-forward part, behind one norm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyRules:
    """What happens before the first layer and after the last."""

    scaled_embeddings: bool = False
    """Token embeddings are multiplied by the square root of their width."""
    normed_embeddings: bool = False
    """They are normed, without a weight."""
    position_embeddings: bool = False
    """Learned position embeddings are added to the input."""
    media_by_token: bool = False
    """Rows of media have inputs of single layers by the tokens that stand for them."""
    logit_scale: str = ""
    """config.json's name for the number that logits are multiplied by; empty: none."""
    logit_divisor: str = ""
    """Its name for the number that logits are divided by; empty: none."""
    unsaid: str = ""
    """Tokens whose names begin with this are never generated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointNames:
    """How a checkpoint's files say it."""

    text_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of text settings that config.json leaves out."""
    part_names: Mapping[str, str] = field(default_factory=dict)
    """Names of layers' parts in transformers, and in our decoder."""
    changed_parts: Collection[str] = ()
    """Parts of names of tensors that transformers changes when it loads a checkpoint, and the decoder takes as they
    are."""


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models: what all its checkpoints have in common. The rest is read from each checkpoint."""

    modalities: Mapping[Modality, InPrompt]
    """The media that it takes, and how items of each stand in a prompt."""
    encoder: EncoderParts = VISION
    """Where checkpoints have the tower that computes rows."""
    texts: Collection[str] = ()
    """The `model_type`s of text that it is combined with, each of which describes the layers
    (`registry.TEXT_FAMILIES`); empty: it describes them itself."""
    prompt: PromptRules = PromptRules()
    attention: AttentionRules = AttentionRules()
    latent: LatentRules = LatentRules()
    indexer: IndexerRules = IndexerRules()
    norms: NormRules = NormRules()
    rope: RopeRules = RopeRules()
    mlp: MlpRules = MlpRules()
    moe: MoeRules = MoeRules()
    layers: LayerRules = LayerRules()
    vocabulary: VocabularyRules = VocabularyRules()
    checkpoint: CheckpointNames = CheckpointNames()
    mixers: Mapping[str, Mixer] = field(default_factory=lambda: {FULL: Mixer.ATTENTION})
    """The mixers of config.json's `layer_types`. Layers have windows if `SLIDING` or `OF_ANSWERS` is among these."""

    @property
    def windowed(self) -> str:
        """config.json's name for layers with windows; empty if there are none."""
        return next((each for each in (SLIDING, OF_ANSWERS) if each in self.mixers), "")

    def own_name(self, name: str) -> str:
        """What the decoder calls a tensor, or a module, by transformers' name behind that of its text.

        >>> names = CheckpointNames(part_names={"feed_forward.w1": "mlp.gate_proj"})
        >>> Family({}, checkpoint=names).own_name("layers.0.feed_forward.w1.weight")
        'layers.0.mlp.gate_proj.weight'
        """
        for theirs, own in self.checkpoint.part_names.items():
            before, found, behind = f".{name}.".partition(f".{theirs}.")
            if found:
                return f"{before}.{own}.{behind}".strip(".")
        return name
