"""The process of a NIXL agent: `python -m common.nixl SOCKET_FD MEMORY_FD`, started by a service.

It computes nothing. The library aborts its process if a peer vanishes at the wrong moment, and a cancelled transfer may
write until its process ends: so neither the process nor the memory is the service's own.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import time
from typing import Any

import numpy as np

from common.nixl.messages import AgentAnswer, AgentMemory, CannotRegister, Connect, Disconnect, Read, Register, ToAgent
from common.process.parent_link import ParentLink, die_with_parent, leave_signals_to_parent
from common.requirements import install
from common.shm.arena import SharedBuffer

_PACKAGES = ("nixl", "nixl_cu13", "nixl_cu12")
"""The first takes whichever of the others fits the machine's CUDA; any of them will do for the memory of a host."""

_SETTINGS = {"NIXL_LOG_LEVEL": "WARN", "UCX_TCP_TX_SEG_SIZE": "256k", "UCX_TCP_RX_SEG_SIZE": "256k"}
"""Unless the environment says otherwise. By TCP, rows come in about half of the time that they take with 8 KiB."""

_LOOK_MICROSECONDS = 10_000
"""Microseconds between checks for events that were not signalled."""

_PAUSE = 50e-6
"""Seconds from one look at reads that are under way to the next."""


def main(link_fd: int, memory_fd: int) -> None:
    """Holds one agent until the parent is gone."""
    die_with_parent()
    leave_signals_to_parent()
    os.environ.update(_SETTINGS | os.environ)
    link: ParentLink[ToAgent] = ParentLink(link_fd, ToAgent)
    with contextlib.suppress(EOFError):
        register = link.receive()
        assert isinstance(register, Register)
        memory = SharedBuffer.attach(memory_fd, register.size)
        try:
            agent = Agent(register, memory)
        except Unusable as error:
            link.send(CannotRegister(str(error)))
            return
        link.send(agent.memory)
        agent.serve(link)


class Unusable(Exception):
    """No agent can be had; the message says why."""


class Agent:
    """The library's agent, over memory of ours that is registered with it. Raises Unusable."""

    def __init__(self, register: Register, memory: SharedBuffer) -> None:
        library = _library()
        self._errors = _errors(library.nixlBind)
        _let_sleep(library.nixlBind)
        self._backend = register.backend
        self._base = int(np.frombuffer(memory.view, np.uint8).ctypes.data)
        self._reads: dict[int, Any] = {}
        try:
            self._agent = library.nixl_agent(register.agent, library.nixl_agent_config(backends=[register.backend]))
            if register.backend not in self._agent.backends:
                raise Unusable(f"NIXL has no back end {register.backend} here")
            pieces = [(self._base, register.size, 0, register.agent)]
            self._registered = self._agent.register_memory(pieces, "DRAM", backends=[register.backend])
            metadata = self._agent.get_agent_metadata()
        except self._errors as error:
            raise Unusable(f"NIXL refuses the memory or its back end: {_told(error)}") from error
        self.memory = AgentMemory(register.agent, register.backend, metadata, self._base, register.size)

    def serve(self, link: ParentLink[ToAgent]) -> None:
        """Carries out requests; raises EOFError when the parent is gone."""
        while True:
            order = link.poll() if self._reads else link.receive()
            if order is not None:
                self._take(order, link)
                continue
            for number in list(self._reads):
                self._look_at(number, link)
            if self._reads:
                time.sleep(_PAUSE)

    def _take(self, order: ToAgent, link: ParentLink[ToAgent]) -> None:
        try:
            if isinstance(order, Connect):
                self._agent.add_remote_agent(order.memory.metadata)
                link.send(AgentAnswer(order.id))
            elif isinstance(order, Disconnect):
                self._agent.remove_remote_agent(order.agent)
            elif isinstance(order, Read):
                self._read(order)
                self._look_at(order.id, link)
        except self._errors as error:
            if isinstance(order, Connect | Read):
                self._end(order.id, link, _told(error))

    def _read(self, order: Read) -> None:
        ours = self._agent.get_xfer_descs([(self._base + order.target, order.size, 0)], "DRAM")
        theirs = self._agent.get_xfer_descs([(order.source, order.size, 0)], "DRAM")
        transfer = self._agent.initialize_xfer("READ", ours, theirs, order.agent, backends=[self._backend])
        self._reads[order.id] = transfer
        self._agent.transfer(transfer)

    def _look_at(self, number: int, link: ParentLink[ToAgent]) -> None:
        try:
            state = self._agent.check_xfer_state(self._reads[number])
        except self._errors as error:
            self._end(number, link, _told(error))
            return
        if state != "PROC":
            self._end(number, link, "" if state == "DONE" else "the transfer failed")

    def _end(self, number: int, link: ParentLink[ToAgent], why: str) -> None:
        if (transfer := self._reads.pop(number, None)) is not None:
            self._agent.release_xfer_handle(transfer)
        link.send(AgentAnswer(number, why))


def _library() -> Any:
    """The library's Python interface; raises Unusable."""
    for package in _PACKAGES:
        try:
            return importlib.import_module(f"{package}._api")
        except ImportError:
            continue
    raise Unusable(f"the package nixl is not installed, or cannot be loaded: {install('nixl')}")


def _let_sleep(bindings: Any) -> None:
    """The Python bindings make agents poll without a pause, which occupies a core. With a pause, they sleep until
    something arrives."""
    config = bindings.nixlAgentConfig

    def set_attribute(self: Any, name: str, value: Any) -> None:
        config.__setattr__(self, name, _LOOK_MICROSECONDS if name == "pthrDelay" else value)

    bindings.nixlAgentConfig = type("Config", (config,), {"__setattr__": set_attribute})


def _errors(bindings: Any) -> tuple[type[Exception], ...]:
    """The errors of the library, each of which is a type of its own, and those of C++ exceptions."""
    own = [each for each in vars(bindings).values() if isinstance(each, type) and issubclass(each, Exception)]
    return (*own, RuntimeError, ValueError)


def _told(error: Exception) -> str:
    return str(error) or type(error).__name__


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
