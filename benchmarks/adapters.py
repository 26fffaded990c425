"""`python -m benchmarks.adapters`: time per token of a batch of answers, with a LoRA adapter for each, and without.

One LLM service, without an encoder, with the random checkpoint of 250 M parameters or another. Rounds take turns:
several answers at once without adapters, then each with its own adapter stored in float32, then in bfloat16. Adapters
have random numbers, for every matrix of the decoder that supports one. Every prompt is new and random; the run fails
if the prefix cache had any of it. A ratio of 1 means that adapters cost nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import torch
from safetensors.torch import save_file

from benchmarks.checkpoint import add_model_options, chosen_model, ordinary_tokens
from benchmarks.hits import check_new, no_wrong_figures, of_llm, since, told
from benchmarks.services import process
from common.checkpoints.checkpoint import Checkpoint
from llm_service.model_config.text import TextConfig
from llm_service.worker.adapters import shapes_of
from twinlens.v1 import llm_pb2
from twinlens.v1.llm_pb2_grpc import LlmServiceStub

if TYPE_CHECKING:
    from twinlens.v1.llm_pb2_grpc import LlmServiceAsyncStub

_TIMEOUT = 300.0
_PROMPT = 16


def write_adapters(checkpoint: Path, folder: Path, count: int, rank: int, dtype: torch.dtype) -> list[str]:
    """Adapters of a small effect in peft's form; their names."""
    shapes = shapes_of(TextConfig.of(Checkpoint(checkpoint).config))
    names = [f"{str(dtype).removeprefix('torch.')}-{number}" for number in range(count)]
    for name in names:
        tensors: dict[str, torch.Tensor] = {}
        for target, (outputs, inputs) in shapes.items():
            stem = f"base_model.model.model.language_model.{target}"
            tensors[f"{stem}.lora_A.weight"] = (torch.randn(rank, inputs) * inputs**-0.5).to(dtype)
            tensors[f"{stem}.lora_B.weight"] = (torch.randn(outputs, rank) * 0.1).to(dtype)
        (folder / name).mkdir()
        save_file(tensors, folder / name / "adapter_model.safetensors")
        (folder / name / "adapter_config.json").write_text(
            json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank})
        )
    return names


async def _ask(stub: LlmServiceAsyncStub, model: str, vocabulary: Sequence[int], tokens: int) -> float:
    """Seconds for each token behind the first that came."""
    draw = random.SystemRandom()
    request = llm_pb2.GenerateRequest(
        model=model,
        tokens=llm_pb2.TokensInput(ids=draw.choices(vocabulary, k=_PROMPT)),
        sampling=llm_pb2.SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True),
    )
    begun, ended, first, said = 0.0, 0.0, 0, 0
    async for response in stub.Generate(request, timeout=_TIMEOUT):
        if response.delta.token_ids:
            said += len(response.delta.token_ids)
            ended = time.perf_counter()
            begun, first = begun or ended, first or said
    return (ended - begun) / (tokens - first)


async def _round(stub: LlmServiceAsyncStub, models: Sequence[str], vocabulary: Sequence[int], tokens: int) -> float:
    """The mean of all answers, which go on together."""
    return statistics.mean(await asyncio.gather(*(_ask(stub, model, vocabulary, tokens) for model in models)))


async def _measure(
    address: str, vocabulary: Sequence[int], kinds: Mapping[str, Sequence[str]], given: argparse.Namespace
) -> None:
    """`kinds` are the names of adapters by what they are stored in."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub: LlmServiceAsyncStub = LlmServiceStub(channel)
        for name in itertools.chain(*kinds.values()):
            await stub.LoadAdapter(llm_pb2.LoadAdapterRequest(name=name, path=name), timeout=_TIMEOUT)
        sides = {"none": [""] * given.answers, **kinds}
        for models in sides.values():
            await _round(stub, models, vocabulary, 4)
        before = await of_llm(stub)
        found: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(given.runs):
            for side, models in sides.items():
                found[side].append(await _round(stub, models, vocabulary, given.tokens))
        hits = since(before, await of_llm(stub))
    check_new("adapters", hits)
    print("| adapters | least | median |\n|---|---:|---:|")
    for side, seconds in found.items():
        print(f"| {side} | {1e3 * min(seconds):.2f} ms | {1e3 * statistics.median(seconds):.2f} ms |")
    print(f"\nOf {given.answers} answers at once, rank {given.rank}, a token takes of the time without:\n")
    plain = found.pop("none")
    for kind, seconds in found.items():
        pairs = [adapted / alone for alone, adapted in zip(plain, seconds, strict=True)]
        least = min(seconds) / min(plain)
        print(f"- {kind}: {least:.3f} by the least of each, {statistics.median(pairs):.3f} by the median of pairs")
    print(f"\nFound in caches meanwhile: {told(hits)}")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adapters", description=__doc__)
    add_model_options(parser)
    parser.add_argument("--answers", type=int, default=16, help="concurrent answers, and adapters")
    parser.add_argument("--rank", type=int, default=8, help="rank of every adapter and of the slots")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of each answer")
    parser.add_argument("--runs", type=int, default=8, help="rounds of each side")
    parser.add_argument("--dtype", default="", help="the service's type; by default its own default")
    given = parser.parse_args()
    checkpoint = chosen_model(given)
    vocabulary = ordinary_tokens(Checkpoint(checkpoint))
    with tempfile.TemporaryDirectory() as folder, no_wrong_figures():
        kinds = {
            name: write_adapters(checkpoint, Path(folder), given.answers, given.rank, getattr(torch, name))
            for name in ("float32", "bfloat16")
        }
        flags = ["--model", str(checkpoint), "--lora-dir", folder, "--max-loras", str(given.answers)]
        flags += ["--max-lora-rank", str(given.rank), "--max-loaded-loras", str(2 * given.answers)]
        flags += ["--dtype", given.dtype] if given.dtype else []
        with process("llm_service", *flags) as address:
            asyncio.run(_measure(address, vocabulary, kinds, given))


if __name__ == "__main__":
    main()
