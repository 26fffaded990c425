"""How heads are rotated, as config.json states it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.checkpoints.checkpoint import CheckpointError
from llm_service.families.family import FULL, INDEXED, SLIDING, Family


@dataclass(frozen=True, slots=True)
class RotaryScaling:
    """Scaling of rotary frequencies for contexts longer than in training: pairs that turn fast within `original` tokens
    keep their frequency, slow ones turn `factor` times as slowly, and those between `slow` and `fast` turns in between.
    `kind` is linear (all are slow), llama3 or yarn. Results grow by `magnitude`; `truncate`: yarn's bounds are whole
    pairs. With kind proportional, the first `share` of the pairs turn as before and the others not at all. With kind
    longrope, each pair turns as many times as slowly as `each` says, and in sequences of more than `original` tokens as
    `each_if_long` says."""

    kind: str
    factor: float
    original: int = 0
    slow: float = 1.0
    fast: float = 1.0
    magnitude: float = 1.0
    truncate: bool = True
    share: float = 1.0
    each: tuple[float, ...] = ()
    each_if_long: tuple[float, ...] = ()

    @classmethod
    def of(cls, rope: Mapping[str, Any], max_position: int) -> RotaryScaling | None:
        """The scaling in a configuration's rotary settings; None if there is none. Raises CheckpointError for an
        unsupported kind, and KeyError if a setting is missing."""
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind in ("default", "mrope", "dynamic"):  # dynamic only scales beyond the longest context
            return None
        if kind == "linear":
            return cls(kind, float(rope["factor"]))
        if kind == "llama3":
            slow, fast = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
            return cls(kind, float(rope["factor"]), int(rope["original_max_position_embeddings"]), slow, fast)
        if kind == "yarn":
            original = int(rope["original_max_position_embeddings"])
            factor = float(rope.get("factor") or max_position / original)
            return cls(
                kind,
                factor,
                original,
                slow=float(rope.get("beta_slow") or 1),
                fast=float(rope.get("beta_fast") or 32),
                magnitude=_yarn_magnitude(rope, factor),
                truncate=bool(rope.get("truncate", True)),
            )
        if kind == LONG:
            original = int(rope["original_max_position_embeddings"])
            factor = float(rope.get("factor") or max_position / original)
            stated = rope.get("attention_factor")
            growth = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
            return cls(
                kind,
                factor,
                original,
                magnitude=growth if stated is None else float(stated),
                each=tuple(map(float, rope["short_factor"])),
                each_if_long=tuple(map(float, rope["long_factor"])),
            )
        if kind == _PROPORTIONAL and rope.get("factor", 1.0) == 1.0:
            return cls(kind, math.inf, share=float(rope.get("partial_rotary_factor", 1.0)))
        raise CheckpointError(f"rotary scaling {kind} is not supported")


LONG = "longrope"
"""Sequences of two lengths turn by frequencies of their own (Ding et al. 2024, LongRoPE)."""
_PROPORTIONAL = "proportional"


def _yarn_magnitude(rope: Mapping[str, Any], factor: float) -> float:
    """The factor that YaRN (Peng et al. 2023) has for cosine and sine, unless it is stated."""
    if (stated := rope.get("attention_factor")) is not None:
        return float(stated)

    one, other = rope.get("mscale"), rope.get("mscale_all_dim")
    if one and other:
        return yarn_growth(factor, float(one)) / yarn_growth(factor, float(other))
    return yarn_growth(factor, 1.0)


def yarn_growth(factor: float, share: float) -> float:
    """What YaRN would have what is turned grow by, of pairs that turn so many times as slowly.

    >>> yarn_growth(1.0, 1.0), round(yarn_growth(40.0, 1.0), 4)
    (1.0, 1.3689)
    """
    return 0.1 * share * math.log(factor) + 1 if factor > 1 else 1.0


@dataclass(frozen=True, slots=True)
class Tempering:
    """Queries grow with their places: times 1 + scale · ln(1 + ⌊(place + ahead) / floor⌋)."""

    floor: float
    scale: float
    ahead: float = 1.0

    @classmethod
    def of(cls, rope: Mapping[str, Any], text: Mapping[str, Any], longest: int) -> Tempering | None:
        """The tempering of layers with rotary settings `rope`, as in Llama 4, whose layers with it do not rotate, and
        in Ministral 3, in all layers; None if no query grows in a context of `longest` tokens. Raises KeyError."""
        found = None
        if beta := rope.get("llama_4_scaling_beta"):
            found = cls(float(rope["original_max_position_embeddings"]), float(beta), ahead=0.0)
        elif rope is _UNROTATED and text.get("attn_temperature_tuning"):
            found = cls(float(text["floor_scale"]), float(text["attn_scale"]))
        return found if found is not None and longest > found.reach else None

    @property
    def reach(self) -> int:
        """Tokens of the longest context in which no query grows."""
        return int(self.floor - self.ahead)

    def factors(self, places: Any) -> Any:
        """The factors of queries at these positions, an integer tensor: float32 of the same shape."""
        return ((places.float() + self.ahead) / self.floor).floor().log1p() * self.scale + 1.0


@dataclass(frozen=True, slots=True)
class RotaryConfig:
    """How heads are rotated: the first `dim` numbers of each, whose pairs `sections` assigns to time, height and width;
    alternating if `interleaved`, and with `space_first` alternating for height and width, before time. `tempering`: how
    much queries grow besides. If `own_sections` is not empty, it assigns pairs to four axes instead, the first of which
    is a token's own number. `learned`: checkpoints contain frequencies, and how much queries grow with their
    positions."""

    dim: int
    theta: float
    sections: tuple[int, int, int]
    interleaved: bool
    scaling: RotaryScaling | None = None
    tempering: Tempering | None = None
    space_first: bool = False
    own_sections: tuple[int, ...] = ()
    learned: bool = False

    @classmethod
    def of(
        cls,
        rope: Mapping[str, Any],
        text: Mapping[str, Any],
        family: Family,
        head_dim: int,
        max_position: int,
        longest: int,
    ) -> RotaryConfig:
        """Of the rotary settings `rope` of a text, in contexts of up to `longest` tokens. Raises CheckpointError as
        `RotaryScaling.of`, and KeyError."""
        share = rope.get("partial_rotary_factor", text.get("partial_rotary_factor", family.rope.partial_factor))
        dim = head_dim if rope.get("rope_type") == _PROPORTIONAL else int(head_dim * share)
        sections = tuple(rope.get("mrope_section") or text.get("mrope_section") or (dim // 2, 0, 0))
        if family.rope.mrope_space_first:  # time is the last
            sections = *sections[2:], *sections[:2]
            if sections[1:2] != sections[2:]:
                raise CheckpointError("height and width that turn different numbers of pairs are not supported")
        own_sections: tuple[int, ...] = sections if len(sections) == _OWN_AXES else ()
        if own_sections and sum(own_sections) == dim // 2:
            sections = dim // 2, 0, 0
        if len(sections) != 3 or sum(sections) != dim // 2:
            raise CheckpointError("mrope_section does not fill what is rotated of a head")
        tempering = Tempering.of(rope, text, longest)
        if long := rope.get("rope_type", rope.get("type")) == LONG:
            if family.modalities or own_sections or tempering is not None or family.rope.learned:
                raise CheckpointError("rotary scaling longrope is not supported here")
            rope = {**_stated(text, "original_max_position_embeddings"), **rope}
        scaling = RotaryScaling.of(rope, max_position)
        if long and scaling is not None and {len(scaling.each), len(scaling.each_if_long)} != {dim // 2}:
            raise CheckpointError("factors of longrope are not as many as pairs that are rotated")
        return cls(
            dim=dim,
            theta=_theta(rope, text, dim),
            sections=(sections[0], sections[1], sections[2]),
            interleaved=bool(rope.get("mrope_interleaved", family.rope.mrope_interleaved)),
            scaling=scaling,
            tempering=tempering,
            space_first=family.rope.mrope_space_first,
            own_sections=own_sections,
            learned=family.rope.learned,
        )


def _stated(text: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {name: text[name]} if text.get(name) else {}


_OWN_AXES = 4
"""Axes if one is a token's own number."""


def _theta(rope: Mapping[str, Any], text: Mapping[str, Any], dim: int) -> float:
    """The base of frequencies. An `alpha` for dynamic scaling stretches it, and then contexts of any length."""
    theta, alpha = float(rope.get("rope_theta") or text["rope_theta"]), float(rope.get("alpha") or 0)
    stretched = alpha > 0 and rope.get("rope_type", rope.get("type")) == "dynamic"
    return theta * math.pow(alpha, dim / (dim - 2)) if stretched else theta


_UNROTATED = {"rope_type": _PROPORTIONAL, "partial_rotary_factor": 0.0, "rope_theta": 1.0}
"""Settings by which no pair turns."""


def rotary_settings(
    text: Mapping[str, Any], family: Family, *, local: bool
) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
    """The rotary settings of all layers, and those of local layers, if these have their own; `local`: there are local
    layers."""
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if family.rope.none:
        return _UNROTATED, None
    if found := [rope[kind] for kind in (FULL, INDEXED) if kind in rope]:
        if found[0] != found[-1]:
            raise CheckpointError("layers with an index and others whose rotary positions differ are not supported")
        return found[0] or _UNROTATED, rope.get(SLIDING)
    if family.rope.local_only and local:
        return _UNROTATED, rope
    base = text.get("rope_local_base_freq")
    return rope, None if base is None else {"rope_theta": base}
