"""Structured output: what an answer must look like, and which tokens may come next. llguidance compiles a grammar
lazily, in bounded time and memory, and gives the tokens that it allows as a bit mask. It lies with the engine, whose
process matches answers token for token; `llm_service/grammar` only tries beforehand what will be done here."""

from __future__ import annotations

import heapq
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from common import log
from common.checkpoint import Checkpoint
from common.errors import InvalidInput
from common.json_gaps import PATTERN, SETTINGS
from llm_service.request import Structure, ThinkingBound, Trigger
from llm_service.token_masks import all_but, allows, either, mask_bytes, mask_of, only_token

_log = log.get("structure")
_LIMITS = LLParserLimits(max_items_in_row=800, step_max_items=10_000)
"""What a parser may hold for one place in the text, and make in one step. All requests wait while a mask is made. In an
ambiguous grammar (`a: a a | "a"`) its time grows with the answer, as the cube of it: 12 ms at 600 items, 31 ms at 1000,
and the library's own bound is 2000. An object has four for each optional property; most schemas have a few dozen."""

_LEAST = 64 << 10
"""Bytes that a compiled grammar counts at least: the smallest hold about 30 KiB."""

_GROWTH = 8 << 10
"""Bytes that a compiled grammar counts for each token of an answer. It is made while it is used, and what is made stays
with it: nothing where an answer goes round in the same few states, 6.4 KB a token where a text has a `maxLength`."""

_OUTGROWN = 4
"""A compiled grammar that counts more than this part of the budget is made anew for the next request."""

_LONGEST_CAUSE = 300
"""Characters of what the compiler says: it repeats what it was given."""


class Matcher(Protocol):
    """The state of one answer. A matcher that meets a limit turns to error and stays there."""

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
        """Tokens of the text that alone may come next; none where there is a choice."""
        ...

    def deep_copy(self) -> Matcher:
        """Another one that stands where this one does."""
        ...


class Form(NamedTuple):
    """What a request's answers must be like: a checked grammar, empty for none, the bytes that its compiled form holds,
    the tenant's salt, behind which token it begins, and how long the model may think. Tenants share no compiled form:
    how soon it is there would tell what another has sent."""

    grammar: str
    bytes: int = 0
    salt: str = ""
    trigger: Trigger | None = None
    thinking_bound: ThinkingBound | None = None


@dataclass(slots=True, eq=False)
class _Kept:
    """A compiled grammar, and the bytes that it counts by now."""

    compiled: LLMatcher
    bytes: int
    mask_bytes: int
    tokenizer: LLTokenizer

    def matcher(self) -> Matcher:
        return _Counted(self.compiled.deep_copy(), self)


class _Counted:
    """A matcher whose compiled form, which it shares with others, counts more with each token."""

    def __init__(self, matcher: LLMatcher, kept: _Kept) -> None:
        self._matcher = matcher
        self._kept = kept
        self.is_stopped = matcher.is_stopped
        self.is_error = matcher.is_error
        self.compute_ff_tokens = matcher.compute_ff_tokens

    def deep_copy(self) -> Matcher:
        """See `Matcher`."""
        return _Counted(self._matcher.deep_copy(), self._kept)

    def compute_bitmask(self) -> bytes:
        # The library's has a bit for its own end of text behind the vocabulary, and so a word more where that is whole.
        mask: bytes = self._matcher.compute_bitmask()[: self._kept.mask_bytes]
        token = only_token(mask)
        if token is None or not self._kept.tokenizer.is_special_token(token) or self._matcher.validate_tokens([token]):
            return mask
        # Where one text alone may come, and has a special token's name in it, the library allows that token, and then
        # does not take it: the text's first sign may come.
        sign = self._matcher.compute_ff_bytes().decode(errors="ignore")[:1].encode()
        return mask_of(self._kept.tokenizer.tokenize_bytes(sign)[:1], 8 * len(mask)) if sign else mask

    def consume_token(self, token: int) -> bool:
        self._kept.bytes += _GROWTH
        taken: bool = self._matcher.consume_token(token)
        return taken


class _Triggered:
    """A matcher that begins behind a token. `before` is the mask until then, and `begin` gives the matcher."""

    def __init__(self, trigger: Trigger, before: bytes, begin: Callable[[], Matcher]) -> None:
        self._trigger = trigger
        self._before = before
        self._begin = begin
        self._begun: Matcher | None = None

    def compute_bitmask(self) -> bytes:
        """See `Matcher`."""
        return self._before if self._begun is None else self._begun.compute_bitmask()

    def consume_token(self, token: int) -> bool:
        """See `Matcher`."""
        if self._begun is None:
            if token == self._trigger.token:
                self._begun = self._begin()
            return True
        taken = self._begun.consume_token(token)
        if self._trigger.recurs and self._begun.is_stopped() and not self._begun.is_error():
            self._begun = None
        return taken

    def is_stopped(self) -> bool:
        """See `Matcher`."""
        return self._begun is not None and self._begun.is_stopped()

    def is_error(self) -> bool:
        """See `Matcher`."""
        return self._begun is not None and self._begun.is_error()

    def compute_ff_tokens(self) -> Sequence[int]:
        """See `Matcher`."""
        return () if self._begun is None else self._begun.compute_ff_tokens()

    def deep_copy(self) -> Matcher:
        """See `Matcher`."""
        other = _Triggered(self._trigger, self._before, self._begin)
        other._begun = None if self._begun is None else self._begun.deep_copy()
        return other


class _Opened:
    """A matcher whose first tokens choose between two others: `form`, and `behind` one of the `openings`. A token that
    both could have is the form's, and may still be followed by a longer opening. `none` is the mask of no token."""

    def __init__(
        self, openings: tuple[tuple[int, ...], ...], none: bytes, form: Matcher | None, behind: Matcher
    ) -> None:
        self._openings, self._none = openings, none  # those that the tokens so far may become
        self._form, self._behind = form, behind
        self._count = 0
        self._chosen: Matcher | None = None

    def compute_bitmask(self) -> bytes:
        """See `Matcher`."""
        if self._chosen is not None:
            return self._chosen.compute_bitmask()
        mask = self._none if self._form is None else self._form.compute_bitmask()
        return either(mask, (opening[self._count] for opening in self._openings))

    def consume_token(self, token: int) -> bool:
        """See `Matcher`."""
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
        """See `Matcher`."""
        decides = self._chosen or self._form
        return decides is not None and decides.is_stopped()

    def is_error(self) -> bool:
        """See `Matcher`."""
        decides = self._chosen or self._form
        return decides is not None and decides.is_error()

    def compute_ff_tokens(self) -> Sequence[int]:
        """See `Matcher`."""
        return () if self._chosen is None else self._chosen.compute_ff_tokens()

    def deep_copy(self) -> Matcher:
        """See `Matcher`."""
        form = None if self._form is None else self._form.deep_copy()
        behind = self._behind.deep_copy()
        other = _Opened(self._openings, self._none, form, behind)
        other._count = self._count
        if self._chosen is not None:
            other._chosen = form if self._chosen is self._form else behind
        return other


class _Bounded:
    """A matcher that bounds reasoning: where it has had its tokens, none may come but the one that ends it, of which
    `forced` is the mask. `inner` says what else may come, None for anything; where it does not allow that token, such
    as within a call, that is waited for."""

    def __init__(self, bound: ThinkingBound, forced: bytes, inner: Matcher | None) -> None:
        self._bound, self._forced, self._inner = bound, forced, inner
        self._left = bound.tokens
        self._thinks = bound.opened
        self._last: tuple[int, ...] = ()

    def compute_bitmask(self) -> bytes:
        """See `Matcher`."""
        mask = b"" if self._inner is None else self._inner.compute_bitmask()
        return self._forced if self._ends_with(mask) else mask

    def _ends_with(self, mask: bytes) -> bool:
        end = self._bound.end
        return self._thinks and self._left <= 0 and (not mask or allows(mask, end))

    def consume_token(self, token: int) -> bool:
        """See `Matcher`."""
        if token == self._bound.end:
            self._thinks = False
        elif self._thinks:
            self._left -= 1
        else:
            self._last = (*self._last, token)[-len(self._bound.begin) :]
            self._thinks = self._last == self._bound.begin
        return self._inner is None or self._inner.consume_token(token)

    def is_stopped(self) -> bool:
        """See `Matcher`."""
        return self._inner is not None and self._inner.is_stopped()

    def is_error(self) -> bool:
        """See `Matcher`."""
        return self._inner is not None and self._inner.is_error()

    def compute_ff_tokens(self) -> Sequence[int]:
        """See `Matcher`."""
        if self._inner is not None:
            return self._inner.compute_ff_tokens()
        return (self._bound.end,) if self._ends_with(b"") else ()

    def deep_copy(self) -> Matcher:
        """See `Matcher`."""
        other = _Bounded(self._bound, self._forced, None if self._inner is None else self._inner.deep_copy())
        other._left, other._thinks, other._last = self._left, self._thinks, self._last
        return other


class Structures:
    """Grammars over one checkpoint's tokens. Compiling takes milliseconds at most; still, not for the event loop.
    Compiled forms are kept while they count `cache_bytes` or less together, the ones used last."""

    def __init__(self, checkpoint: Checkpoint, vocab_size: int, eos: Iterable[int], *, cache_bytes: int = 0) -> None:
        ends = sorted(eos)
        self._tokenizer = _tokenizer(_within(checkpoint.tokenizer_settings(), vocab_size), vocab_size, ends)
        self._unended = all_but(ends, vocab_size)
        self._vocab_size = vocab_size
        self._forced: dict[int, bytes] = {}
        self._cache_bytes = cache_bytes
        self._kept: OrderedDict[tuple[str, str], _Kept] = OrderedDict()

    def compile(self, structure: Structure) -> tuple[str, LLMatcher]:
        """A wish as a grammar in llguidance's own form, and compiled; raises InvalidInput where it makes no sense."""
        field = f"sampling.{structure.kind}"
        if self._tokenizer is None:
            why = "answers cannot be held to a structure with this kind of tokenizer"
            raise InvalidInput(why, reason="BAD_STRUCTURE", field=field)
        grammar = _grammar(structure)
        matcher = self._compiled(grammar)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            why = " ".join(matcher.get_error().split())[:_LONGEST_CAUSE]
            raise InvalidInput(f"the {structure.kind} cannot be compiled: {why}", reason="BAD_STRUCTURE", field=field)
        return grammar, matcher

    def grammar(self, structure: Structure) -> str:
        """The grammar alone; raises as `compile`."""
        return self.compile(structure)[0]

    def matcher(self, form: Form) -> Matcher:
        """A new matcher for a form; what is compiled may be kept for the next request with the same one. To be called
        by one thread at a time, while others may use the matchers."""
        if form.thinking_bound is None:
            return self._of_grammar(form)
        end = form.thinking_bound.end
        forced = self._forced.setdefault(end, mask_of((end,), self._vocab_size))
        return _Bounded(form.thinking_bound, forced, self._of_grammar(form) if form.grammar else None)

    def _of_grammar(self, form: Form) -> Matcher:
        name = (form.salt, form.grammar)
        kept = self._kept.pop(name, None)
        if kept is None or kept.bytes * _OUTGROWN > self._cache_bytes:
            assert self._tokenizer is not None, "a grammar that was compiled before"
            size = max(_LEAST, form.bytes + len(form.grammar))
            kept = _Kept(self._compiled(form.grammar), size, mask_bytes(self._vocab_size), self._tokenizer)
        self._kept[name] = kept
        held = self.kept_bytes
        while held > self._cache_bytes:
            held -= self._kept.popitem(last=False)[1].bytes
        if form.trigger is None:
            return kept.matcher()
        behind = _Triggered(form.trigger, b"" if form.trigger.recurs else self._unended, kept.matcher)
        if not form.trigger.openings:
            return behind
        return _Opened(form.trigger.openings, mask_of((), self._vocab_size), kept.matcher(), behind)

    @property
    def kept_bytes(self) -> int:
        """What the compiled forms that are kept count together."""
        return sum(kept.bytes for kept in self._kept.values())

    def _compiled(self, grammar: str) -> LLMatcher:
        assert self._tokenizer is not None, "a grammar that was compiled before"
        return LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)


def _tokenizer(settings: dict[str, Any], vocab_size: int, ends: list[int]) -> LLTokenizer | None:
    """None where the library knows no tokenizers of this kind, such as one of pieces by their likelihood (Unigram)."""
    try:
        return LLTokenizer(json.dumps(settings), n_vocab=vocab_size, eos_token=ends or None)
    except ValueError as error:
        _log.warning("answers cannot be held to a structure with this kind of tokenizer", cause=str(error))
        return None


def _within(settings: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """A tokenizer's settings, without added tokens that the model does not know, wherever they stand."""
    added = settings.get("added_tokens", [])
    beyond = {each["content"] for each in added if each["id"] >= vocab_size}
    words = settings["model"].get("vocab")
    if not beyond:
        return settings
    known = [each for each in added if each["content"] not in beyond]
    if isinstance(words, dict):
        words = {word: token for word, token in words.items() if word not in beyond}
    elif isinstance(words, list):  # each one's place is its number
        words = words[:vocab_size]
    return {**settings, "added_tokens": known, "model": {**settings["model"], "vocab": words}}


@dataclass(order=True, slots=True)
class _Asked:
    """A matcher that is to be made, behind those that are before it."""

    cost: int
    """Bytes that it holds, and more for each that was asked for before."""
    number: int
    """Tells those of one cost apart."""
    form: Form = field(compare=False)
    output: Sequence[int] = field(compare=False)
    future: Future[Matcher] = field(compare=False)


class Matchers:
    """Makes matchers in a thread of its own: compiling lets other threads run, and may take most of a second. `made` is
    called in that thread whenever there is one more. What takes least is made first, by the bytes that it holds: a
    hundred milliseconds and 7 MB are as many states. So nobody waits for another's large form but while it is made; and
    none is overtaken for ever, since each counts the least bytes more than the one that was asked for before it."""

    def __init__(self, structures: Structures, made: Callable[[], None]) -> None:
        self._structures = structures
        self._made = made
        self._thread = ThreadPoolExecutor(1, "matchers")
        self._lock = threading.Lock()
        self._asked: list[_Asked] = []
        self._count = 0

    def __call__(self, form: Form, output: Sequence[int] = ()) -> Future[Matcher]:
        """A new matcher, soon; it stands behind these tokens. Where they are not of that form, its result is
        InvalidInput."""
        future: Future[Matcher] = Future()
        future.add_done_callback(lambda _: self._made())
        with self._lock:
            self._count += 1
            heapq.heappush(self._asked, _Asked(form.bytes + self._count * _LEAST, self._count, form, output, future))
        self._thread.submit(self._make)
        return future

    def _make(self) -> None:
        """Makes the one that is next."""
        with self._lock:
            asked = heapq.heappop(self._asked)
        if not asked.future.set_running_or_notify_cancel():
            return
        try:
            matcher = self._structures.matcher(asked.form)
            if not all(map(matcher.consume_token, asked.output)):
                raise InvalidInput("the answer so far does not match its form", reason="BAD_RESUME", field="resume")
        except BaseException as error:  # noqa: BLE001 - it is raised where the matcher is asked for
            asked.future.set_exception(error)
        else:
            asked.future.set_result(matcher)


def _grammar(structure: Structure) -> str:
    field = f"sampling.{structure.kind}"
    try:
        match structure.kind:
            case "json_schema":
                free = SETTINGS in structure.text or not structure.text.lstrip().startswith("{")  # true is one as well
                return str(
                    LLMatcher.grammar_from_json_schema(
                        structure.text, defaults=None if free else {"whitespace_pattern": PATTERN}
                    )
                )
            case "regex":
                return str(LLMatcher.grammar_from_regex(structure.text))
            case "grammar":
                return str(LLMatcher.grammar_from_lark(structure.text))
            case "choice":
                words = " | ".join(json.dumps(word) for word in json.loads(structure.text))
                return str(LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {words}"))  # one word to the parser
            case "structural_tag":
                raise ValueError("it is compiled as a grammar")
    except ValueError as error:
        raise InvalidInput(f"the {structure.kind} cannot be read", reason="BAD_STRUCTURE", field=field) from error
