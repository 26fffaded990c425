"""What single layers of a decoder have beside mixers and feed-forward parts, as config.json states it: inputs of their
own, tables of marks, streams between them, and embeddings of n-grams."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.checkpoint import CheckpointError


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
class BalancedShape:
    """Between layers there are so many streams, each as wide as the decoder, which become each other by matrices that
    are balanced in so many `rounds`; `eps` is added to what they are made of, and to what is divided by."""

    count: int
    eps: float
    rounds: int

    @classmethod
    def of(cls, text: Mapping[str, Any]) -> BalancedShape | None:
        """None where there are none of this kind."""
        if not text.get("hc_mult") or "hc_magnitude" in text:
            return None
        return cls(int(text["hc_mult"]), float(text["hc_eps"]), max(1, int(text["hc_sinkhorn_iters"])))


@dataclass(frozen=True, slots=True)
class OpenedShape:
    """Between layers there are so many streams, each as wide as the decoder, by which gates are opened: of each as much
    as one says goes into a part of a layer, and as much as another one says, `magnitude` at the most, of what that
    makes is added to it. `eps` is added to both."""

    count: int
    eps: float
    magnitude: float

    @classmethod
    def of(cls, text: Mapping[str, Any]) -> OpenedShape | None:
        """None where there are none of this kind."""
        if not text.get("hc_mult") or "hc_magnitude" not in text:
            return None
        return cls(int(text["hc_mult"]), float(text["hc_eps"]), float(text["hc_magnitude"]))


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
