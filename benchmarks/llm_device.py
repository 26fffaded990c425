"""`python -m benchmarks.llm_device`: the decoder of Qwen3-VL-8B with random weights on a GPU: decoding and prefill.

A step is all that a rank does with a plan, from token ids to sampled tokens. *Least* is the time, by the data sheet,
to read the weights and all sequences' keys and values once, or to do the arithmetic. Weights are made on the device,
so no checkpoint is needed. Variants take turns; if no graph fits, as above 1024 tokens, a step of that variant runs
eagerly too. *Replay* is the graph alone, without a step's work before and after it. In *mixed lengths* one sequence
has full length, and the others are 8 to 64 times shorter; the *next turn* is a chunk of few tokens after a context. A
step is *repeated* over the same tokens and the same cache of random numbers: nothing below the services caches tokens,
so there are no hits to count. The data sheet is the peer.
"""

from __future__ import annotations

import argparse
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
import torch

from benchmarks.device import Machine, add_options, head, line, machine, ms, timed
from benchmarks.quantized import BYTES, FORMS
from benchmarks.shapes import EXPERTS, MODEL, TINY, cache_bytes, step_operations, weight_bytes
from common.shm.arena import SharedBuffer
from llm_service.layers.attention.backend import PagedChunk
from llm_service.layers.linear.layout import quantized
from llm_service.layers.linear.parallel import PackedLinear
from llm_service.layers.linear.quantized_weight import QuantizedWeight
from llm_service.layers.moe.experts import Experts
from llm_service.layers.tensor_parallel import ALONE
from llm_service.model_config.text import TextConfig
from llm_service.models.decoder import Decoder
from llm_service.plan import Chunk, Draw, StepPlan
from llm_service.worker.caches import Caches
from llm_service.worker.dummy_plans import appended
from llm_service.worker.graphs import CaptureBounds
from llm_service.worker.model_runner import ModelRunner
from llm_service.worker.row_arena import RowArena

_LEVELS = 4
_GRAPH_BYTES = 8 << 30
_REST_BYTES = 6 << 30
"""Of a GPU's memory, for graphs and for what a step computes with."""
_NEXT_TURN = 20
_FEW = 5

Times = dict[str, float]
"""Seconds of a step, by the way."""
Step = Callable[[StepPlan], object]

_REPLAY = "replay"


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of step: chunks of (context, count) tokens, each of a sequence of its own."""

    name: str
    chunks: tuple[tuple[int, int], ...]

    @property
    def tokens(self) -> int:
        """That are computed."""
        return sum(count for _, count in self.chunks)

    @property
    def context(self) -> int:
        """Of the longest sequence, with what is computed."""
        return max(map(sum, self.chunks))

    def blocks(self, size: int) -> int:
        """Of `size` tokens, that its sequences fill."""
        return sum(-(-sum(chunk) // size) for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class Settings:
    """How the decoder is computed: as the service's options say."""

    attention: str = "auto"
    block_size: int = 16
    weights: str = ""


def cases(sequences: Sequence[int], contexts: Sequence[int], tokens: Sequence[int]) -> list[Case]:
    """All kinds, each number of sequences at each context; the longest context is that of the last three kinds."""
    most, longest = max(sequences), max(contexts)
    shorter = [(max(1, longest // 64 * (1 + n % 8)), 1) for n in range(most - 1)]
    return [
        *(Case("decode", ((context, 1),) * many) for context in contexts for many in sequences),
        Case("mixed lengths", ((longest, 1), *shorter)),
        *(Case("prefill", ((0, many),)) for many in tokens),
        Case("next turn", ((longest, _NEXT_TURN),)),
    ]


def batch(chunks: Sequence[tuple[int, int]], block_size: int = 16) -> list[PagedChunk]:
    """Of chunks (context, count). Blocks alternate, as they do when sequences have grown side by side."""
    needed = [-(-sum(chunk) // block_size) for chunk in chunks]
    tables: list[list[int]] = [[] for _ in chunks]
    number = 0
    for depth in range(max(needed)):
        for table, need in zip(tables, needed, strict=True):
            if depth < need:
                table.append(number)
                number += 1
    return [PagedChunk(*chunk, table) for chunk, table in zip(chunks, tables, strict=True)]


def step(chunks: Sequence[tuple[int, int]], block_size: int = 16) -> StepPlan:
    """Draws a token behind each chunk, whose tables come with it."""
    places = array("i", [context + n for context, count in chunks for n in range(count)])
    ends, draws = 0, []
    for _, count in chunks:
        ends += count
        draws.append(Draw(at=ends - 1))
    made = [Chunk(context, count, row) for row, (context, count) in enumerate(chunks)]
    given = [appended(row, each.blocks) for row, each in enumerate(batch(chunks, block_size))]
    return StepPlan(array("i", [5] * ends).tobytes(), (places * 3).tobytes(), made, [], draws, appended=given)


def _shorten(part: PackedLinear | Experts, form: Callable[[torch.Tensor], QuantizedWeight]) -> None:
    """Has a layer compute with weights in 8 or 4 bits; the head's inputs stay as they are."""
    if isinstance(part, PackedLinear):
        made = form(part.weight.detach())
        rounds = made.rounds_inputs and part._rounds_inputs
        part._replace_weight(quantized([replace(made, rounds_inputs=rounds)]))
    elif part.gate_up_proj.device.type == "cuda":
        part._stay_short(*([[form(each)] for each in every] for every in part._weights()))
    else:
        pairs = zip(*part._weights(), strict=True)
        part._replace_weights([(quantized([form(one)]), quantized([form(other)])) for one, other in pairs])


def make_runner(config: TextConfig, blocks: int, here: Machine, settings: Settings) -> ModelRunner:
    """A rank with weights whose sums stay around 1, and a cache full of noise."""
    decoder = Decoder(config, ALONE, here.dtype, here.device)
    for parameter in decoder.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, parameter.shape[-1] ** -0.5)
        else:
            parameter.fill_(1.0)
    for part in decoder.modules():
        if settings.weights and isinstance(part, PackedLinear | Experts):
            _shorten(part, FORMS[settings.weights])
    decoder.finalize()
    made = decoder.mixers(), blocks, settings.block_size, here.dtype, here.device
    caches = Caches(*made, attention=settings.attention)
    arena = RowArena(SharedBuffer.create("bench", 1 << 16).view, _LEVELS, config.hidden_size, here.dtype)
    runner = ModelRunner(decoder.eval(), arena, caches)
    for kind in caches.paged.values():
        kind.cache.normal_()
    runner.warm_up()
    return runner


def measure(
    config: TextConfig, here: Machine, wanted: Sequence[Case], settings: Settings, *, compiled: bool = False
) -> Iterator[tuple[Case, Times]]:
    """Times every step a few times eagerly, before anything is captured, and then in every way; where layers are
    `compiled`, all of them once more so. Cases whose keys and values do not fit the device are left out, by name."""
    room = _room(config, here, settings)
    fitting = [case for case in wanted if cache_bytes(config, here.dtype.itemsize, case.chunks) <= room]
    for case in wanted:
        if case not in fitting:
            print(f"left out, for lack of memory: {case.name}, {len(case.chunks)} × {case.context}")
    blocks = max(case.blocks(settings.block_size) for case in fitting)
    runner = make_runner(config, blocks, here, settings)
    decodes = [case for case in fitting if case.tokens == len(case.chunks)]
    bounds = CaptureBounds(
        max(len(case.chunks) for case in decodes),
        max(case.tokens for case in fitting),
        max(case.context for case in fitting),
        _LEVELS,
    )
    for name in ("", ", compiled")[: 1 + compiled]:
        if name:
            assert isinstance(runner._decoder, Decoder)
            runner._decoder.compile_layers()
        else:
            for case in fitting:
                yield case, _times(runner, {"eager": runner.run}, case, settings, min(_FEW, here.runs), here)
        ways = _ways(runner, here, bounds)
        for case in fitting:
            found = _times(runner, ways, case, settings, here.runs, here)
            yield case, {f"{way}{name}": whole for way, whole in found.items()}


def _times(
    runner: ModelRunner, ways: Mapping[str, Step], case: Case, settings: Settings, runs: int, here: Machine
) -> Times:
    """Of one case, in every way."""
    plan = step(case.chunks, settings.block_size)
    runner.run(plan)
    plan = msgspec.structs.replace(plan, appended=[])  # what runs on has its tables
    passes: dict[str, Callable[[], object]] = {way: partial(run, plan) for way, run in ways.items()}
    return {way: whole for way, (whole, _) in timed(passes, runs, here.device).items()}


def _room(config: TextConfig, here: Machine, settings: Settings) -> float:
    """Bytes for keys and values."""
    if here.device.type != "cuda":
        return float("inf")
    weights = weight_bytes(config, BYTES.get(settings.weights, here.dtype.itemsize), tokens=1 << 20)
    embeddings = config.vocab_size * config.hidden_size * here.dtype.itemsize
    return torch.cuda.mem_get_info(here.device)[0] - weights - embeddings - _GRAPH_BYTES - _REST_BYTES


def _ways(runner: ModelRunner, here: Machine, bounds: CaptureBounds) -> dict[str, Step]:
    """What there is to compare, by name."""
    if here.capture is None or runner.not_capturable():
        return {"eager": runner.run}
    runner.capture(bounds, here.capture(), max_bytes=_GRAPH_BYTES, agree=lambda number: number)
    captured = runner.graphs
    assert captured is not None

    def run(plan: StepPlan, *, graphs: bool) -> object:
        runner.graphs = captured if graphs else None
        return runner.run(plan)

    @torch.inference_mode()
    def replay(plan: StepPlan) -> None:
        """Over the metadata that the step before has filled."""
        if (graph := captured.find(plan.chunks, deep=False)) is not None:
            graph.replay()

    return {
        "eager": lambda plan: run(plan, graphs=False),
        "graph": lambda plan: run(plan, graphs=True),
        _REPLAY: replay,
    }


def rows(
    config: TextConfig, here: Machine, wanted: Sequence[Case], settings: Settings, *, compiled: bool = False
) -> Iterator[str]:
    """The table, row by row."""
    names: list[str] = []
    element = here.dtype.itemsize
    for case, times in measure(config, here, wanted, settings, compiled=compiled):
        if list(times) != names:
            names = list(times)
            yield "\n" + head(
                ["step", "sequences", "context", "tokens", "least", *names, "fastest ÷ least", "tokens/s"]
            )
        read = weight_bytes(config, BYTES.get(settings.weights, element), case.tokens)
        read += cache_bytes(config, element, case.chunks)
        least = max(read / here.peaks.bandwidth, step_operations(config, case.chunks) / here.peaks.operations)
        best = min(seconds for name, seconds in times.items() if not name.startswith(_REPLAY))
        here.keep(
            table="llm_device",
            step=case.name,
            sequences=len(case.chunks),
            context=case.context,
            tokens=case.tokens,
            experts=config.experts,
            layers=config.layers,
            attention=settings.attention,
            block_size=settings.block_size,
            weights=settings.weights,
            least=least,
            seconds=times,
        )
        told = [case.name, len(case.chunks), case.context, case.tokens, *map(ms, (least, *times.values()))]
        yield line([*told, f"{best / least:.2f}", f"{case.tokens / best:.0f}"])


def config_of(layers: int, *, experts: bool, tiny: bool) -> TextConfig:
    """The shape that was asked for."""
    text: dict[str, Any] = {**MODEL["text_config"], **(EXPERTS if experts else {})}
    text |= TINY if tiny else {}
    if experts and tiny:
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    text["num_hidden_layers"] = min(layers, text["num_hidden_layers"])
    return TextConfig.of({**MODEL, "text_config": text})


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.llm_device", description=__doc__)
    add_options(parser, 20)
    parser.add_argument(
        "--sequences", type=int, nargs="+", default=(1, 4, 16, 64), help="numbers of decoding sequences"
    )
    parser.add_argument("--context", type=int, nargs="+", default=(1024,), help="tokens in the cache of each sequence")
    parser.add_argument("--tokens", type=int, nargs="+", default=(512, 1024, 2048, 8192), help="tokens of a prefill")
    parser.add_argument(
        "--layers", type=int, default=48, help="fewer layers, for a GPU with less memory, or longer contexts"
    )
    parser.add_argument("--experts", action="store_true", help="the mixture of experts of Qwen3-VL-30B-A3B instead")
    parser.add_argument(
        "--weights", choices=tuple(FORMS), default="", help="8-bit or 4-bit weights; w8a8, fp8: inputs too"
    )
    parser.add_argument("--attention", default="auto", help="the service's option")
    parser.add_argument("--block-size", type=int, default=16, help="the service's option")
    parser.add_argument(
        "--compile", action="store_true", help="also with layers compiled by torch, which takes minutes"
    )
    given = parser.parse_args()
    here = machine(parser, given)
    config = config_of(1 if given.tiny else given.layers, experts=given.experts, tiny=given.tiny)
    asked = ((1, 2), (20,), (16,)) if given.tiny else (given.sequences, given.context, given.tokens)
    attention = given.attention if here.device.type == "cuda" else "triton"  # which the interpreter can capture
    settings = Settings(attention, given.block_size, given.weights)
    for row in rows(config, here, cases(*asked), settings, compiled=given.compile):
        print(row, flush=True)


if __name__ == "__main__":
    main()
