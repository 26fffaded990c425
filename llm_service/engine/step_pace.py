"""How many prompt tokens the running answers can bear beside theirs: as many as keep their pace, by what steps took."""

from __future__ import annotations

_GROWTH = 0.01
"""What steps of decodes alone take at least is believed to grow by this share with each second of such steps."""
_SHORTEST = 1e-6
"""Seconds that prompt tokens take at least: a clock is not exact."""
_KEPT = 0.7
"""The share of a prompt token's time that remains after the next step that computes some."""
_FAR = 4.0
"""A prompt token's time is believed to have become so many times as long at most."""
_PATIENCE = 8
"""Steps in a row that leave prompts out."""


class StepPace:
    """Learns what steps take, and bounds the prompt tokens of those that carry decodes.

    A running answer is to get its tokens at most `slowdown` times as far apart as where nothing else is computed: over
    several steps, since one cannot always be cut so short. What a step with decodes took less than that is saved for
    the next ones, and what it took more is paid back by them; so whatever takes the device's time, an encoder on the
    same cores included, counts. `slowdown` 0 bounds nothing. A step that computes prompts has at least `least` tokens
    of them, and a multiple of `multiple`; where that is more than can be borne, steps in between have none, but not
    more than a few in a row: no prompt waits for ever.

    How long decodes take alone is the least of late, for numbers of sequences that lie between the same powers of two.
    While nothing is known of a number of sequences, they are computed alone.
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
        """A step of so many decodes and so many prompt tokens took so long."""
        kind = decodes.bit_length()
        alone = self._alone.get(kind, 0.0) if decodes else 0.0
        if tokens:
            each, before = max(_SHORTEST, seconds - alone) / tokens, self._seconds_per_token
            # One that stood still for whatever reason, as for a kernel that was compiled, says little of the next one.
            each = each if before is None else _KEPT * before + (1.0 - _KEPT) * min(each, _FAR * before)
            self._seconds_per_token = each
        elif decodes:
            alone = self._alone[kind] = min(seconds, alone * (1.0 + _GROWTH * seconds)) if alone else seconds
        if alone:
            # What one chunk of the least length wants is saved at most; what is owed is some steps' time at most.
            most = self._least * (self._seconds_per_token or 0.0)
            saved = self._saved + self._slowdown * alone - seconds
            self._saved = min(most, max(-_PATIENCE * self._slowdown * alone, saved))

    def prompt_tokens(self, decodes: int) -> int | None:
        """How many tokens of prompts the next step may compute beside so many decodes; None: any number. It is asked
        once for each step, where there are prompts to compute."""
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
