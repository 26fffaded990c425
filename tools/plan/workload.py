"""The workload: requests and their arrival times."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of one kind. A share of the pictures was seen before; times between arrivals are exponential."""

    patches: int = 784
    """Of a picture; the LLM sees a fourth as many rows."""
    pictures: int = 1
    """In a request; 0: text alone."""
    repeats: float = 0.0
    """Share of pictures that were asked about before."""
    prompt_tokens: int = 50
    answer_tokens: int = 100
    merge: int = 4
    """Patches to a row."""


@dataclass(slots=True)
class Request:
    """One of them: its arrival in seconds, and which pictures it shows."""

    number: int
    at: float
    pictures: tuple[int, ...]


def arrivals(workload: Workload, phases: list[tuple[float, float]], seed: int = 1) -> Iterator[Request]:
    """Requests over `phases` of (seconds, requests a second), one after the other."""
    draw = random.Random(seed)
    begin, number = 0.0, 0
    seen = 0
    for seconds, rate in phases:
        at = begin
        while rate and (at := at + draw.expovariate(rate)) < begin + seconds:
            shown = []
            for _ in range(workload.pictures):
                if seen and draw.random() < workload.repeats:
                    shown.append(draw.randrange(seen))
                else:
                    shown.append(seen)
                    seen += 1
            yield Request(number, at, tuple(shown))
            number += 1
        begin += seconds
