"""The chart's autoscalers, simulated: Kubernetes' rule, every 15 s, over the metrics that the services export."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from tools.plan.simulation import Cluster, Device
from tools.plan.workload import Request

PERIOD, WINDOW, STABLE, TOLERANCE = 15.0, 120.0, 600.0, 0.1
"""Seconds between looks, of a rate, for which fewer must do before fewer are kept; the share that changes nothing."""


@dataclass(frozen=True, slots=True)
class Targets:
    """For one replica, as `autoscaling` in the chart's values."""

    busy_workers: float = 0.7
    backlog_seconds: float = 2.0
    sequences: float = 16.0
    least: int = 1
    most: int = 32


@dataclass(frozen=True, slots=True)
class Look:
    """What there was when an autoscaler looked."""

    at: float
    encoders: int
    llms: int
    busy_workers: float
    sequences: float


class _Scaler:
    """The rule for one kind: as many as the worst ratio wants, and fewer only after `STABLE` seconds."""

    def __init__(self, targets: Targets) -> None:
        self._targets = targets
        self._wanted: deque[tuple[float, int]] = deque()

    def wanted(self, now: float, there: int, *ratios: float) -> int:
        """`ratios` are sums over replicas, in units of one replica's target."""
        worst = max(ratios)
        wanted = there if abs(worst / there - 1) <= TOLERANCE else math.ceil(worst)
        wanted = min(max(wanted, self._targets.least), self._targets.most)
        self._wanted.append((now, wanted))
        while self._wanted[0][0] < now - STABLE:
            self._wanted.popleft()
        return max(wanted, min(there, max(each for _, each in self._wanted)))


class Autoscaler:
    """Scales a cluster while requests come to it; `looks` is what it saw."""

    def __init__(self, cluster: Cluster, targets: Targets) -> None:
        self.looks: list[Look] = []
        self._cluster, self._targets = cluster, targets
        self._encoders, self._llms = _Scaler(targets), _Scaler(targets)
        self._coming = [0, 0]
        self._spent: deque[tuple[float, float]] = deque()
        self._sequences: deque[tuple[float, int]] = deque()
        self._devices = [each.device for each in cluster.encoders]

    def play(self, requests: Iterable[Request]) -> None:
        """As `Cluster.play`, with replicas that come and go meanwhile."""
        self._cluster.clock.at(PERIOD, self._look)
        self._cluster.play(requests)

    def _look(self) -> None:
        cluster, clock = self._cluster, self._cluster.clock
        spent = sum(device.busy_seconds for device in self._devices)
        self._spent.append((clock.now, spent))
        while self._spent[0][0] < clock.now - WINDOW:
            self._spent.popleft()
        since, before = self._spent[0]
        busy = (spent - before) / (clock.now - since) if clock.now > since else 0.0
        self._sequences.append((clock.now, sum(each.sequences for each in cluster.engines)))
        while self._sequences[0][0] < clock.now - WINDOW:
            self._sequences.popleft()
        sequences = sum(each for _, each in self._sequences) / len(self._sequences)
        self.looks.append(Look(clock.now, len(cluster.encoders), len(cluster.engines), busy, sequences))
        backlog = sum(each.backlog_seconds for each in cluster.encoders) / self._targets.backlog_seconds
        there = len(cluster.encoders) + self._coming[0]
        wanted = self._encoders.wanted(clock.now, there, busy / self._targets.busy_workers, backlog)
        for _ in range(there, wanted):
            self._start(0)
        del cluster.encoders[max(1, wanted) :]
        there = len(cluster.engines) + self._coming[1]
        wanted = self._llms.wanted(clock.now, there, sequences / self._targets.sequences)
        for _ in range(there, wanted):
            self._start(1)
        del cluster.engines[max(1, wanted) :]
        clock.at(clock.now + PERIOD, self._look)

    def _start(self, kind: int) -> None:
        self._coming[kind] += 1

        def serves() -> None:
            self._coming[kind] -= 1
            device = Device(self._cluster.clock)
            if kind == 0:
                self._devices.append(device)
                self._cluster.add_encoder(device)
            else:
                self._cluster.add_engine(device)

        self._cluster.clock.at(self._cluster.clock.now + self._cluster.costs.start_seconds, serves)
