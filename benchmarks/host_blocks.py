"""`python -m benchmarks.host_blocks`: time to the first token of a conversation that returns after its KV blocks were
evicted, with `--kv-host-bytes` and without.

Two LLM services with one encoder take turns. Their KV caches hold two of the conversations, each of a new picture and
a new text. All begin one after the other, and each then asks one more new question. So the returning part is
*repeated*, except for that question, and its prefix hits are shown; at a conversation's begin there must be none. Both
services keep the rows of pictures. A CPU's KV cache is host memory too, so this shows the cost of copying compared
with computing, not a GPU's bus.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from contextlib import AsyncExitStack, ExitStack
from typing import TYPE_CHECKING

import grpc

from benchmarks.checkpoint import add_model_options, block_bytes, chosen_model
from benchmarks.first_token import first_token
from benchmarks.hits import PREFIX, check_new, no_wrong_figures, of_llm, since
from benchmarks.services import process
from benchmarks.workload import long_text, new_picture, new_text
from twinlens.v1 import media_pb2
from twinlens.v1.llm_pb2_grpc import LlmServiceStub

if TYPE_CHECKING:
    from twinlens.v1.llm_pb2_grpc import LlmServiceAsyncStub

_CONVERSATIONS = 6


async def _ask(stub: LlmServiceAsyncStub, picture: bytes, texts: list[str]) -> tuple[float, int]:
    """Seconds to the first token, and how many tokens the prompt has."""
    media = media_pb2.Media(modality=media_pb2.MODALITY_IMAGE, data=picture)
    first, finished = await first_token(stub, [media], *texts)
    return first, finished.usage.prompt_tokens


async def _measure(with_host: str, without: str, words: int) -> None:
    async with AsyncExitStack() as stack:
        addresses = {"forgotten": without, "--kv-host-bytes": with_host}
        stubs = {
            name: LlmServiceStub(await stack.enter_async_context(grpc.aio.insecure_channel(address)))
            for name, address in addresses.items()
        }
        for stub in stubs.values():  # to warm up
            await _ask(stub, new_picture(), [long_text(words)])
        before = {name: await of_llm(stub) for name, stub in stubs.items()}
        begun: dict[str, list[tuple[bytes, str]]] = {name: [] for name in stubs}
        firsts: dict[str, list[float]] = {name: [] for name in stubs}
        tokens = 0
        for _ in range(_CONVERSATIONS):
            for name, stub in stubs.items():
                conversation = new_picture(), long_text(words)
                taken, tokens = await _ask(stub, conversation[0], [conversation[1]])
                begun[name].append(conversation)
                firsts[name].append(taken)
        for name, stub in stubs.items():
            check_new("conversations that begin", since(before[name], await of_llm(stub)))
        print(f"Prompts of {tokens} tokens; {_CONVERSATIONS} conversations, of which the cache holds two.\n")
        print("| blocks that made way are | it begins | it comes back | ratio | tokens found then, each |")
        print("|---|---:|---:|---:|---:|")
        for name, stub in stubs.items():
            known = await of_llm(stub)
            back = [(await _ask(stub, picture, [text, new_text()]))[0] for picture, text in begun[name]]
            found = since(known, await of_llm(stub))[PREFIX] // _CONVERSATIONS
            begins, returns = statistics.median(firsts[name]), statistics.median(back)
            times = f"{begins * 1e3:.0f} ms | {returns * 1e3:.0f} ms | {returns / begins:.2f}"
            print(f"| {name} | {times} | {found} |", flush=True)


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_blocks", description=__doc__)
    add_model_options(parser)
    parser.add_argument("--words", type=int, default=600, help="words of a conversation's first text")
    parser.add_argument("--blocks", type=int, default=200, help="KV blocks of 16 tokens in the cache")
    given = parser.parse_args()
    folder = chosen_model(given)
    model = ("--model", str(folder))
    with no_wrong_figures(), ExitStack() as stack:
        encoder = stack.enter_context(process("encoder_service", *model))
        size = given.blocks * block_bytes(folder)
        llm = ("llm_service", *model, "--encoders", encoder, "--kv-cache-bytes", str(size))
        without = stack.enter_context(process(*llm))
        with_host = stack.enter_context(process(*llm, "--kv-host-bytes", str(8 * size)))
        asyncio.run(_measure(with_host, without, given.words))


if __name__ == "__main__":
    main()
