"""The checkpoint's chat template, kept apart from what users write: a template may inspect and cut a text, but the
result still belongs to the user. So nothing that a user writes can be mistaken for a part of the template."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jinja2

from common.checkpoints import tekken
from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from common.errors import InvalidInput
from llm_service.prompt.caller_text import CallerTexts, Part, sources
from llm_service.prompt.output_marks import THINK, UNREAD, OutputMarks, ToolFormat
from llm_service.prompt.template_environment import TemplateEnvironment, with_texts
from llm_service.request import ChatPrompt, MediaItem, Message, ToolDefinition

ROLES = ("system", "user", "assistant", "tool")

# The errors that a template raises for a conversation that it does not expect: its own and Python's.
_TEMPLATE_FAILURES = (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError)


# A word of a tool's definition, such as a type or a name, which a template may inspect: it contains no character of
# template syntax or special tokens.
_WORD = re.compile(r"[A-Za-z_$][\w$.-]{0,127}", re.ASCII)


def _put_all(texts: CallerTexts, value: Any) -> Any:
    """A JSON value in which every text and key is replaced by its mark, except plain words."""
    match value:
        case str():
            return value if _WORD.fullmatch(value) else texts.put(value)
        case dict():
            return {_put_all(texts, name): _put_all(texts, each) for name, each in value.items()}
        case list():
            return [_put_all(texts, each) for each in value]
        case _:
            return value


_REASONING = {
    "reasoning_content": "reasoning_content",
    "block": r"""==\s*['"]thinking['"]""",
    "thinking": r"""message\.thinking|message\[['"]thinking['"]\]""",
}
"""Where a message has its reasoning, by a mark in templates that look there."""

_THINKING = ("enable_thinking", "thinking")
_OWN = {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "pad_token", "unk_token"}
_OWN |= {*_THINKING, "reasoning_effort"}
"""Variables that a conversation, another field of a request or the checkpoint gives."""

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
    """A compiled template; `render` returns (piece, whether the caller wrote it) pairs. It supports tools, switching
    thinking on or off, and thinking effort if it names their variables. Conversations that it rejects raise
    InvalidInput. `defaults` are variables that a prompt may override; raises CheckpointError for one that the template
    does not use. `marks` precede those that it shows."""

    def __init__(
        self,
        source: str,
        variables: dict[str, Any],
        refused: str = _REFUSED,
        *,
        defaults: Mapping[str, Any] | None = None,
        marks: OutputMarks | None = None,
    ) -> None:
        self._template, names = TemplateEnvironment().template_and_names(source)
        self._variables, self._refused = variables, refused
        self.knows_tools = bool(re.search(r"\btools\b", source))
        choices = {"enable_thinking": r"enable_thinking", "thinking": r"(?<![.\w])thinking is (?:not )?defined"}
        self._thinking = [name for name, sign in choices.items() if re.search(sign, source)]
        self.knows_thinking = bool(self._thinking)
        self.knows_effort = bool(re.search(r"\breasoning_effort\b", source))
        self._names = names - _OWN - variables.keys()
        self._defaults = self._known(defaults or {})
        shown = OutputMarks.of(source)
        found = (marks or OutputMarks()).or_else(shown)
        self.reads_reasoning = found.reasoning != UNREAD
        written = found.reasoning if self.reads_reasoning else shown.reasoning
        self.never_thinks = written is None and not self.knows_thinking
        self._reasoning = next((place for place, sign in _REASONING.items() if re.search(sign, source)), None)
        self.shows_reasoning = self.reads_reasoning and found.reasoning is not None
        self.reasoning_marks = found.reasoning or THINK
        self.reasons_on_new_line = bool(re.search(r"(?:\\n|\n)" + re.escape(self.reasoning_marks[0]), source))
        self.tool_format = found.tools
        self._with_tools: ChatTemplate | None = None
        self.names_calls = "[ARGS]" in source
        """Of Mistral's: a call is a name and its arguments, not an element of a list."""

    def _known(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Variables by the template's own names for them."""
        found: dict[str, Any] = {}
        for name, value in defaults.items():
            is_known = name in self._names or (name == "reasoning_effort" and self.knows_effort)
            own = self._thinking if name in _THINKING else [name] if is_known else []
            if not own:
                raise CheckpointError(f"--default-chat-template-kwargs: the chat template has no variable {name}")
            found.update(dict.fromkeys(own, value))
        return found

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        placeholders: dict[str, str] | None = None,
        *,
        source: str | None = None,
        defaults: Mapping[str, Any] | None = None,
        marks: OutputMarks | None = None,
    ) -> ChatTemplate:
        """The template from `source`, or else from where checkpoints keep it. Without one, a conversation is a single
        message with these placeholders for its media, by modality, if the model was taught no other form; without
        placeholders, or if the template is invalid, raises CheckpointError."""
        settings = checkpoint.json("tokenizer_config.json")
        named = _by_name(
            source
            or checkpoint.text("chat_template.jinja")
            or checkpoint.json("chat_template.json").get("chat_template")
            or settings.get("chat_template")
            or tekken.chat_template(checkpoint.json(tekken.FILE))
        )
        source = named.get("default")
        if not isinstance(source, str) and placeholders is not None:
            return cls(_PLAIN, {"placeholders": placeholders}, _PLAIN_REFUSED, defaults=defaults, marks=marks)
        if not isinstance(source, str):
            raise CheckpointError("the checkpoint has no chat template")
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        variables = {name: settings[name] for name in names if isinstance(settings.get(name), str)}
        try:
            template = cls(source, variables, defaults=defaults, marks=marks)
            if isinstance(with_tools := named.get("tool_use"), str):
                template._take_tools(cls(with_tools, variables, marks=marks))
            return template
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(
                f"the chat template is not valid Jinja: line {error.lineno}: {error.message}"
            ) from error

    def may_think(self, prompt: ChatPrompt) -> bool:
        """Whether an answer may begin with reasoning, as far as the model's marks are known, unless the prompt forbids
        it."""
        default = next((self._defaults[name] for name in _THINKING if name in self._defaults), None)
        thinking = default if prompt.thinking is None else prompt.thinking
        effort = prompt.reasoning_effort or self._defaults.get("reasoning_effort")
        return self.shows_reasoning and thinking is not False and effort != "none"

    def _take_tools(self, other: ChatTemplate) -> None:
        """Conversations with tools are laid out by another template."""
        self._with_tools = other
        other._defaults = self._defaults
        self.knows_tools, self.tool_format, self.names_calls = True, other.tool_format, other.names_calls

    def render(self, prompt: ChatPrompt) -> list[tuple[str, bool]]:
        """The conversation laid out as (text, whether the caller wrote it); media are where the template puts them.

        Raises InvalidInput for an unknown role, for content that the template ignores, or if the template rejects the
        conversation.
        """
        if self._with_tools is not None and prompt.tools:
            return self._with_tools.render(prompt)
        self._check(prompt)
        with with_texts() as texts:
            return [(part.text, bool(part.source)) for part in self._laid_out(prompt, texts) if part.text]

    def _laid_out(self, prompt: ChatPrompt, texts: CallerTexts) -> list[Part]:
        said = _RENAMED[self.tool_format](prompt.messages) if self.tool_format in _RENAMED else prompt.messages
        messages = [self._message(message, texts) for message in said]
        ending = _last_text(messages[-1]) if prompt.continues else None
        variables: dict[str, Any] = {**self._variables, **self._defaults, **_put_all(texts, dict(prompt.variables))}
        if prompt.tools:
            variables["tools"] = [{"type": "function", "function": _function(tool, texts)} for tool in prompt.tools]
        thinking = False if prompt.reasoning_effort == "none" else prompt.thinking
        if thinking is not None:
            variables.update(dict.fromkeys(self._thinking, thinking))
        variables["add_generation_prompt"] = not (prompt.continues or prompt.unanswered)
        if prompt.reasoning_effort and self.knows_effort:
            rendered = self._with_effort(prompt.reasoning_effort, messages, variables)
        else:
            rendered = self._rendered(messages, variables)
        parts = texts.parts(rendered)
        return parts if ending is None else self._unended(ending, parts)

    def _unended(self, ending: set[int], parts: list[Part]) -> list[Part]:
        """The parts up to the end of the last message's text."""
        ends = [at for at, part in enumerate(parts) if part.source in ending]
        if not ends:
            raise InvalidInput(self._refused, reason="CHAT_REFUSED", field="chat.messages")
        return parts[: ends[-1] + 1]

    def _rendered(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        try:
            return self._template.render(messages=messages, **variables)
        except _TEMPLATE_FAILURES as error:
            raise InvalidInput(self._refused, reason="CHAT_REFUSED", field="chat.messages") from error

    def _with_effort(self, effort: str, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        try:
            return self._rendered(messages, {**variables, "reasoning_effort": effort})
        except InvalidInput:
            self._rendered(messages, variables)  # if this succeeds, the word is the cause
            why = "the model's chat template does not know this effort"
            raise InvalidInput(why, reason="BAD_EFFORT", field="chat.reasoning_effort") from None

    def _check(self, prompt: ChatPrompt) -> None:
        """Raises InvalidInput for content that the template would ignore."""
        if prompt.tools and not self.knows_tools:
            raise InvalidInput(
                "the model's chat template does not support tools", reason="NO_TOOLS", field="chat.tools"
            )
        self._check_thinking(prompt)
        if unknown := next((name for name in prompt.variables if name not in self._names), None):
            why = f"the model's chat template has no such variable: {unknown}"
            raise InvalidInput(why, reason="BAD_VARIABLE", field="chat.template_variables")
        if prompt.continues:
            _check_final(prompt.messages[-1], f"chat.messages[{len(prompt.messages) - 1}]")
        for index, message in enumerate(prompt.messages):
            field = f"chat.messages[{index}]"
            if message.role not in ROLES:
                raise InvalidInput(
                    f"a message's role must be one of {', '.join(ROLES)}", reason="UNKNOWN_ROLE", field=f"{field}.role"
                )
            if (message.role == "tool" or message.tool_calls) and not self.knows_tools:
                raise InvalidInput("the model's chat template does not support tools", reason="NO_TOOLS", field=field)
            if (message.tool_calls or message.reasoning) and message.role != "assistant":
                raise InvalidInput("only an assistant message has calls and reasoning", reason="BAD_TOOL", field=field)
            if message.tool_call_id and message.role != "tool":
                raise InvalidInput("only a tool message has the result of a call", reason="BAD_TOOL", field=field)

    def _check_thinking(self, prompt: ChatPrompt) -> None:
        done_anyway = prompt.thinking is False and self.never_thinks
        if prompt.thinking is not None and not self.knows_thinking and not done_anyway:
            raise InvalidInput(
                "the model's chat template does not let requests choose thinking",
                reason="NO_THINKING",
                field="chat.thinking",
            )
        none = prompt.reasoning_effort == "none" and (self.knows_thinking or self.never_thinks)
        if prompt.reasoning_effort and not self.knows_effort and not none:
            why = "the model's chat template does not let requests choose the effort"
            raise InvalidInput(why, reason="NO_THINKING", field="chat.reasoning_effort")

    def _message(self, message: Message, texts: CallerTexts) -> dict[str, Any]:
        content: list[dict[str, str]] = []
        for part in message.parts:
            if isinstance(part, MediaItem):
                content.append({"type": part.modality, part.modality: "here"})
            else:
                content.append({"type": "text", "text": texts.put(part)})
        more: dict[str, Any] = {}
        if message.tool_calls:
            more["tool_calls"] = [
                {
                    "id": _put_all(texts, call.id),
                    "type": "function",
                    "function": {"name": _put_all(texts, call.name), "arguments": _put_all(texts, call.arguments)},
                }
                for call in message.tool_calls
            ]
        if message.tool_call_id:
            more["tool_call_id"] = _put_all(texts, message.tool_call_id)
        if message.reasoning and self._reasoning is None:
            pass  # callers send reasoning back, and this template ignores it
        elif message.reasoning and self._reasoning == "block":
            content.insert(0, {"type": "thinking", "thinking": texts.put(message.reasoning)})
        elif message.reasoning:
            more[str(self._reasoning)] = texts.put(message.reasoning)
        if all(part["type"] == "text" for part in content):
            said = texts.read("".join(part["text"] for part in content))
            return {"role": message.role, "content": said, **more}
        return {"role": message.role, "content": content, **more}


def _last_text(message: dict[str, Any]) -> set[int]:
    """The numbers of the texts that an answer continues. A template should see that there is one even if it is
    empty."""
    content = message["content"]
    found = sources(content if isinstance(content, str) else content[-1]["text"])
    if not content:
        message["content"] = str.__str__(content)
    return found


def _by_name(template: Any) -> dict[str, Any]:
    """A checkpoint's templates: one, or a list of named ones, of which `tool_use` is for conversations with tools."""
    if not isinstance(template, list):
        return {"default": template}
    return {each["name"]: each.get("template") for each in template if isinstance(each, dict) and "name" in each}


def _check_final(message: Message, field: str) -> None:
    """Raises InvalidInput if the last message cannot be continued."""
    ends_with_text = bool(message.parts) and isinstance(message.parts[-1], str)
    if message.role != "assistant" or message.tool_calls or not ends_with_text:
        why = "continue_final_message needs a last message of the assistant that ends with text and has no tool calls"
        raise InvalidInput(why, reason="BAD_FINAL_MESSAGE", field=field)


def _numbered(messages: Sequence[Message]) -> list[Message]:
    """Names calls as Kimi does, by the function and their number in the conversation: its template prints a call's id
    where others print the function."""
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


def _with_short_ids(messages: Sequence[Message]) -> list[Message]:
    """Gives calls ids as Mistral has them, nine letters and digits, which its templates require; a call and its result
    get the same one."""
    return [
        replace(
            message,
            tool_calls=tuple(replace(call, id=_short_id(call.id)) for call in message.tool_calls),
            tool_call_id=_short_id(message.tool_call_id) if message.tool_call_id else "",
        )
        for message in messages
    ]


def _short_id(own: str) -> str:
    if len(own) == 9 and own.isascii() and own.isalnum():
        return own
    return hashlib.sha256(own.encode()).hexdigest()[:9]


_RENAMED = {ToolFormat.KIMI: _numbered, ToolFormat.MISTRAL: _with_short_ids}


def _function(tool: ToolDefinition, texts: CallerTexts) -> dict[str, Any]:
    out: dict[str, Any] = {"name": _put_all(texts, tool.name)}
    if tool.description:
        out["description"] = _put_all(texts, tool.description)
    if tool.parameters is not None:
        out["parameters"] = _put_all(texts, tool.parameters)
    return out
