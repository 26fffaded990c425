"""How a model writes its calls."""

from __future__ import annotations

from enum import Enum


class ToolFormat(Enum):
    """How a model writes its calls."""

    NONE = "none"
    """It may not call, or its calls are words: nothing is looked for."""
    JSON = "json"
    """`<tool_call>{"name": …, "arguments": …}</tool_call>`, as Qwen and Hermes do."""
    XML = "xml"
    """`<tool_call><function=…><parameter=…>…</parameter></function></tool_call>`, as Qwen3-Coder and Qwen3.5 do."""
    GLM = "glm"
    """`<tool_call>name<arg_key>…</arg_key><arg_value>…</arg_value></tool_call>`."""
    MISTRAL = "mistral"
    """`[TOOL_CALLS][{"name": …, "arguments": …}]`, or `[TOOL_CALLS]name[ARGS]{…}` for each call."""
    KIMI = "kimi"
    """`<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}<|tool_call_end|>` in a section of calls."""
    GEMMA = "gemma"
    """`<|tool_call>call:name{key:value}<tool_call|>`, with strings between two `<|"|>`."""
    LLAMA = "llama"
    """The whole answer is calls, if it is any: JSON objects, or a list of Python's calls."""
    LFM = "lfm"
    """`<|tool_call_start|>[name(key=value)]<|tool_call_end|>`."""
    MINIMAX = "minimax"
    """`<tool_call><invoke name="name"><key>value</key></invoke></tool_call>`, each tag behind `]<]minimax[>[`."""
    GRANITE = "granite"
    """`<|tool_call|>[{"name": …, "arguments": …}]`."""
    APERTUS = "apertus"
    """`<|tools_prefix|>[{name: {…}}]<|tools_suffix|>`."""
    DEEPSEEK = "deepseek"
    """`<｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>` in a section of calls; before V3.1 there is a
    type in place of the name, which follows the separator, and arguments are in a code fence."""
    HUNYUAN = "hunyuan"
    """`<tool_calls>[{"name": …, "arguments": …}]</tool_calls>`, as Jamba does as well."""
    PHI = "phi"
    """`functools[{"name": …, "arguments": …}]`."""
    INTERNLM = "internlm"
    """`<|action_start|><|plugin|>{"name": …, "parameters": …}<|action_end|>`."""
    LIST = "list"
    """The whole answer is a list of calls: it had to be."""
    ARGUMENTS = "arguments"
    """The whole answer is the arguments of the only function in question."""
