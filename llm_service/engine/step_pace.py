"""Bounds the prompt tokens of a step so that running answers keep their pace, as learned from the times of earlier
steps."""

from __future__ import annotations

_GROWTH = 0.01
"""The least time of steps of decodes alone is assumed to grow by this share for each second of such steps."""
_SHORTEST = 1e-6
"""Seconds that prompt tokens take at least: a clock is not exact."""
_KEPT = 0.7
"""The share of a prompt token's time that remains after the next step that computes some."""
_FAR = 4.0
"""At most by this factor is a prompt token's time taken to have grown at once."""
_PATIENCE = 8
"""Steps in a row that leave prompts out."""


class StepPace:
    """Learns how long steps take, and bounds the prompt tokens of steps with decodes.

    A running answer should get its tokens at most `slowdown` times as far apart as when nothing else is computed,
    averaged over several steps, since one step cannot always be cut that short. Time that a step with decodes saves is
    available to the next steps, and time that it exceeds is paid back by them; so everything that takes time on the
    device counts, such as an encoder on the same cores. `slowdown` 0 means no bound. A step with prompts computes at
    least `least` of their tokens, and a multiple of `multiple`. If that is more than the pace allows, some steps
    compute no prompts, but only a few in a row, so that no prompt waits forever.

    The time of decodes alone is the least of recent steps, kept apart for each power of two of the number of sequences.
    While it is unknown for a number, decodes are computed alone.
    """

    def __init__(self, slowdown: float, *, least: int = 32, multiple: int = 1) -> None:
        self._slowdown = slowdown
        self._multiple = multiple
        self._least = -(-least // multiple) * multiple
        self._alone: dict[int, float] = {}
        self._seconds_per_token: float | None = None
        self._saved = 0.0
        self._left_out = 0

    def learn(self, decodes: int, tokens: int, seconds: float) -> None:
        """Records how long a step with so many decodes and prompt tokens took."""
        kind = decodes.bit_length()
        alone = self._alone.get(kind, 0.0) if decodes else 0.0
        if tokens:
            each, before = max(_SHORTEST, seconds - alone) / tokens, self._seconds_per_token
            # A step that was held up, for example by compiling a kernel, says little about the next one.
            each = each if before is None else _KEPT * before + (1.0 - _KEPT) * min(each, _FAR * before)
            self._seconds_per_token = each
        elif decodes:
            alone = self._alone[kind] = min(seconds, alone * (1.0 + _GROWTH * seconds)) if alone else seconds
        if alone:
            # At most the time of one shortest chunk is saved, and at most the time of some steps is owed.
            most = self._least * (self._seconds_per_token or 0.0)
            saved = self._saved + self._slowdown * alone - seconds
            self._saved = min(most, max(-_PATIENCE * self._slowdown * alone, saved))

    def prompt_tokens(self, decodes: int) -> int | None:
        """How many prompt tokens the next step may compute beside so many decodes; None: no bound. Called once for each
        step that has prompts to compute."""
        if not self._slowdown or not decodes:
            return None
        tokens = self._bearable(decodes)
        if tokens < self._least:
            tokens = self._least if self._left_out >= _PATIENCE else 0
        self._left_out = 0 if tokens else self._left_out + 1
        return tokens - tokens % self._multiple

    def _bearable(self, decodes: int) -> int:
        alone = self._alone.get(decodes.bit_length())
        if alone is None:
            return 0
        if self._seconds_per_token is None:
            return self._least
        return int(((self._slowdown - 1.0) * alone + self._saved) / self._seconds_per_token)
