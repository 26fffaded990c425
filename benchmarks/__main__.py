"""`python -m benchmarks`: one photograph and a question, here and through transformers, in one run.

Both engines get the same random checkpoint of about 250 M parameters in float32 and the same threads. A ratio below 1
for times, above 1 for rates, is in our favour.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from benchmarks import twinlens_side
from benchmarks.checkpoint import CACHE, bench_checkpoint
from benchmarks.workload import CONCURRENT

_ROWS = (
    ("ttft_cold", "TTFT, new picture", "ttft_cold"),
    ("ttft_same_picture", "TTFT, same picture, other question", "ttft_cold"),
    ("ttft_same_prompt", "TTFT, same prompt", "ttft_cold"),
    ("per_token", "time per output token", "per_token"),
    *(
        (f"tokens_per_second_{many}", f"tokens/s at {many} concurrent", f"tokens_per_second_{many}")
        for many in CONCURRENT
    ),
)


def main() -> None:
    """Measures both sides one after the other and prints a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--model", type=Path, help="checkpoint folder; by default a random one of 250 M parameters")
    parser.add_argument("--runs", type=int, default=5, help="repetitions; the median is shown")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of a long answer")
    parser.add_argument("--only", choices=("twinlens", "transformers"), help="measure one side alone")
    given = parser.parse_args()
    folder = given.model or bench_checkpoint(CACHE)
    theirs: dict[str, float] = {}
    ours: dict[str, float] = {}
    if given.only != "twinlens":
        command = [
            sys.executable,
            "-m",
            "benchmarks.transformers_side",
            str(folder),
            str(given.runs),
            str(given.tokens),
        ]
        theirs = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    if given.only != "transformers":
        ours = twinlens_side.main(folder, given.runs, given.tokens)
    _print(theirs, ours)


def _print(theirs: dict[str, float], ours: dict[str, float]) -> None:
    print(f"| {'':36} | transformers | twinlens | ratio |\n|{'-' * 38}|-------------:|---------:|------:|")
    for name, title, against in _ROWS:
        rate = name.startswith("tokens")
        peer, own = theirs.get(against), ours.get(name)
        ratio = f"{own / peer:.2f}" if peer and own else ""
        print(f"| {title:36} | {_figure(peer, rate):>12} | {_figure(own, rate):>8} | {ratio:>5} |")
    stages = {name.removeprefix("stage_"): value for name, value in ours.items() if name.startswith("stage_")}
    if stages:
        print(
            "\nStages of a new picture: " + ", ".join(f"{name} {value * 1e3:.1f} ms" for name, value in stages.items())
        )


def _figure(value: float | None, rate: bool) -> str:
    if value is None:
        return ""
    return f"{value:.1f}" if rate else f"{value * 1e3:.1f} ms"


if __name__ == "__main__":
    main()
