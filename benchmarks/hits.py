"""Cache hits during a measurement, which show whether its content was new.

Counters are totals since a service's start; the difference around a measurement is shown.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from twinlens.v1 import encoder_pb2, llm_pb2

if TYPE_CHECKING:
    from twinlens.v1.encoder_pb2_grpc import EncoderServiceAsyncStub
    from twinlens.v1.llm_pb2_grpc import LlmServiceAsyncStub

Hits = dict[str, int]
"""How often, or for how many tokens, each cache of an engine had what was asked for, by the cache's name."""

PREFIX, ROWS, HEADERS, STORE = "prefix tokens", "items with rows", "items with headers", "items in the store"


class NotNewError(Exception):
    """A cache had what should have been new to it, so the figures are not what their names say."""


@contextmanager
def no_wrong_figures() -> Iterator[None]:
    """Ends the program where a cache had what should be new."""
    try:
        yield
    except NotNewError as error:
        sys.exit(f"No figures, since they would be wrong. {error}")


def since(before: Mapping[str, int], now: Mapping[str, int]) -> Hits:
    """What was added."""
    return {name: count - before.get(name, 0) for name, count in now.items()}


def added(several: Iterable[Mapping[str, int]]) -> Hits:
    """The sums, by name."""
    total: Hits = {}
    for each in several:
        for name, count in each.items():
            total[name] = total.get(name, 0) + count
    return total


def told(hits: Mapping[str, int]) -> str:
    """In a few words.

    >>> told({"prefix tokens": 32, "rows": 0}), told({"prefix tokens": 0, "rows": 0}), told({})
    ('32 prefix tokens', 'nothing', 'has no cache')
    """
    if not hits:
        return "has no cache"
    return ", ".join(f"{count} {name}" for name, count in hits.items() if count) or "nothing"


def check_new(what: str, hits: Mapping[str, int]) -> None:
    """Raises NotNewError where a cache had anything."""
    if any(hits.values()):
        raise NotNewError(f"{what}: content that should be new was in caches: {told(hits)}")


async def of_services(llm: LlmServiceAsyncStub, *encoders: EncoderServiceAsyncStub) -> Hits:
    """Of a whole deployment."""
    return {**await of_llm(llm), **await of_encoders(*encoders)}


async def of_encoders(*stubs: EncoderServiceAsyncStub) -> Hits:
    """Items that encoders did not have to compute, wherever their rows were."""
    loads = await asyncio.gather(*(stub.GetLoad(encoder_pb2.EncoderServiceGetLoadRequest()) for stub in stubs))
    return {STORE: sum(load.store_hits for load in loads)}


async def of_llm(stub: LlmServiceAsyncStub) -> Hits:
    """Prompt tokens whose keys and values were there, items whose rows were, and items whose headers were."""
    load = await stub.GetLoad(llm_pb2.LlmServiceGetLoadRequest())
    return {PREFIX: load.prefix_hit_tokens, ROWS: load.row_hits, HEADERS: load.headers_known}


def of_vllm(metrics: str) -> Hits:
    """vLLM's counters in its text for Prometheus; empty where it has none of them.

    >>> of_vllm('vllm:prefix_cache_hits_total{engine="0"} 48.0\\nvllm:mm_cache_hits_total{engine="0"} 1.0\\n')
    {'prefix tokens': 48, 'mm items': 1}
    """
    named = {"vllm:prefix_cache_hits_total": PREFIX, "vllm:mm_cache_hits_total": "mm items"}
    found: Hits = {}
    for line in metrics.splitlines():
        name, value = line.partition("{")[0].partition(" ")[0], line.rpartition(" ")[2]
        if name in named:
            found[named[name]] = found.get(named[name], 0) + int(float(value))
    return found
