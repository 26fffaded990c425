"""Whose turn it is to compute what CPUs have kernels of ours for: torch, while they are compiled, or they.

A fact of the process. Whoever runs steps changes it between two of them (`llm_service.worker.changeover`); whoever
does not care has our kernels, which are compiled at their first call. It imports nobody.
"""

from __future__ import annotations


class _Turn:
    ours = True
    laid_out = True


_turn = _Turn()


def ours() -> bool:
    """Whether our kernels compute."""
    return _turn.ours


def give(*, to_us: bool) -> None:
    """Has our kernels compute from now on, or torch."""
    _turn.ours = to_us


def laid_out() -> bool:
    """Whether weights may be laid out as our kernels want them."""
    return _turn.laid_out


def leave_to_torch() -> None:
    """Has torch compute for good, on weights as it wants them. For before there is a weight."""
    _turn.ours = _turn.laid_out = False
