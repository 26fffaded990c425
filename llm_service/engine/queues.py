"""Waiting and running sequences, both by priority and arrival, and the sequences of each request."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from itertools import pairwise

from llm_service.engine.sequence import Order, Sequence

_FEW = 64
"""Number of deadlines below which those of ended requests are not removed."""


def order_of(sequence: Sequence) -> Order:
    """Orders sequences: by priority, then arrival, then choice; a smaller one is served first."""
    return sequence.order


@dataclass(slots=True)
class Queues:
    """Every sequence is in `waiting` or in `running` until it ends. Only running sequences hold blocks."""

    waiting: list[Sequence] = field(default_factory=list)
    running: list[Sequence] = field(default_factory=list)
    requests: dict[int, list[Sequence]] = field(default_factory=dict)
    _deadlines: list[tuple[float, int]] = field(default_factory=list)

    def add(self, id: int, sequences: list[Sequence], deadline: float | None) -> None:
        """Takes a new request in; its sequences wait."""
        self.requests[id] = sequences
        for sequence in sequences:
            insort(self.waiting, sequence, key=order_of)
        if deadline is not None:
            self._forget_deadlines()
            heapq.heappush(self._deadlines, (deadline, id))

    def start(self, sequence: Sequence, computed: int) -> None:
        """Moves a sequence from waiting to running; the KV of its first `computed` tokens is cached."""
        self._take(self.waiting, sequence)
        insort(self.running, sequence, key=order_of)
        sequence.start(computed)

    def preempt(self, sequence: Sequence) -> None:
        """From running to waiting."""
        self._take(self.running, sequence)
        insort(self.waiting, sequence, key=order_of)
        sequence.preempt()

    def remove(self, sequence: Sequence) -> bool:
        """Removes a sequence that has ended. Returns whether it was the last one of its request, which is removed as
        well."""
        self._take(self.running if sequence.running else self.waiting, sequence)
        sequence.finish()
        siblings = self.requests[sequence.id]
        siblings.remove(sequence)
        for sibling in siblings:
            if sibling.first_choice is sequence:
                sibling.compute_own_prompt()
        if not siblings:
            del self.requests[sequence.id]
        return not siblings

    def forget_places(self, sequence: Sequence) -> bool:
        """If all choices of a request have computed their media positions, its items lose their places in the arena.
        Returns whether they did."""
        prompt = sequence.prompt
        if any(choice.num_computed_tokens < prompt.media_end for choice in self.requests[sequence.id]):
            return False
        prompt.displace()
        return True

    def displace(self, sequence: Sequence) -> bool:
        """Has all choices of a request wait for new places for its items, which have none until then. Returns False,
        and does nothing, while one of them still has rows to read there."""
        choices = self.requests[sequence.id]
        if any(choice.running and choice.num_computed_tokens < choice.prompt.media_end for choice in choices):
            return False
        for choice in choices:
            choice.wait_for_placement()
        sequence.prompt.displace()
        return True

    def next_deadline(self) -> float | None:
        """The earliest deadline of all requests."""
        while self._deadlines and self._deadlines[0][1] not in self.requests:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def _forget_deadlines(self) -> None:
        """Removes deadlines of ended requests once they are many: clients may set them years ahead."""
        if len(self._deadlines) > 2 * len(self.requests) + _FEW:
            self._deadlines = [each for each in self._deadlines if each[1] in self.requests]
            heapq.heapify(self._deadlines)

    def late(self, now: float) -> list[int]:
        """Requests whose deadline has passed by `now`, each once."""
        found: list[int] = []
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            found.append(heapq.heappop(self._deadlines)[1])
        return found

    @staticmethod
    def _take(queue: list[Sequence], sequence: Sequence) -> None:
        place = bisect_left(queue, sequence.order, key=order_of)
        assert queue[place] is sequence
        del queue[place]

    def check_integrity(self) -> None:
        """Raises AssertionError unless each sequence is in one queue and belongs to a request, in order."""
        for queue in (self.waiting, self.running):
            assert all(one.order < other.order for one, other in pairwise(queue))
            assert all(sequence.running == (queue is self.running) for sequence in queue)
        assert not any(sequence.table.blocks for sequence in self.waiting), "a waiting sequence holds blocks"
        everyone = sorted(map(id, (*self.waiting, *self.running)))
        assert everyone == sorted(id(sequence) for group in self.requests.values() for sequence in group)
