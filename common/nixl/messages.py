"""Messages to and from the process of a NIXL agent."""

from __future__ import annotations

import msgspec


class AgentMemory(msgspec.Struct, frozen=True, tag=True):
    """Memory that an agent has registered, and what others need to read it: `size` bytes from address `base` of the
    agent's process. An agent's name is never reused; `metadata` is opaque and says how to reach it."""

    agent: str
    backend: str
    metadata: bytes
    base: int
    size: int


class Register(msgspec.Struct, tag=True):
    """The first message: create an agent of this name, and register all `size` bytes of the inherited memory."""

    agent: str
    backend: str
    size: int


class CannotRegister(msgspec.Struct, tag=True):
    """The answer if that fails, with the reason for the operator; otherwise the answer is an `AgentMemory`. The process
    ends."""

    why: str


class Connect(msgspec.Struct, tag=True):
    """Another agent's memory is going to be read. `id` names the question."""

    id: int
    memory: AgentMemory


class Disconnect(msgspec.Struct, tag=True):
    """It is not read any more."""

    agent: str


class Read(msgspec.Struct, tag=True):
    """`size` bytes from address `source` of an agent that is connected go to offset `target` of our own memory."""

    id: int
    agent: str
    source: int
    target: int
    size: int


class AgentAnswer(msgspec.Struct, tag=True):
    """A `Connect` or a `Read` is over, and nothing is written for it any more. `why` it failed; empty: it did not."""

    id: int
    why: str = ""


ToAgent = Register | Connect | Disconnect | Read
FromAgent = AgentMemory | CannotRegister | AgentAnswer
