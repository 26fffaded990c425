"""The table of all models of the installed transformers, and how each is served: `python -m tools.models PAGE`.

A run finds out: models with a family are known; for every other a small model is made and tried, and if there is a
recipe for a checkpoint, both services must answer from it as transformers does. Results are kept in a file of JSON
lines in the build folder, and an interrupted run resumes. They are merged with the rows of the page; rows of an
earlier release of transformers say so.
"""

from __future__ import annotations

import argparse
import os
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

from common.checkpoints.checkpoint import CheckpointError
from common.hf.classes import class_of, missing, state_tokens, transformers
from common.hf.models import checked
from common.hf.rows import row_token
from llm_service.families.registry import FAMILIES
from llm_service.families.sight import SpanRule
from llm_service.models.trial import try_config, try_ours_of
from tools.launcher import NotStartedError, Service
from tools.models.compare import OURS, RANKS, Differs, through_services
from tools.models.drawn_prompts import drawn_prompt
from tools.models.families import make_native
from tools.models.prompts import FILM_WITH_SOUND, SOUND, TWO, TWO_SOUNDS, VIDEO
from tools.models.recipes import RECIPES
from tools.models.tiny import config_of_recipe, make

_PAGE = """\
# Models

All {seeing} kinds of models that transformers {release} has for pictures and text, by `model_type` of config.json,
and its {hearing} for sounds and text. `make models` (`python -m tools.models docs/MODELS.md`) generates this
page{older}.
{counts}.

- **native**: a family of ours ([ARCHITECTURE.md](ARCHITECTURE.md)); `tests/parity` compares more of it.
- **transformers** computes rows and their places in a prompt ([transformers.md](design/transformers.md)). The text is
  computed, over our scheduler and paged cache, by *our decoder*, as for native families, or by *transformers*.
- **compared**: both services answered from a tiny checkpoint of the kind, with its own processor and random float32
  weights. Token ids and 32 greedy tokens equalled transformers'.
    - Prompts: text alone, a picture, two pictures of different size between texts; also videos, sounds, and videos
      with sound (*video sound*), if the row says so. *One picture in a prompt*: two are refused.
    - Each was computed alone, with at least three others, and from the prefix cache; at once, and in steps of 16
      tokens. Steps are larger if rows of a picture, or all tokens of a prompt, see each other and need more.
    - *tp 2*: also on two ranks. Without it ranks are refused, because transformers, which computes the text, has no
      plan for them, or one that gives other logits.
    - A row is for one size of its kind. Gemma 4's smaller sizes hear, and none of their rows see each other; a
      separate test compares them (`tests/parity/test_hf_hearing.py`).
- **compared in one process**: the same on one rank, without gRPC (`testkit/hf_side.py`).
- Rows with neither: a small model's logits equalled transformers', in chunks, packed with another prompt. The trial
  at start-up checks the rest.
- **refused**: the services say why, and do not start.
- **unknown**: the default configuration makes no small model, or transformers needs a package that was missing; the
  trial at start-up decides.

Nothing here ran on a GPU, and all weights were random.

| kind | how | text by | |
|---|---|---|---|
{rows}
"""

RELEASE = version("transformers")
WRONG = "wrong"
"""How a kind is served that must not be; it is on no page."""
_KEPT = Path("build/models.jsonl")
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
"""No import starts a thread then: what has one cannot be forked."""


class Row(msgspec.Struct, frozen=True):
    """How one kind of models is served, what there is to say of it, and the release of transformers that was asked."""

    kind: str
    how: str
    note: str = ""
    text: str = ""
    release: str = RELEASE

    def __str__(self) -> str:
        older = [] if self.release == RELEASE else [f"by {self.release}"]
        return f"| {self.kind} | {self.how} | {self.text} | {', '.join(filter(None, [self.note, *older]))} |"

    @classmethod
    def read(cls, line: str, release: str = RELEASE) -> Row | None:
        """Of a line of a page of a release; None for one that is no row.

        >>> Row.read("| llava | transformers | our decoder | compared, by 5.23.0 |")
        Row(kind='llava', how='transformers', note='compared', text='our decoder', release='5.23.0')
        """
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) != _CELLS or cells[2] not in _HOW:
            return None
        if older := _BY.search(cells[4]):
            return cls(cells[1], cells[2], cells[4][: older.start()], cells[3], older[1])
        return cls(cells[1], cells[2], cells[4], cells[3], release)


_CELLS, _HOW = 6, ("native", "transformers", "refused", "unknown")
_BY = re.compile(r"(?:^|, )by (\d[\w.]*)$")


_SPANS = {
    SpanRule.EVERYWHERE: "rows of a picture see each other",
    SpanRule.IN_WINDOWS: "rows of a picture see each other in layers with a window",
    SpanRule.BEYOND_WINDOWS: "rows of a picture see each other, beyond windows as well",
    SpanRule.WHOLE_PROMPTS: "all tokens of a prompt see each other",
    SpanRule.ALL_MEDIA: "rows of all pictures of a prompt see each other",
}


def kinds() -> list[str]:
    """All that transformers has for pictures and text, in its order, and those for sounds and text. Of one that speaks
    as well, its thinker."""
    seeing = [made.model_type for made in transformers().AutoModelForImageTextToText._model_mapping]
    hearing = {made.model_type for made in transformers().AutoModelForMultimodalLM._model_mapping if _is_one(made)}
    for made, cls in transformers().AutoModelForPreTraining._model_mapping.items():
        if hasattr(cls, "get_audio_features"):
            hearing.add(made.model_type)
    return [*seeing, *sorted({*hearing, *RECIPES, *FAMILIES}.difference(seeing))]


def _is_one(made: Any) -> bool:
    return "thinker_config" not in (getattr(made, "sub_configs", None) or {})


def rows(asked: Sequence[str], compared: Comparison) -> Iterator[Row]:
    """One for each kind, those with a recipe compared so."""
    configurations = {kind: transformers().CONFIG_MAPPING[kind] for kind in asked}
    for kind in asked:
        if kind in FAMILIES:
            yield _compared_family(kind)
        else:
            yield _tried(kind, configurations[kind], compared)


def _compared_family(kind: str) -> Row:
    """Always by both services: there is nothing of transformers to be tried."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            names = through_services(make_native(kind, Path(folder)))
    except (AssertionError, Differs, NotStartedError, RuntimeError) as error:
        return Row(kind, WRONG, " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST])
    return Row(kind, "native", ", ".join([_COMPARED[by_services], *_notes(names)]), OURS)


def _tried(kind: str, made: Any, compared: Comparison) -> Row:
    try:
        text, found = text_by(kind, made)
    except CheckpointError as error:
        return Row(kind, "refused", _told(error))
    except (AttributeError, ImportError, KeyError, TypeError, ValueError, RuntimeError) as error:
        return Row(kind, "unknown", _told(error))
    notes = [_SPANS[found]] if found is not SpanRule.NOWHERE else []
    if kind not in RECIPES:
        return Row(kind, "transformers", ", ".join(notes), text)
    try:
        with tempfile.TemporaryDirectory() as folder:
            names = compared(kind, make(kind, Path(folder)))
    except (CheckpointError, NotStartedError) as error:
        return Row(kind, "refused", _told(error))
    except ImportError as error:
        return Row(kind, "unknown", _told(error))
    except (AssertionError, AttributeError, Differs, KeyError, RuntimeError, TypeError, ValueError) as error:
        return Row(kind, WRONG, " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST])
    if (OURS in names) != (text == OURS):
        return Row(kind, WRONG, f"{text} was to compute the text, and did not")
    return Row(kind, "transformers", ", ".join([_COMPARED[compared], *_notes(names), *notes]), text)


def text_by(kind: str, made: Any) -> tuple[str, SpanRule]:
    """Whose decoder computes a text, and where rows of it see each other, as trials say. Raises CheckpointError where
    neither does."""
    try:
        config = _configuration(kind, made)
        return OURS, try_ours_of(config, drawn_prompt).spans
    except CheckpointError:
        config = _configuration(kind, made)  # a trial shrinks it
        return "transformers", try_config(config, drawn_prompt).spans


def _configuration(kind: str, made: Any) -> Any:
    config = config_of_recipe(kind) if kind in RECIPES else made()
    class_of(config)
    state_tokens(config)
    checked(config)
    seen = getattr(config, "image_token_id", None) is not None
    vocabulary = config.get_text_config(decoder=True).vocab_size
    if row_token(config) >= vocabulary:  # as defaults have it, which belong to no checkpoint
        setattr(config, "image_token_id" if seen else "audio_token_id", vocabulary - 1)
    return config


def by_services(kind: str, checkpoint: Path) -> set[str]:
    """Names of what was compared. Raises NotStartedError where a service does not start, and Differs where one says
    something else than transformers."""
    return through_services(checkpoint, RECIPES[kind].step_tokens)


def in_process(kind: str, checkpoint: Path) -> set[str]:
    """The same without the services."""
    side: Any = resolve_name("testkit.hf_side")
    names: set[str] = side.compare(side.Served.of(checkpoint), RECIPES[kind].step_tokens)
    return names


Comparison = Callable[[str, Path], set[str]]
_COMPARED: dict[Comparison, str] = {by_services: "compared", in_process: "compared in one process"}


def _notes(names: set[str]) -> list[str]:
    one = ["one picture in a prompt"] * (TWO not in names and "one picture" in names)
    one += ["one sound in a prompt"] * (TWO_SOUNDS not in names and SOUND in names)
    notes = {"videos": VIDEO, "sounds": SOUND, "video sound": FILM_WITH_SOUND, "tp 2": RANKS}
    return one + [note for note, name in notes.items() if name in names]


def _told(error: BaseException) -> str:
    """One line that no table's bars are in."""
    if isinstance(error, ImportError):
        return missing(error)
    if not isinstance(error, CheckpointError | NotStartedError):
        return "its defaults state too little"
    line = " ".join(str(error).split()).replace("|", "/")
    return line if len(line) <= _LONGEST else line[: _LONGEST - 1].rstrip() + "…"


_LONGEST = 140


def page(found: Sequence[Row]) -> str:
    """The page with these rows."""
    counts = Counter(row.how for row in found)
    compared = sum("compared" in row.note for row in found)
    ours = sum(row.text == OURS for row in found)
    told = ", ".join(f"{counts[how]} {how}" for how in _HOW)
    told += f". {compared} were compared; our decoder computes the text of {ours}"
    seeing = len(transformers().AutoModelForImageTextToText._model_mapping)
    older = sum(row.release != RELEASE for row in found)
    return _PAGE.format(
        seeing=seeing,
        hearing=len(found) - seeing,
        release=RELEASE,
        older=f" ({older} with an earlier release, as their rows say)" if older else "",
        counts=told,
        rows="\n".join(map(str, found)),
    )


def main() -> None:
    """Prints each row as it is found, and writes the page from when on it has all."""
    parser = argparse.ArgumentParser(prog="python -m tools.models", description=__doc__)
    parser.add_argument("page", type=Path, help="the page to write, such as docs/MODELS.md")
    parser.add_argument(
        "--only", nargs="+", metavar="KIND", help="only these, even if they are kept; by default all that are not kept"
    )
    parser.add_argument("--kept", type=Path, default=_KEPT, help="file of the kept rows")
    parser.add_argument("--in-process", action="store_true", help="compare without the services, in seconds each")
    given = parser.parse_args()
    torch.set_num_threads(1)
    told, every, kept = _of_page(given.page), kinds(), _kept(given.kept)
    found = {**kept, **told} if given.only else {**told, **kept}  # a page may be newer than what was kept besides
    compared = in_process if given.in_process else by_services
    wrong = False
    for row in rows(given.only or [kind for kind in every if kind not in kept], compared):
        sys.stdout.write(f"{row}\n")
        sys.stdout.flush()
        if row.how == WRONG:
            wrong = True
            found.pop(row.kind, None)  # whatever was found of it before: there is no page until it is right
            continue
        found[row.kind] = row
        given.kept.parent.mkdir(parents=True, exist_ok=True)
        with given.kept.open("ab") as lines:
            lines.write(msgspec.json.encode(row) + b"\n")
        if all(kind in found for kind in every):
            given.page.write_text(page([found[kind] for kind in every]), encoding="utf-8")
    if wrong:
        sys.exit("some would be served, and answer otherwise than transformers")


def _of_page(path: Path) -> dict[str, Row]:
    """The rows of a page, each of the release that it names, or the page does."""
    text = path.read_text("utf-8") if path.exists() else ""
    release = next(iter(re.findall(r" transformers (\d[\w.]*) ", text)), RELEASE)
    return {row.kind: row for row in (Row.read(line, release) for line in text.splitlines()) if row is not None}


def _kept(path: Path) -> dict[str, Row]:
    """What was found before with this release, the last of each kind. What does not say with which one is older."""
    if not path.exists():
        return {}
    lines = [
        msgspec.convert({"release": "", **msgspec.json.decode(line)}, Row) for line in path.read_bytes().splitlines()
    ]
    return {row.kind: row for row in lines if row.release == RELEASE}


if __name__ == "__main__":
    # Services are forked: what they import is half of what a kind takes.
    os.environ.update(_ONE_THREAD)
    Service.popen = staticmethod(resolve_name("testkit.forkserver:popen"))
    main()
