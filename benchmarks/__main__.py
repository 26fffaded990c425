"""`python -m benchmarks`: one photograph and a question, here and through transformers and vLLM, in one run.

All get the same random checkpoint of about 250 M parameters in float32 and the same cores, one after the other. vLLM is
measured where `--vllm` names its program, in an environment of its own. A ratio (ours to the peer's) below 1 for times,
above 1 for rates, is in our favour.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from benchmarks import twinlens_side, vllm_side
from benchmarks.checkpoint import CACHE, bench_checkpoint
from benchmarks.workload import CONCURRENT

Figures = dict[str, float]

_ROWS = (
    ("ttft_cold", "TTFT, new picture"),
    ("ttft_same_picture", "TTFT, same picture, other question"),
    ("ttft_same_prompt", "TTFT, same prompt"),
    ("per_token", "time per output token"),
    *((f"tokens_per_second_{many}", f"tokens/s at {many} concurrent") for many in CONCURRENT),
)
_SIDES = ("transformers", "vllm", "twinlens")


def main() -> None:
    """Measures one side after the other and prints a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--model", type=Path, help="checkpoint folder; by default a random one of 250 M parameters")
    parser.add_argument("--runs", type=int, default=5, help="repetitions; the median is shown")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of a long answer")
    parser.add_argument("--vllm", type=Path, help="vLLM's program, such as /opt/vllm/bin/vllm")
    parser.add_argument("--only", choices=_SIDES, help="measure one side alone")
    given = parser.parse_args()
    folder = given.model or bench_checkpoint(CACHE)
    wanted = [given.only] if given.only else [side for side in _SIDES if side != "vllm" or given.vllm]
    if "vllm" in wanted and given.vllm is None:
        parser.error("--only vllm needs --vllm")
    peers: dict[str, Figures] = {}
    if "transformers" in wanted:
        peers["transformers"] = _transformers(folder, given.runs, given.tokens)
    if "vllm" in wanted:
        peers["vLLM"] = vllm_side.main(given.vllm, folder, given.runs, given.tokens)
    ours = twinlens_side.main(folder, given.runs, given.tokens) if "twinlens" in wanted else {}
    _print(peers, ours)


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


def _figure(value: float, rate: bool) -> str:
    return f"{value:.1f}" if rate else f"{value * 1e3:.1f} ms"


if __name__ == "__main__":
    main()
