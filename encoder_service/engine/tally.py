"""What the device workers have done."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Totals since start."""

    vit_calls: int = 0
    vit_patches: int = 0
    graph_calls: int = 0
    preprocess_seconds: float = 0.0
    vit_seconds: float = 0.0
    worker_deaths: int = 0


@dataclass(frozen=True, slots=True)
class Computed:
    """One batch that a worker has computed. `fill` is its share of the patches that one may have."""

    units: int
    patches: int
    fill: float
    preprocess_seconds: float
    vit_seconds: float
