"""How a test asks a light engine to take its time."""

from __future__ import annotations

SLOW = 11
"""While an answer is computed whose request has a bias for this token, be it zero, every step takes `SLOW_SECONDS`."""
SLOW_SECONDS = 0.1
