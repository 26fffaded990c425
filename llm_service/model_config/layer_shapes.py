"""Further parts of decoder layers, as config.json states them: per-layer inputs, tables of special tokens, streams
between layers, and n-gram embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.checkpoints.checkpoint import CheckpointError


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """Each layer has its own input for each token, of so many numbers, from a table with `rows` rows; tokens beyond
    these use the first row. Media rows use that of the token `padding`; None: those of their placeholders."""

    width: int
    padding: int | None
    rows: int

    @classmethod
    def of(cls, text: Mapping[str, Any], *, padded: bool = True) -> LayerInputs | None:
        """None if layers have none; `padded`: media rows use the padding token's. Raises CheckpointError if some tokens
        would have none."""
        if not text.get("hidden_size_per_layer_input"):
            return None
        rows = int(text["vocab_size_per_layer_input"])
        if padded and rows != int(text["vocab_size"]):
            raise CheckpointError("layers that have inputs for other tokens than there are are not supported")
        padding = int(text.get("pad_token_id") or 0) if padded else None
        return cls(int(text["hidden_size_per_layer_input"]), padding, rows)


@dataclass(frozen=True, slots=True)
class MarkTable:
    """The `count` tokens from id `first` on have a table of their own, with so many numbers each, called `name` in
    checkpoints."""

    name: str
    first: int
    count: int
    width: int
    eps: float


@dataclass(frozen=True, slots=True)
class AlternatingShape:
    """AltUp: there are so many streams between layers, and layers compute the first. `scaled`: the gate of per-layer
    inputs has a weight. A second residual passes through `residual_rank` numbers."""

    count: int
    scaled: bool
    residual_rank: int

    @classmethod
    def of(cls, text: Mapping[str, Any]) -> AlternatingShape | None:
        """None if there is one stream. Raises CheckpointError if layers compute another stream than the first."""
        if not text.get("altup_num_inputs"):
            return None
        if text.get("altup_active_idx"):
            raise CheckpointError("layers that compute another stream than the first are not supported")
        count, scaled = int(text["altup_num_inputs"]), bool(text.get("altup_correct_scale", True))
        return cls(count, scaled, int(text["laurel_rank"]))


@dataclass(frozen=True, slots=True)
class StreamShape:
    """Hyper-connections: so many streams between layers, each as wide as the decoder. The input of a layer's part is
    mixed from all of them, by weights computed from all of them through `rank` numbers."""

    count: int
    rank: int

    @classmethod
    def of(cls, text: Mapping[str, Any]) -> StreamShape | None:
        """None if there is one stream."""
        count = int(text.get("hc_count") or 1)
        return cls(count, int(text["hc_lowrank"])) if count > 1 else None


@dataclass(frozen=True, slots=True)
class BalancedShape:
    """Manifold-constrained hyper-connections: so many streams between layers, mixed by matrices that are balanced in so
    many `rounds`; `eps` is added to what these are made from, and to divisors."""

    count: int
    eps: float
    rounds: int

    @classmethod
    def of(cls, text: Mapping[str, Any]) -> BalancedShape | None:
        """None if there are no such streams."""
        if not text.get("hc_mult") or "hc_magnitude" in text:
            return None
        return cls(int(text["hc_mult"]), float(text["hc_eps"]), max(1, int(text["hc_sinkhorn_iters"])))


@dataclass(frozen=True, slots=True)
class OpenedShape:
    """Gated hyper-connections: so many streams between layers, each with a gate for what goes into a layer's part, and
    one, up to `magnitude`, for what is added from it. `eps` is added to both."""

    count: int
    eps: float
    magnitude: float

    @classmethod
    def of(cls, text: Mapping[str, Any]) -> OpenedShape | None:
        """None if there are no such streams."""
        if not text.get("hc_mult") or "hc_magnitude" not in text:
            return None
        return cls(int(text["hc_mult"]), float(text["hc_eps"]), float(text["hc_magnitude"]))


@dataclass(frozen=True, slots=True)
class NgramShape:
    """N-gram embeddings: in these `layers`, counted from 0, each token adds embeddings of the n-grams of 2 to `size`
    tokens that end with it, found by `heads` hashes each, `width` numbers in all; a convolution over `reach` positions,
    `size` tokens apart, follows. Tables of hashes have more than `base` rows, a prime number each and together a
    multiple of `multiple`, and are in `parts` in a checkpoint. N-grams do not cross the token `end`."""

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
        """None if no layer has any. Raises CheckpointError if the end token is not stated, a layer does not exist, or a
        size makes no sense."""
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
