"""A process that compiles structures: `python -m llm_service.grammar SOCKET_FD`, started by the front.

It compiles each in a fork of itself, which has already read the vocabulary: a structure of a few bytes can take minutes
and gigabytes, and the kernel kills the fork at its limits. The process itself stays, ready for the next one.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
from pathlib import Path

import msgspec

from common.checkpoints.checkpoint import Checkpoint
from common.errors import InvalidInput
from common.process.malloc import bytes_in_use
from common.process.parent_link import ParentLink, die_with_parent, leave_signals_to_parent
from common.process.status import was_ended
from llm_service.engine.structure import Structures
from llm_service.grammar.foresight import refusal
from llm_service.grammar.gbnf import as_lark
from llm_service.grammar.messages import (
    Answer,
    Broke,
    Compile,
    Compiled,
    CompileStarted,
    Lost,
    Outcome,
    Ready,
    Refused,
    ToCompiler,
    TooSlow,
    Vocabulary,
)
from llm_service.request import Structure

_MEMORY = 1 << 30
"""Bytes that compiling may take in addition to what the process has once the vocabulary is read."""

_SHORTEST = 1e-6
"""Seconds: a timer of none would never end."""


def main() -> None:
    """Serves one front until it goes away."""
    die_with_parent()
    leave_signals_to_parent()
    link: ParentLink[ToCompiler] = ParentLink(int(sys.argv[1]), ToCompiler)
    try:
        vocabulary = link.receive()
        assert isinstance(vocabulary, Vocabulary)
        structures = Structures(Checkpoint.resolve(vocabulary.model), vocabulary.size, vocabulary.ends)
        with contextlib.suppress(InvalidInput):  # if the tokenizer's kind is not supported
            structures.grammar(Structure("regex", "a"))  # so that set-up costs do not count for the first structure
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + _MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        link.send(Ready())
        while isinstance(order := link.receive(), Compile):
            link.send(_compile(structures, order, link))
    except EOFError:
        return


def _compile(structures: Structures, order: Compile, link: ParentLink[ToCompiler]) -> Outcome:
    """The outcome of a structure, compiled by a fork of this process. The fork has its own pipe, so that a message cut
    off by its death is not mistaken for a complete one."""
    parent = os.getpid()
    try:
        reading, writing = os.pipe()
        pid = os.fork()
    except OSError:
        return Lost()
    if not pid:
        _work(structures, order, parent, writing)
    os.close(writing)
    os.read(reading, 1)  # from now on the fork dies with this process, even if it is stopped
    link.send(CompileStarted(pid))
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status == 0:
        return msgspec.msgpack.decode(said, type=Answer)  # type: ignore[no-any-return]
    if status == -signal.SIGPROF:
        return TooSlow()
    return Lost() if was_ended(status) else Broke()


def _work(structures: Structures, order: Compile, parent: int, writing: int) -> None:
    """The whole life of the fork. It exits here in any case, and runs none of the parent's clean-up."""
    try:
        die_with_parent(parent)
        os.write(writing, b".")
        signal.setitimer(signal.ITIMER_PROF, max(_SHORTEST, order.seconds))  # SIGPROF, at its end, ends the process
        said = msgspec.msgpack.encode(_answer(structures, order))
        signal.setitimer(signal.ITIMER_PROF, 0)
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(said)
        os._exit(0)
    finally:
        os._exit(1)


def _answer(structures: Structures, order: Compile) -> Answer:
    structure, limits = Structure(order.kind, order.text), order.limits  # type: ignore[arg-type]
    if order.kind == "grammar" and (lark := _lark(order.text)) != order.text:
        structure = Structure("grammar", lark)
        if why := refusal(structure, limits):  # which was not visible in its other form
            return Refused(why, too_large=True)
    before = bytes_in_use()
    try:
        grammar, matcher = structures.compile(structure)
    except InvalidInput as error:
        return Refused(error.message)
    held, most = max(0, bytes_in_use() - before), limits.compiled_bytes
    del matcher  # it had to exist while its memory was measured
    if held > most:
        return Refused(f"the {order.kind} takes more than {most} bytes when it is compiled", too_large=True)
    return Compiled(grammar, held)


def _lark(text: str) -> str:
    """A grammar in Lark's form; one that cannot be read is returned unchanged, and refused by the compiler."""
    try:
        return as_lark(text)
    except ValueError:
        return text


if __name__ == "__main__":
    main()
