"""What a family of models is described by."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from common.encoder_digest import VISION, EncoderParts
from common.hf.description import PromptFrame
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
    """What follows in a layer, for each token alone."""

    DENSE = "dense"
    EXPERTS = "experts"
    SCALED_EXPERTS = "experts whose inputs are scaled"
    BY_MODALITY = "experts by modality"
    POOLED_EXPERTS = "experts of narrower rows"
    BOTH = "dense, and experts beside it"
    NONE = "none: the layer is a mixer alone"


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What one decoder layer is made of."""

    mixer: Mixer
    feed_forward: FeedForwardKind
    sight: Sight = ALL_BEFORE
    """What a token sees, where the mixer is attention."""
    keys_of: int | None = None
    """The layer, counted from 0, whose keys and values it attends to; None: its own."""
    wide: bool = False
    """Its dense feed-forward part is twice as wide as others."""
    gates: Gates | None = None
    """Those of a dense part and of what all tokens go through beside experts; None: the activation that the
    configuration names."""
    expert_gates: Gates | None = None
    """Those of experts, likewise."""
    cut_share: float = 0.0
    """Share of a dense part's numbers that is cut off between its products."""
    inner: int = 0
    """Numbers of a dense part between its products; 0: as many as others have."""
    rotated: bool = True
    """Its latent attention has rotated numbers, as that of other layers."""
    chooses: bool = True
    """It chooses what an index lets it see; else it sees what the last layer before it chose."""


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """What checkpoints call a layer's norms, empty where there is none: those of what goes into its mixer and its
    feed-forward part, and those of what comes out of each before it is added."""

    mixer_in: str = "input_layernorm"
    feed_forward_in: str = "post_attention_layernorm"
    mixer_out: str = ""
    feed_forward_out: str = ""

    @property
    def behind(self) -> LayerNorms:
        """The same of what comes out of each part, in the stead of what goes in."""
        return LayerNorms("", "", self.mixer_in, self.feed_forward_in)


@dataclass(frozen=True, slots=True)
class Rows:
    """A run of an item's rows, its next `count`, each with a placeholder, or with a token of that id where one is
    given, or of that name among the family's `marks`. Rows that are pruned have none."""

    count: int
    token: int | str | None = None


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A special token, by what config.json calls its id, or tokenizer_config.json the token."""

    name: str


def in_one_run(header: Header) -> Iterable[str | SpecialToken | Rows]:
    """All rows one after the other, and nothing besides."""
    return (Rows(header.all_rows),)


@dataclass(frozen=True, slots=True)
class InPrompt:
    """How a family lays items of one modality out in a prompt.

    `token` is what the checkpoint calls the placeholder, as a `SpecialToken`, or the id. `expand` says what stands in
    its stead: texts, special tokens, which `marks` names, and the item's rows, all of them in order. `timed_frames`:
    positions in time count seconds · tokens_per_second, else frame groups. `counted`: rows have no height and width,
    and count on as text does.
    """

    token: str | int
    expand: Callable[[Header], Iterable[str | SpecialToken | Rows]] = in_one_run
    marks: tuple[str, ...] = ()
    timed_frames: bool = False
    counted: bool = False


FAR = 1 << 20
"""Positions of sequences that turn by other frequencies, since they are long, are counted from here."""
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
"""What config.json calls layers of attention whose tokens see all before them, or a window, or their chunk."""
OF_ANSWERS = "reference_sliding_attention"
"""What it calls layers whose tokens see all of a prompt, and of an answer a window."""
INDEXED = "indexed_attention"
"""What it calls layers that score all tokens before one, and attend to the best of them."""
MLP_ALONE, EXPERTS_ALONE = "mlp", "moe"
"""What it calls layers that are a feed-forward part alone."""
WINDOWED: Mapping[str, Mixer] = {FULL: Mixer.ATTENTION, SLIDING: Mixer.ATTENTION}


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRules:
    """How items of media stand in a prompt, besides what `InPrompt` says of each modality."""

    layout_from_encoder: bool = False
    """An item's header says which tokens stand for it; nothing follows from a grid."""
    alone: Collection[Modality] = ()
    """Items of these modalities are alone in a prompt: their rows depend on others."""
    duration_mark: str = ""
    """What a template has in the stead of a sound's seconds."""
    seam: str = ""
    """A mark beside items: two that touch are one, and what is behind it gets a space."""
    number_mark: str = ""
    """What stands for an item begins with this, if the item's number among those of its modality is behind it."""
    placeholder_run: int = 0
    """So many placeholders side by side stand for an item, as one does; 0: each stands for one."""
    long_rope_threshold: int = 0
    """Sequences that are longer turn by other frequencies (LongRoPE): their places are counted from `FAR`; 0: none."""
    pinned_tokens: Collection[int] = ()
    """Tokens that stay at an item's time where they are right behind it."""
    frame: PromptFrame | None = None
    """What else stands in a prompt with items, where that is not what the tokenizer puts before any text."""


class OutputGate(Enum):
    """A gate behind attention: for each number of each head, projected with the queries or apart, or one a head."""

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
    """What attention has."""

    bias: bool = False
    """Queries, keys and values have biases."""
    fused_qkv: bool = False
    """Checkpoints have queries, keys and values as one matrix."""
    qk_norm: QkNorm | None = None
    """How each head of queries and keys is normed before it is rotated; None: it is not."""
    value_norm: bool = False
    """Each head of values is normed, without a weight."""
    output_gate: OutputGate = OutputGate.NONE
    """What multiplies what a head attends to."""
    sinks: bool = False
    """Each head has a score of something that nobody attends to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentRules:
    """What multi-head latent attention has besides."""

    norm_eps: float | None = None
    """That of the latents' norms; None: the decoder's."""
    scaled: bool = False
    """Latents are multiplied by the root of how many times as wide the decoder is."""
    normed_rope_key: bool = False
    """The rotated key that heads share is normed first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerRules:
    """What an index of tokens has, of sparse attention."""

    norm_eps: float | None = 1e-6
    """That of its norms; None: the decoder's."""
    rope_last: bool = False
    """The last numbers of its heads are rotated, in the stead of the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NormRules:
    """Which norms there are, and how they norm."""

    names: LayerNorms = LayerNorms()
    """Those of a layer."""
    zero_centred: bool = False
    """Norms of layers and heads scale by 1 + weight."""
    plain_final: bool = False
    """The last norm, behind all layers, does not."""
    float32_weights: bool = False
    """Weights stay in float32."""
    layer_norm: bool = False
    """Norms take the mean off first, as LayerNorm does."""
    biases: bool = False
    """Those LayerNorms have biases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeRules:
    """How heads are rotated by their places, unless a checkpoint says otherwise."""

    none: bool = False
    """They are not."""
    local_only: bool = False
    """Only local layers, those with a window or chunks, rotate, where there are any."""
    partial_factor: float = 1.0
    """So much of a head is rotated."""
    interleaved: bool = False
    """The two numbers of a pair are neighbours in checkpoints."""
    learned: bool = False
    """Checkpoints have how fast pairs turn, and by how much queries grow with their places."""
    mrope_interleaved: bool = False
    """Pairs are dealt out to time, height and width in turns."""
    mrope_space_first: bool = False
    """Pairs of height and width are dealt out so, before those of time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpRules:
    """What feed-forward parts have, those of experts included."""

    ungated: bool = False
    """No gates, and a ReLU or its square between two products."""
    fused_gate_up: bool = False
    """Checkpoints have gates and what they open as one matrix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeRules:
    """What layers with experts have, and how experts are chosen."""

    kind: FeedForwardKind = FeedForwardKind.EXPERTS
    """What follows in such a layer."""
    grouped: bool = False
    """Each expert has a score of its own, and the best are among those of the best groups."""
    softmax_scores: bool = False
    """That score is its probability among all experts."""
    unnormalised: bool = False
    """Experts count by their probabilities among all, which do not sum up to 1."""
    ungated_shared: bool = False
    """The shared expert has no gate."""
    limited_experts: bool = False
    """The one limit of gates that a checkpoint states is for those of experts alone."""
    inputs_first: bool = False
    """Stacked matrices of experts have inputs first, whatever their shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRules:
    """How the parts of a decoder layer are put together."""

    output_biases: bool = False
    """What comes out of attention, and both products of a feed-forward part, have biases."""
    parallel_residual: bool = False
    """The feed-forward part is given what the mixer is."""
    gated_residual: bool = False
    """What parts give is added by gates of the layer's own."""
    scalars: bool = False
    """What comes out of a layer is multiplied by a number."""
    single_parts: bool = False
    """A layer is a mixer or a feed-forward part, behind one norm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyRules:
    """What becomes of tokens before the first layer, and of what the last one gives."""

    scaled_embeddings: bool = False
    """Those of tokens are multiplied by the root of their width."""
    normed_embeddings: bool = False
    """They are normed, without a weight."""
    position_embeddings: bool = False
    """What enters has numbers added by its place, from a table."""
    media_by_token: bool = False
    """Rows of media have inputs of single layers by the tokens that stand for them."""
    logit_scale: str = ""
    """What config.json calls the number that logits are multiplied by, if they are."""
    logit_divisor: str = ""
    """What it calls the one that they are divided by."""
    unsaid: str = ""
    """What names of tokens begin with that are never said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointNames:
    """How a checkpoint's files say it."""

    text_defaults: Mapping[str, Any] = field(default_factory=dict)
    """What holds of the decoder where config.json leaves it out."""
    part_names: Mapping[str, str] = field(default_factory=dict)
    """What transformers calls parts of layers, and what the decoder does."""
    changed_parts: Collection[str] = ()
    """Parts of names of tensors that transformers changes when it loads a checkpoint, and the decoder takes as they
    are."""


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models: what holds of all its checkpoints. What these state themselves is read from them."""

    modalities: Mapping[Modality, InPrompt]
    """The media that it takes, and how items of each stand in a prompt."""
    encoder: EncoderParts = VISION
    """Where checkpoints have what computes rows."""
    texts: Collection[str] = ()
    """The kinds of text that it goes with, each of which decides what layers have (`registry.TEXT_FAMILIES`); empty:
    it has its own."""
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
    """What config.json's `layer_types` stand for. There are windows where `SLIDING` or `OF_ANSWERS` is among them."""

    @property
    def windowed(self) -> str:
        """What config.json calls layers with windows; empty where there are none."""
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
