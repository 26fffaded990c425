"""Measures costs on a running pair, and runs a workload on it, for comparison with the simulation."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tools.plan.costs import Costs
from twinlens import LlmClient, SamplingParams, generate_request, user, v1

NewPicture = Callable[[int], v1.Media]
"""A picture of so many patches that was never shown."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One real request: seconds to its first and last token, seconds of the encoder's worker, tokens of the prompt."""

    first_token: float
    ended: float
    worker: float
    prompt_tokens: int


class Pair:
    """Asks an LLM service; every text is a new one."""

    def __init__(self, client: LlmClient) -> None:
        self._client = client
        self._numbers = itertools.count()

    def ask(self, pictures: Sequence[v1.Media], words: int, answer: int) -> Seen:
        """With so many words behind the pictures; exactly so many tokens are answered."""
        text = f"{next(self._numbers)} " + "word " * words
        sampling = SamplingParams(temperature=0, max_tokens=answer, min_tokens=answer, ignore_eos=True)
        begun = time.perf_counter()
        first, worker, tokens = 0.0, 0.0, 0
        with self._client.generate(generate_request(user(*pictures, text), sampling)) as events:
            for event in events:
                if event.HasField("started"):
                    tokens = event.started.prompt_tokens
                elif event.HasField("delta"):
                    first = first or time.perf_counter() - begun
                else:
                    stages = {each.stage: each.seconds for each in event.finished.timings}
                    worker = stages.get("encoder_preprocess", 0.0) + stages.get("encoder_vit", 0.0)
        return Seen(first, time.perf_counter() - begun, worker, tokens)

    def alike(self, runs: int, pictures: Callable[[], Sequence[v1.Media]], words: int) -> Seen:
        """The medians of requests one after the other."""
        seen = [self.ask(pictures(), words, 2) for _ in range(runs)]
        return Seen(
            statistics.median(each.first_token for each in seen),
            statistics.median(each.ended for each in seen),
            statistics.median(each.worker for each in seen),
            seen[0].prompt_tokens,
        )

    def between_tokens(self, clients: int, answer: int, rounds: int = 4) -> float:
        """Seconds between tokens of so many answers at once, the median of all rounds but the first; no pictures."""
        with ThreadPoolExecutor(clients) as pool:
            seen = [list(pool.map(lambda _: self.ask((), 4, answer), range(clients))) for _ in range(rounds)]
        later = (each for one in seen[1:] for each in one)
        return statistics.median((each.ended - each.first_token) / (answer - 1) for each in later)


def measure(
    pair: Pair, picture: NewPicture, small: int, large: int, *, runs: int = 9, answer: int = 96, **limits: int
) -> Costs:
    """Costs from requests one after the other, with pictures of `small` and `large` patches, and from answers at once
    of `answer` tokens each.

    `limits` are those of the services: `batch_patches`, `step_tokens`, `running`.
    """
    pair.alike(3, lambda: [picture(large)], 4)  # what is slower at first is not measured
    alone, eight = pair.between_tokens(1, answer), pair.between_tokens(8, answer)
    decode = max(0.0, (eight - alone) / 7)
    step = max(0.0, alone - decode)
    short, long = pair.alike(runs, lambda: (), 4), pair.alike(runs, lambda: (), 180)
    prefill = max(0.0, (long.first_token - short.first_token) / (long.prompt_tokens - short.prompt_tokens))
    front = max(0.0, short.first_token - step - prefill * short.prompt_tokens)
    few, many = pair.alike(runs, lambda: [picture(small)], 4), pair.alike(runs, lambda: [picture(large)], 4)
    patch = max(0.0, (many.worker - few.worker) / (large - small))
    around = [each.first_token - each.worker - front - step - prefill * each.prompt_tokens for each in (few, many)]
    around_patch = max(0.0, (around[1] - around[0]) / (large - small))
    return Costs(
        batch=max(0.0, few.worker - patch * small),
        patch=patch,
        picture=max(0.0, around[0] - around_patch * small),
        picture_patch=around_patch,
        front=front,
        step=step,
        prefill=prefill,
        decode=decode,
        **limits,
    )


def closed(ask: Callable[[], Seen], clients: int, seconds: float) -> tuple[float, list[Seen]]:
    """What `clients` see that each ask again as soon as they are answered; the requests a second meanwhile.

    Requests that were under way at the end count by the time that they took.
    """
    seen: list[Seen] = []
    begun = time.perf_counter()

    def go() -> None:
        while time.perf_counter() < begun + seconds:
            seen.append(ask())

    threads = [threading.Thread(target=go) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(seen) / (time.perf_counter() - begun), seen
