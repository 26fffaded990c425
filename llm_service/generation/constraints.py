"""Constraints of answers: a grammar for the answer or its calls, bad words, and a bound of reasoning."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgspec

from common.aio import tasks
from common.errors import InvalidInput
from common.json_schema.calls import of_arguments
from llm_service.generation.choices import Choice
from llm_service.grammar.compiler import Compiler
from llm_service.prompt.builder import PromptBuilder
from llm_service.prompt.reasoning import CallSign, ReasoningCounter
from llm_service.request import ChatPrompt, PromptLayout, Request, Structure, Trigger

_MOST_TRIED = 32
"""Most strict functions that are compiled one by one if they cannot be compiled together."""
_FEW_LETTERS = 2048
"""Bad words with fewer characters are tokenized on the event loop, in less than a millisecond."""


class Constraints:
    """Turns the constraints of a request into sampling parameters; `compiler` compiles grammars."""

    def __init__(self, prompts: PromptBuilder, compiler: Compiler) -> None:
        self._prompts = prompts
        self._compiler = compiler

    async def apply(self, request: Request) -> Request:
        """The request with its grammar compiled, its bad words as tokens, and its reasoning bounded. Raises
        InvalidInput if the form that it asks for is not valid."""
        return await self._with_bad_words(self._bounded(await self._with_grammar(request)))

    def behind_reasoning(self, request: Request, layout: PromptLayout, *, thinking: bool) -> Request:
        """The request, with its form applied after the reasoning if the answer begins, or may begin, with reasoning."""
        if (bound := request.sampling.thinking_bound) is not None and thinking:
            request = _sampled(request, thinking_bound=msgspec.structs.replace(bound, opened=True))
        if request.structure is None or (trigger := self._trigger(request, layout)) is None:
            return request
        return _sampled(request, grammar_trigger=trigger)

    def _trigger(self, request: Request, layout: PromptLayout) -> Trigger | None:
        assert request.structure is not None
        return self._prompts.form_trigger(request.prompt, layout.ids, request.structure)

    def count_reasoning(self, request: Request, layout: PromptLayout, choices: dict[int, Choice]) -> bool:
        """Has the reasoning of each choice counted, unless the answer has its form from the first token on. Returns
        whether answers begin with reasoning."""
        template = self._prompts.template
        if not template.reads_reasoning:
            return False
        thinking = self._prompts.ends_in_thinking(layout.ids)
        if request.structure is not None and self._trigger(request, layout) is None:
            return False
        tools = request.prompt.tools if isinstance(request.prompt, ChatPrompt) else ()
        call = CallSign.of(template.tool_format, [tool.name for tool in tools])
        for choice in choices.values():
            choice.count_reasoning(
                ReasoningCounter(self._prompts.texts, template.reasoning_marks, thinking=thinking, call=call)
            )
        return thinking

    async def _with_grammar(self, request: Request) -> Request:
        """The request with its structure compiled, in bounded time and off the event loop: the form of its answer, or
        else of the calls in it."""
        calls = None if request.structure or request.pooling else self._prompts.strict_calls(request.prompt)
        structure, trigger = calls or (request.structure, None)
        if structure is None:
            return request
        if not calls:
            structure = self._prompts.form(structure, request.prompt)
        try:
            made = await self._compiler.grammar(structure, request.salt, request.salt or request.peer)
        except InvalidInput as error:
            if request.structure is not None and request.structure.kind == "structural_tag":
                error = error.at("sampling.structural_tag")  # it is compiled as a grammar
            at_fault = await self._strict_at_fault(request)
            raise at_fault or (error.at("chat.tools") if calls else error) from None
        return _sampled(request, grammar=made.grammar, grammar_bytes=made.bytes, grammar_trigger=trigger)

    async def _strict_at_fault(self, request: Request) -> InvalidInput | None:
        """The error for the first of a few strict functions whose parameters cannot be compiled on their own."""
        tools = request.prompt.tools if isinstance(request.prompt, ChatPrompt) else ()
        strict = [(number, tool.parameters) for number, tool in enumerate(tools) if tool.strict]
        for number, parameters in strict[:_MOST_TRIED]:
            alone = Structure("json_schema", json.dumps(of_arguments(parameters)))
            try:
                await self._compiler.grammar(alone, request.salt, request.salt or request.peer)
            except InvalidInput as error:
                return error.at(f"chat.tools[{number}].parameters")
        return None

    def _bounded(self, request: Request) -> Request:
        """The request with a bound on its reasoning."""
        if (budget := request.thinking_token_budget) is None:
            return request
        return _sampled(request, thinking_bound=self._prompts.thinking_bound(budget))

    async def _with_bad_words(self, request: Request) -> Request:
        """The request, with its bad words as tokens."""
        if not request.bad_words:
            return request
        few = sum(map(len, request.bad_words)) <= _FEW_LETTERS
        runs = await tasks.compute(self._prompts.bad_word_ids, request.bad_words, at_once=few)
        return _sampled(request, bad_word_ids=runs)


def _sampled(request: Request, **values: Any) -> Request:
    """The request with some of its sampling parameters as given."""
    return replace(request, sampling=msgspec.structs.replace(request.sampling, **values))
