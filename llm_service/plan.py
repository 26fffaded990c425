"""What the scheduler tells the workers to compute, and what they answer. A step plan is a message: it holds all that a
step needs, but for what a worker keeps of sequences: the KV cache, and their block tables. There are hundreds of the
small ones in a step, and they cannot be part of a cycle, so the garbage collector is spared them (`gc=False`)."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterable, Sequence

import msgspec


class StepMemoryError(Exception):
    """The device has too little memory for a step, which was not computed. What it holds of sequences may be lost."""


class Chunk(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The next tokens of the flattened batch, which are of one sequence."""

    context: int
    """Tokens of the sequence before these, whose KV is in the cache."""
    count: int
    """Tokens of the chunk."""
    row: int
    """The sequence's row of all block tables, which is long enough for context + count tokens."""
    decodes: bool = False
    """They are an answer's, its last one with drafts behind it for example: what attends gives each the bits that it
    has alone."""
    answers: int = 0
    """How many of them, the last ones, are an answer's, which may be computed anew at once."""
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
    """How to choose one token from the logits at place `at` of the flattened batch. Fields without a description are
    those of `SamplingParams`."""

    at: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    uniform: float = 0.0
    """In [0, 1), decides the draw: the scheduler makes it, so that every rank, and a repeated run with the same seed,
    choose alike."""
    banned: tuple[int, ...] = ()
    """Tokens that cannot be chosen."""
    logit_bias: dict[int, float] = {}
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    prompt: bytes = b""
    """The prompt's distinct tokens, int32, where a penalty needs them."""
    output: bytes = b""
    """All tokens chosen so far, int32, where a penalty needs them."""
    logprobs: int = -1
    """How many of the likeliest tokens to report beside the chosen one; -1: not even that one's."""
    allowed_mask: bytes = b""
    """A bit for each token (little-endian): one whose bit is not set cannot be chosen. Empty: all can be."""
    carried: int = -1
    """The draw of the plan before that chooses the token before this one, the last of `output`; -1: it is known."""
    banned_behind: tuple[tuple[int, int], ...] = ()
    """Pairs of tokens: the second cannot be chosen where the first is the token that is carried over."""
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
"""Waits for the masks of a step that were not known when it was planned: one for each draw whose mask follows."""


def no_masks() -> Sequence[bytes]:
    """Of a step that was planned when all its tokens were known."""
    return ()


def with_masks(draws: list[Draw], masks: Masks) -> list[Draw]:
    """The draws of a plan with the masks that follow; waits for them where any draw has one."""
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
    """Asks how likely tokens of a prompt are: `targets`, int32 [m] as bytes, are those that follow the places from `at`
    on in the flattened batch; `top` of the likeliest are given beside each."""

    at: int
    targets: bytes
    top: int


class HiddenSum(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Asks for the sum of the hidden states, behind the last norm, of `count` places from `at` on in the flattened
    batch."""

    at: int
    count: int = 1


class Proposal(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Asks for up to `count` drafts behind the token that is drawn last for a chunk; 0 for none. A token at index i of
    the sequence is at i + `mrope_delta` there. `following` is the prompt's token behind a chunk for which none is
    drawn."""

    count: int
    mrope_delta: int
    following: int = 0


class StateCopies(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Copies of states between slots, in order: (from slot, to slot) `before` and `after` the step; `within` it, of
    those that a chunk passes: (number of the chunk, its tokens up to there, to slot), at multiples of what such a layer
    computes at once."""

    before: list[tuple[int, int]] = []
    within: list[tuple[int, int, int]] = []
    after: list[tuple[int, int]] = []


class StepAdapters(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """In which slots adapters are while a step is computed."""

    filled: list[tuple[int, int]] = []
    """Those that are put there before it: (slot, number of the adapter)."""
    slots: list[int] = []
    """Each chunk's slot, -1 for none; empty where no chunk has one."""


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """One forward pass over a flattened batch of n tokens. Plans are computed one after the other, in the order they
    were made; each may be made while the one before it is still computed."""

    token_ids: bytes
    """int32 [n]."""
    positions: bytes
    """int32 [3, n]: time, height and width, as mRoPE has them."""
    chunks: list[Chunk]
    """One for each sequence, behind each other in the batch."""
    rows: list[RowSlice]
    """Places whose embeddings are media's, by place."""
    draws: list[Draw]
    """The tokens to choose, by place."""
    carried: list[tuple[int, int]] = []
    """(place, draw): the token at that place is the one that this draw of the plan before chooses."""
    prompt_logprobs: list[PromptLogprobsAsked] = []
    """Prompts' tokens whose log-probabilities are asked for."""
    slots: list[int] = []
    """Each chunk's slot of states, for a model whose layers have any. Without context a chunk reads nothing there."""
    states: StateCopies = StateCopies()
    """Between those slots."""
    appended: list[Appended] = []
    """What block tables have become longer by since the plan before, ahead of anything that is computed."""
    adapters: StepAdapters = StepAdapters()
    proposals: list[Proposal] = []
    """One for each chunk, where a model proposes drafts; nothing is carried over then."""
    greedy: bool = False
    """Every draw is of the likeliest token, and none asks for log-probabilities: ranks find the tokens together."""
    whole: list[tuple[int, int]] = []
    """[begin, end) of the batch, each the last tokens of a prompt, which see each other and what was computed of it
    before."""
    pools: list[HiddenSum] = []
    """What is asked of prompts whose embeddings are wanted."""
    offloaded: list[tuple[int, int]] = []
    """KV blocks that are copied to the host first of all, in order: (block, place in the host's memory)."""
    loaded: list[tuple[int, int]] = []
    """Then those that are copied from there: (place, block)."""

    @property
    def tokens(self) -> int:
        """Tokens of the batch."""
        return len(self.token_ids) // 4

    @property
    def wanted(self) -> list[int]:
        """The places of draws, and behind them the first ones of pools; where there are neither, any place."""
        return [*(draw.at for draw in self.draws), *(each.at for each in self.pools)] or [0]


_LIKELY = struct.Struct("<id")


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Natural logarithms: the chosen token's, and the likeliest tokens with theirs, likeliest first. Those are packed:
    as objects, twenty of them take two kilobytes, and an answer waits for its reader."""

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
    """What came of a plan; times are of `time.perf_counter`, which all processes of a host share."""

    tokens: list[int]
    """One for each draw."""
    logprobs: list[TokenLogprobs | None]
    """One for each draw, None where none was asked for."""
    prompt_logprobs: list[list[TokenLogprobs]] = []
    """For each of the plan's, one for each of its targets."""
    replayed: bool = False
    """A captured graph computed it."""
    began: float = 0.0
    ended: float = 0.0
    proposed: list[list[int]] = []
    """Drafts for each chunk; empty where no model proposes any."""
    pooled: list[bytes] = []
    """For each pool, float32 [hidden]."""
