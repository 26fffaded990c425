"""`python -m benchmarks.speculation`: a token's time with and without drafts, by how much an answer repeats its
prompt.

Two LLM services with one checkpoint, one of them with `--speculative-tokens`, take turns, without an encoder. The
weights are the random ones of 250 M parameters, except those that decide the next token: attention and MLP are
computed but add nothing, and each token's most likely successor is fixed by one long cycle through the vocabulary. So
a prompt can contain the answer. *Copied*: all of the answer, as half of the prompt; *half*: its first half; *new*:
nothing; *misled*: three tokens of it at a time, followed by others. Every prompt is new; the run fails if a prefix
cache had any of it. The service without drafts is the baseline, and both services' tokens must be equal.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from benchmarks.checkpoint import add_model_options, chosen_model, ordinary_tokens
from benchmarks.hits import added, check_new, no_wrong_figures, of_llm, since, told
from benchmarks.services import process
from common.checkpoints.checkpoint import Checkpoint
from llm_service.layers.cpu.selection import wide_vectors
from twinlens.v1 import llm_pb2
from twinlens.v1.llm_pb2_grpc import LlmServiceStub

if TYPE_CHECKING:
    from twinlens.v1.llm_pb2_grpc import LlmServiceAsyncStub

_TIMEOUT = 300.0
_ADDS = ("self_attn.o_proj.weight", "linear_attn.out_proj.weight", "mlp.down_proj.weight")
"""What a layer adds is a product with these."""

KINDS = ("copied", "half", "new", "misled")


@dataclass(slots=True)
class Timed:
    """Answers of one kind by one service: seconds for each token behind the first, drafts, and how many were right."""

    per_token: list[float] = field(default_factory=list)
    drafts: int = 0
    accepted: int = 0


class Round:
    """All these tokens in one order, which begins again behind the last."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._order = list(tokens)
        random.Random(0).shuffle(self._order)

    def successors(self) -> torch.Tensor:
        """int64 [2, m]: tokens, and what comes behind each."""
        return torch.tensor([self._order, [*self._order[1:], self._order[0]]])

    def piece(self, count: int) -> list[int]:
        """So many tokens from a place that nobody knows."""
        at = random.SystemRandom().randrange(len(self._order) - count)
        return self._order[at : at + count]


def write_successors(source: Path, folder: Path, order: Round) -> None:
    """Makes the checkpoint whose next token is the successor of another one, in a folder that is there."""
    shutil.copytree(source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("complete", "*.safetensors"))
    weights = load_file(source / "model.safetensors")
    embedding = weights["model.language_model.embed_tokens.weight"]
    for name, weight in weights.items():
        if name.startswith("model.language_model.layers.") and name.endswith(_ADDS):
            weight.zero_()
    weights["model.language_model.norm.weight"].fill_(1)
    tokens, following = order.successors()
    head = torch.zeros_like(embedding)
    head[following] = functional.normalize(embedding[tokens].float()).to(head.dtype)
    weights["lm_head.weight"] = head
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def prompt(kind: str, order: Round, tokens: int) -> tuple[list[int], list[int]]:
    """A prompt of 2 · `tokens` tokens, and what it makes the model say."""
    whole = order.piece(tokens + 3)
    begin, answer = whole[:3], whole[3:]
    match kind:
        case "copied":
            before = [*begin, *answer]
        case "half":
            before = [*begin, *answer[: tokens // 2]]
        case "misled":
            wrong = order.piece(tokens)
            triples = [[*whole[n : n + 3], other] for n, other in enumerate(wrong)]
            before = [token for triple in triples for token in triple]
        case _:
            before = []
    filler = order.piece(max(0, 2 * tokens - len(before) - len(begin)))
    return [*filler, *before, *begin], answer


async def _ask(stub: LlmServiceAsyncStub, ids: Sequence[int], tokens: int, into: Timed) -> list[int]:
    request = llm_pb2.GenerateRequest(
        tokens=llm_pb2.TokensInput(ids=ids),
        sampling=llm_pb2.SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True),
    )
    said: list[int] = []
    begun, ended, first = 0.0, 0.0, 0
    async for response in stub.Generate(request, timeout=_TIMEOUT):
        if response.delta.token_ids:
            said.extend(response.delta.token_ids)
            now = time.perf_counter()
            begun, first = begun or now, first or len(said)
            ended = now
        if response.HasField("finished"):
            into.drafts += response.finished.usage.draft_tokens
            into.accepted += response.finished.usage.accepted_draft_tokens
    into.per_token.append((ended - begun) / (tokens - first))
    return said


async def _measure(addresses: Sequence[str], order: Round, given: argparse.Namespace) -> dict[str, list[Timed]]:
    """By kind: without drafts, and with them."""
    found = {kind: [Timed(), Timed()] for kind in KINDS}
    channels = [grpc.aio.insecure_channel(address) for address in addresses]
    try:
        stubs = [LlmServiceStub(channel) for channel in channels]
        for stub in stubs:
            await _ask(stub, prompt("new", order, given.tokens)[0], given.tokens, Timed())
        before = added([await of_llm(stub) for stub in stubs])
        for number in range(given.runs):
            for kind in KINDS:
                ids, answer = prompt(kind, order, given.tokens)
                for way in (0, 1) if number % 2 == 0 else (1, 0):
                    said = await _ask(stubs[way], ids, given.tokens, found[kind][way])
                    if said != answer:
                        raise RuntimeError(f"a {kind} answer is not what the weights say")
        hits = since(before, added([await of_llm(stub) for stub in stubs]))
    finally:
        await asyncio.gather(*(channel.close() for channel in channels))
    check_new("speculation", hits)
    print(f"Found in caches meanwhile: {told(hits)}\n")
    return found


def _print(found: dict[str, list[Timed]]) -> None:
    print("| the answer is | a token without drafts | with them | ratio of each pair: median | drafts | right |")
    print("|---|---:|---:|---:|---:|---:|")
    for kind, (without, drafted) in found.items():
        ratio = statistics.median(new / old for old, new in zip(without.per_token, drafted.per_token, strict=True))
        one, other = (1e3 * statistics.median(each.per_token) for each in (without, drafted))
        print(f"| {kind} | {one:.2f} ms | {other:.2f} ms | {ratio:.2f} | {drafted.drafts} | {drafted.accepted} |")


def main() -> None:
    """Measures and prints a table of medians."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speculation", description=__doc__)
    add_model_options(parser)
    drafts = 15 if wide_vectors() else 11  # as docs/CONFIGURATION.md recommends
    parser.add_argument("--speculative-tokens", type=int, default=drafts, help="drafts of the service with drafts")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--runs", type=int, default=6, help="new prompts of each kind; the median is shown")
    given = parser.parse_args()
    source = chosen_model(given)
    order = Round(ordinary_tokens(Checkpoint(source)))
    with no_wrong_figures(), ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="successors-"))
        write_successors(source, Path(folder), order)
        addresses = [
            stack.enter_context(
                process("llm_service", "--model", folder, "--encoders", "127.0.0.1:9", f"--speculative-tokens={n}")
            )
            for n in (0, given.speculative_tokens)
        ]
        _print(asyncio.run(_measure(addresses, order, given)))


if __name__ == "__main__":
    main()
