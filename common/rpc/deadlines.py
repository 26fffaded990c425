"""Whether a caller has left because his time was up."""

from __future__ import annotations

_ROUNDED_UP, _AHEAD = 0.015, 0.05


def has_run_out(seconds: float, remaining: float | None) -> bool:
    """Whether the deadline of a call that came `seconds` ago was its end, with `remaining` seconds to go until then, as
    a service counts; None: it has no deadline. A caller's own clock ends it a little earlier: gRPC tells a service a
    deadline that is rounded up, by a hundredth at most, and a message takes its time.

    >>> has_run_out(3.29, 0.04), has_run_out(3.29, 0.4), has_run_out(3.29, None)
    (True, False, False)
    """
    return remaining is not None and remaining <= _AHEAD + _ROUNDED_UP * seconds
