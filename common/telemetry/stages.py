"""Stages of a request: how long each took, and when."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stage:
    """`seconds` were spent on it between `began` and `ended`: less than lie between them where it paused, more where
    several items were in it at once. None: nobody said when.

    Moments are those of `time.perf_counter`, or are counted from another one: see `since`.
    """

    seconds: float
    began: float | None = None
    ended: float | None = None

    @classmethod
    def between(cls, began: float, ended: float) -> Stage:
        """One that went on all the time."""
        return cls(ended - began, began, ended)

    def with_more(self, more: Stage) -> Stage:
        """Both together."""
        began = self.began if more.began is None else more.began if self.began is None else min(self.began, more.began)
        ended = self.ended if more.ended is None else more.ended if self.ended is None else max(self.ended, more.ended)
        return Stage(self.seconds + more.seconds, began, ended)

    def since(self, moment: float) -> Stage:
        """The same, its moments counted from this one.

        >>> Stage.between(7.0, 9.0).since(5.0)
        Stage(seconds=2.0, began=2.0, ended=4.0)
        """
        began = None if self.began is None else self.began - moment
        return Stage(self.seconds, began, None if self.ended is None else self.ended - moment)


def add(stages: MutableMapping[str, Stage], name: str, more: Stage) -> None:
    """Adds to the stage of that name, which may be there already."""
    stages[name] = stages[name].with_more(more) if name in stages else more


def seconds_of(stages: Mapping[str, Stage]) -> dict[str, float]:
    """Seconds by stage."""
    return {name: stage.seconds for name, stage in stages.items()}
