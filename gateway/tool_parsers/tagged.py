"""Calls between `<tool_call>` and its end mark: JSON as Qwen and Hermes write, and GLM's form; and
InternLM's JSON between others."""

from __future__ import annotations

import re
from typing import Final

from gateway.tool_parsers.arguments import arguments_of, written
from gateway.tool_parsers.tool_parser import Call, Functions, Marked, NoCalls, OrJson, Reader, Stretch

MARKS: Final = ("<tool_call>", "</tool_call>")
INTERNLM: Final = ("<|action_start|><|plugin|>", "<|action_end|>")
_GLM_NAME = re.compile(r"\s{0,64}([^\s<]{1,128})\s{0,64}")
_GLM_ARGUMENT = re.compile(r"<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)


def json_reader(functions: Functions) -> Reader:
    """Reads `{"name": …, "arguments": …}`."""
    return OrJson(MARKS[1], functions, NoCalls())


def internlm_reader(functions: Functions) -> Reader:
    """Reads the same between InternLM's marks."""
    return OrJson(INTERNLM[1], functions, NoCalls())


def glm_reader(functions: Functions) -> Reader:
    """Reads a name, and pairs of `<arg_key>` and `<arg_value>`."""
    return OrJson(MARKS[1], functions, _GlmReader(functions))


class _GlmReader(Marked):
    """Reads up to the end mark if a name comes first; anything else is not a call, whatever follows."""

    def __init__(self, functions: Functions) -> None:
        quotes = {"<arg_value>": "</arg_value>"}
        super().__init__(MARKS[1], quotes, lambda body: _glm_call(body, functions), ends_open=False)

    def read(self, text: str, *, last: bool) -> Stretch | None:
        """See `Reader`."""
        name = _GLM_NAME.match(text)
        behind = text[name.end() : name.end() + len(MARKS[1])] if name else text.lstrip()
        may_be = any(tag.startswith(behind) or behind.startswith(tag) for tag in ("<arg_key>", MARKS[1]))
        return super().read(text, last=last) if may_be and (name or not behind) else Stretch(0, [])


def _glm_call(body: str, functions: Functions) -> list[Call] | None:
    name = _GLM_NAME.match(body)
    if name is None or (name.end() == len(body) and name[1] not in functions):  # else any word would be a call
        return None
    pairs: dict[str, str] = {}
    at = name.end()
    while found := _GLM_ARGUMENT.match(body, at):
        pairs[found[1].strip()] = found[2]
        at = found.end()
    text = None if body[at:].strip() else written(arguments_of(functions.get(name[1], {}), pairs))
    return None if text is None else [(name[1], text)]
