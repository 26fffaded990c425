"""Measure the exported checkpoint on scenes that training never saw: `python -m tools.demo_model.evaluate`.

An answer is right when it is the expected sentence, letter by letter (capitals and the final dot aside). `--through
services` asks the two running services instead of the reference, `--through both` asks both and counts differences.
"""

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tools.demo_model.cases import DRAWERS, KINDS, Case, cases
from tools.demo_model.places import TARGET
from tools.demo_model.through import Both, Services, Through, Transformers
from twinlens import TwinlensError

WANTED = {
    "colour": 97, "shape": 97, "count": 93, "relation": 93, "read": 80, "video": 90, "differs": 90, "pictures": 90,
}  # fmt: skip


def plain(text: str) -> str:
    """What of an answer is compared."""
    return text.strip().rstrip(".").lower()


def measure(through: Through, kind: str, number: int, seed: int, renderer: str) -> tuple[int, list[tuple[Case, str]]]:
    """How many of `number` answers are right, and the wrong ones."""
    asked = list(cases(kind, number, seed, renderer))
    with ThreadPoolExecutor(through.at_once) as pool:
        answers = pool.map(through.answer, asked)
        given = list(tqdm(answers, total=number, desc=kind, leave=False, ascii=True, disable=None))
    wrong = [(case, said) for case, said in zip(asked, given, strict=True) if plain(said) != plain(case.answer)]
    return number - len(wrong), wrong


def chosen(args: argparse.Namespace) -> Through:
    """The way of asking that the flags name."""
    if args.through == "transformers":
        return Transformers(args.model)
    services = Services(args.address)
    return services if args.through == "services" else Both(Transformers(args.model), services)


def table(found: dict[str, dict[str, int]], number: int) -> str:
    """A table in Markdown: a row for each kind, a column for each renderer."""
    head = "| question | wanted | " + " | ".join(found) + " |"
    lines = [head, "|" + " --- |" * (2 + len(found))]
    for kind in next(iter(found.values())):
        shares = " | ".join(f"{100 * right[kind] / number:.1f} %" for right in found.values())
        lines.append(f"| {kind} | {f'{WANTED[kind]} %' if kind in WANTED else '–'} | {shares} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m tools.demo_model.evaluate", description=__doc__)
    parser.add_argument("--model", type=Path, default=TARGET, help="the checkpoint's folder (default: models/demo)")
    ways = ("transformers", "services", "both")
    parser.add_argument("--through", choices=ways, default=ways[0], help="who answers (default: %(default)s)")
    address = "the LLM service's address (default: %(default)s)"
    parser.add_argument("--address", default="127.0.0.1:7002", help=address)
    scenes = "scenes for each kind of question (default: %(default)s)"
    parser.add_argument("--scenes", type=int, default=500, help=scenes)
    parser.add_argument("--seed", type=int, default=20_000_003, help="of the scenes (default: %(default)s)")
    parser.add_argument("--renderer", choices=tuple(DRAWERS), action="append", help="default: each in turn")
    parser.add_argument("--kind", choices=KINDS, action="append", help="default: all")
    parser.add_argument("--show", type=int, default=0, help="print this many wrong answers of each kind")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    if args.through != "services" and not (args.model / "config.json").exists():
        parser.error(f"--model {args.model} is not the folder of a checkpoint")
    try:
        compare(args)
    except TwinlensError as error:
        sys.exit(f"the services at {args.address} do not answer, which `make up` starts: {error}")


def compare(args: argparse.Namespace) -> None:
    """Ask, count and print. Raises TwinlensError if the services do not answer."""
    through, found = chosen(args), dict[str, dict[str, int]]()
    for renderer in args.renderer or tuple(DRAWERS):
        found[renderer] = {}
        for kind in args.kind or KINDS:
            found[renderer][kind], wrong = measure(through, kind, args.scenes, args.seed, renderer)
            print(f"{renderer} {kind}: {found[renderer][kind]} of {args.scenes}", flush=True)
            for case, given in wrong[: args.show]:
                print(f"  {case.question} should be {case.answer!r}, is {given!r}")
    print(table(found, args.scenes))
    if isinstance(through, Both):
        print(f"{len(through.unequal)} answers of the services differ from the reference")
    if args.json is not None:
        result: dict[str, Any] = {"scenes": args.scenes, "seed": args.seed, "right": found}
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
