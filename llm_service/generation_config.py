"""What sampling is like where a request does not say: by the checkpoint's generation_config.json, or the operator."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.checkpoint import Checkpoint, CheckpointError

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
_KNOWN = (*(name for name in RANGES if name not in _LENGTHS), "do_sample", _LENGTH)


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
    How long answers are a checkpoint does not say.

    >>> sampling_defaults({"temperature": 0.6, "top_k": -1, "max_new_tokens": 9})
    {'temperature': 0.6}
    >>> sampling_defaults({"do_sample": False})
    {'temperature': 0.0}
    """
    stated = {name: config[name] for name in RANGES if name not in _LENGTHS and _is_number(config.get(name))}
    defaults = {name: value for name, value in stated.items() if is_within(name, value)}
    if "top_k" in defaults:
        defaults["top_k"] = int(defaults["top_k"])  # JSON knows no whole numbers
    if config.get("do_sample") is False:
        defaults["temperature"] = 0.0
    return defaults


def read(checkpoint: Checkpoint, source: str, override: Mapping[str, Any] | None) -> dict[str, Any]:
    """Defaults by `source`: `auto` is the checkpoint's file, `none` no file, anything else a folder that has one; an
    operator's `override` goes before it. Raises CheckpointError where there is no such file."""
    stated = _stated(checkpoint, source)
    given = dict(override or {})
    if "temperature" in given:
        stated.pop("do_sample", None)  # what is meant is this temperature
    length = given.pop(_LENGTH, None)
    return sampling_defaults({**stated, **given}) | ({} if length is None else {"max_tokens": length})


def _stated(checkpoint: Checkpoint, source: str) -> dict[str, Any]:
    if source in ("auto", "none"):
        return dict(checkpoint.json("generation_config.json")) if source == "auto" else {}
    path = Path(source, "generation_config.json")
    try:
        return dict(json.loads(path.read_text("utf-8")).items())
    except (OSError, ValueError, RecursionError, AttributeError) as error:
        raise CheckpointError(f"--generation-config: {path} cannot be read: {error}") from error


def check_override(override: Mapping[str, Any]) -> None:
    """Raises ValueError, which names what is wrong, for what would be ignored or is out of range."""
    for name, value in override.items():
        if name not in _KNOWN:
            raise ValueError(f"--override-generation-config: {name} is none of {', '.join(_KNOWN)}")
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
