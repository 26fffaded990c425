"""The table of all models that the installed library has, and how each is served: `python -m tools.models PAGE`.

It is made by a run: what a family serves is known; of everything else a small model is made and tried, and where there
is a recipe for a checkpoint, both services answer from it as the library does. Rows are kept as they are found, in a
file of JSON lines beside the build's other products, and a run goes on where the last one stopped. With `--only`, other
rows stay as the page has them.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import msgspec
import torch

from common.checkpoint import CheckpointError
from common.library_models import check, class_of, library, row_token
from llm_service.families.registry import FAMILIES
from llm_service.layers.attention.general_backend import SpanRule
from llm_service.models.trial import drawn_prompt, try_config
from tools.launcher import NotStartedError
from tools.models.compare import FILM_WITH_SOUND, RANKS, SOUND, STATES, TWO, VIDEO, Differs, through_services
from tools.models.recipes import RECIPES
from tools.models.tiny import config_of_recipe, make

_PAGE = """\
# Models

All {seeing} kinds of models that transformers {release} has for pictures and text, by `model_type` of config.json, and
{hearing} for sounds and text, as `python -m tools.models docs/MODELS.md` found them (`make models`).
{counts}; {compared} compared.

- **native**: a family of ours ([ARCHITECTURE.md](ARCHITECTURE.md)), which `tests/parity` compares as well.
- **library**: computed by transformers, over our scheduler and paged cache ([generic.md](design/generic.md)). Of those
  that are not compared a small model's logits were the library's own, in chunks, packed with another prompt; a
  checkpoint shows the rest at start.
- **refused**: the services say why, and do not start.
- **unknown**: the default configuration alone makes no small model; a checkpoint is tried at start.

*Compared*: both services answered from a tiny checkpoint of the kind, with its own processor and random weights in
float32, and token ids and 32 greedy tokens were the library's own: text alone, a picture, two pictures of different
size between texts, and videos, sounds, and videos with theirs (*video sound*) where the row says so; each prompt alone,
beside three others or more, and from the prefix cache, which need not have any of a prompt where the row says *layers
with states*; in steps of 16 tokens (of 80, where rows of a picture see each other and are more), and at once, there on
two ranks where the row says *tp 2*: elsewhere the library has no plan for ranks, and they are refused.
*Compared in one process*: the same on one rank, without the wires between (`tests/parity/library_side.py`).

Nothing here ran on a GPU, and weights were never trained ones.

| kind | how | |
|---|---|---|
{rows}
"""

WRONG = "wrong"
"""How a kind is served that must not be; it is on no page."""
_KEPT = Path("build/models.jsonl")
_STEP_TOKENS = 16


class Row(msgspec.Struct, frozen=True):
    """How one kind of models is served, and what there is to say of it."""

    kind: str
    how: str
    note: str = ""

    def __str__(self) -> str:
        return f"| {self.kind} | {self.how} | {self.note} |"


_SPANS = {
    SpanRule.EVERYWHERE: "rows of a picture see each other",
    SpanRule.IN_WINDOWS: "rows of a picture see each other in layers with a window",
}


def kinds() -> list[str]:
    """All that the library has for pictures and text, in its order, and those for sounds and text that a family of ours
    serves, or that there is a recipe for."""
    seeing = [made.model_type for made in library().AutoModelForImageTextToText._model_mapping]
    return [*seeing, *sorted({*RECIPES, *FAMILIES}.difference(seeing))]


def rows(asked: Sequence[str], compared: Comparison) -> Iterator[Row]:
    """One for each kind, those with a recipe compared so."""
    configurations = {kind: library().CONFIG_MAPPING[kind] for kind in asked}
    for kind in asked:
        if kind in FAMILIES:
            yield _compared(kind, "native", by_services, [])
        else:
            yield _tried(kind, configurations[kind], compared)


def _tried(kind: str, made: Any, compared: Comparison) -> Row:
    try:
        config = config_of_recipe(kind) if kind in RECIPES else made()
        class_of(config)
    except CheckpointError as error:
        return Row(kind, "refused", _told(error))
    except (AttributeError, ImportError, KeyError, TypeError, ValueError) as error:
        return Row(kind, "unknown", _told(error))
    try:
        check(config)
        vocabulary = config.get_text_config(decoder=True).vocab_size
        if row_token(config) >= vocabulary:  # as defaults have it, which belong to no checkpoint
            config.image_token_id = vocabulary - 1
        found = try_config(config, lambda: drawn_prompt(config))
    except CheckpointError as error:
        return Row(kind, "refused", _told(error))
    except (AttributeError, ImportError, KeyError, TypeError, ValueError, RuntimeError) as error:
        return Row(kind, "unknown", _told(error))
    notes = [_SPANS[found.spans]] if found.spans is not SpanRule.NOWHERE else []
    if kind not in RECIPES:
        return Row(kind, "library", ", ".join(notes))
    return _compared(kind, "library", compared, notes)


def _compared(kind: str, how: str, compared: Comparison, notes: list[str]) -> Row:
    try:
        with tempfile.TemporaryDirectory() as folder:
            notes = [*compared(kind, _made(kind, Path(folder))), *notes]
    except (CheckpointError, NotStartedError) as error:
        return Row(kind, "refused", _told(error))
    except (AssertionError, AttributeError, Differs, KeyError, RuntimeError, TypeError, ValueError) as error:
        return Row(kind, WRONG, " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST])
    return Row(kind, how, ", ".join(notes))


def _made(kind: str, folder: Path) -> Path:
    """A tiny checkpoint. Those of our oldest families are made as their tests make them."""
    if kind in RECIPES:
        return make(kind, folder)
    if kind == "qwen2_audio":
        made: Path = resolve_name("tests.audio_checkpoint:make_audio_checkpoint")(folder)
    else:
        made = resolve_name("tests.checkpoints:make_checkpoint")(kind, folder)
    return made


def by_services(kind: str, checkpoint: Path) -> list[str]:
    """Notes on what was compared. Raises NotStartedError where a service does not start, and Differs where one says
    something else than the library."""
    steps = RECIPES[kind].step_tokens if kind in RECIPES else _STEP_TOKENS
    return ["compared", *_notes(through_services(checkpoint, steps))]


def in_process(kind: str, checkpoint: Path) -> list[str]:
    """The same without the services."""
    compare: Callable[[Path, int], set[str]] = resolve_name("tests.parity.library_side:compare")
    return ["compared in one process", *_notes(compare(checkpoint, RECIPES[kind].step_tokens))]


def _notes(names: set[str]) -> list[str]:
    one = ["one picture in a prompt"] * (TWO not in names and "one picture" in names)
    notes = {"videos": VIDEO, "sounds": SOUND, "video sound": FILM_WITH_SOUND, "tp 2": RANKS, STATES: STATES}
    return one + [note for note, name in notes.items() if name in names]


Comparison = Callable[[str, Path], list[str]]


def _told(error: BaseException) -> str:
    """One line that no table's bars are in."""
    if isinstance(error, ImportError):
        wanted = re.search(r"requires the (\w+) library", str(error))
        return f"the library wants a package that is not installed here: {wanted[1] if wanted else error.name}"
    if not isinstance(error, CheckpointError | NotStartedError):
        return "its defaults state too little"
    line = " ".join(str(error).split()).replace("|", "/")
    return line if len(line) <= _LONGEST else line[: _LONGEST - 1].rstrip() + "…"


_LONGEST = 140


def page(found: Sequence[Row]) -> str:
    """The page with these rows."""
    counts = Counter(row.how for row in found)
    compared = sum("compared" in row.note for row in found)
    told = ", ".join(f"{counts[how]} {how}" for how in ("native", "library", "refused", "unknown"))
    seeing = len(library().AutoModelForImageTextToText._model_mapping)
    return _PAGE.format(
        seeing=seeing,
        hearing=len(found) - seeing,
        release=version("transformers"),
        counts=told,
        compared=compared,
        rows="\n".join(map(str, found)),
    )


def main() -> None:
    """Prints each row as it is found; writes the page once all are there."""
    parser = argparse.ArgumentParser(prog="python -m tools.models", description=__doc__)
    parser.add_argument("page", type=Path, help="the page to write, such as docs/MODELS.md")
    parser.add_argument("--only", nargs="+", metavar="KIND", help="these, again; else all that are not kept")
    parser.add_argument("--kept", type=Path, default=_KEPT, help="where rows are kept")
    parser.add_argument("--in-process", action="store_true", help="compare without the services, in seconds each")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = _kept(given.kept)
    every = kinds()
    compared = in_process if given.in_process else by_services
    wrong = False
    for row in rows(given.only or [kind for kind in every if kind not in found], compared):
        sys.stdout.write(f"{row}\n")
        sys.stdout.flush()
        if row.how == WRONG:
            wrong = True
            continue
        found[row.kind] = row
        given.kept.parent.mkdir(parents=True, exist_ok=True)
        with given.kept.open("ab") as lines:
            lines.write(msgspec.json.encode(row) + b"\n")
    if wrong:
        sys.exit("some would be served, and answer otherwise than the library")
    if given.only:
        found = {**_on_page(given.page), **found}
    if all(kind in found for kind in every):
        given.page.write_text(page([found[kind] for kind in every]), encoding="utf-8")


def _on_page(path: Path) -> dict[str, Row]:
    """The rows of a page that was written before."""
    if not path.exists():
        return {}
    cells = (line.strip("|").split("|") for line in path.read_text("utf-8").splitlines() if line.startswith("| "))
    rows = (Row(*(cell.strip() for cell in each)) for each in cells)
    return {row.kind: row for row in rows if row.kind != "kind"}


def _kept(path: Path) -> dict[str, Row]:
    """What was found before, the last of each kind."""
    if not path.exists():
        return {}
    lines = [msgspec.json.decode(line, type=Row) for line in path.read_bytes().splitlines()]
    return {row.kind: row for row in lines}


if __name__ == "__main__":
    main()
