"""`python -m benchmarks.plan`: predictions of tools.plan and measurements on this machine's pair, for three workloads.

Costs are measured on the same pair, one request at a time, before and after each workload, since machines change their
speed; the prediction uses the mean of both and the machine's number of cores. Pictures and texts are new; a *repeated*
picture was asked about before in the same workload. Below each line are the costs and the cache hits.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks import services, workload
from benchmarks.hits import HEADERS, PREFIX, ROWS, Hits, since, told
from tools.plan.costs import Costs
from tools.plan.measure import Pair, Seen, closed, measure
from tools.plan.simulation import Cluster
from tools.plan.workload import Workload, arrivals
from twinlens import LlmClient, image, v1

SMALL, LARGE = 64, 784
"""Patches of 16 by 16 pixels: pictures of 128 and of 448 pixels to a side."""

WORKLOADS = {
    "new pictures, short answers": (Workload(LARGE, 1, 0.0, 0, 4), 4, 4),
    "texts, long answers": (Workload(LARGE, 0, 0.0, 0, 96), 8, 4),
    "half of the pictures repeated": (Workload(LARGE, 1, 0.5, 0, 32), 6, 60),
}
"""By name: what is asked (its prompt's tokens are counted when it runs), by how many clients, words of the text."""


def main() -> None:
    """Measures, predicts, and prints both."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan", description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/demo"), help="checkpoint folder")
    parser.add_argument("--seconds", type=float, default=25.0, help="seconds of each workload")
    parser.add_argument("--runs", type=int, default=9, help="requests of each kind to measure costs")
    parser.add_argument("--answer", type=int, default=96, help="tokens of the answers that give a step's costs")
    given = parser.parse_args()
    files = {patches: workload.new_picture(round(math.sqrt(patches)) * 16) for patches in (SMALL, LARGE)}

    def picture(patches: int) -> v1.Media:
        return image(workload.renamed(files[patches]), min_pixels=patches * 256, max_pixels=patches * 256)

    flags = ("--threads", "1")
    with services.both(given.model, encoder_flags=flags, llm_flags=flags) as (_, llm), LlmClient(llm) as client:
        comparison = Comparison(Pair(client), client, picture, given.seconds, given.runs, given.answer)
        print(f"{'workload':32}{'requests/s':>24}{'first token, ms':>24}{'whole answer, ms':>24}")
        for name, (asked, clients, words) in WORKLOADS.items():
            comparison.of(name, asked, clients, words)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Of one pair, for so many seconds a workload, costs from so many `runs` of each kind and from answers of so many
    tokens; `picture` makes a new one of so many patches."""

    pair: Pair
    client: LlmClient
    picture: Callable[[int], v1.Media]
    seconds: float
    runs: int
    answer: int

    def of(self, name: str, asked: Workload, clients: int, words: int) -> None:
        """Prints a line: predicted, measured, and how far off; one of what caches gave, and one of the costs."""
        requests = arrivals(asked, [(math.inf, 1.0)])
        shown: dict[int, v1.Media] = {}
        counted = self.pair.ask([], words, 2).prompt_tokens

        def ask() -> Seen:
            pictures = [shown.setdefault(each, self.picture(asked.patches)) for each in next(requests).pictures]
            return self.pair.ask(pictures, words, asked.answer_tokens)

        first_costs = self._costs()
        before = self._hits()
        rate, seen = closed(ask, clients, self.seconds)
        found = since(before, self._hits())
        costs = Costs.mean(first_costs, self._costs())
        asked = Workload(asked.patches, asked.pictures, asked.repeats, counted, asked.answer_tokens)
        cluster = Cluster.split(costs, asked, 1, 1, cores=os.cpu_count() or 1)
        foretold = cluster.closed(arrivals(asked, [(math.inf, 1.0)]), clients, self.seconds)
        first = statistics.mean(each.first_token - each.arrived for each in cluster.measured)
        whole = statistics.mean(each.ended - each.arrived for each in cluster.measured)
        pairs = (
            (foretold, rate),
            (first * 1e3, statistics.mean(each.first_token for each in seen) * 1e3),
            (whole * 1e3, statistics.mean(each.ended for each in seen) * 1e3),
        )
        cells = (f"{one:9.1f} {two:9.1f} {one / two - 1:+4.0%}" for one, two in pairs)
        print(f"{name:32}" + "".join(f"{cell:>24}" for cell in cells))
        print(f"  in caches, {len(seen)} requests: {told(found)}")
        print(f"  {costs}", flush=True)

    def _costs(self) -> Costs:
        return measure(self.pair, self.picture, SMALL, LARGE, runs=self.runs, answer=self.answer)

    def _hits(self) -> Hits:
        load = self.client.get_load()
        return {PREFIX: load.prefix_hit_tokens, ROWS: load.row_hits, HEADERS: load.headers_known}


if __name__ == "__main__":
    main()
