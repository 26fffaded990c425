"""A question with an answer of one token, over gRPC, for benchmarks of the time to the first token. It measures
nothing by itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from twinlens.v1 import llm_pb2, media_pb2

if TYPE_CHECKING:
    from twinlens.v1.llm_pb2_grpc import LlmServiceAsyncStub

TIMEOUT = 300.0
"""Seconds that one call may take."""


async def first_token(
    stub: LlmServiceAsyncStub, media: Sequence[media_pb2.Media], *texts: str
) -> tuple[float, llm_pb2.GenerateFinished]:
    """Asks about media, in one message, with texts behind them: seconds to the token, and what the service says of its
    answer. Raises RuntimeError where there is none."""
    parts = [*(llm_pb2.ChatPart(media=each) for each in media), *(llm_pb2.ChatPart(text=text) for text in texts)]
    request = llm_pb2.GenerateRequest(
        chat=llm_pb2.ChatInput(messages=[llm_pb2.ChatMessage(role="user", parts=parts)]),
        sampling=llm_pb2.SamplingParams(max_tokens=1, temperature=0, ignore_eos=True),
    )
    first, begun = 0.0, time.perf_counter()
    async for response in stub.Generate(request, timeout=TIMEOUT):
        if response.HasField("delta"):
            first = first or time.perf_counter() - begun
        elif response.HasField("finished"):
            return first, response.finished
    raise RuntimeError("no token came")
