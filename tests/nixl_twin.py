"""In the place of `common.nixl`: an agent without the library, `python -m tests.nixl_twin SOCKET_FD MEMORY_FD`.

Its metadata names its process and descriptor, by which others on this host read its memory. Its back end says how it
reads: `UCX` well; `SPOILS` changes a byte; `FAILS`; `HANGS` ends no read; `DIES` of the first; `FORGETS` with it
whom it knows. `NONE` cannot be had.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

from common.nixl.messages import AgentAnswer, AgentMemory, CannotRegister, Connect, Disconnect, Read, Register, ToAgent
from common.process.parent_link import ParentLink, die_with_parent, leave_signals_to_parent
from common.shm.arena import Range, SharedBuffer


def main(link_fd: int, memory_fd: int) -> None:
    die_with_parent()
    leave_signals_to_parent()
    link: ParentLink[ToAgent] = ParentLink(link_fd, ToAgent)
    with contextlib.suppress(EOFError):
        register = link.receive()
        assert isinstance(register, Register)
        if register.backend == "NONE":
            link.send(CannotRegister("there is no such back end"))
            return
        memory = SharedBuffer.attach(memory_fd, register.size)
        metadata = f"/proc/{os.getpid()}/fd/{memory_fd}".encode()
        link.send(AgentMemory(register.agent, register.backend, metadata, 1 << 20, register.size))
        serve(link, register.backend, memory)


def serve(link: ParentLink[ToAgent], kind: str, memory: SharedBuffer) -> None:
    known: dict[str, AgentMemory] = {}
    forgets = kind == "FORGETS"
    while True:
        order = link.receive()
        if isinstance(order, Connect):
            known[order.memory.agent] = order.memory
            link.send(AgentAnswer(order.id))
        elif isinstance(order, Disconnect):
            known.pop(order.agent, None)
        elif isinstance(order, Read):
            if kind == "DIES":
                os.kill(os.getpid(), signal.SIGKILL)
            if forgets:
                known.clear()
                forgets = False
            if kind != "HANGS":
                link.send(AgentAnswer(order.id, read(order, known.get(order.agent), memory, kind)))


def read(order: Read, theirs: AgentMemory | None, memory: SharedBuffer, kind: str) -> str:
    """Why it failed; empty where it did not."""
    if kind == "FAILS":
        return "the transfer failed"
    if theirs is None:
        return "nobody has that name"
    try:
        with Path(theirs.metadata.decode()).open("rb", buffering=0) as source:
            data = bytearray(os.pread(source.fileno(), order.size, order.source - theirs.base))
    except OSError as error:
        return str(error)
    data[len(data) // 2] ^= kind == "SPOILS"
    memory.slice(Range(order.target, order.size))[:] = data
    return ""


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
