"""Structured output: which tokens may come next. llguidance compiles a grammar lazily, within bounds of time and
memory, and returns the allowed tokens as a bit mask. It runs in the engine process, which matches answers token by
token; `llm_service/grammar` tries beforehand what is done here."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from common.checkpoints.checkpoint import Checkpoint
from common.errors import InvalidInput
from common.json_schema.whitespace import PATTERN, SETTINGS
from common.telemetry import log
from llm_service.engine.matchers import LEAST_BYTES, CompiledGrammar, Form, Matcher, matcher_of
from llm_service.request import Structure
from llm_service.token_masks import mask_bytes

_log = log.get("structure")
_LIMITS = LLParserLimits(max_items_in_row=800, step_max_items=10_000)
"""Most parser states for one position of the text, and most that one step may make. All requests wait while a mask is
computed. For an ambiguous grammar (`a: a a | "a"`) the time grows with the cube of the answer's length: 12 ms at 600
items, 31 ms at 1000; the library's own bound is 2000. An object takes four items for each optional property, so most
schemas have a few dozen."""

_OUTGROWN = 4
"""A compiled grammar that takes more than this part of the budget is compiled anew for the next request."""

_LONGEST_CAUSE = 300
"""Most characters quoted of the compiler's message, which repeats its input."""


class Structures:
    """Grammars over one checkpoint's tokens. Compiling takes milliseconds at most; still, not for the event loop.
    Compiled forms are kept while they count `cache_bytes` or less together, the ones used last."""

    def __init__(self, checkpoint: Checkpoint, vocab_size: int, eos: Iterable[int], *, cache_bytes: int = 0) -> None:
        self._ends = tuple(sorted(eos))
        self._tokenizer = _tokenizer(_within(checkpoint.tokenizer_settings(), vocab_size), vocab_size, self._ends)
        self._vocab_size = vocab_size
        self._cache_bytes = cache_bytes
        self._kept: OrderedDict[tuple[str, str], CompiledGrammar] = OrderedDict()

    def compile(self, structure: Structure) -> tuple[str, LLMatcher]:
        """Translates a structure into a grammar in llguidance's form, and compiles it. Raises InvalidInput if that is
        impossible."""
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
        """A new matcher for a form; its compiled grammar may be cached for the next request with the same form. Only
        one thread at a time may call this, while others use the matchers."""
        bounds_alone = form.thinking_bound is not None and not form.grammar
        return matcher_of(form, None if bounds_alone else self._of_form(form), self._vocab_size, self._ends)

    def _of_form(self, form: Form) -> CompiledGrammar:
        """The compiled grammar of a form, which becomes the most recently used."""
        name = (form.salt, form.grammar)
        kept = self._kept.pop(name, None)
        if kept is None or kept.bytes * _OUTGROWN > self._cache_bytes:
            assert self._tokenizer is not None, "a grammar that was compiled before"
            size = max(LEAST_BYTES, form.bytes + len(form.grammar))
            kept = CompiledGrammar(self._compiled(form.grammar), size, mask_bytes(self._vocab_size), self._tokenizer)
        self._kept[name] = kept
        held = self.kept_bytes
        while held > self._cache_bytes:
            held -= self._kept.popitem(last=False)[1].bytes
        return kept

    @property
    def kept_bytes(self) -> int:
        """The size of all cached compiled grammars, in bytes."""
        return sum(kept.bytes for kept in self._kept.values())

    def _compiled(self, grammar: str) -> LLMatcher:
        assert self._tokenizer is not None, "a grammar that was compiled before"
        return LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)


def _tokenizer(settings: dict[str, Any], vocab_size: int, ends: Sequence[int]) -> LLTokenizer | None:
    """None if the library supports no such tokenizer, for example a Unigram one."""
    try:
        return LLTokenizer(json.dumps(settings), n_vocab=vocab_size, eos_token=[*ends] or None)
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
                return str(
                    LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {words}")
                )  # one terminal for the parser
            case "structural_tag":
                raise ValueError("it is compiled as a grammar")
    except ValueError as error:
        raise InvalidInput(f"the {structure.kind} cannot be read", reason="BAD_STRUCTURE", field=field) from error
