"""What single layers of a decoder have of their own, as config.json states it: heads, inputs, an index of what they
attend to, streams between them, and embeddings of n-grams."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.checkpoint import CheckpointError
from llm_service.families.family import FULL, SLIDING, Family
from llm_service.families.gates import BoundedGates, Gates, RaisedGates
from llm_service.models.rotary_config import yarn_growth


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Heads of keys and values, and the numbers of a head. `keys_as_values`: there is one projection for both, and a
    value is what a key was before it was normed and rotated."""

    kv_heads: int
    head_dim: int
    keys_as_values: bool = False

    @classmethod
    def of_full(cls, text: Mapping[str, Any], types: Sequence[str], usual: HeadShape) -> HeadShape | None:
        """Of layers without a window, where it is another than the usual one. Configurations state it as
        `global_head_dim` and `num_global_key_value_heads`, or, as they are saved now, layer by layer.

        Raises CheckpointError where layers of one type differ, or in something else.
        """
        same, stated = bool(text.get("attention_k_eq_v")), text.get("per_layer_config")
        heads, dim = text.get("num_global_key_value_heads") if same else None, text.get("global_head_dim")
        if stated is not None:
            own = _of_type(stated, types, FULL, {"head_dim", "num_key_value_heads"})
            heads, dim = own.get("num_key_value_heads"), own.get("head_dim")
        found = cls(int(heads or usual.kv_heads), int(dim or usual.head_dim), same)
        return None if found == usual else found


def local_heads(text: Mapping[str, Any], types: Sequence[str]) -> int | None:
    """How many heads of queries layers with a window have, where these are others. Raises CheckpointError as
    `HeadShape.of_full`."""
    own = _of_type(text.get("per_layer_config") or {}, types, SLIDING, {_QUERIES})
    found, usual = own.get(_QUERIES), int(text["num_attention_heads"])
    return None if found in (None, usual) else int(found)


def local_latents(text: Mapping[str, Any], types: Sequence[str], *, has_latents: bool) -> Mapping[str, Any]:
    """Sizes of latents that layers with a window have of their own. Raises CheckpointError as `HeadShape.of_full`, and
    where other layers have any, or those of a text without latents."""
    return _of_type(text.get("per_layer_config") or {}, types, SLIDING if has_latents else "", _LATENTS)


_QUERIES = "num_attention_heads"
_LATENTS = {"kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"}
_KNOWN = {"head_dim", "num_key_value_heads", _QUERIES} | _LATENTS


def _of_type(
    stated: Mapping[str, Mapping[str, Any]], types: Sequence[str], wanted: str, names: Collection[str]
) -> Mapping[str, Any]:
    """What all layers of one type have of their own among these settings, and no others have."""
    apart = {int(layer): own for layer, own in stated.items()}
    if unknown := sorted({name for own in apart.values() for name in own} - _KNOWN):
        raise CheckpointError(f"layers with {unknown[0]} of their own are not supported")
    named = [{name: apart.get(layer, {}).get(name) for name in names} for layer in range(len(types))]
    each = [{name: value for name, value in own.items() if value is not None} for own in named]
    found = next((own for own, kind in zip(each, types, strict=True) if kind == wanted), {})
    if any(own != (found if kind == wanted else {}) for own, kind in zip(each, types, strict=True)):
        raise CheckpointError("layers of one type with different heads are not supported")
    return found


def gates_of(text: Mapping[str, Any], limits: str) -> tuple[Gates | None, ...]:
    """Those of each layer, by what a configuration calls the list of their limits, in which 0 is none; empty where all
    are plain ones."""
    count = int(text["num_hidden_layers"])
    if (sharpness := text.get("swiglu_alpha")) is not None:
        return (RaisedGates(float(sharpness), float(text["swiglu_limit"])),) * count
    each = [limit or None for limit in text.get(limits) or ()][:count]
    return tuple(None if limit is None else BoundedGates(float(limit)) for limit in each) if any(each) else ()


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """Heads whose keys and values are made of one latent of `rank` numbers, which all share, as in DeepSeek-V2. A
    query and a key have `plain` numbers, and `rotated` ones, which of a key all heads share as well; a value has
    `value`. Queries are made of a latent of `query_rank` numbers, 0: of the layer's input. Products are multiplied by
    `scale`. `neighbours`: the two numbers of a rotary pair are neighbours in checkpoints. Latents are normed with this
    `eps`, and then multiplied, that of keys by `growth` and that of queries by `query_growth`; with `norms_rotated` the
    rotated numbers of a key are normed as well, before they are."""

    rank: int
    rotated: int
    plain: int
    value: int
    query_rank: int
    scale: float
    neighbours: bool
    eps: float = 1e-6
    growth: float = 1.0
    query_growth: float = 1.0
    norms_rotated: bool = False

    @classmethod
    def of(cls, text: Mapping[str, Any], rope: Mapping[str, Any], family: Family, norm_eps: float) -> LatentHeads:
        """Of a text with these rotary settings, whose other norms have this eps. Raises KeyError where a size is
        missing."""
        hidden, rank = int(text["hidden_size"]), int(text["kv_lora_rank"])
        query_rank = int(text.get("q_lora_rank") or 0)
        rotated, plain = int(text["qk_rope_head_dim"]), int(text["qk_nope_head_dim"])
        scale, growth = (plain + rotated) ** -0.5, rope.get("mscale_all_dim")
        if growth and rope.get("rope_type", rope.get("type", "default")) != "default":
            scale *= yarn_growth(float(rope["factor"]), float(growth)) ** 2
        return cls(
            rank=rank,
            rotated=rotated,
            plain=plain,
            value=int(text["v_head_dim"]),
            query_rank=query_rank,
            scale=scale,
            neighbours=bool(text.get("rope_interleave", family.rotary_neighbours)),
            eps=norm_eps if family.latent_eps is None else family.latent_eps,
            growth=(hidden / rank) ** 0.5 if family.scaled_latents else 1.0,
            query_growth=(hidden / query_rank) ** 0.5 if family.scaled_latents and query_rank else 1.0,
            norms_rotated=family.normed_rotary_keys,
        )

    @property
    def width(self) -> int:
        """Numbers that are kept of a token: its latent, and behind that its rotated key."""
        return self.rank + self.rotated

    @property
    def query(self) -> int:
        """Numbers of a head's query."""
        return self.plain + self.rotated

    def expands(self, count: int, context: int) -> bool:
        """Whether `count` tokens behind `context` others take fewer products if a head's keys and values are made of
        all latents, rather than its queries multiplied with latents. Of its own tokens that takes as many either way.

        >>> shape = LatentHeads(512, 64, 128, 128, 1536, 0.1, neighbours=True)
        >>> shape.expands(16, 0), shape.expands(64, 19), shape.expands(64, 20), shape.expands(171, 100_000)
        (True, True, False, True)
        """
        made = context * self.rank * (self.plain + self.value)
        less = 2 * self.rank - self.plain - self.value  # of products for each token that one sees
        return made < count * (context + count / 2) * less


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """Each layer has an input of its own for each token, of so many numbers, which is looked up by the token in a table
    of so many `rows`; tokens beyond these have that of the first. Media rows have that of the token `padding`, None: of
    the tokens that stand for them."""

    width: int
    padding: int | None
    rows: int

    @classmethod
    def of(cls, text: Mapping[str, Any], *, padded: bool = True) -> LayerInputs | None:
        """None where layers have none; `padded`: media rows have the padding's. Raises CheckpointError where some
        tokens have none then."""
        if not text.get("hidden_size_per_layer_input"):
            return None
        rows = int(text["vocab_size_per_layer_input"])
        if padded and rows != int(text["vocab_size"]):
            raise CheckpointError("layers that have inputs for other tokens than there are are not supported")
        padding = int(text.get("pad_token_id") or 0) if padded else None
        return cls(int(text["hidden_size_per_layer_input"]), padding, rows)


@dataclass(frozen=True, slots=True)
class MarkTable:
    """`count` tokens from the id `first` on have a table of their own, of so many numbers each, which is called `name`
    in checkpoints."""

    name: str
    first: int
    count: int
    width: int
    eps: float


@dataclass(frozen=True, slots=True)
class AlternatingShape:
    """Between layers there are so many streams, of which layers compute the first. `scaled`: what that opens of layers'
    own inputs is by a weight. A second residual goes by way of `residual_rank` numbers."""

    count: int
    scaled: bool
    residual_rank: int

    @classmethod
    def of(cls, text: Mapping[str, Any]) -> AlternatingShape | None:
        """None where there is one. Raises CheckpointError where it is another than the first that layers compute."""
        if not text.get("altup_num_inputs"):
            return None
        if text.get("altup_active_idx"):
            raise CheckpointError("layers that compute another stream than the first are not supported")
        count, scaled = int(text["altup_num_inputs"]), bool(text.get("altup_correct_scale", True))
        return cls(count, scaled, int(text["laurel_rank"]))


def inner_sizes(text: Mapping[str, Any]) -> tuple[int, ...]:
    """Of each layer the numbers between the products of its feed-forward part; empty where all have as many. Raises
    CheckpointError where there is not one for each layer."""
    stated = text.get("intermediate_size")
    if not isinstance(stated, list) or len(set(stated)) < 2:
        return ()
    if len(stated) != int(text["num_hidden_layers"]):
        raise CheckpointError("intermediate_size is not of each layer")
    return tuple(map(int, stated))


def cut_shares(text: Mapping[str, Any]) -> tuple[float, ...]:
    """Of each layer the share of its gates that do not count; empty where all do in all layers."""
    stated = text.get("activation_sparsity_pattern") or ()
    return tuple(map(float, stated)) if any(stated) else ()


@dataclass(frozen=True, slots=True)
class IndexShape:
    """How a layer's index chooses what a token attends to: keys of `head_dim` numbers, one for each `stretch` tokens,
    are scored by so many `heads` of queries, and the tokens of the best `kept` stretches are seen, with those behind
    the last whole one."""

    heads: int
    head_dim: int
    stretch: int
    kept: int

    @classmethod
    def of(cls, text: Mapping[str, Any]) -> IndexShape:
        """Raises CheckpointError where keys have several heads, or the budget is no whole number of stretches."""
        if int(text["indexer_kv_heads"]) != 1:
            raise CheckpointError("an index with several heads of keys is not supported")
        budget, stretch = int(text["indexer_budget"]), int(text["indexer_compress_ratio"])
        if not 0 < stretch <= budget or budget % stretch:
            raise CheckpointError(f"an index that keeps {budget} tokens in stretches of {stretch} is not supported")
        return cls(int(text["indexer_n_heads"]), int(text["indexer_head_dim"]), stretch, budget // stretch)


@dataclass(frozen=True, slots=True)
class TokenIndexShape:
    """How a layer's index chooses what a token attends to: each token has a key of `head_dim` numbers, which is scored
    by so many `heads` of queries, and the `most` with the highest scores are seen."""

    heads: int
    head_dim: int
    most: int

    @classmethod
    def of(cls, text: Mapping[str, Any]) -> TokenIndexShape:
        """Raises KeyError where a size is missing."""
        return cls(int(text["index_n_heads"]), int(text["index_head_dim"]), int(text["index_topk"]))


@dataclass(frozen=True, slots=True)
class BlockIndexShape:
    """How a layer's index chooses what a token attends to: each token has a key of `head_dim` numbers, which is scored
    by a head of queries for each head of keys and values. Blocks of `size` tokens are seen there, as `BlockIndex` has
    it: the `local` ones that end with a token's own, and those with the highest scores, `most` in all."""

    head_dim: int
    size: int
    most: int
    local: int

    @classmethod
    def of(cls, text: Mapping[str, Any], kv_heads: int) -> BlockIndexShape:
        """Raises CheckpointError where it has other heads than keys have, or more local blocks than blocks, and
        KeyError where a size is missing."""
        if int(text["index_n_heads"]) != kv_heads:
            raise CheckpointError("an index of blocks with other heads than keys have is not supported")
        most, local = int(text["index_topk_blocks"]), int(text["index_local_blocks"])
        if local > most:
            raise CheckpointError(f"an index that keeps {most} blocks, and {local} local ones, is not supported")
        return cls(int(text["index_head_dim"]), int(text["index_block_size"]), most, local)


@dataclass(frozen=True, slots=True)
class StreamShape:
    """Between layers there are so many streams, each as wide as the decoder. How they are mixed into what a part of a
    layer is given follows from all of them, by way of `rank` numbers."""

    count: int
    rank: int

    @classmethod
    def of(cls, text: Mapping[str, Any]) -> StreamShape | None:
        """None where there is one."""
        count = int(text.get("hc_count") or 1)
        return cls(count, int(text["hc_lowrank"])) if count > 1 else None


@dataclass(frozen=True, slots=True)
class NgramShape:
    """In these `layers`, counted from 0, each token adds embeddings of itself with the tokens before it, of n-grams of
    2 to `size` tokens, which are found by `heads` hashes each, `width` numbers in all; a convolution of `reach` places,
    `size` tokens apart, sees what others have added. Tables of hashes have more than `base` rows, a prime number of
    them, and together a multiple of `multiple`, and are in `parts` in a checkpoint. Nothing is seen across the token
    `end`."""

    layers: tuple[int, ...]
    size: int
    heads: int
    width: int
    reach: int
    base: int
    multiple: int
    parts: int
    seed: int
    end: int

    @classmethod
    def of(cls, text: Mapping[str, Any]) -> NgramShape | None:
        """None where no layer has any. Raises CheckpointError where the token that ends texts is not stated, layers are
        meant that are not there, or a size makes no sense."""
        if not (layers := text.get("ple_layer_ids")):
            return None
        ends = text.get("eos_token_id")
        end = ends[0] if isinstance(ends, list) and ends else ends
        if not isinstance(end, int):
            raise CheckpointError("embeddings of n-grams need the eos_token_id that config.json does not state")
        found = tuple(sorted({int(layer) - 1 for layer in layers}))
        if found[0] < 0 or found[-1] >= int(text["num_hidden_layers"]):
            raise CheckpointError("ple_layer_ids names layers that are not there")
        made = cls(
            layers=found,
            size=int(text.get("ngram_size", 3)),
            heads=int(text.get("heads_per_ngram", 8)),
            width=int(text.get("ple_embed_dim") or text["hidden_size"]),
            reach=int(text.get("ple_conv_kernel_size", 4)),
            base=int(text.get("ngram_vocab_size_base", 20_000_000)),
            multiple=int(text.get("make_ngram_vocab_size_divisible_by", 128)),
            parts=int(text.get("split_ngram_parts", 512)),
            seed=int(text.get("seed", 1234)),
            end=end,
        )
        if made.size < 2 or min(made.heads, made.width, made.reach, made.base, made.multiple, made.parts) < 1:
            raise CheckpointError("n-grams of fewer than two tokens, or of sizes below 1, are not supported")
        return made
