"""`python -m benchmarks`: one photograph and a question, here and through transformers and vLLM, in one run.

All get the same random checkpoint of about 250 M parameters in float32 and the same cores, one after the other; with
`--starts` several times in turns, since what memory a process gets is decided when it starts. vLLM is measured where
`--vllm` names its program, in an environment of its own. A ratio (ours to the peer's) below 1 for times, above 1 for
rates, is in our favour.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import twinlens_side, vllm_side
from benchmarks.checkpoint import add_model_options, chosen_model
from benchmarks.workload import CONCURRENT

Figures = dict[str, float]

_ROWS = (
    ("ttft_cold", "TTFT, new picture"),
    ("ttft_same_picture", "TTFT, same picture, other question"),
    ("ttft_same_prompt", "TTFT, same prompt"),
    ("per_token", "time per output token"),
    *((f"tokens_per_second_{many}", f"tokens/s at {many} concurrent") for many in CONCURRENT),
)
_NAMES = {"transformers": "transformers", "vllm": "vLLM", "twinlens": "Twinlens"}
_SIDES = tuple(_NAMES)


def main() -> None:
    """Measures one side after the other and prints a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    add_model_options(parser)
    parser.add_argument("--runs", type=int, default=5, help="repetitions; the median is shown")
    parser.add_argument("--starts", type=int, default=1, help="times that each side is started; the median is shown")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of a long answer")
    parser.add_argument("--vllm", type=Path, help="vLLM's program, such as /opt/vllm/bin/vllm")
    parser.add_argument("--only", choices=_SIDES, help="measure one side alone")
    given = parser.parse_args()
    folder = chosen_model(given)
    wanted = [given.only] if given.only else [side for side in _SIDES if side != "vllm" or given.vllm]
    if "vllm" in wanted and given.vllm is None:
        parser.error("--only vllm needs --vllm")
    measure: dict[str, Callable[[], Figures]] = {
        "transformers": lambda: _transformers(folder, given.runs, given.tokens),
        "vllm": lambda: vllm_side.main(given.vllm, folder, given.runs, given.tokens),
        "twinlens": lambda: twinlens_side.main(folder, given.runs, given.tokens),
    }
    starts: dict[str, list[Figures]] = {side: [] for side in wanted}
    for _ in range(given.starts):
        for side in wanted:
            starts[side].append(measure[side]())
    sides = {side: _medians(figures) for side, figures in starts.items()}
    ours = sides.pop("twinlens", {})
    _print({_NAMES[side]: figures for side, figures in sides.items()}, ours)
    if given.starts > 1:
        _print_spread(starts)


def _medians(starts: Sequence[Figures]) -> Figures:
    return {name: statistics.median(figures[name] for figures in starts) for name in starts[0]}


def _transformers(folder: Path, runs: int, tokens: int) -> Figures:
    command = [sys.executable, "-m", "benchmarks.transformers_side", str(folder), str(runs), str(tokens)]
    figures: Figures = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    cold = figures["ttft_cold"]
    return {**figures, "ttft_same_picture": cold, "ttft_same_prompt": cold}  # it remembers nothing


def _print(peers: dict[str, Figures], ours: Figures) -> None:
    columns = ["", *peers, *(["Twinlens", *(f"÷ {peer}" for peer in peers)] if ours else [])]
    print("| " + " | ".join(columns) + " |\n|---|" + "---:|" * (len(columns) - 1))
    for name, title in _ROWS:
        rate = name.startswith("tokens")
        cells = [_figure(figures[name], rate) for figures in (*peers.values(), *([ours] if ours else []))]
        cells += [f"{ours[name] / figures[name]:.2f}" for figures in peers.values()] if ours else []
        print(f"| {title} | " + " | ".join(cells) + " |")
    stages = {name.removeprefix("stage_"): value for name, value in ours.items() if name.startswith("stage_")}
    if stages:
        told = ", ".join(f"{name} {value * 1e3:.1f} ms" for name, value in stages.items())
        print(f"\nStages of a new picture: {told}")


def _print_spread(starts: dict[str, list[Figures]]) -> None:
    """How much the first row and the time of a token depend on the start."""
    print("\nFrom start to start:")
    for side, measured in starts.items():
        told = []
        for name in ("ttft_cold", "per_token"):
            values = [figures[name] for figures in measured]
            told.append(f"{dict(_ROWS)[name]} {_figure(min(values), False)} to {_figure(max(values), False)}")
        print(f"{_NAMES[side]}: {', '.join(told)}")


def _figure(value: float, rate: bool) -> str:
    return f"{value:.1f}" if rate else f"{value * 1e3:.1f} ms"


if __name__ == "__main__":
    main()
