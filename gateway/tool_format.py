"""How a model writes its calls."""

from __future__ import annotations

from enum import Enum


class ToolFormat(Enum):
    """How a model writes its calls."""

    NONE = "none"
    """It may not call, and nothing is looked for."""
    JSON = "json"
    """`<tool_call>{"name": …, "arguments": …}</tool_call>`, as Qwen and Hermes do."""
    XML = "xml"
    """`<tool_call><function=…><parameter=…>…</parameter></function></tool_call>`, as Qwen3-Coder and Qwen3.5 do."""
    GLM = "glm"
    """`<tool_call>name<arg_key>…</arg_key><arg_value>…</arg_value></tool_call>`."""
    LIST = "list"
    """The whole answer is a list of calls: it had to be."""
    ARGUMENTS = "arguments"
    """The whole answer is the arguments of the only function in question."""
