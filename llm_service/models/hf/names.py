"""Which tensors belong to the text, and our decoder's names of them: in transformers' models, and in checkpoints in
every layout that transformers reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor

from common.checkpoints.checkpoint import CheckpointError
from common.hf.classes import decoder_of, head_of, mark_tables_of, towers_within
from common.hf.stored_names import conversions, names_within
from llm_service.families.registry import TEXT_FAMILIES
from llm_service.layers.embeddings.media_marks import PARTS
from llm_service.models.loader import HEAD
from llm_service.models.parted_tensors import PartedTensors

_TOGETHER = ".experts.", ".gate_up_proj."
"""Parts of tensors' names that transformers stacks (experts) or joins (gates and up projections) when it loads them;
our decoder takes them as stored."""


def named_tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """The text's tensors of a model of transformers, by the decoder's names; a head that is tied is left out."""
    names, tied = _Names(model), head_of(model).weight is model.get_input_embeddings().weight
    for name, tensor in model.state_dict().items():
        own = names.own(name)
        if own is not None and not (tied and own == HEAD):
            yield own, tensor


def own_names(model: Any, stored: Iterable[str]) -> tuple[dict[str, str], PartedTensors]:
    """The decoder's names of a checkpoint's tensors that belong to the text, and which of these names are joined from
    several tensors, or are parts of one. Raises CheckpointError if transformers transforms one of them otherwise."""
    names, renamed, parted = _Names(model), dict[str, str](), PartedTensors()
    weights = {f"{name.rpartition('.')[0]}.weight" for name in stored}
    for name, (there, whole) in names_within(model, {*stored, *weights}).items():
        if (own := names.own(there)) is None:
            continue
        together = any(part in whole for part in _TOGETHER) and not _transposed(model, name)
        as_it_is = not whole or together or names.takes_changed(there)
        if not as_it_is and not _part(model, names, there, whole, parted):
            raise CheckpointError(f"transformers makes another tensor of {name} when it loads it")
        renamed[name] = own
    return renamed, parted


def _transposed(model: Any, stored: str) -> bool:
    """Whether transformers transposes a tensor whatever its shape."""
    from transformers.core_model_loading import Transpose, WeightConverter

    steps = [step for step in conversions(model) if isinstance(step, WeightConverter)]
    does = [each for step in steps if step.rename_source_key(stored)[1] is not None for each in step.operations]
    return any(isinstance(each, Transpose) and not each.check_dims for each in does)


def _part(model: Any, names: _Names, stored: str, first: str, parted: PartedTensors) -> bool:
    """Records how transformers splits a tensor by rows, or joins it, by its own names of the tensor and of the first
    one made from it. False if it does something else."""
    from transformers.core_model_loading import Chunk, Concatenate, Split, WeightConverter

    steps = [step for step in conversions(model) if isinstance(step, WeightConverter)]
    step = next(step for step in steps if step.rename_source_key(stored)[1] is not None)
    (does, *more), (target, *_) = step.operations, step.target_patterns
    if more or not isinstance(does, Chunk | Concatenate | Split) or does.dim != 0:
        return False
    if isinstance(does, Concatenate):
        pattern = step.rename_source_key(stored)[1]
        each = [names.own(stored.replace(str(pattern), piece)) for piece in step.source_patterns]
        whole = names.own(first)
        if whole is None or None in each:
            return False
        parted.joined[whole] = [piece for piece in each if piece is not None]
        return True
    made = [first.replace(target, each) for each in step.target_patterns]
    ends = list(accumulate(model.get_parameter(each).shape[0] for each in made))
    rows = [slice(begin, end) for begin, end in pairwise([0, *ends])]
    own = names.own(stored)
    parted.cut[str(own)] = [(str(names.own(each)), part) for each, part in zip(made, rows, strict=True)]
    return True


class _Names:
    """A transformers model's names of the parts that our decoder has."""

    def __init__(self, model: Any) -> None:
        names = {id(part): name for name, part in model.named_modules()}
        parts = decoder_of(model), model.get_input_embeddings(), head_of(model)
        inner, table, head = (names.get(id(part), "") for part in parts)
        if not (inner and table and head):
            raise CheckpointError(f"{type(model).__name__} does not keep its text layers apart")
        self._inner, self._outer = f"{inner}.", {table: "embed_tokens", head: "lm_head"}
        for name in mark_tables_of(model):
            self._outer |= {f"{name}.{part}": f"{name.rpartition('.')[2]}.{part}" for part in PARTS}
        towers = () if parts[0] is not model.base_model else towers_within(parts[0])
        self._towers = tuple(f"{names[id(part)]}." for part in towers)
        family = TEXT_FAMILIES.get(model.config.get_text_config(decoder=True).model_type)
        self._own = str if family is None else family.own_name
        self._changed = () if family is None else tuple(family.checkpoint.changed_parts)

    def takes_changed(self, name: str) -> bool:
        """Whether the decoder takes a tensor as a checkpoint has it that transformers changes."""
        return any(part in name for part in self._changed)

    def own(self, name: str) -> str | None:
        """The decoder's name of a tensor; None if it has none."""
        module, _, kind = name.rpartition(".")
        if (own := self._outer.get(module)) is not None:
            return f"{own}.{kind}"
        if not name.startswith(self._inner) or name.startswith(self._towers):
            return None
        return self._own(name.removeprefix(self._inner))
