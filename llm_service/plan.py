"""What the scheduler tells the workers to compute, and what they answer. A step plan is a message: it holds all that a
step needs, so that a worker keeps no state of requests but the KV cache."""

from __future__ import annotations

import msgspec


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """`count` tokens of one sequence, after `context` tokens that are in the KV cache.

    They are the next `count` tokens of the flattened batch; `blocks` is the sequence's block table, long enough for
    context + count tokens.
    """

    context: int
    count: int
    blocks: list[int]


class RowSlice(msgspec.Struct, frozen=True, array_like=True):
    """`count` embedding rows at byte `offset` of the row arena take the places from `at` on in the flattened batch."""

    at: int
    offset: int
    count: int


class Draw(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """How to choose one token from the logits at place `at` of the flattened batch.

    `uniform` in [0, 1) decides the draw; the scheduler makes it, so that every rank, and a repeated run with the same
    seed, choose alike. Tokens in `banned` cannot be chosen. `history` and `output_from` (where in it the output begins)
    are given only where a penalty needs them. `logprobs`: how many of the likeliest to report, -1 for none at all.
    `allowed`: where it is given, a token whose bit (little-endian) is not set cannot be chosen.
    """

    at: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    uniform: float = 0.0
    banned: tuple[int, ...] = ()
    logit_bias: dict[int, float] = {}
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    history: bytes = b""
    output_from: int = 0
    logprobs: int = -1
    allowed: bytes = b""

    @property
    def plain(self) -> bool:
        """The highest logit wins, untouched."""
        return self.temperature == 0.0 and not (self.banned or self.logit_bias or self.history or self.allowed)


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """One forward pass over a flattened batch of n tokens.

    `token_ids` is int32 [n] and `positions` int32 [3, n], as bytes; chunks lie one after the other.
    """

    token_ids: bytes
    positions: bytes
    chunks: list[Chunk]
    rows: list[RowSlice]
    draws: list[Draw]

    @property
    def tokens(self) -> int:
        """Tokens of the batch."""
        return len(self.token_ids) // 4


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural logarithms: the chosen token's, and the likeliest tokens with theirs, likeliest first."""

    chosen: float
    top: list[tuple[int, float]]


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """One token for each draw of the plan, in order, and its log-probabilities where they were asked for."""

    tokens: list[int]
    logprobs: list[TokenLogprobs | None]
