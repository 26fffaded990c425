"""`python -m benchmarks`: one photograph and a question, through Twinlens, transformers and vLLM, in one run.

All get the same random checkpoint of about 250 M parameters, the same cores and the same questions, one engine after
the other; with `--starts` several times in turns, since a process gets its memory layout when it starts. Every row,
warm-up and round has new pictures and texts, except rows called *repeated*. A second table shows each engine's cache
hits; if new content was in a cache, the run fails. vLLM is measured if `--vllm` names its program, in a separate
environment; if it does not run, the benchmark says so. Ratios (ours to the peer's) below 1 for times, and above 1 for
rates, favour Twinlens.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from benchmarks import twinlens_side, vllm_side
from benchmarks.checkpoint import add_model_options, chosen_model
from benchmarks.hits import added, no_wrong_figures, told
from benchmarks.services import partner
from benchmarks.sides import TITLES, Job, Measured
from benchmarks.workload import Plan

_NAMES = {"transformers": "transformers", "vllm": "vLLM", "twinlens": "Twinlens"}
_SIDES = tuple(_NAMES)


def main() -> None:
    """Measures one side after the other and prints the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    add_model_options(parser)
    parser.add_argument("--runs", type=int, default=5, help="questions of each kind; the median is shown")
    parser.add_argument("--starts", type=int, default=1, help="starts of each side; the median is shown")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of a long answer")
    parser.add_argument("--vllm", type=Path, help="vLLM's program, such as /opt/vllm/bin/vllm")
    parser.add_argument("--only", choices=_SIDES, help="measure one side only")
    given = parser.parse_args()
    wanted = [given.only] if given.only else list(_SIDES)
    if "vllm" in wanted:
        try:
            print(f"vLLM {vllm_side.version(given.vllm)}\n", flush=True)
        except vllm_side.NotServingError as error:
            _leave_vllm_out(wanted, str(error))
    folder = chosen_model(given)
    measure: dict[str, Callable[[Plan], Measured]] = {
        "transformers": lambda plan: _transformers(folder, plan, given.tokens),
        "vllm": lambda plan: vllm_side.main(given.vllm, folder, plan, given.tokens),
        "twinlens": lambda plan: twinlens_side.main(folder, plan, given.tokens),
    }
    starts: dict[str, list[Measured]] = {side: [] for side in wanted}
    for _ in range(given.starts):
        plan = Plan.new(given.runs)
        for side in tuple(wanted):
            try:
                with no_wrong_figures():
                    starts[side].append(measure[side](plan))
            except vllm_side.NotServingError as error:
                _leave_vllm_out(wanted, str(error))
    print_tables({side: measured for side, measured in starts.items() if measured})


def _leave_vllm_out(wanted: list[str], why: str) -> None:
    """Says so, in the place where the table will be; ends the run where nothing else is wanted."""
    wanted.remove("vllm")
    if not wanted:
        sys.exit(f"vLLM cannot be measured: {why}")
    print(f"vLLM is left out: {why}\n", flush=True)


def _transformers(folder: Path, plan: Plan, tokens: int) -> Measured:
    with partner("benchmarks.transformers_side", str(folder)) as peer:
        assert peer.stdin is not None
        assert peer.stdout is not None
        peer.stdin.write(msgspec.json.encode(Job(plan, tokens)).decode())
        peer.stdin.close()
        measured = peer.stdout.read()
    return msgspec.json.decode(measured, type=Measured)


def print_tables(starts: dict[str, list[Measured]]) -> None:
    """Medians over the starts, hits of all starts together, and how far starts lay apart."""
    figures = {side: _medians([each.figures for each in measured]) for side, measured in starts.items()}
    peers, ours = [side for side in figures if side != "twinlens"], figures.get("twinlens")
    columns = [_NAMES[side] for side in figures] + ([f"÷ {_NAMES[peer]}" for peer in peers] if ours else [])
    _print_head(columns)
    for name, title in TITLES.items():
        cells = [_figure(name, found[name]) for found in figures.values()]
        cells += [f"{ours[name] / figures[peer][name]:.2f}" for peer in peers] if ours else []
        print(f"| {title} | " + " | ".join(cells) + " |")
    print("\nFound in caches meanwhile, in all starts:\n")
    _print_head([_NAMES[side] for side in figures])
    for name, title in TITLES.items():
        cells = [told(added(each.hits[name] for each in starts[side])) for side in figures]
        print(f"| {title} | " + " | ".join(cells) + " |")
    if ours and (stages := _medians([each.stages for each in starts["twinlens"]])):
        spent = ", ".join(f"{name} {1e3 * value:.1f} ms" for name, value in stages.items())
        print(f"\nStages of a new picture: {spent}")
    if max(map(len, starts.values())) > 1:
        _print_spread(starts)


def _medians(starts: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(figures[name] for figures in starts) for name in starts[0]}


def _print_head(columns: Sequence[str]) -> None:
    print("| | " + " | ".join(columns) + " |\n|---|" + "---:|" * len(columns))


def _print_spread(starts: dict[str, list[Measured]]) -> None:
    """How much the first row and the time of a token depend on the start."""
    print("\nFrom start to start:")
    for side, measured in starts.items():
        ranges = []
        for name in ("ttft_new", "per_token"):
            values = [each.figures[name] for each in measured]
            ranges.append(f"{TITLES[name]} {_figure(name, min(values))} to {_figure(name, max(values))}")
        print(f"{_NAMES[side]}: {', '.join(ranges)}")


def _figure(name: str, value: float) -> str:
    return f"{value:.1f}" if name.startswith("tokens") else f"{value * 1e3:.1f} ms"


if __name__ == "__main__":
    main()
