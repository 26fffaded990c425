"""The checkpoint's chat template, kept apart from what users write.

A template sees a marker in place of each text; the texts come in only after it has run. So nothing that a user writes
can look like a part of the template, and a template that inspects its input cannot be steered by it.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common import tekken
from common.checkpoint import Checkpoint, CheckpointError
from common.errors import InvalidInput
from llm_service.prompt.output_marks import THINK, ToolFormat, reasoning_marks, tool_format
from llm_service.request import ChatPrompt, MediaItem, Message, ToolDefinition

ROLES = ("system", "user", "assistant", "tool")

# What a template raises over a conversation of a shape that it does not know: its own errors, and Python's.
_TEMPLATE_FAILURES = (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError)


# A word of a tool's definition, such as a type or a name, which a template may look at: no sign that any template or
# special token is made with.
_WORD = re.compile(r"[A-Za-z_$][\w$.-]{0,127}", re.ASCII)
_MARK = re.compile(r"(\ue000[0-9a-f]{16}:\d+)\ue001")
# The same where it is to be found again: escaped, where a template prints a list.
_PLACE = re.compile(r"(?:\ue000|\\ue000)([0-9a-f]{16}):(\d+)(j?)(?:\ue001|\\ue001)")


class _Marks:
    """Stands for the caller's texts while a template runs."""

    def __init__(self) -> None:
        self._name = secrets.token_hex(8)
        self._texts: list[str] = []

    def put(self, text: str) -> str:
        """What stands for a text."""
        self._texts.append(text)
        return f"\ue000{self._name}:{len(self._texts) - 1}\ue001"

    def put_all(self, value: Any) -> Any:
        """A JSON value in which something stands for every text and key, but for plain words."""
        match value:
            case str():
                return value if _WORD.fullmatch(value) else self.put(value)
            case dict():
                return {self.put_all(name): self.put_all(each) for name, each in value.items()}
            case list():
                return [self.put_all(each) for each in value]
            case _:
                return value

    def take(self, rendered: str) -> list[tuple[str, bool]]:
        """The pieces of what a template has made, each with whether the caller wrote it. A text that stands inside of
        JSON is written as JSON has it."""
        out: list[tuple[str, bool]] = []
        told = 0
        for found in _PLACE.finditer(rendered):
            name, number, within_json = found.groups()
            if name != self._name:
                continue
            if text := rendered[told : found.start()]:
                out.append((text, False))
            if own := self._texts[int(number)]:
                out.append((json.dumps(own, ensure_ascii=False)[1:-1] if within_json else own, True))
            told = found.end()
        return [*out, (rendered[told:], False)] if told < len(rendered) else out


_REASONING = {
    "reasoning_content": "reasoning_content",
    "block": r"""==\s*['"]thinking['"]""",
    "thinking": r"""message\.thinking|message\[['"]thinking['"]\]""",
}
"""Where a message has what the model thought, by a sign of a template that looks there."""

_REFUSED = "the model's chat template refuses this conversation"
_PLAIN_REFUSED = "the model has no chat template: a conversation is one message of a user"
_PLAIN = """\
{%- if messages | length != 1 or messages[0].role != 'user' %}{{ raise_exception('') }}{% endif %}
{%- set content = messages[0].content %}
{%- if content is string %}{{ content }}{% else %}
{%- for part in content if part.type != 'text' %}{{ placeholders[part.type] }}{% endfor %}
{%- for part in content if part.type == 'text' %}{{ part.text }}{% endfor %}
{%- endif %}"""
"""Items first, then texts, as they are."""


class ChatTemplate:
    """A compiled template; `render` gives (piece, is the caller's) pairs. It knows tools, a choice of thinking, and how
    much of it, where it names their variables. A conversation that it refuses is `refused` so."""

    def __init__(self, source: str, variables: dict[str, Any], refused: str = _REFUSED) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _now
        environment.filters["tojson"] = _to_json
        self._template = environment.from_string(source)
        self._variables, self._refused = variables, refused
        self.knows_tools = bool(re.search(r"\btools\b", source))
        choices = {"enable_thinking": r"enable_thinking", "thinking": r"(?<![.\w])thinking is (?:not )?defined"}
        self._thinking = [name for name, sign in choices.items() if re.search(sign, source)]
        self.knows_thinking = bool(self._thinking)
        self.knows_effort = bool(re.search(r"\breasoning_effort\b", source))
        marks = reasoning_marks(source)
        self.never_thinks = marks is None and not self.knows_thinking
        self._reasoning = next((place for place, sign in _REASONING.items() if re.search(sign, source)), None)
        self.knows_reasoning = self._reasoning is not None
        self.reasoning_marks = marks or THINK
        self.tool_format = tool_format(source)
        self.names_calls = "[ARGS]" in source
        """Of Mistral's: a call is a name and its arguments, not an element of a list."""

    @classmethod
    def of(
        cls, checkpoint: Checkpoint, placeholders: dict[str, str] | None = None, *, source: str | None = None
    ) -> ChatTemplate:
        """The `source`, or else the template where checkpoints keep it. Where there is none, a conversation is one
        message with these placeholders in it, by modality, of a model that was taught no other; without them, raises
        CheckpointError, as for a template that is none."""
        settings = checkpoint.json("tokenizer_config.json")
        source = (
            source
            or checkpoint.text("chat_template.jinja")
            or checkpoint.json("chat_template.json").get("chat_template")
            or settings.get("chat_template")
            or tekken.chat_template(checkpoint.json(tekken.FILE))
        )
        if not isinstance(source, str) and placeholders is not None:
            return cls(_PLAIN, {"placeholders": placeholders}, _PLAIN_REFUSED)
        if not isinstance(source, str):
            raise CheckpointError("the checkpoint has no chat template")
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        try:
            return cls(source, {name: settings[name] for name in names if isinstance(settings.get(name), str)})
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"the chat template is no Jinja: line {error.lineno}: {error.message}") from error

    def render(self, prompt: ChatPrompt) -> list[tuple[str, bool]]:
        """The laid-out conversation as (text, whether the caller wrote it); media stand as the template has them.

        Raises InvalidInput for a role that is not known, for what the template has no place for, or a conversation that
        it refuses.
        """
        marks = _Marks()
        self._check(prompt)
        said = _numbered(prompt.messages) if self.tool_format is ToolFormat.KIMI else prompt.messages
        messages = [self._message(message, marks) for message in said]
        variables: dict[str, Any] = dict(self._variables)
        if prompt.tools:
            variables["tools"] = [{"type": "function", "function": _function(tool, marks)} for tool in prompt.tools]
        thinking = False if prompt.reasoning_effort == "none" else prompt.thinking
        if thinking is not None:
            variables.update(dict.fromkeys(self._thinking, thinking))
        variables["add_generation_prompt"] = not prompt.continues
        if prompt.reasoning_effort and self.knows_effort:
            rendered = self._with_effort(prompt.reasoning_effort, messages, variables)
        else:
            rendered = self._rendered(messages, variables)
        return marks.take(self._unended(messages[-1], rendered) if prompt.continues else rendered)

    def _unended(self, message: dict[str, Any], rendered: str) -> str:
        """Up to the end of what the last message says."""
        content = message["content"]
        mark = _MARK.findall(content if isinstance(content, str) else content[-1]["text"])[-1] + "\ue001"
        if mark not in rendered:
            raise InvalidInput(self._refused, reason="CHAT_REFUSED", field="chat.messages")
        return rendered[: rendered.rindex(mark) + len(mark)]

    def _rendered(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        try:
            return self._template.render(messages=messages, **variables)
        except _TEMPLATE_FAILURES as error:
            raise InvalidInput(self._refused, reason="CHAT_REFUSED", field="chat.messages") from error

    def _with_effort(self, effort: str, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        try:
            return self._rendered(messages, {**variables, "reasoning_effort": effort})
        except InvalidInput:
            self._rendered(messages, variables)  # where this goes well, it is the word
            why = "the model's chat template knows no such effort"
            raise InvalidInput(why, reason="BAD_EFFORT", field="chat.reasoning_effort") from None

    def _check(self, prompt: ChatPrompt) -> None:
        """Raises InvalidInput for what the template would leave out."""
        if prompt.tools and not self.knows_tools:
            raise InvalidInput("the model's chat template knows no tools", reason="NO_TOOLS", field="chat.tools")
        self._check_thinking(prompt)
        if prompt.continues:
            _check_final(prompt.messages[-1], f"chat.messages[{len(prompt.messages) - 1}]")
        for index, message in enumerate(prompt.messages):
            field = f"chat.messages[{index}]"
            if message.role not in ROLES:
                raise InvalidInput(
                    f"a message's role must be one of {', '.join(ROLES)}", reason="UNKNOWN_ROLE", field=f"{field}.role"
                )
            if (message.role == "tool" or message.tool_calls) and not self.knows_tools:
                raise InvalidInput("the model's chat template knows no tools", reason="NO_TOOLS", field=field)
            if message.reasoning and not self.knows_reasoning:
                raise InvalidInput(
                    "the model's chat template has no place for reasoning", reason="NO_THINKING", field=field
                )
            if (message.tool_calls or message.reasoning) and message.role != "assistant":
                raise InvalidInput("calls and reasoning are an assistant's", reason="BAD_TOOL", field=field)
            if message.tool_call_id and message.role != "tool":
                raise InvalidInput("the result of a call is a tool's", reason="BAD_TOOL", field=field)

    def _check_thinking(self, prompt: ChatPrompt) -> None:
        done_anyway = prompt.thinking is False and self.never_thinks
        if prompt.thinking is not None and not self.knows_thinking and not done_anyway:
            raise InvalidInput(
                "the model's chat template leaves no choice of thinking", reason="NO_THINKING", field="chat.thinking"
            )
        none = prompt.reasoning_effort == "none" and (self.knows_thinking or self.never_thinks)
        if prompt.reasoning_effort and not self.knows_effort and not none:
            why = "the model's chat template leaves no choice of how much it thinks"
            raise InvalidInput(why, reason="NO_THINKING", field="chat.reasoning_effort")

    def _message(self, message: Message, marks: _Marks) -> dict[str, Any]:
        content: list[dict[str, str]] = []
        for part in message.parts:
            if isinstance(part, MediaItem):
                content.append({"type": part.modality, part.modality: "here"})
            else:
                content.append({"type": "text", "text": marks.put(part)})
        more: dict[str, Any] = {}
        if message.tool_calls:
            more["tool_calls"] = [
                {
                    "id": marks.put_all(call.id),
                    "type": "function",
                    "function": {"name": marks.put_all(call.name), "arguments": marks.put_all(call.arguments)},
                }
                for call in message.tool_calls
            ]
        if message.tool_call_id:
            more["tool_call_id"] = marks.put_all(message.tool_call_id)
        if message.reasoning and self._reasoning == "block":
            content.insert(0, {"type": "thinking", "thinking": marks.put(message.reasoning)})
        elif message.reasoning:
            more[str(self._reasoning)] = marks.put(message.reasoning)
        if all(part["type"] == "text" for part in content):
            return {"role": message.role, "content": "".join(part["text"] for part in content), **more}
        return {"role": message.role, "content": content, **more}


def _check_final(message: Message, field: str) -> None:
    """Raises InvalidInput where nothing goes on behind the last message."""
    ends_with_text = bool(message.parts) and isinstance(message.parts[-1], str)
    if message.role != "assistant" or message.tool_calls or not ends_with_text:
        why = "an answer goes on behind an assistant's message that ends with a text, and has no calls"
        raise InvalidInput(why, reason="BAD_FINAL_MESSAGE", field=field)


def _numbered(messages: Sequence[Message]) -> list[Message]:
    """With calls named as Kimi's are, by the function and their turn in the conversation: its template lays out a
    call's name where others have the function's."""
    names: dict[str, str] = {}
    number = 0
    out: list[Message] = []
    for message in messages:
        calls = [replace(call, id=f"functions.{call.name}:{number + n}") for n, call in enumerate(message.tool_calls)]
        number += len(calls)
        names |= {call.id: own.id for call, own in zip(message.tool_calls, calls, strict=True)}
        result_of = names.get(message.tool_call_id, message.tool_call_id)
        out.append(replace(message, tool_calls=tuple(calls), tool_call_id=result_of))
    return out


class _Generation(Extension):
    """What stands between `generation` and `endgeneration` is marked for those who train; it is text like any other."""

    tags = {"generation"}  # noqa: RUF012 # as its base has it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The nodes between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _function(tool: ToolDefinition, marks: _Marks) -> dict[str, Any]:
    out: dict[str, Any] = {"name": marks.put_all(tool.name)}
    if tool.description:
        out["description"] = marks.put_all(tool.description)
    if tool.parameters is not None:
        out["parameters"] = marks.put_all(tool.parameters)
    return out


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, **options: Any) -> str:
    """As Hugging Face's templates expect it; what stands for texts is told that it stands inside of JSON."""
    return _MARK.sub("\\1j\ue001", json.dumps(value, ensure_ascii=options.pop("ensure_ascii", False), **options))
