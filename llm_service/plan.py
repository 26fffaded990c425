"""What the scheduler tells the workers to compute, and their results. A step plan is a message with everything that a
step needs, except the KV cache and block tables, which workers keep. A step has hundreds of the small structs, which
cannot be part of a cycle, so the garbage collector ignores them (`gc=False`)."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterable, Sequence

import msgspec


class StepMemoryError(Exception):
    """The device had too little memory for a step, which was not computed. KV and states of sequences may be lost."""


class Chunk(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The next tokens of one sequence, in the flattened batch."""

    context: int
    """Tokens of the sequence before these; their KV is in the cache."""
    count: int
    """Tokens of the chunk."""
    row: int
    """The sequence's row of all block tables, which have blocks for context + count tokens."""
    decodes: bool = False
    """They belong to an answer, such as its last token with drafts behind it: attention computes each with the bits
    that it would have alone."""
    answers: int = 0
    """How many of them, at the end, belong to an answer; after a preemption these may be computed in one chunk."""
    answered: int = 0
    """How many tokens the answer has with them."""


class Appended(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The block table in row `row` goes on, from index `begin`, with `blocks`, int32 as bytes. With `begin` 0 it is
    another sequence's."""

    row: int
    begin: int
    blocks: bytes


class RowSlice(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`count` embedding rows at byte `offset` of the row arena take the places from `at` on in the flattened batch."""

    at: int
    offset: int
    count: int


class Draw(msgspec.Struct, frozen=True, array_like=True, kw_only=True, gc=False):
    """How to choose one token from the logits at batch position `at`. Fields without a description are those of
    `SamplingParams`."""

    at: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    uniform: float = 0.0
    """In [0, 1), decides the draw. The scheduler draws it, so that all ranks, and a repeated run with the same seed,
    choose alike."""
    banned: tuple[int, ...] = ()
    """Tokens that cannot be chosen."""
    logit_bias: dict[int, float] = {}
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    prompt: bytes = b""
    """int32: the prompt's distinct tokens, if a penalty needs them."""
    output: bytes = b""
    """int32: all tokens chosen so far, if a penalty needs them."""
    logprobs: int = -1
    """How many of the likeliest tokens to report besides the chosen one; -1: none, not even the chosen one."""
    allowed_mask: bytes = b""
    """A bit for each token (little-endian); tokens whose bit is 0 cannot be chosen. Empty: all can."""
    carried: int = -1
    """The draw of the plan before that chooses the token before this one, the last of `output`; -1: it is known."""
    banned_behind: tuple[tuple[int, int], ...] = ()
    """Pairs of tokens: the second cannot be chosen if the first is the token that is carried over."""
    mask_follows: bool = False
    """`allowed_mask` is handed over while the step is computed."""

    def with_last(self, token: int) -> Draw:
        """The draw with the token before it put in."""
        output = array("i", self.output)
        if output:
            output[-1] = token
        banned = (*self.banned, *(second for first, second in self.banned_behind if first == token))
        return msgspec.structs.replace(self, output=output.tobytes(), carried=-1, banned=banned, banned_behind=())

    @property
    def alters(self) -> bool:
        """Logits are changed before anything is chosen."""
        bans = self.banned or self.banned_behind
        masked = self.allowed_mask or self.mask_follows
        return bool(bans or masked or self.logit_bias or self.prompt or self.output)

    @property
    def plain(self) -> bool:
        """The highest logit wins, untouched."""
        return self.temperature == 0.0 and not self.alters


Masks = Callable[[], Sequence[bytes]]
"""Waits for the masks of a step that were not known when it was planned, one for each draw whose mask follows."""


def no_masks() -> Sequence[bytes]:
    """Of a step that was planned when all its tokens were known."""
    return ()


def with_masks(draws: list[Draw], masks: Masks) -> list[Draw]:
    """A plan's draws with the masks that follow; waits for these if any draw needs one."""
    if not any(draw.mask_follows for draw in draws):
        return draws
    following = iter(masks())
    filled = [
        msgspec.structs.replace(draw, allowed_mask=next(following), mask_follows=False) if draw.mask_follows else draw
        for draw in draws
    ]
    assert next(following, None) is None, "one mask for each draw that waits for one"
    return filled


class PromptLogprobsAsked(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Asks for the log-probabilities of prompt tokens: `targets`, int32 [m] as bytes, follow the batch positions from
    `at` on; `top` of the likeliest tokens are reported for each."""

    at: int
    targets: bytes
    top: int


class HiddenSum(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Asks for the sum of the hidden states after the final norm, of `count` batch positions from `at` on."""

    at: int
    count: int = 1


class Proposal(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Asks for up to `count` drafts behind the token drawn last for a chunk; 0: none. Token i of the sequence has
    position i + `mrope_delta`. `following` is the prompt token behind a chunk for which no token is drawn."""

    count: int
    mrope_delta: int
    following: int = 0


class StateCopies(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Copies of states between slots, in order: (from slot, to slot) `before` and `after` the step, and `within` it for
    states that a chunk passes: (number of the chunk, its tokens up to there, to slot), at multiples of what such layers
    compute at once."""

    before: list[tuple[int, int]] = []
    within: list[tuple[int, int, int]] = []
    after: list[tuple[int, int]] = []


class StepAdapters(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The slots of adapters during a step."""

    filled: list[tuple[int, int]] = []
    """Adapters to load before the step: (slot, number of the adapter)."""
    slots: list[int] = []
    """Each chunk's slot, -1 for none; empty if no chunk has an adapter."""


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """One forward pass over a flattened batch of n tokens. Plans are computed one after the other, in the order they
    were made; each may be made while the one before it is still computed."""

    token_ids: bytes
    """int32 [n]."""
    positions: bytes
    """int32 [3, n]: time, height and width, as mRoPE has them."""
    chunks: list[Chunk]
    """One for each sequence, consecutive in the batch."""
    rows: list[RowSlice]
    """Positions whose embeddings are media rows, in ascending order."""
    draws: list[Draw]
    """The tokens to choose, by place."""
    carried: list[tuple[int, int]] = []
    """(place, draw): the token at that place is the one that this draw of the plan before chooses."""
    prompt_logprobs: list[PromptLogprobsAsked] = []
    """Prompt tokens whose log-probabilities are asked for."""
    slots: list[int] = []
    """Each chunk's state slot, if layers have states. A chunk without context does not read it."""
    states: StateCopies = StateCopies()
    """Copies between these slots."""
    appended: list[Appended] = []
    """Blocks added to block tables since the plan before; applied before anything is computed."""
    adapters: StepAdapters = StepAdapters()
    proposals: list[Proposal] = []
    """One for each chunk, if a model proposes drafts; nothing is carried over then."""
    greedy: bool = False
    """Every draw is of the likeliest token, and none asks for log-probabilities: ranks find the tokens together."""
    whole: list[tuple[int, int]] = []
    """[begin, end) in the batch of the last tokens of prompts whose tokens see each other and all before."""
    pools: list[HiddenSum] = []
    """Pooled hidden states of prompts whose embeddings are wanted."""
    offloaded: list[tuple[int, int]] = []
    """KV blocks that are copied to the host first of all, in order: (block, place in the host's memory)."""
    loaded: list[tuple[int, int]] = []
    """Then copies from the host: (place, block)."""

    @property
    def tokens(self) -> int:
        """Tokens of the batch."""
        return len(self.token_ids) // 4

    @property
    def wanted(self) -> list[int]:
        """Batch positions of the draws, then of the first position of each pool; any position if there are neither."""
        return [*(draw.at for draw in self.draws), *(each.at for each in self.pools)] or [0]


_LIKELY = struct.Struct("<id")


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Natural logarithms: of the chosen token, and of the likeliest tokens, likeliest first. The latter are packed:
    twenty of them as objects would take two kilobytes while an answer waits for its reader."""

    chosen: float
    packed: bytes = b""
    """For each of the likeliest, int32 and float64."""

    @classmethod
    def of(cls, chosen: float, top: Iterable[tuple[int, float]]) -> TokenLogprobs:
        """From these."""
        return cls(chosen, b"".join(_LIKELY.pack(token, value) for token, value in top))

    @property
    def top(self) -> list[tuple[int, float]]:
        """The likeliest tokens, with theirs."""
        return list(_LIKELY.iter_unpack(self.packed))


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """The result of a plan; times are of `time.perf_counter`, which all processes of a host share."""

    tokens: list[int]
    """One for each draw."""
    logprobs: list[TokenLogprobs | None]
    """One for each draw, None if none were asked for."""
    prompt_logprobs: list[list[TokenLogprobs]] = []
    """For each of the plan's, one for each of its targets."""
    replayed: bool = False
    """A captured graph computed it."""
    began: float = 0.0
    ended: float = 0.0
    proposed: list[list[int]] = []
    """Drafts for each chunk; empty if no model proposes any."""
    pooled: list[bytes] = []
    """For each pool, float32 [hidden]."""
