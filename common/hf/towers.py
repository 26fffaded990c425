"""A transformers model without its text, and the tensors of a checkpoint that it needs."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate
from typing import Any

from torch import nn

from common.checkpoints.checkpoint import SINGLE, Checkpoint, CheckpointError
from common.hf.classes import decoder_of, head_of, keep_only, towers_within
from common.hf.rows import makes_tokens
from common.hf.stored_names import made_of

ALL = ("",)
"""How the names of all tensors begin."""


def without_text(model: Any) -> None:
    """Removes the decoder and the logit head. The token table stays if rows are in it, as does its norm, if any, which
    rows of sounds pass through in Muse Spark."""
    decoder, table, text = decoder_of(model), model.get_input_embeddings(), {id(head_of(model))}
    if decoder is model:
        raise CheckpointError(f"{type(model).__name__} does not keep its text layers apart")
    if makes_tokens(model.base_model):
        keep_only(decoder, [table, *towers_within(decoder)])
    elif norms := dict(table.named_children()):
        keep_only(decoder, [*norms.values(), *towers_within(decoder)])
        model.set_input_embeddings(nn.ModuleDict(norms))
    elif decoder is model.base_model:
        keep_only(decoder, towers_within(decoder))
    else:
        text.add(id(decoder))
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if id(child) in text:
                setattr(module, name, None)
    model._tied_weights_keys, model.all_tied_weights_keys = None, {}


def tower_tensors(checkpoint: Checkpoint, model: Any) -> Sequence[str]:
    """Prefixes of all tensors except those that certainly belong to the text alone, given a model without weights,
    which loses its text here. Tensors that transformers ignores, or whose use is unknown, are included. All tensors, if
    names are unknown, or apparently not all of the tower's are among them."""
    stored = _names(checkpoint)
    if not stored or getattr(model.config, "transformers_weights", None) or getattr(model.config, "extra_files", ()):
        return ALL
    modules = [name for name, _ in model.named_modules()]
    first = {name: _of_first_expert(name) for name in stored}
    whole = made_of(model, {*first.values()})
    try:
        without_text(model)
    except CheckpointError:  # loading it will report that
        return ALL
    left, tower = {name for name, _ in model.named_modules()}, model.state_dict().keys()
    gone = tuple(f"{name}." for name in modules if name not in left and name.rpartition(".")[0] in left)
    text = {name for name, made in whole.items() if all(each.startswith(gone) for each in made)}
    text -= {name for name, made in made_of(model, text).items() if made & tower}
    needed = {name for name in stored if first[name] not in text}
    if tower - {each for made in made_of(model, needed).values() for each in made}:
        return ALL
    return _beginnings(needed, text)


def _of_first_expert(name: str) -> str:
    """A tensor's name with the number of its expert replaced by the first: both belong to the same part of the model.
    There may be a hundred thousand of them."""
    return _EXPERT.sub("0", name)


_EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")


def _names(checkpoint: Checkpoint) -> set[str]:
    """The names of its tensors, as far as they are known without shards; of a model that speaks as well, its
    thinker's."""
    if (shards := checkpoint.shards()) is not None:
        names = {*shards}
    else:
        names = {*checkpoint.tensors} if (checkpoint.folder / SINGLE).is_file() else set()
    return {name for name in names if name.startswith("thinker.")} if "thinker_config" in checkpoint.config else names


def _beginnings(wanted: Collection[str], others: Collection[str]) -> tuple[str, ...]:
    """The shortest beginnings of names, to the end of a part, that all the wanted ones have and none of the others,
    which are of first experts; a name itself where there is none.

    >>> _beginnings(["a.vision.one", "a.vision.two", "a.text.norm"], ["a.text.layer.0", "head.weight"])
    ('a.text.norm', 'a.vision.')
    """
    taken = {begin for name in others for begin in _parts(name)}
    return tuple(
        sorted({next((each for each in _parts(name) if _of_first_expert(each) not in taken), name) for name in wanted})
    )


def _parts(name: str) -> Iterator[str]:
    """The beginnings of a name, each up to a point, the shortest first."""
    return accumulate(f"{part}." for part in name.split(".")[:-1])
