"""`python -m benchmarks.versions --before REVISION`: the effect of a change: two versions of Twinlens in turns.

The services of the revision and of this checkout run at the same time, but only one version is asked at a time. Each
answers alone, then `--together` at once; the order changes from round to round. Every question and its picture are new
and go to both; the run fails if a cache had one. The peer is the version before.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import statistics
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from benchmarks.checkpoint import add_model_options, chosen_model
from benchmarks.hits import check_new, no_wrong_figures, since, told
from benchmarks.services import both
from benchmarks.sides import Timed
from benchmarks.twinlens_side import Twinlens
from benchmarks.workload import Question

_ROOT = Path(__file__).resolve().parents[1]
_WARM_UP_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Round:
    """What one version took for a round: its answer alone, and seconds for several at once."""

    alone: Timed
    together: float


_AS_DATA: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
"""Which Python 3.11 knows from 3.11.4 on; what git packs is our own."""


@contextmanager
def files_of(revision: str) -> Iterator[Path]:
    """A folder with the files of a git revision, for as long as the block runs."""
    packed = subprocess.run(["git", "archive", revision], cwd=_ROOT, check=True, capture_output=True).stdout
    with tempfile.TemporaryDirectory(prefix="twinlens-") as folder:
        with tarfile.open(fileobj=io.BytesIO(packed)) as files:
            files.extractall(folder, **_AS_DATA)
        yield Path(folder)


async def _measure(sides: Sequence[Twinlens], rounds: int, tokens: int, many: int) -> list[tuple[Round, Round]]:
    """Both versions' rounds, before and now."""
    for side in sides:
        await side.together([Question.new() for _ in range(max(many, 1))], _WARM_UP_TOKENS)
    looked = [await side.hits() for side in sides]
    pairs: list[tuple[Round, Round]] = []
    for number in range(rounds):
        question, several = Question.new(), [Question.new() for _ in range(many)]
        found: dict[int, Round] = {}
        for place in (0, 1) if number % 2 == 0 else (1, 0):
            alone = await sides[place].ask(question, tokens)
            found[place] = Round(alone, await sides[place].together(several, tokens) if several else 0.0)
        pairs.append((found[0], found[1]))
    for side, before, name in zip(sides, looked, ("before", "now"), strict=True):
        hits = since(before, await side.hits())
        check_new(name, hits)
        print(f"Found in caches meanwhile, {name}: {told(hits)}")
    return pairs


def _print(pairs: Sequence[tuple[Round, Round]], many: int) -> None:
    rows: list[tuple[str, Callable[[Round], float]]] = [
        ("TTFT, new picture", lambda side: side.alone.first),
        ("time per output token", lambda side: side.alone.per_token),
    ]
    if many:
        rows.append((f"{many} new pictures at once", lambda side: side.together))
    print("\n| | before | now | ratio of each pair: median | quartiles |\n|---|---:|---:|---:|---:|")
    for title, seconds in rows:
        before, now = (1e3 * statistics.median(map(seconds, column)) for column in zip(*pairs, strict=True))
        ratios = [seconds(new) / seconds(old) for old, new in pairs]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"| {title} | {before:.1f} ms | {now:.1f} ms | {middle:.3f} | {low:.3f} to {high:.3f} |")


async def _between(before: tuple[str, str], now: tuple[str, str], given: argparse.Namespace) -> None:
    addresses = (*before, *now)
    channels = [grpc.aio.insecure_channel(address) for address in addresses]
    try:
        sides = [Twinlens(channels[0], channels[1]), Twinlens(channels[2], channels[3])]
        pairs = await _measure(sides, given.rounds, given.tokens, given.together)
    finally:
        await asyncio.gather(*(channel.close() for channel in channels))
    _print(pairs, given.together)


def main() -> None:
    """Measures and prints a table of medians."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.versions", description=__doc__)
    add_model_options(parser)
    parser.add_argument("--before", required=True, metavar="REVISION", help="the revision to compare with")
    parser.add_argument("--rounds", type=int, default=12, help="rounds, at least two")
    parser.add_argument("--tokens", type=int, default=24, help="tokens of each answer")
    parser.add_argument("--together", type=int, default=4, metavar="N", help="concurrent answers, or 0")
    given = parser.parse_args()
    folder = chosen_model(given).resolve()
    with no_wrong_figures(), files_of(given.before) as old, both(folder, checkout=old) as before, both(folder) as now:
        asyncio.run(_between(before, now, given))


if __name__ == "__main__":
    main()
