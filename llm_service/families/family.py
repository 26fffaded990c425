"""What a family of models is described by."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from common.hf.description import PromptFrame
from common.identity import VISION, EncoderParts
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
    """What one decoder layer is made of. `sight` is what a token sees where its mixer is attention, and `keys_of` the
    layer, counted from 0, whose keys and values it attends to, None: its own. `wide`: its dense feed-forward part is
    twice as wide as others. `gates` are those of a dense part and of what all tokens go through beside experts,
    `expert_gates` those of experts, None: the activation that the configuration names. A dense part has `inner` numbers
    between its products, 0: as many as others. Latent attention may have no `rotated` numbers where that of other
    layers has; one to what an index chooses either `chooses`, or sees what the last layer before it chose."""

    mixer: Mixer
    feed_forward: FeedForwardKind
    sight: Sight = ALL_BEFORE
    keys_of: int | None = None
    wide: bool = False
    gates: Gates | None = None
    expert_gates: Gates | None = None
    cut_share: float = 0.0
    inner: int = 0
    rotated: bool = True
    chooses: bool = True


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
    """A run of an item's rows, its next `count`: as many placeholders, or tokens of that id where one is given, or of
    that name among the family's `marks`, less those of rows that are pruned."""

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


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models. What its checkpoints state themselves is read from them. `encoder` is where they have what
    computes rows.

    `replaced`: the encoder says what stands in a prompt for an item, in its header; nothing follows from a grid.
    `alone`: of which modalities an item is alone in a prompt, as it depends on the others. `length_mark`: what a
    template has in the stead of a sound's seconds. `seam`: a mark beside items, of which two that touch are one, and
    behind which a word gets a space. `number_mark`: what stands for an item begins with, if its number among those of
    its modality is behind that. `run`: so many placeholders side by side stand for an item, as one does. `pinned`:
    tokens that stay at an item's time where they are right behind it. `frame`: what else stands in a prompt with items,
    where that is not what the tokenizer puts before any text. `texts`: the kinds of text that it goes with, each of
    which decides what layers have (`registry.TEXT_FAMILIES`); empty: it has its own.

    Layers: `attention_bias`, queries, keys and values have biases; `output_biases`, what comes out of attention and
    both products of a feed-forward part; `qk_norm`, each query and key head is normed before it is rotated, by a norm
    without a weight with `plain_head_norms`, with `local_head_norms` in local layers alone; `output_gate`, each head of
    queries has a gate for what is attended to, number by number, from a projection of its own with `gates_apart`, and
    `head_gates`, one for all of it; `norms`, which there are, and `zero_centred_norms`, those of layers and heads scale
    by 1 + weight, but for the last with `whole_last_gain`, or, with `long_gains`, by weights that stay in float32;
    `layer_norms`, those of layers take the mean off first, as LayerNorm does, without biases, or with `norm_biases`;
    `parallel_residual`, a layer's feed-forward part is given what its mixer is; `gated_residual`, what parts give is
    added by gates of the layer's own; `value_norm`, each head of values is normed, without a weight; `layer_scalars`,
    what comes out of a layer is multiplied by a number; `media_by_token`, rows of media have inputs of single layers by
    the tokens that stand for them; `scaled_embeddings`, those of tokens are multiplied by the root of their width, with
    `normed_embeddings` they are normed, without a weight; `logit_scale` and `logit_divisor`, what config.json calls the
    number that logits are multiplied or divided by, if they are; `rotary_neighbours`, the two numbers of a rotary pair
    are neighbours in checkpoints; `latent_eps`, that of norms of latents, and `index_eps`, that of norms of an index of
    tokens, None: the usual, with `index_turns_last` the last numbers of its heads are rotated in the stead of the
    first; `sinks`, each head has a score of something that nobody attends to; with `scaled_latents` these
    are multiplied by the root of how many times as wide the decoder is, and with `normed_rotary_keys` the rotated key
    that heads share is normed first; `learned_positions`, how fast rotary pairs turn, and by how much queries grow with
    their places, is in checkpoints; `rotary_in_windows`, heads are rotated in local layers alone, those with a window
    or chunks, where there are any, and with `unrotated` in none; `learned_places`, what enters has numbers added by its
    place; `fused_heads`, checkpoints have queries, keys and values as one matrix, and `fused_gates` gates and what they
    open; `ungated`, feed-forward parts have none, and a ReLU or its square between two products; `grouped_experts`,
    each expert has a score of its own, with `likely_experts` its probability among all, and the likeliest are among
    those of the likeliest groups; `probability_weights`, experts count by their probabilities among all, which do not
    sum up to 1; `ungated_shared`, what all tokens go through beside their experts has no gate; `cut_experts`, one
    limit of gates is for those of experts alone; `sparse`, what follows in a layer with experts, whose stacked matrices
    have inputs first where they are `experts_inputs_first`, or their shape says so; `single_parts`, a layer is a mixer
    or a feed-forward part, behind one norm;
    `mrope_interleaved`, rotary pairs are dealt out to time, height and width in turns, and `space_first`, those of
    height and width so before those of time, and `rotary_share`, so much of a head is rotated, unless the checkpoint
    says otherwise. `mixers`: what config.json's `layer_types` stand for; a family has windows where `SLIDING` or
    `OF_ANSWERS` is among them, and where queries grow in none of its contexts they are left as they are. `unsaid`: what
    names of tokens begin with that are never said. `text_defaults`: what holds of the decoder where config.json leaves
    it out. `part_names`: what transformers calls parts of layers, and the decoder otherwise. `changed_parts`: tensors
    that transformers changes when it loads a checkpoint, and the decoder takes as they are, by parts of their names.
    """

    modalities: Mapping[Modality, InPrompt]
    encoder: EncoderParts = VISION
    replaced: bool = False
    alone: Collection[Modality] = ()
    length_mark: str = ""
    seam: str = ""
    number_mark: str = ""
    run: int = 0
    turns_at: int = 0
    pinned: Collection[int] = ()
    frame: PromptFrame | None = None
    texts: Collection[str] = ()
    attention_bias: bool = False
    output_biases: bool = False
    qk_norm: bool = False
    plain_head_norms: bool = False
    local_head_norms: bool = False
    output_gate: bool = False
    gates_apart: bool = False
    head_gates: bool = False
    norms: LayerNorms = LayerNorms()
    zero_centred_norms: bool = False
    long_gains: bool = False
    whole_last_gain: bool = False
    layer_norms: bool = False
    norm_biases: bool = False
    parallel_residual: bool = False
    gated_residual: bool = False
    value_norm: bool = False
    layer_scalars: bool = False
    media_by_token: bool = False
    scaled_embeddings: bool = False
    normed_embeddings: bool = False
    logit_scale: str = ""
    logit_divisor: str = ""
    rotary_neighbours: bool = False
    latent_eps: float | None = None
    index_eps: float | None = 1e-6
    index_turns_last: bool = False
    sinks: bool = False
    scaled_latents: bool = False
    normed_rotary_keys: bool = False
    learned_positions: bool = False
    rotary_in_windows: bool = False
    unrotated: bool = False
    learned_places: bool = False
    fused_heads: bool = False
    fused_gates: bool = False
    ungated: bool = False
    grouped_experts: bool = False
    likely_experts: bool = False
    probability_weights: bool = False
    ungated_shared: bool = False
    cut_experts: bool = False
    sparse: FeedForwardKind = FeedForwardKind.EXPERTS
    experts_inputs_first: bool = False
    single_parts: bool = False
    mrope_interleaved: bool = False
    space_first: bool = False
    rotary_share: float = 1.0
    text_defaults: Mapping[str, Any] = field(default_factory=dict)
    mixers: Mapping[str, Mixer] = field(default_factory=lambda: {FULL: Mixer.ATTENTION})
    unsaid: str = ""
    part_names: Mapping[str, str] = field(default_factory=dict)
    changed_parts: Collection[str] = ()

    @property
    def windowed(self) -> str:
        """What config.json calls layers with windows; empty where there are none."""
        return next((each for each in (SLIDING, OF_ANSWERS) if each in self.mixers), "")

    def own_name(self, name: str) -> str:
        """What the decoder calls a tensor, or a module, by transformers' name behind that of its text.

        >>> Family({}, part_names={"feed_forward.w1": "mlp.gate_proj"}).own_name("layers.0.feed_forward.w1.weight")
        'layers.0.mlp.gate_proj.weight'
        """
        for theirs, own in self.part_names.items():
            before, found, behind = f".{name}.".partition(f".{theirs}.")
            if found:
                return f"{before}.{own}.{behind}".strip(".")
        return name
