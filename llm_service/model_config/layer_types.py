"""The types of a configuration's layers, and how far tokens see in each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from common.checkpoints.checkpoint import CheckpointError
from llm_service.families.family import CHUNKED, FULL, OF_ANSWERS, SLIDING, Family

_WINDOW = 4096
"""Tokens of a window if the configuration does not state it."""


def window_length(text: Mapping[str, Any]) -> int:
    """Tokens that are seen in a layer with a window; 0: all."""
    stated = text.get("sliding_window", _WINDOW) if text.get("use_sliding_window") else None
    return 0 if stated is None else int(stated)


def window_lengths(text: Mapping[str, Any], types: Sequence[str]) -> tuple[int, ...]:
    """One for each layer; empty if no layer has a window."""
    seen = [window_length(text) if each in (SLIDING, OF_ANSWERS) else 0 for each in types]
    return tuple(seen) if any(seen) else ()


def chunk_length(text: Mapping[str, Any], family: Family) -> int:
    """Tokens of a chunk, if layers of the family attend within chunks; else 0."""
    if CHUNKED not in family.mixers:
        return 0
    if not text.get("attention_chunk_size"):
        raise CheckpointError("config.json does not say how long the chunks are within which layers attend")
    return int(text["attention_chunk_size"])


def chunk_lengths(text: Mapping[str, Any], family: Family, types: Sequence[str]) -> tuple[int, ...]:
    """One for each layer; empty if no layer has chunks."""
    chunk = chunk_length(text, family) if CHUNKED in types else 0
    chunks = tuple(chunk if each == CHUNKED else 0 for each in types)
    return chunks if chunk else ()


def check_rotated(text: Mapping[str, Any], family: Family, types: Sequence[str]) -> None:
    """Raises CheckpointError if the layers that a configuration rotates are not those that the family rotates, or if it
    scales positions in some layers only."""
    kind = (text.get("rope_parameters") or {}).get("rope_type", "default")
    if kind != "default" and len(text.get("rope_scaling_layers") or types) < len(types):
        raise CheckpointError("rotary positions that are scaled in some layers alone are not supported")
    rotated = text.get("no_rope_layers") or text.get("layer_rope_theta")  # both say 0 of a layer that is not
    local = window_length(text) + chunk_length(text, family) > 0  # else all are rotated
    found = [not local or each != FULL for each in types]
    if family.rope.local_only and rotated and [bool(each) for each in rotated] != found:
        raise CheckpointError("rotary positions of layers without a window, or local ones without, are not supported")


def check_reach(text: Mapping[str, Any], family: Family, longest: int) -> None:
    """Raises CheckpointError if a window is shorter than the context and the family has no windows."""
    if not family.windowed and 0 < (window := window_length(text)) < longest:
        what = "sliding-window attention is not supported"
        raise CheckpointError(f"{what}: no context may be longer than {window} tokens (--max-context)")


def layer_types(text: dict[str, Any], family: Family) -> list[str]:
    """The type of each layer. Raises CheckpointError for a type that the family does not support."""
    count = int(text["num_hidden_layers"])
    types: list[str] = text.get("layer_types") or _usual_types(text, family, count)
    if len(types) != count:
        raise CheckpointError(f"layer_types names {len(types)} layers of {count}")
    if unknown := sorted(set(types) - family.mixers.keys()):
        raise CheckpointError(f"layers of the type {unknown[0]} are not supported")
    return types


def _usual_types(text: Mapping[str, Any], family: Family, count: int) -> list[str]:
    """The types of so many layers, by a period of full attention or a pattern of letters: L for layers with a window, G
    for others. Raises CheckpointError for any other pattern."""
    interval, others = text.get("full_attention_interval", 1), "linear_attention"
    if windowed := family.windowed:  # all of them have the window, unless some are said to have none
        interval, others = text.get("sliding_window_pattern") or count + 1, windowed if window_length(text) else FULL
    if isinstance(interval, str) and set(interval) <= {"L", "G"}:
        return [others if interval[at % len(interval)] == "L" else FULL for at in range(count)]
    if not isinstance(interval, int) or interval < 1:
        raise CheckpointError(f"a pattern of layers with a window of {str(interval)[:64]!r} is not supported")
    return [others if (at + 1) % interval else FULL for at in range(count)]
