"""The table of all models that the installed library has, and how each is served: `python -m tools.models [PAGE]`.

It is made by a run: what a family serves is known, and of everything else a small model is made and tried.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from common.checkpoint import CheckpointError
from common.library_models import check, class_of, library
from llm_service.families.registry import FAMILIES
from llm_service.models.trial import drawn_prompt, try_config
from tools.models.tiny import RECIPES, config_of_recipe

_PAGE = """\
# Models

All {total} kinds of models that transformers {release} has for pictures and text, by `model_type` of config.json, as
`python -m tools.models docs/MODELS.md` found them (`make models`). {counts}.

- **native**: a family of ours ([ARCHITECTURE.md](ARCHITECTURE.md)).
- **library**: computed by transformers, over our scheduler and paged cache ([generic.md](design/generic.md)). A small
  model of the kind's configuration was made, and its logits of a prompt with rows were the library's own, in chunks,
  packed with another prompt. *Compared*: ids, rows and 32 greedy tokens as well, from a tiny checkpoint with its own
  processor, in chunks of 16, beside others and from the prefix cache (`tests/parity/test_library_models.py`). Of the
  rest only a checkpoint shows whether its processor says what stands for a picture, and its tower gives rows alone; a
  service that cannot serve one says so at start.
- **refused**: the services say why, and do not start.
- **unknown**: the default configuration alone makes no small model; a checkpoint is tried at start.

| kind | how | |
|---|---|---|
{rows}
"""


@dataclass(frozen=True, slots=True)
class Row:
    """How one kind of models is served, and what there is to say of it."""

    kind: str
    how: str
    note: str = ""

    def __str__(self) -> str:
        return f"| {self.kind} | {self.how} | {self.note} |"


def rows() -> Iterator[Row]:
    """One for each kind, in the library's order."""
    for made in library().AutoModelForImageTextToText._model_mapping:
        kind = made.model_type
        if kind in FAMILIES:
            yield Row(kind, "native")
        else:
            yield _tried(kind, made)


def _tried(kind: str, made: Any) -> Row:
    try:
        config = config_of_recipe(kind) if kind in RECIPES else made()
        class_of(config)
    except (AttributeError, ImportError, KeyError, TypeError, ValueError, CheckpointError) as error:
        return Row(kind, "unknown", _told(error))
    try:
        check(config)
        vocabulary = config.get_text_config(decoder=True).vocab_size
        if config.image_token_id >= vocabulary:  # as defaults have it, which belong to no checkpoint
            config.image_token_id = vocabulary - 1
        found = try_config(config, lambda: drawn_prompt(config))
    except CheckpointError as error:
        return Row(kind, "refused", _told(error))
    except (AttributeError, ImportError, KeyError, TypeError, ValueError, RuntimeError) as error:
        return Row(kind, "unknown", _told(error))
    notes = ["compared"] * (kind in RECIPES) + ["rows of a picture see each other"] * found.spans
    return Row(kind, "library", ", ".join(notes))


def _told(error: BaseException) -> str:
    """One line that no table's bars are in."""
    line = " ".join(str(error).split()).replace("|", "/")
    return line if len(line) <= 140 else line[:139].rstrip() + "…"


def page(found: list[Row]) -> str:
    """The page with these rows."""
    counts = Counter(row.how for row in found)
    compared = sum("compared" in row.note for row in found)
    told = ", ".join(f"{counts[how]} {how}" for how in ("native", "library", "refused", "unknown"))
    told = told.replace(" library", f" library ({compared} of them compared)")
    return _PAGE.format(total=len(found), release=version("transformers"), counts=told, rows="\n".join(map(str, found)))


def main() -> None:
    """Prints each row as it is found; writes the page where one is named."""
    parser = argparse.ArgumentParser(prog="python -m tools.models", description=__doc__)
    parser.add_argument("page", nargs="?", type=Path, help="the page to write, such as docs/MODELS.md")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for row in rows():
        sys.stdout.write(f"{row}\n")
        sys.stdout.flush()
        found.append(row)
    if given.page is not None:
        given.page.write_text(page(found), encoding="utf-8")


if __name__ == "__main__":
    main()
