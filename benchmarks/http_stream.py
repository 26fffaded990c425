"""A cheap client of the gateway: one connection, one streamed chat after the other, parsing only what is timed and
counted."""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import Any, Self

from benchmarks.sides import Timed

_DONE = b"data: [DONE]\n\n"
_USAGE = re.compile(rb'"completion_tokens":(\d+)')
_CACHED = re.compile(rb'"cached_tokens":(\d+)')
_EVENT = b"data: {"
_END = b"0\r\n\r\n"
_SECONDS = 300.0


class HttpCaller:
    """One connection, which stays open; `cached` are the prompt tokens that the prefix cache had, of all answers."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str) -> None:
        self._reader = reader
        self._writer = writer
        self._address = address
        self.cached = 0

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
            came, first, pause = await self._follow(began)
        whole = time.perf_counter() - began
        if _DONE not in came or _USAGE.findall(came) != [b"%d" % tokens]:
            raise RuntimeError(f"the gateway's answer has not {tokens} tokens: {came[-400:].decode(errors='replace')}")
        self.cached += sum(map(int, _CACHED.findall(came)))
        return Timed(first, whole, tokens, pause=pause)

    async def _follow(self, began: float) -> tuple[bytes, float, float]:
        """The last bytes of the answer, the seconds to the second event (the first has the role alone), and the longest
        between two parts from there on."""
        first, events, tail, pause, last = 0.0, 0, b"", 0.0, 0.0
        while not tail.endswith(_END):
            part = await self._reader.read(1 << 18)
            if not part:
                raise RuntimeError("the gateway has closed the connection")
            now = time.perf_counter()
            if not first:
                events += part.count(_EVENT)  # the head and the first events come in parts of their own
                first = now - began if events > 1 else 0.0
            else:
                pause = max(pause, now - last)
            tail, last = (tail + part)[-4096:], now
        return tail, first, pause
