"""A child process for the tests of `common.process.children`: echoes, ends, hangs or babbles as it is told.

`python -m tests.unit.common.echo_child SOCKET_FD [MEMORY_FD]`. With `--parent` it is itself a parent: it starts an
echo child, prints that one's process id, and waits to be killed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import msgspec

from common.process import stacks
from common.process.children import Child
from common.process.parent_link import ParentLink, die_with_parent
from common.shm.arena import SharedBuffer


class Say(msgspec.Struct, tag=True):
    """Echo this back."""

    words: bytes


class Do(msgspec.Struct, tag=True):
    """exit, hang, babble, or write into the shared memory."""

    what: str


Message = Say | Do


def main() -> None:
    die_with_parent()
    stacks.write_when_asked()
    link: ParentLink[Message] = ParentLink(int(sys.argv[1]), Message)
    try:
        while True:
            message = link.receive()
            if isinstance(message, Say):
                link.send(message)
            elif message.what == "exit":
                return
            elif message.what == "hang":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                link.send(Say(b"hanging"))
                signal.pause()
            elif message.what == "babble":
                os.write(link.fileno(), b"\4\0\0\0\xc1\xc1\xc1\xc1")
            elif message.what == "write":
                SharedBuffer.attach(int(sys.argv[2]), 4096).view[:5] = b"hello"
                link.send(Say(b"written"))
    except EOFError:
        return


async def _be_a_parent() -> None:
    child: Child[Say] = await Child.start("tests.unit.common.echo_child", receives=Say)
    child.send(Say(b"ready"))
    await child.receive()
    sys.stdout.write(f"{child.process.pid}\n")
    sys.stdout.flush()
    await child.process.wait()


if __name__ == "__main__":
    if sys.argv[1] == "--parent":
        asyncio.run(_be_a_parent())
    else:
        main()
