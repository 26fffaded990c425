"""Structured output: what a request wants its answer to look like, and which tokens may come next.

The work is llguidance's: a grammar is compiled lazily, in bounded time and memory, and a matcher gives the tokens that
it allows as a bit mask. The front checks a grammar before the request is admitted; the engine matches.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from common.checkpoint import Checkpoint, CheckpointError
from common.errors import InvalidInput
from llm_service.request import Structure

_CACHED = 64
"""Compiled grammars that are kept."""

_LIMITS = LLParserLimits(max_items_in_row=800, step_max_items=10_000)
"""What a parser may hold for one place in the text, and make in one step. All requests wait while a mask is made. In an
ambiguous grammar (`a: a a | "a"`) its time grows with the answer, as the cube of it: 12 ms at 600 items, 31 ms at 1000,
and the library's own bound is 2000. An object has four for each optional property; most schemas have a few dozen."""


class Matcher(Protocol):
    """The state of one answer. A matcher that meets a limit turns to error and stays there."""

    def compute_bitmask(self) -> bytes:
        """Bit i of the little-endian mask says whether token i may come next."""
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


class Structures:
    """Grammars over one checkpoint's tokens. Compiling takes milliseconds at most; still, not for the event loop."""

    def __init__(self, checkpoint: Checkpoint, vocab_size: int, eos: Iterable[int]) -> None:
        source = checkpoint.text("tokenizer.json")
        if source is None:
            raise CheckpointError("the checkpoint has no tokenizer.json")
        ends = sorted(eos)
        self._tokenizer = LLTokenizer(source, n_vocab=vocab_size, eos_token=ends or None)
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def grammar(self, structure: Structure) -> str:
        """The grammar of a wish, in llguidance's own form; raises InvalidInput where it makes no sense."""
        field = f"sampling.{structure.kind}"
        grammar = _grammar(structure)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise InvalidInput(
                f"the {structure.kind} cannot be compiled, or allows nothing", reason="BAD_STRUCTURE", field=field
            )
        return grammar

    def matcher(self, grammar: str) -> Matcher:
        """A new matcher for a grammar; the compiled form is kept for the next request with the same one. To be called
        by one thread at a time."""
        compiled = self._compiled.pop(grammar, None)
        if compiled is None:
            compiled = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
        self._compiled[grammar] = compiled
        if len(self._compiled) > _CACHED:
            self._compiled.popitem(last=False)
        matcher: Matcher = compiled.deep_copy()
        return matcher


class Matchers:
    """Makes matchers in a thread of its own: compiling lets other threads run, and may take most of a second. `made` is
    called in that thread whenever there is one more."""

    def __init__(self, structures: Structures, made: Callable[[], None]) -> None:
        self._structures = structures
        self._made = made
        self._thread = ThreadPoolExecutor(1, "matchers")

    def __call__(self, grammar: str) -> Future[Matcher]:
        """A new matcher, soon."""
        future = self._thread.submit(self._structures.matcher, grammar)
        future.add_done_callback(lambda _: self._made())
        return future


def _grammar(structure: Structure) -> str:
    field = f"sampling.{structure.kind}"
    try:
        match structure.kind:
            case "json_schema":
                return str(LLMatcher.grammar_from_json_schema(structure.text))
            case "regex":
                return str(LLMatcher.grammar_from_regex(structure.text))
            case "grammar":
                return str(LLMatcher.grammar_from_lark(structure.text))
            case "choice":
                words = " | ".join(json.dumps(word) for word in json.loads(structure.text))
                return str(LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {words}"))  # one word to the parser
    except ValueError as error:
        raise InvalidInput(f"the {structure.kind} cannot be read", reason="BAD_STRUCTURE", field=field) from error
