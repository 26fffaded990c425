"""Defaults of sampling, from the checkpoint's generation_config.json or from the operator."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.checkpoints.checkpoint import Checkpoint, CheckpointError

RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.0, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "top_k": (0, 1 << 31),
    "max_tokens": (1, 1 << 31),
    "min_tokens": (0, 1 << 31),
}
"""Parameters of sampling that have a least and a largest value."""
ABOVE_ZERO = ("top_p", "repetition_penalty")
_LENGTHS = ("max_tokens", "min_tokens")
_LENGTH = "max_new_tokens"
"""transformers' name of max_tokens."""
_NO_FOLDER = ("auto", "none")
_KNOWN = (*(name for name in RANGES if name not in _LENGTHS), "do_sample", _LENGTH)


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """`values` are the parameters used unless a request states its own; `most_tokens` bounds every answer."""

    values: Mapping[str, Any] = field(default_factory=dict)
    most_tokens: int | None = None


def is_within(name: str, value: float) -> bool:
    """Whether a parameter may have this value."""
    low, high = RANGES[name]
    return math.isfinite(value) and low <= value <= high and not (name in ABOVE_ZERO and value == 0)


def wanted_range(name: str) -> str:
    """The same, in words.

    >>> wanted_range("top_p"), wanted_range("top_k")
    ('above 0.0, and at most 1.0', 'between 0 and 2147483648')
    """
    low, high = RANGES[name]
    return f"above {low}, and at most {high}" if name in ABOVE_ZERO else f"between {low} and {high}"


def sampling_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of sampling by the fields of a generation config; those out of range, as a top_k of -1, are nothing.

    >>> sampling_defaults({"temperature": 0.6, "top_k": -1, "max_new_tokens": 9})
    {'temperature': 0.6, 'max_tokens': 9}
    >>> sampling_defaults({"do_sample": False})
    {'temperature': 0.0}
    """
    named = {name: name for name in RANGES if name not in _LENGTHS} | {"max_tokens": _LENGTH}
    stated = {name: config[theirs] for name, theirs in named.items() if _is_number(config.get(theirs))}
    defaults = {name: value for name, value in stated.items() if is_within(name, value)}
    for name in ("top_k", "max_tokens"):  # JSON knows no whole numbers
        if name in defaults:
            defaults[name] = int(defaults[name])
    if config.get("do_sample") is False:
        defaults["temperature"] = 0.0
    return defaults


def read(checkpoint: Checkpoint, source: str, override: Mapping[str, Any] | None) -> SamplingDefaults:
    """Defaults by `source`: `auto` is the checkpoint's file, `none` no file, anything else a folder with one;
    `override` takes precedence. A length stated by the operator, by override or folder, bounds all answers; one stated
    by the checkpoint is only a default. Raises CheckpointError if the file is missing."""
    stated = _stated(checkpoint, source)
    given = dict(override or {})
    if "temperature" in given:
        stated.pop("do_sample", None)  # it means this temperature
    values = sampling_defaults({**stated, **given})
    by_operator = source not in _NO_FOLDER or _LENGTH in given
    return SamplingDefaults(values, values.get("max_tokens") if by_operator else None)


def _stated(checkpoint: Checkpoint, source: str) -> dict[str, Any]:
    if source in _NO_FOLDER:
        return dict(checkpoint.json("generation_config.json")) if source == "auto" else {}
    path = Path(source, "generation_config.json")
    try:
        return dict(json.loads(path.read_text("utf-8")).items())
    except (OSError, ValueError, RecursionError, AttributeError) as error:
        raise CheckpointError(f"--generation-config: {path} cannot be read: {error}") from error


def check_override(override: Mapping[str, Any]) -> None:
    """Raises ValueError, which names the value, for values that would be ignored or are out of range."""
    for name, value in override.items():
        if name not in _KNOWN:
            raise ValueError(f"--override-generation-config: {name} is not one of {', '.join(_KNOWN)}")
        if name == "do_sample":
            if not isinstance(value, bool):
                raise ValueError("--override-generation-config: do_sample is true or false")
            continue
        known = "max_tokens" if name == _LENGTH else name
        whole = isinstance(RANGES[known][1], int)
        if not _is_number(value) or not is_within(known, value) or (whole and value != int(value)):
            what = f"{'a whole number ' if whole else ''}{wanted_range(known)}"
            raise ValueError(f"--override-generation-config: {name} must be {what}")
    if override.get("do_sample") is False and override.get("temperature", 0) != 0:
        raise ValueError("--override-generation-config: do_sample false and a temperature exclude each other")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)
