"""A process that compiles structures: `python -m llm_service.grammar SOCKET_FD`, started by the front, never by hand.

A structure of a few bytes can take minutes and gigabytes. This process may take neither: the front kills it when its
time is over, and the kernel refuses it more memory than it may have, which ends it as well."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

from common.checkpoint import Checkpoint
from common.errors import InvalidInput
from common.processes import ParentLink, die_with_parent, leave_signals_to_parent
from llm_service.engine.structure import Structures
from llm_service.grammar.messages import Compile, Compiled, Prepared, Refused, ToCompiler, Vocabulary
from llm_service.request import Structure

_MEMORY = 1 << 30
"""Bytes that compiling may add to what the process has once the vocabulary is read."""


def main() -> None:
    """Serves one front until it goes away."""
    die_with_parent()
    leave_signals_to_parent()
    link: ParentLink[ToCompiler] = ParentLink(int(sys.argv[1]), ToCompiler)
    try:
        vocabulary = link.receive()
        assert isinstance(vocabulary, Vocabulary)
        structures = Structures(Checkpoint.resolve(vocabulary.model), vocabulary.size, vocabulary.ends)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + _MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        link.send(Prepared())
        while isinstance(order := link.receive(), Compile):
            link.send(_answer(structures, order))
    except EOFError:
        return


def _answer(structures: Structures, order: Compile) -> Compiled | Refused:
    try:
        return Compiled(structures.grammar(Structure(order.kind, order.text)))  # type: ignore[arg-type]
    except InvalidInput as error:
        return Refused(error.message)


if __name__ == "__main__":
    main()
