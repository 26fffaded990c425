"""Simulated distance between two processes on one machine: a relay that delays bytes in both directions.

    python -m benchmarks.relay PORT SECONDS

prints its own port, and forwards connections there to PORT and back, each direction SECONDS late.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.services import partner

_READ_BYTES = 1 << 20


async def _pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter, seconds: float) -> None:
    loop = asyncio.get_running_loop()
    under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def arrive() -> None:
        while True:
            due, data = await under_way.get()
            await asyncio.sleep(due - loop.time())
            if not data:
                return
            sink.write(data)
            await sink.drain()

    arriving = asyncio.create_task(arrive())
    try:
        data = b"start"
        while data:
            data = await source.read(_READ_BYTES)
            under_way.put_nowait((loop.time() + seconds, data))
        await arriving
    except ConnectionError:
        arriving.cancel()
    finally:
        sink.close()


async def _serve(port: int, seconds: float) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port, limit=_READ_BYTES)
        await asyncio.gather(_pass_on(reader, back, seconds), _pass_on(there, writer, seconds))

    server = await asyncio.start_server(connected, "127.0.0.1", 0, limit=_READ_BYTES)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)


@contextmanager
def relay(port: int, seconds: float) -> Iterator[str]:
    """A relay's port for the length of the block; it runs in a process of its own."""
    with partner("benchmarks.relay", str(port), str(seconds)) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), float(sys.argv[2])))
