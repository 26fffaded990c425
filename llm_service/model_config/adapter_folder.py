"""A LoRA adapter in peft's format: `adapter_config.json` beside `adapter_model.safetensors`, inside the folder that the
operator allows. It is checked completely, against the shapes of the matrices it adapts, before it is used."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from llm_service.model_config.name_patterns import Budget, NamePattern, PatternError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PICKLES = "adapter_model.bin", "adapter_model.pt"
_MAX_CONFIG = 1 << 20
_MAX_HEADER = 4 << 20
"""Bytes of the table of tensors: some hundred for each."""
_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_BASE = "base_model.model."
_TENSOR = re.compile(r"base_model\.model\.(?P<target>[\w.]+)\.lora_(?P<half>[AB])\.weight")
_MOST_PATTERNS = 4096
_STEM = re.compile(
    r"^(?:model\.language_model|language_model\.model(?:\.decoder)?|model\.text_model|model)\.(?=layers\.)"
)
_SAYS_NOTHING = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "eva_config", "exclude_modules", "inference_mode"),
        *("init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout", "megatron_core"),
        *("peft_type", "peft_version", "r", "rank_pattern", "alpha_pattern", "revision", "target_modules", "task_type"),
        *("use_rslora", "qalora_group_size", "runtime_config"),
    }
)
"""Fields that are supported or do not affect the computation; all others must be off."""
_KEEPS_BASE = (True, False, None, "gaussian", "eva", "orthogonal")
"""First values of an adapter that leave the base's weights as they are."""
_OFF: tuple[object, ...] = (None, False, "", "none", [], {})


class AdapterError(ValueError):
    """A folder does not hold an adapter for this model; the message says why, without naming a place on this host."""


class Adapter(msgspec.Struct, frozen=True):
    """A LoRA adapter as it was read."""

    digest: bytes
    """The SHA-256 of all that it is."""
    rank: int
    """The largest of its matrices'."""
    weights: bytes
    """Its file of weights (safetensors)."""
    scales: dict[str, float]
    """For each adapted matrix, the factor of the product of its two."""
    names: dict[str, str]
    """For each adapted matrix, the common prefix in the file of its two names, before `.lora_A.weight` and
    `.lora_B.weight`."""


@dataclass(frozen=True, slots=True)
class Adaptable:
    """What adapters may change: (outputs, inputs) of each matrix, by its name behind the decoder's stem, up to a
    maximum rank; `bases` are names of the model. `own_name` maps transformers' name of a matrix to the decoder's."""

    shapes: Mapping[str, tuple[int, int]]
    max_rank: int
    bases: Collection[str] = ()
    own_name: Callable[[str], str] = str

    @property
    def max_bytes(self) -> int:
        """No file of weights is longer."""
        return _MAX_HEADER + sum(self.max_rank * sum(shape) * _BYTES["F32"] for shape in self.shapes.values())


def read(root: str, path: str, adaptable: Adaptable) -> Adapter:
    """Reads an adapter's folder `path`, relative to `root`. Nothing outside of `root` is read, not even through links,
    and no file longer than such an adapter's can be. Raises AdapterError."""
    inside = Path(os.path.realpath(root))
    folder = inside / path
    if not path or not _is_folder(folder, inside):
        raise AdapterError("there is no such folder below --lora-dir")
    if not (folder / WEIGHTS).exists() and any((folder / name).exists() for name in _PICKLES):
        raise AdapterError("its weights are a pickle, which is not read: save them as safetensors")
    config = _config(_content(folder / CONFIG, inside, _MAX_CONFIG), adaptable.bases)
    weights = _content(folder / WEIGHTS, inside, adaptable.max_bytes)
    pairs = _pairs(weights, adaptable)
    scales = _scales(config, pairs, adaptable.max_rank)
    digest = hashlib.sha256(json.dumps(scales, sort_keys=True).encode() + weights).digest()
    names = {target: f"{_BASE}{name}" for target, (name, _) in pairs.items()}
    return Adapter(digest, max(rank for _, rank in pairs.values()), weights, scales, names)


def largest_rank(config: Mapping[str, Any]) -> int:
    """The largest rank in an adapter's configuration. Raises AdapterError if there is none."""
    stated = [config.get("r"), *(config.get("rank_pattern") or {}).values()]
    ranks = [rank for rank in stated if isinstance(rank, int) and rank > 0]
    if not ranks or len(ranks) < len(stated):
        raise AdapterError(f"{CONFIG} states no rank")
    return max(ranks)


def stem_of(name: str) -> str:
    """A matrix's name, as `Adaptable` has it, of the one that peft gives it, or an empty text.

    >>> stem_of("model.language_model.layers.0.mlp.up_proj")
    'layers.0.mlp.up_proj'
    """
    return _STEM.sub("", name) if _STEM.match(name) else ""


def _is_folder(path: Path, root: Path) -> bool:
    try:
        return Path(os.path.realpath(path)).is_relative_to(root) and path.is_dir()
    except (OSError, ValueError):  # a name that is too long, or has a zero byte in it
        return False


def _content(path: Path, root: Path, limit: int) -> bytes:
    """A regular file of at most `limit` bytes. It is checked after it was opened, so nothing can be put in its
    place."""
    try:
        # Without O_NONBLOCK a named pipe would be waited for.
        descriptor = os.open(os.path.realpath(path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise AdapterError(f"it has no {path.name} that can be read") from error
    with open(descriptor, "rb") as file:  # noqa: PTH123 - a descriptor
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or not Path(f"/proc/self/fd/{descriptor}").readlink().is_relative_to(root):
            raise AdapterError(f"{path.name} is not a file below --lora-dir")
        if found.st_size > limit:
            raise AdapterError(
                f"{path.name} has {found.st_size} bytes; such an adapter of this model has {limit} at most"
            )
        return file.read(limit)


def _config(text: bytes, bases: Collection[str]) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{CONFIG} is not JSON") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise AdapterError(f"{CONFIG} does not say that this is a LoRA adapter")
    others = sorted(name for name, value in config.items() if name not in _SAYS_NOTHING and value not in _OFF)
    if others:
        raise AdapterError(f"{others[0][:64]!r} is not served: matrices of a low rank are, and nothing else")
    if config.get("init_lora_weights") not in _KEEPS_BASE:
        raise AdapterError("init_lora_weights: it goes with a base whose own weights were changed")
    base = config.get("base_model_name_or_path")
    if isinstance(base, str) and base and bases and Path(base).name not in bases:
        raise AdapterError(f"it is for the base model {Path(base).name[:64]!r}, which is not served here")
    return config


def _pairs(weights: bytes, adaptable: Adaptable) -> dict[str, tuple[str, int]]:
    """For each adapted matrix, peft's name and the rank of its pair of matrices."""
    try:
        length = int.from_bytes(weights[:8], "little")
        if len(weights) < 8 or length > len(weights) - 8:
            raise ValueError("the table is longer than the file")
        header = json.loads(weights[8 : 8 + length])
        header.pop("__metadata__", None)
        entries = {
            str(name): (str(entry["dtype"]), tuple(map(int, entry["shape"])), tuple(map(int, entry["data_offsets"])))
            for name, entry in header.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise AdapterError(f"{WEIGHTS} is not a safetensors file") from error
    _check_places([(dtype, shape, place) for dtype, shape, place in entries.values()], len(weights) - 8 - length)
    ranks: dict[tuple[str, str], int] = {}
    names: dict[str, str] = {}
    for tensor, (_, shape, _) in entries.items():
        found = _TENSOR.fullmatch(tensor)
        target = adaptable.own_name(stem_of(found["target"])) if found else ""
        if found is None or target not in adaptable.shapes:
            raise AdapterError(f"it adapts {tensor[:160]!r}, which cannot be adapted here")
        outputs, inputs = adaptable.shapes[target]
        half = found["half"]
        rank = shape[0 if half == "A" else 1] if len(shape) == 2 else 0
        if shape != ((rank, inputs) if half == "A" else (outputs, rank)):
            raise AdapterError(f"{tensor[:160]!r} has another shape than this model needs")
        if (target, half) in ranks:
            raise AdapterError(f"{target} is adapted twice")
        ranks[target, half] = rank
        names[target] = found["target"]
    if not names:
        raise AdapterError("it adapts nothing")
    for target in names:
        if ranks.get((target, "A")) != ranks.get((target, "B")):
            raise AdapterError(f"the two matrices for {target} do not go together")
    return {target: (name, ranks[target, "A"]) for target, name in names.items()}


def _check_places(entries: list[tuple[str, tuple[int, ...], tuple[int, ...]]], size: int) -> None:
    """Every tensor has floats, and its own bytes in the file."""
    end = 0
    for dtype, shape, place in sorted(entries, key=lambda entry: entry[2]):
        if dtype not in _BYTES:
            raise AdapterError(f"its numbers are {dtype[:16]!r}, not floats of 16 or 32 bits")
        if len(place) != 2 or place[0] != end or min(shape, default=0) < 1:
            raise AdapterError(f"{WEIGHTS} is not a safetensors file")
        end = place[1]
        if end - place[0] != math.prod(shape) * _BYTES[dtype]:
            raise AdapterError(f"{WEIGHTS} is not a safetensors file")
    if end != size:
        raise AdapterError(f"{WEIGHTS} is cut off, or has more than its table says")


class _Patterns:
    """A setting of all matrices, with exceptions for those whose names match a pattern."""

    def __init__(self, config: Mapping[str, Any], field: str, patterns: str, budget: Budget) -> None:
        given = config.get(patterns) or {}
        if not isinstance(given, dict) or len(given) > _MOST_PATTERNS:
            raise AdapterError(f"{patterns} is not a table of at most {_MOST_PATTERNS} names")
        self._field, self._patterns, self._budget = field, patterns, budget
        self._value = config.get(field)
        self._given = [(pattern, self._read(pattern), value) for pattern, value in given.items()]

    def _read(self, pattern: str) -> NamePattern:
        try:
            return NamePattern(pattern)
        except PatternError as error:
            raise self._refusal(pattern, error) from error

    def of(self, name: str) -> float:
        """The setting of the matrix with this name in peft: of the first pattern that matches, else the common one."""
        value = next((value for pattern, read, value in self._given if self._fits(pattern, read, name)), self._value)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise AdapterError(f"{self._field} is not a number")
        return value

    def _fits(self, pattern: str, read: NamePattern, name: str) -> bool:
        try:
            return read.fits(name, self._budget)
        except PatternError as error:
            raise self._refusal(pattern, error) from error

    def _refusal(self, pattern: str, error: PatternError) -> AdapterError:
        return AdapterError(f"{self._patterns} has a pattern that {error}: {pattern[:64]!r}")


def _scales(config: Mapping[str, Any], pairs: Mapping[str, tuple[str, int]], max_rank: int) -> dict[str, float]:
    """The factor of B A, by adapted matrix: alpha / r, or alpha / √r with `use_rslora` (Kalajdzievski 2023)."""
    budget = Budget()
    ranks = _Patterns(config, "r", "rank_pattern", budget)
    alphas = _Patterns(config, "lora_alpha", "alpha_pattern", budget)
    scales: dict[str, float] = {}
    for target, (name, rank) in pairs.items():
        if rank > max_rank:
            raise AdapterError(f"its rank is {rank}; --max-lora-rank is {max_rank}")
        if ranks.of(name) != rank:
            raise AdapterError(f"{CONFIG} and {WEIGHTS} do not agree about ranks")
        scales[target] = alphas.of(name) / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return scales
