"""transformers' names for the tensors of checkpoints, in every layout that it reads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def conversions(model: Any) -> list[Any]:
    """The conversions that transformers applies to a checkpoint's tensors when it loads a model."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    found: list[Any] = get_model_conversion_mapping(model)
    return found


def names_within(model: Any, stored: Iterable[str]) -> dict[str, tuple[str, str]]:
    """The name in a model of each tensor of a checkpoint that transformers reads, and, for one that it transforms or
    merges, the conversion."""
    known = model.state_dict()
    return {name: found for name, found in renamed(model, stored).items() if (found[1] or found[0]) in known}


def renamed(model: Any, stored: Iterable[str]) -> dict[str, tuple[str, str]]:
    """The same of every tensor, whether the model has one of that name or not."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    steps, known = conversions(model), model.state_dict()
    renamings = [step for step in steps if isinstance(step, WeightRenaming)]
    converters = [step for step in steps if isinstance(step, WeightConverter)]
    found: dict[str, tuple[str, str]] = {}
    for name in sorted(stored):
        there, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        if there not in known and name in known:  # it has transformers' own name, and keeps it
            there, pattern = name, None
        plain = there if pattern is None else rename_source_key(name, renamings, [])[0]
        found[name] = (plain, "" if pattern is None else there)
    return found


def made_of(model: Any, stored: Iterable[str]) -> dict[str, set[str]]:
    """The names in a model of all that becomes of each tensor, whether the model has one of that name or not."""
    from transformers.core_model_loading import WeightConverter

    converters = [step for step in conversions(model) if isinstance(step, WeightConverter)]
    several = [step for step in converters if len(step.target_patterns) > 1]
    made: dict[str, set[str]] = {}
    for name, (plain, whole) in renamed(model, stored).items():
        made[name] = {whole or plain}
        if whole:
            cut = (step for step in several if step.rename_source_key(plain)[1] is not None)
            made[name] |= {
                whole.replace(step.target_patterns[0], each) for step in cut for each in step.target_patterns
            }
    return made
