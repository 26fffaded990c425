"""A sequence: one choice of one request, as the scheduler sees it. Numbers only, no torch."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from llm_service.engine.bad_words import BadWords
from llm_service.engine.block_identity import NEVER, BlockContent, BlockIdentities
from llm_service.engine.block_manager import BlockTable
from llm_service.engine.drafts import DraftLength
from llm_service.engine.limits import SchedulerLimits
from llm_service.engine.matchers import Matcher
from llm_service.engine.messages import Add
from llm_service.engine.prompt import Prompt
from llm_service.engine.state_slots import SnapshotPlace
from llm_service.request import Pooling, SamplingParams
from llm_service.token_masks import both, leaves_any

Order = tuple[int, int, int]

PLACEHOLDER = 0
"""Placeholder for a token that a running step will choose."""


class WaitReason(enum.Enum):
    """Why nothing of a sequence can be computed."""

    GRAMMAR = enum.auto()
    """Its matcher has not been taken in: it is on its way, or has just come."""
    MEDIA_ROWS = enum.auto()
    """The next media row has not arrived, or the client has too many prompt logprobs still to read."""
    PLACEMENT = enum.auto()
    """Its items have no places in the row arena."""
    SIBLING = enum.auto()
    """The first choice of its request is still computing the prompt that they share."""
    TOKEN = enum.auto()
    """Its length is unknown until a step under way has verified its drafts."""


@dataclass(slots=True, eq=False)
class Sequence:
    """The tokens of a request so far, how many of them have their KV computed, and the blocks that hold it. Only its
    methods change a sequence; those that answer a question change nothing but what they remember.

    A step counts as computed when it is planned, since steps run in the order of their planning. So the last
    `num_placeholders` tokens may still have to come from steps under way. If the step under way verifies drafts, there
    is one placeholder for each draft and one behind them; those behind the first wrong draft are never filled.
    """

    id: int
    """Its request's."""
    choice: int
    prompt: Prompt
    tokens: array[int]
    """int32: the prompt, then the chosen tokens, with `PLACEHOLDER` for each that is not known yet."""
    identities: BlockIdentities
    sampling: SamplingParams
    seed: int
    adapter: int
    """A number; 0 for none."""
    table: BlockTable
    order: Order
    """A smaller one is served first."""
    max_length: int
    """Tokens that it may have, the prompt's included."""
    stop_ids: tuple[int, ...]
    """Tokens that end it."""
    turn_ends: tuple[int, ...]
    """Tokens at the end of a turn."""
    matcher_future: Future[Matcher] | None = None
    """The matcher of its grammar that is on its way."""
    matcher: Matcher | None = None
    """Has consumed the known tokens of the output."""
    first_choice: Sequence | None = None
    """The one that computes the prompt that they share."""
    num_computed_tokens: int = 0
    """Tokens whose KV is computed, steps that are planned included."""
    num_placeholders: int = 0
    placeholder_draw: int = 0
    """Index of the draw that chooses the last placeholder."""
    running: bool = False
    num_resumed_tokens: int = 0
    """Output tokens that the request brought with it."""
    num_starts: int = 0
    """How often it has started: once, and again after each preemption."""
    num_tokens_with_logprobs: int = 0
    """Tokens of the prompt that have theirs by steps up to the last one planned, or need none."""
    num_logprobs_taken: int = 0
    """Prompt tokens whose logprobs the client has read."""
    finished: bool = False
    rolled_back: bool = False
    """The model has layers with states, and a draft was wrong: the next step computes the known tokens again from
    before the drafts."""
    drafts: array[int] = field(default_factory=lambda: array("i"))
    """int32: the tokens that the step under way verifies behind the last known token."""
    draft_masks: list[bytes] = field(default_factory=list)
    """The grammar's mask behind 0, 1, … drafts, in the form of `Draw.allowed_mask`."""
    proposed: array[int] = field(default_factory=lambda: array("i"))
    """int32: the drafts that a model proposed with the last step."""
    draft_length: DraftLength = field(default_factory=lambda: DraftLength(0))
    plain: bool = False
    """Greedy sampling without further options."""
    bad_words: BadWords | None = None
    pooling: Pooling | None = None
    """The step that computes the end of its prompt gives it no token, but ends it; a placeholder stands for that."""
    _pooled: np.ndarray | None = None
    """float64 [hidden]: the sum of hidden states since it was started last."""
    _waits_for: WaitReason | None = None
    _branches: dict[int, SnapshotPlace] = field(default_factory=dict)
    """Positions where states are kept for other sequences, in ascending order."""

    @classmethod
    def of(cls, add: Add, limits: SchedulerLimits, eos: tuple[int, ...], *, arrival: int, seed: int) -> list[Sequence]:
        """One sequence for each choice of a request that is not finished; all but the first of them wait until that one
        has its prompt computed. `eos` end an answer. Without a seed of its own the request has this one."""
        prompt, sampling = Prompt.of(add, limits.chunk_rule), add.sampling
        length, most = len(prompt.tokens), min(add.max_length or limits.max_context, limits.max_context)
        resumed = {each.choice: each for each in add.resume}
        sequences: list[Sequence] = []
        for choice in range(sampling.n):
            given = resumed.get(choice)
            if given is not None and given.finished:
                continue
            output = array("i", b"" if given is None else given.token_ids)
            asked = choice == 0 and not output and sampling.prompt_logprobs is not None
            sequence = cls(
                id=add.id,
                choice=choice,
                prompt=prompt,
                tokens=prompt.tokens + output,
                identities=BlockIdentities(
                    prompt.root, prompt.keyed_runs, length if limits.forgets_answers else NEVER, add.identities
                ),
                sampling=sampling,
                adapter=add.adapter,
                table=BlockTable(add.session, prompt.tenant),
                seed=seed if sampling.seed is None else sampling.seed,
                order=(-add.priority, arrival, choice),
                # If nothing is generated, a prompt may fill the whole context: its placeholder is not a token.
                max_length=min(most + (add.pooling is not None), length + sampling.max_tokens),
                stop_ids=(*(() if sampling.ignore_eos else eos), *sampling.stop_token_ids),
                turn_ends=eos,
                first_choice=sequences[0] if sequences else None,
                num_resumed_tokens=len(output),
                num_tokens_with_logprobs=max(1, add.with_logprobs) if asked else length,
                num_logprobs_taken=add.with_logprobs,
                plain=sampling == _plainest(sampling),
                bad_words=BadWords.of(sampling.bad_word_ids),
                draft_length=DraftLength(limits.speculative_tokens),
                pooling=add.pooling,
            )
            sequences.append(sequence)
        return sequences

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt.tokens)

    @property
    def generated(self) -> int:
        """Number of tokens chosen so far, including those of steps under way."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def has_begun(self) -> bool:
        """Whether a token has been chosen, besides those that the request brought."""
        return self.generated > self.num_resumed_tokens

    @property
    def output(self) -> array[int]:
        """The known tokens behind the prompt."""
        return self.tokens[self.prompt_tokens : self.num_known_tokens]

    @property
    def num_known_tokens(self) -> int:
        """Tokens, from the first on, that are known by now."""
        return len(self.tokens) - self.num_placeholders

    @property
    def pending(self) -> int:
        """Number of tokens whose KV is still to be computed."""
        return len(self.tokens) - self.num_computed_tokens

    @property
    def at_max_length(self) -> bool:
        """No token may be added: once the steps under way are done, it ends."""
        return len(self.tokens) >= self.max_length

    @property
    def wait_reason(self) -> WaitReason | None:
        """Why nothing can be computed now, regardless of blocks; None: it may continue."""
        if self.matcher_future is not None:
            return WaitReason.GRAMMAR
        if self.num_placeholders and self.drafts:
            return WaitReason.TOKEN
        if self._waits_for is None and self.first_choice is not None and not self.first_choice.has_begun:
            return WaitReason.SIBLING
        return self._waits_for

    @property
    def takes_drafts(self) -> bool:
        """Whether drafts can be verified: all tokens are known and the prompt is computed. Below `min_tokens` a grammar
        may allow no token, which is only checked behind known tokens."""
        computed = self.pending == 1 and self.num_computed_tokens >= self.prompt_tokens and not self.num_placeholders
        return computed and (not self.sampling.is_constrained or self.generated >= self.sampling.min_tokens)

    @property
    def grammar_ready(self) -> bool:
        """Whether its matcher is ready, or it needs none."""
        return self.matcher_future is None or self.matcher_future.done()

    def num_computable(self, begin: int) -> int:
        """How many tokens from `begin` on can be computed now: those before the first media row that has not
        arrived."""
        return max(0, self.prompt.computable_end(begin, len(self.tokens)) - begin)

    def num_before_logprobs_wait(self, begin: int, most: int) -> int:
        """How many tokens from `begin` on can be computed before `most` logprobs of the prompt wait for its caller."""
        if self.num_tokens_with_logprobs >= self.prompt_tokens or begin < self.prompt.whole_end:
            return len(self.tokens) - begin
        end = self.num_logprobs_taken + most
        return (len(self.tokens) if end >= self.prompt_tokens else end - 1) - begin

    def find_branches(self, multiple: int, shared: int) -> None:
        """Finds the positions where others may continue from this sequence's state, each the last multiple before a
        branch: where another sequence left the first `shared` tokens, at branches of the prompt, and at the end. Called
        before it starts."""
        found = {(len(self.tokens) - 1) // multiple * multiple: SnapshotPlace.END}
        found |= self.prompt.branches(multiple, self.turn_ends)
        found[shared // multiple * multiple] = SnapshotPlace.BRANCH
        self._branches = dict(sorted(found.items()))

    def branches(self, begin: int, end: int) -> dict[int, SnapshotPlace]:
        """The branches in (begin, end], in ascending order."""
        return {branch: place for branch, place in self._branches.items() if begin < branch <= end}

    def use_grammar(self, matcher: Future[Matcher]) -> None:
        """Constrains its tokens by a grammar, which is still being compiled."""
        self.matcher_future = matcher

    def take_matcher(self) -> None:
        """Takes the matcher, which must be ready. Raises InvalidInput if the grammar does not allow the output so
        far."""
        if self.matcher_future is not None:
            self.matcher, self.matcher_future = self.matcher_future.result(), None

    def start(self, computed: int) -> None:
        """Marks the sequence as running; the KV of its first `computed` tokens is cached."""
        self.running, self.num_computed_tokens = True, computed
        self.num_starts += 1
        self._pooled = None

    def preempt(self) -> None:
        """Stops running. It holds no blocks, and its KV must be computed again."""
        self.running, self.num_computed_tokens, self.rolled_back = False, 0, False

    def forget_placeholders(self) -> None:
        """Removes placeholders whose steps were abandoned."""
        if self.num_placeholders:
            del self.tokens[-self.num_placeholders :]
        self.num_placeholders, self.drafts, self.proposed = 0, array("i"), array("i")

    def forget_logprobs(self, first: int) -> None:
        """Marks logprobs of prompt tokens from this one on as not computed."""
        self.num_tokens_with_logprobs = min(self.num_tokens_with_logprobs, first)

    def finish(self) -> None:
        """Ends the sequence: nothing more is computed for it."""
        self.running, self.finished = False, True
        if self.matcher_future is not None:
            self.matcher_future.cancel()

    def compute_own_prompt(self) -> None:
        """The first choice has ended: it has computed the prompt, or never will."""
        self.first_choice = None

    def end_session(self) -> None:
        """Its blocks are no longer kept for a session."""
        self.table.session = 0

    def wait_for_rows(self) -> None:
        """Nothing can be computed until another row lands."""
        if self._waits_for is None:
            self._waits_for = WaitReason.MEDIA_ROWS

    def take_prompt_logprobs(self, before: int) -> None:
        """The client has read the logprobs of the prompt's tokens before this one."""
        self.num_logprobs_taken = max(self.num_logprobs_taken, before)
        self.rows_landed()  # it may have been preempted while it waited

    def wait_for_placement(self) -> None:
        """Nothing can be computed until its items have places."""
        self._waits_for = WaitReason.PLACEMENT

    def rows_landed(self) -> None:
        """A row has landed."""
        if self._waits_for is WaitReason.MEDIA_ROWS:
            self._waits_for = None

    def items_placed(self) -> None:
        """All items have places."""
        self._waits_for = None

    def advance(self, count: int) -> None:
        """Records that a step was planned which computes the next `count` tokens, and the logprobs of the prompt tokens
        that follow them."""
        self.num_computed_tokens += count
        self.rolled_back = False
        if self.num_tokens_with_logprobs < self.prompt_tokens:
            computed = min(self.num_computed_tokens + 1, self.prompt_tokens)
            self.num_tokens_with_logprobs = max(
                self.num_tokens_with_logprobs, computed
            )  # it may lie behind them after a preemption

    def add_pooled(self, values: bytes, start: int) -> None:
        """Adds a sum of hidden states, float32 [hidden], of a step planned after start number `start`. A sum from
        before the last start is dropped: all of them are computed again."""
        if start != self.num_starts:
            return
        more = np.frombuffer(values, np.float32)
        self._pooled = more.astype(np.float64) if self._pooled is None else self._pooled + more

    def take_pooled(self) -> bytes:
        """The pooled hidden state, float32 [hidden]. The whole prompt must be computed."""
        assert self._pooled is not None, "a prompt has hidden states"
        found = self._pooled / self.prompt_tokens if self.pooling is Pooling.MEAN else self._pooled
        return found.astype(np.float32).tobytes()

    def propose(self, drafts: array[int]) -> None:
        """Makes the next step verify these drafts after the last token, which is known, as far as the grammar allows
        them."""
        self.drafts, self.draft_masks = drafts, []
        if not self.sampling.is_constrained or not drafts:
            return
        ahead = None if self.matcher is None else self.matcher.deep_copy()
        for count in range(len(drafts) + 1):
            mask = self.allowed_by(ahead)
            if count and ahead is not None and ahead.is_error():  # found behind a draft, which may be wrong
                break
            if not leaves_any(
                mask, self.bad_ends(drafts[:count])
            ):  # after drafts too; without drafts the sequence fails
                break
            self.draft_masks.append(mask)
            if count == len(drafts) or (ahead is not None and ahead.is_stopped()):
                break
            token = drafts[count]
            if mask and not mask[token // 8] >> token % 8 & 1:
                break
            if ahead is not None and not ahead.consume_token(token):
                break
        self.drafts = drafts[: max(0, len(self.draft_masks) - 1)]

    def allowed_by(self, matcher: Matcher | None) -> bytes:
        """The mask of tokens that the client and a matcher allow next; empty if all are allowed."""
        return both(b"" if matcher is None else matcher.compute_bitmask(), self.sampling.allowed_mask)

    def bad_ends(self, drafts: Iterable[int] = ()) -> tuple[int, ...]:
        """The tokens that may not be chosen behind these drafts, because they would complete a bad word. Bad words that
        depend on a token not known yet are left out."""
        if self.bad_words is None or self.num_placeholders:
            return () if self.bad_words is None else self.bad_words.alone
        return self.bad_words.banned(self._end(self.bad_words.reach) + array("i", drafts))

    def bad_pairs(self) -> tuple[tuple[int, int], ...]:
        """For a last token that is not known yet: pairs whose second token may not be chosen behind the first."""
        if self.bad_words is None or not self.num_placeholders:
            return ()
        return self.bad_words.banned_behind(self._end(self.bad_words.reach))

    def _end(self, count: int) -> array[int]:
        """The last `count` known tokens of the output, or all if there are fewer."""
        return self.tokens[max(self.prompt_tokens, self.num_known_tokens - count) : self.num_known_tokens]

    def take_proposed(self, drafts: list[int]) -> None:
        """Takes a model's drafts behind its last token, which is known."""
        self.proposed = array("i", drafts)

    def append_placeholder(self, draw: int) -> None:
        """A step has been planned that chooses the next token as this draw."""
        self.tokens.append(PLACEHOLDER)
        self.num_placeholders += 1
        self.placeholder_draw = draw

    def fill_placeholder(self, token: int) -> bool:
        """Sets the first unknown token; returns whether it was an accepted draft."""
        self.tokens[-self.num_placeholders] = token
        self.num_placeholders -= 1
        if self.matcher is not None:
            self.matcher.consume_token(token)
        return bool(self.drafts) and self._verify(token)

    def _verify(self, token: int) -> bool:
        """Whether this token was the draft. If not, what was chosen and computed behind it is invalid."""
        right = len(self.drafts) - self.num_placeholders
        if self.num_placeholders and token == self.drafts[right]:
            return True
        self.draft_length.verified(len(self.drafts), right)
        if self.num_placeholders:
            del self.tokens[-self.num_placeholders :]
        self.rolled_back = self.table.spare >= 0 and right < len(self.drafts)
        self.num_placeholders, self.drafts = 0, array("i")
        # A state includes wrong drafts; keys and values after the right ones are overwritten.
        valid = len(self.tokens) - 2 - right if self.rolled_back else len(self.tokens) - 1
        self.num_computed_tokens = min(self.num_computed_tokens, valid)
        return False

    def block_identity(self, index: int, block_size: int) -> bytes:
        """The identity of block number `index`; all its tokens must be known."""
        self._begin_like_first_choice(block_size)
        return self.identities.at(index, self.tokens, block_size)

    def block_content(self, index: int, block_size: int) -> BlockContent:
        """The content of block number `index`; its identity must have been computed."""
        return self.identities.content(index, self.tokens, block_size, self.adapter, self.prompt.plain_root)

    def block_identities(self, block_size: int) -> list[bytes]:
        """The identities of all full blocks that need not be computed if they are cached: at most up to the last token,
        and only up to the first token whose successor is asked for."""
        asked = (
            len(self.tokens) if self.num_tokens_with_logprobs >= self.prompt_tokens else self.num_tokens_with_logprobs
        )
        if self.pooling is not None and self.pooling.of_all:
            asked = 1
        self._begin_like_first_choice(block_size)
        return self.identities.first((asked - 1) // block_size, self.tokens, block_size)

    def _begin_like_first_choice(self, block_size: int) -> None:
        if self.first_choice is not None and not self.identities:  # it has the same prompt, and has computed it
            self.identities.begin_like(self.first_choice.identities, self.prompt_tokens // block_size)


def _plainest(sampling: SamplingParams) -> SamplingParams:
    """Parameters with the same length and greedy sampling only."""
    kept = {name: getattr(sampling, name) for name in ("max_tokens", "n", "ignore_eos", "stop_token_ids", "seed")}
    return SamplingParams(temperature=0.0, **kept)
