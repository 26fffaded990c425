"""Matchers track where each answer is in its grammar, and give the tokens that may come next as bit masks."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, Protocol

from llguidance import LLMatcher, LLTokenizer

from common.errors import InvalidInput
from llm_service.request import ThinkingBound, Trigger
from llm_service.token_masks import all_but, allows, either, mask_of, only_token

LEAST_BYTES = 64 << 10
"""Bytes that a compiled grammar counts at least: the smallest hold about 30 KiB."""

_GROWTH = 8 << 10
"""Bytes that a compiled grammar is assumed to grow with each token of an answer. States are compiled on demand and
kept: none for an answer that cycles through the same few states, 6.4 KB a token for a text with `maxLength`."""

_MASKS = 16
"""Masks of one kind that matchers share."""


class Matcher(Protocol):
    """The state of one answer. A matcher that exceeds a limit is in error from then on."""

    def compute_bitmask(self) -> bytes:
        """Bit i of the little-endian mask says whether token i may come next; no mask at all: any may."""
        ...

    def consume_token(self, token: int) -> bool:
        """Takes the token that was chosen."""
        ...

    def is_stopped(self) -> bool:
        """Nothing may follow: the answer is complete, or the matcher has failed."""
        ...

    def is_error(self) -> bool:
        """A limit was met."""
        ...

    def compute_ff_tokens(self) -> Sequence[int]:
        """The tokens that the grammar forces next; empty if there is a choice."""
        ...

    def deep_copy(self) -> Matcher:
        """An independent matcher in the same state."""
        ...


class Form(NamedTuple):
    """What a request's answers must look like: a checked grammar (empty: none), the size of its compiled form in bytes,
    the tenant's salt, the token behind which it begins, and how long the model may think. Tenants share no compiled
    forms, since their timing would tell what another tenant has sent."""

    grammar: str
    bytes: int = 0
    salt: str = ""
    trigger: Trigger | None = None
    thinking_bound: ThinkingBound | None = None


@dataclass(slots=True, eq=False)
class CompiledGrammar:
    """The part that all matchers of one grammar share, and its size in bytes so far."""

    compiled: LLMatcher
    bytes: int
    mask_bytes: int
    tokenizer: LLTokenizer

    def matcher(self) -> Matcher:
        """A new one, at its beginning."""
        return _Counted(self.compiled.deep_copy(), self)


class _Counted:
    """A matcher that adds each of its tokens to the size of the compiled form it shares."""

    def __init__(self, matcher: LLMatcher, grammar: CompiledGrammar) -> None:
        self._matcher = matcher
        self._grammar = grammar
        self.is_stopped = matcher.is_stopped
        self.is_error = matcher.is_error
        self.compute_ff_tokens = matcher.compute_ff_tokens

    def deep_copy(self) -> Matcher:
        return _Counted(self._matcher.deep_copy(), self._grammar)

    def compute_bitmask(self) -> bytes:
        # The library's mask has a bit for its own end of text after the vocabulary, so one word more if the
        # vocabulary is a multiple of 32.
        mask: bytes = self._matcher.compute_bitmask()[: self._grammar.mask_bytes]
        token, tokenizer = only_token(mask), self._grammar.tokenizer
        if token is None or not tokenizer.is_special_token(token) or self._matcher.validate_tokens([token]):
            return mask
        # If only one text may follow and it contains the name of a special token, the library allows that token and
        # then rejects it: allow the text's first character.
        sign = self._matcher.compute_ff_bytes().decode(errors="ignore")[:1].encode()
        return mask_of(tokenizer.tokenize_bytes(sign)[:1], 8 * len(mask)) if sign else mask

    def consume_token(self, token: int) -> bool:
        self._grammar.bytes += _GROWTH
        taken: bool = self._matcher.consume_token(token)
        return taken


class _Triggered:
    """A matcher that begins behind a token. `before` is the mask until then; `begin` creates the matcher."""

    def __init__(self, trigger: Trigger, before: bytes, begin: Callable[[], Matcher]) -> None:
        self._trigger = trigger
        self._before = before
        self._begin = begin
        self._begun: Matcher | None = None

    def compute_bitmask(self) -> bytes:
        return self._before if self._begun is None else self._begun.compute_bitmask()

    def consume_token(self, token: int) -> bool:
        if self._begun is None:
            if token == self._trigger.token:
                self._begun = self._begin()
            return True
        taken = self._begun.consume_token(token)
        if self._trigger.recurs and self._begun.is_stopped() and not self._begun.is_error():
            self._begun = None
        return taken

    def is_stopped(self) -> bool:
        return self._begun is not None and self._begun.is_stopped()

    def is_error(self) -> bool:
        return self._begun is not None and self._begun.is_error()

    def compute_ff_tokens(self) -> Sequence[int]:
        return () if self._begun is None else self._begun.compute_ff_tokens()

    def deep_copy(self) -> Matcher:
        other = _Triggered(self._trigger, self._before, self._begin)
        other._begun = None if self._begun is None else self._begun.deep_copy()
        return other


class _Opened:
    """A matcher whose first tokens decide between `form`, and `behind` one of the `openings`. A token that fits both
    counts as the form's, and a longer opening may still follow. `none` is the mask that allows no token."""

    def __init__(
        self, openings: tuple[tuple[int, ...], ...], none: bytes, form: Matcher | None, behind: Matcher
    ) -> None:
        self._openings, self._none = openings, none  # the openings that are still possible
        self._form, self._behind = form, behind
        self._count = 0
        self._chosen: Matcher | None = None

    def compute_bitmask(self) -> bytes:
        if self._chosen is not None:
            return self._chosen.compute_bitmask()
        mask = self._none if self._form is None else self._form.compute_bitmask()
        return either(mask, (opening[self._count] for opening in self._openings))

    def consume_token(self, token: int) -> bool:
        if self._chosen is not None:
            return self._chosen.consume_token(token)
        openings = tuple(opening for opening in self._openings if opening[self._count] == token)
        form = self._form if self._form is not None and allows(self._form.compute_bitmask(), token) else None
        if form is None and not openings:
            return False
        if form is not None and not form.consume_token(token):
            return False
        self._count += 1
        whole = any(len(opening) == self._count for opening in openings)
        self._openings = tuple(opening for opening in openings if len(opening) > self._count)
        self._form = form
        if form is None and whole:
            self._chosen = self._behind
        elif not self._openings:
            self._chosen = form
        return True

    def is_stopped(self) -> bool:
        decides = self._chosen or self._form
        return decides is not None and decides.is_stopped()

    def is_error(self) -> bool:
        decides = self._chosen or self._form
        return decides is not None and decides.is_error()

    def compute_ff_tokens(self) -> Sequence[int]:
        return () if self._chosen is None else self._chosen.compute_ff_tokens()

    def deep_copy(self) -> Matcher:
        form = None if self._form is None else self._form.deep_copy()
        behind = self._behind.deep_copy()
        other = _Opened(self._openings, self._none, form, behind)
        other._count = self._count
        if self._chosen is not None:
            other._chosen = form if self._chosen is self._form else behind
        return other


class _Bounded:
    """A matcher that bounds reasoning: after its budget only the token that ends reasoning is allowed; `forced` is the
    mask of that token. `inner` restricts the other tokens (None: not at all); while it does not allow the ending token,
    for example inside a tool call, the end is postponed."""

    def __init__(self, bound: ThinkingBound, forced: bytes, inner: Matcher | None) -> None:
        self._bound, self._forced, self._inner = bound, forced, inner
        self._left = bound.tokens
        self._thinks = bound.opened
        self._last: tuple[int, ...] = ()

    def compute_bitmask(self) -> bytes:
        mask = b"" if self._inner is None else self._inner.compute_bitmask()
        return self._forced if self._ends_with(mask) else mask

    def _ends_with(self, mask: bytes) -> bool:
        end = self._bound.end
        return self._thinks and self._left <= 0 and (not mask or allows(mask, end))

    def consume_token(self, token: int) -> bool:
        if token == self._bound.end:
            self._thinks = False
        elif self._thinks:
            self._left -= 1
        else:
            self._last = (*self._last, token)[-len(self._bound.begin) :]
            self._thinks = self._last == self._bound.begin
        return self._inner is None or self._inner.consume_token(token)

    def is_stopped(self) -> bool:
        return self._inner is not None and self._inner.is_stopped()

    def is_error(self) -> bool:
        return self._inner is not None and self._inner.is_error()

    def compute_ff_tokens(self) -> Sequence[int]:
        if self._inner is not None:
            return self._inner.compute_ff_tokens()
        return (self._bound.end,) if self._ends_with(b"") else ()

    def deep_copy(self) -> Matcher:
        other = _Bounded(self._bound, self._forced, None if self._inner is None else self._inner.deep_copy())
        other._left, other._thinks, other._last = self._left, self._thinks, self._last
        return other


def matcher_of(form: Form, grammar: CompiledGrammar | None, vocab_size: int, ends: tuple[int, ...]) -> Matcher:
    """A new matcher for a form, and for its compiled grammar if it has one; `ends` are the model's end tokens."""
    inner = None if grammar is None else _of_grammar(form.trigger, grammar, vocab_size, ends)
    if form.thinking_bound is None:
        assert inner is not None, "a form has a grammar or a bound"
        return inner
    return _Bounded(form.thinking_bound, _only(form.thinking_bound.end, vocab_size), inner)


def _of_grammar(trigger: Trigger | None, grammar: CompiledGrammar, vocab_size: int, ends: tuple[int, ...]) -> Matcher:
    if trigger is None:
        return grammar.matcher()
    behind = _Triggered(trigger, b"" if trigger.recurs else _unended(ends, vocab_size), grammar.matcher)
    if not trigger.openings:
        return behind
    return _Opened(trigger.openings, mask_of((), vocab_size), grammar.matcher(), behind)


@lru_cache(_MASKS)
def _only(token: int, vocab_size: int) -> bytes:
    return mask_of((token,), vocab_size)


@lru_cache(_MASKS)
def _unended(ends: tuple[int, ...], vocab_size: int) -> bytes:
    return all_but(ends, vocab_size)


@dataclass(order=True, slots=True)
class _Asked:
    """A request for a matcher, ordered by cost."""

    cost: int
    """Bytes that it holds, and more for each that was asked for before."""
    number: int
    """Distinguishes requests of equal cost."""
    form: Form = field(compare=False)
    output: Sequence[int] = field(compare=False)
    future: Future[Matcher] = field(compare=False)


class Matchers:
    """Has `make` create matchers in a thread of its own: compiling releases the interpreter's lock and may take most of
    a second. That thread calls `made` after each. The cheapest comes first, by the bytes of its compiled form (7 MB
    take about a hundred milliseconds), so a request waits for another's large grammar only while it is being compiled.
    None waits forever, since each costs at least a few bytes more than the request before it."""

    def __init__(self, make: Callable[[Form], Matcher], made: Callable[[], None]) -> None:
        self._make = make
        self._made = made
        self._thread = ThreadPoolExecutor(1, "matchers")
        self._lock = threading.Lock()
        self._asked: list[_Asked] = []
        self._count = 0

    def __call__(self, form: Form, output: Sequence[int] = ()) -> Future[Matcher]:
        """Requests a new matcher that has consumed these tokens. The future raises InvalidInput if the form does not
        allow them."""
        future: Future[Matcher] = Future()
        future.add_done_callback(lambda _: self._made())
        with self._lock:
            self._count += 1
            heapq.heappush(
                self._asked, _Asked(form.bytes + self._count * LEAST_BYTES, self._count, form, output, future)
            )
        self._thread.submit(self._make_next)
        return future

    def _make_next(self) -> None:
        """Makes the one that is next."""
        with self._lock:
            asked = heapq.heappop(self._asked)
        if not asked.future.set_running_or_notify_cancel():
            return
        try:
            matcher = self._make(asked.form)
            if not all(map(matcher.consume_token, asked.output)):
                raise InvalidInput("the answer so far does not match its form", reason="BAD_RESUME", field="resume")
        except BaseException as error:  # noqa: BLE001 - it is raised where the matcher is asked for
            asked.future.set_exception(error)
        else:
            asked.future.set_result(matcher)
