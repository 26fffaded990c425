"""Heads of latent attention, as config.json states them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from common.checkpoints.checkpoint import CheckpointError
from llm_service.families.family import SLIDING, Family, Mixer
from llm_service.model_config.own_settings import KEY_HEADS, LATENT_SIZES, QUERY_HEADS, own_settings
from llm_service.model_config.rotary import yarn_growth


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """Heads of multi-head latent attention (DeepSeek-V2): all share one latent of `rank` numbers for keys and values.
    Queries and keys have `plain` numbers and `rotated` ones, and all heads share a key's rotated numbers; values have
    `value` numbers. Queries come from a latent of `query_rank` numbers, 0: from the layer's input. Products are
    multiplied by `scale`. `neighbours`: the numbers of a rotary pair are adjacent in checkpoints. Latents are normed
    with `eps`, then multiplied by `growth` (keys) or `query_growth`; with `norms_rotated`, the rotated numbers of a key
    are normed before rotation as well."""

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
        """Reads a text's settings; `rope` are its rotary settings and `norm_eps` is that of its other norms. Raises
        KeyError if a size is missing, and CheckpointError if there are biases, or numbers are rotated although the
        family has no rotation."""
        hidden, rank = int(text["hidden_size"]), int(text["kv_lora_rank"])
        query_rank = int(text.get("q_lora_rank") or 0)
        rotated, plain = int(text["qk_rope_head_dim"]), int(text["qk_nope_head_dim"])
        if text.get("attention_bias"):
            raise CheckpointError("latents with biases are not supported")
        if rotated and family.rope.none:
            raise CheckpointError("latents with rotated numbers are not supported here")
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
            neighbours=bool(text.get("rope_interleave", family.rope.interleaved)),
            eps=norm_eps if family.latent.norm_eps is None else family.latent.norm_eps,
            growth=(hidden / rank) ** 0.5 if family.latent.scaled else 1.0,
            query_growth=(hidden / query_rank) ** 0.5 if family.latent.scaled and query_rank else 1.0,
            norms_rotated=family.latent.normed_rope_key,
        )

    @property
    def unrotated(self) -> LatentHeads:
        """The same with all numbers of a query and a key plain ones."""
        return replace(self, rotated=0, plain=self.query)

    @property
    def width(self) -> int:
        """Numbers kept for a token: its latent, followed by its rotated key."""
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


def latent_heads(
    text: Mapping[str, Any],
    types: Sequence[str],
    rope: Mapping[str, Any],
    window_rope: Mapping[str, Any] | None,
    family: Family,
    norm_eps: float,
) -> tuple[LatentHeads | None, LatentHeads | None]:
    """The latent heads of layers of these types, and of those with a window, each with its rotary settings; None if
    there are none. Raises CheckpointError as `own_settings`, if layers without latents have such sizes, or latents have
    biases, and KeyError as `LatentHeads.of`."""
    has_latents = not _MIXERS.isdisjoint(family.mixers.values())
    own = own_settings(text, types, SLIDING if has_latents else "", LATENT_SIZES)
    if not has_latents:
        return None, None
    if text.get("attention_bias"):
        raise CheckpointError("biases of latents are not supported")
    every = LatentHeads.of(text, rope, family, norm_eps)
    local = LatentHeads.of({**text, **own}, window_rope or rope, family, norm_eps)
    _check_heads(text, types, local)
    return every, local if SLIDING in types else None


def _check_heads(text: Mapping[str, Any], types: Sequence[str], local: LatentHeads) -> None:
    """Saved configurations repeat, for layers with a window, numbers that follow from sizes of latents. Raises
    CheckpointError if these differ."""
    own = own_settings(text, types, SLIDING, KEY_HEADS | {QUERY_HEADS})
    queries, keys = own.get(QUERY_HEADS, text.get(QUERY_HEADS)), own.get("num_key_value_heads")
    if keys not in (None, queries):
        raise CheckpointError(f"layers whose latents are for {keys} heads of keys and {queries} of queries do not fit")
    if own.get("head_dim") not in (None, local.query, local.rotated):
        raise CheckpointError(f"layers whose heads have {own['head_dim']} numbers do not fit latents for {local.query}")


_MIXERS = {Mixer.LATENT_ATTENTION, Mixer.INDEXED_LATENT_ATTENTION, Mixer.POOLED_LATENT_ATTENTION}


def unrotated_layers(text: Mapping[str, Any]) -> frozenset[int]:
    """Layers whose latents have no rotated numbers, in a text whose other layers have them."""
    stated = (text.get("no_rope_layers") or ())[: int(text["num_hidden_layers"])]
    return frozenset(layer for layer, rotated in enumerate(stated) if not rotated)  # 0 says so


def latent_sources(text: Mapping[str, Any]) -> tuple[int, ...]:
    """For each layer, the layer whose latents it uses; empty if all use their own. Raises CheckpointError unless it is
    the last layer before it that shares its latents and is rotated alike."""
    sources = [int(each) for each in text.get("kv_source_layers") or ()]
    unrotated = unrotated_layers(text)
    for layer, source in enumerate(sources):
        shares = [each for each in range(layer) if sources[each] == each and each in sources[each + 1 :]]
        alike = [each for each in shares if (each in unrotated) == (layer in unrotated)]
        if source != layer and alike[-1:] != [source]:
            raise CheckpointError(f"layer {layer} shares other latents than the last that are for layers of its kind")
    return () if sources == list(range(len(sources))) else tuple(sources)
