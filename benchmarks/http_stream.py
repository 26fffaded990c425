"""A caller of the gateway that costs little itself: one connection, one streamed chat after the other, nothing parsed
but what is timed and counted."""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import Any, Self

from benchmarks.sides import Timed

_DONE = b"data: [DONE]\n\n"
_USAGE = re.compile(rb'"completion_tokens":(\d+)')
_EVENT = b"data: {"
_END = b"0\r\n\r\n"
_SECONDS = 300.0


class HttpCaller:
    """One connection, which stays open."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str) -> None:
        self._reader = reader
        self._writer = writer
        self._address = address

    @classmethod
    async def connect(cls, address: str) -> Self:
        """To the gateway at host:port."""
        host, _, port = address.rpartition(":")
        return cls(*await asyncio.open_connection(host, int(port)), address)

    async def close(self) -> None:
        """Ends the connection."""
        self._writer.close()
        await self._writer.wait_closed()

    async def chat(self, content: Any, tokens: int) -> Timed:
        """One greedy answer of exactly `tokens` tokens. The first is there when more than the assistant's role is.

        Raises RuntimeError for any other answer.
        """
        body = json.dumps(
            {
                "messages": [{"role": "user", "content": content}],
                "max_tokens": tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {self._address}\r\ncontent-length: {len(body)}\r\n\r\n"
        began = time.perf_counter()
        self._writer.write(head.encode() + body)
        async with asyncio.timeout(_SECONDS):
            came, first = await self._follow(began)
        whole = time.perf_counter() - began
        if _DONE not in came or _USAGE.findall(came) != [b"%d" % tokens]:
            raise RuntimeError(f"the gateway's answer has not {tokens} tokens: {came[-400:].decode(errors='replace')}")
        return Timed(first, whole, tokens)

    async def _follow(self, began: float) -> tuple[bytes, float]:
        """The last bytes of the answer, and the seconds to the second event: the first has the role alone."""
        first, events, tail = 0.0, 0, b""
        while not tail.endswith(_END):
            part = await self._reader.read(1 << 18)
            if not part:
                raise RuntimeError("the gateway has closed the connection")
            if not first:
                events += part.count(_EVENT)  # the head and the first events come in parts of their own
                first = time.perf_counter() - began if events > 1 else 0.0
            tail = (tail + part)[-4096:]
        return tail, first
