"""The decoder's graphs without a GPU: what a graph would do again is done again, over the same buffers.

Between two replays everything that a replay need not leave alone is filled with NaN and with block numbers that do not
exist, so that a padded token, a stale row or the tail of a block table cannot go unnoticed.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common.gpu.graphs import CaptureFailed
from llm_service.engine.sequence import Sequence
from llm_service.layers.lora.linear_adapters import AdapterKernel
from llm_service.plan import Chunk
from llm_service.request import SamplingParams
from llm_service.worker.draft_model import DraftModel
from llm_service.worker.graphs import CaptureBounds, Graph, GraphKind, decode_sizes, prefill_sizes
from testkit.checkpoints import Family
from testkit.local_engine import LocalEngine, Prompt, make_prompt
from testkit.plain_attention import PlainTables
from tests import pictures
from tests.adapters import make_adapter
from tests.eagle_checkpoint import eagle_head
from tests.mtp_checkpoint import with_mtp_layer
from tests.parity.graphed import PEOPLE, Again, graphed

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


def sizes(decodes: list[int], prefills: list[int], verifies: Iterable[int] = ()) -> dict[GraphKind, list[int]]:
    return {GraphKind.PREFILL: prefills, GraphKind.VERIFY: [*verifies], GraphKind.DECODE: decodes}


def prompts_of(folder: Path) -> list[Prompt]:
    photographs = [pictures.photograph(name).resize((120, 90)) for name in ("astronaut", "coffee")]
    return [
        make_prompt(folder, [photographs[0], "What is in the picture?"]),
        make_prompt(folder, ["Tell me about two red circles."]),
        make_prompt(folder, [photographs[1], "and", photographs[0], "differ how?"]),
        make_prompt(folder, ["Describe the video."]),
    ]


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_vl",
        *(pytest.param(each, marks=pytest.mark.soak) for each in ("qwen2_5_vl", "qwen3_vl_moe", "qwen3_5")),
    ],
)
def test_tokens_are_the_same_with_graphs_and_without(family: Family, checkpoints: Callable[..., Path]) -> None:
    folder = checkpoints(family)
    prompts = prompts_of(folder)
    plain = LocalEngine(folder, step_tokens=64, max_running=PEOPLE)
    expected = [outcome.tokens for outcome in plain.run(prompts, GREEDY)]
    engine, _ = graphed(folder)
    assert [outcome.tokens for outcome in engine.run(prompts, GREEDY)] == expected
    assert engine.runner.graphs is not None
    assert engine.runner.graphs.replays == engine.scheduler.counters.steps, "every step has a graph that fits it"


@pytest.mark.soak
def test_steps_of_a_token_each_have_graphs_where_layers_choose_by_an_index(checkpoints: Callable[..., Path]) -> None:
    folder = checkpoints("qwen4_exp")
    prompts = prompts_of(folder)[:2]
    plain = LocalEngine(folder, step_tokens=64, max_running=PEOPLE)
    expected = [outcome.tokens for outcome in plain.run(prompts, GREEDY)]
    engine, _ = graphed(folder)
    assert [outcome.tokens for outcome in engine.run(prompts, GREEDY)] == expected
    graphs, steps = engine.runner.graphs, engine.scheduler.counters.steps
    assert graphs is not None
    assert graphs.sizes == sizes(decode_sizes(PEOPLE), [])
    assert steps - 4 < graphs.replays < steps, "prompts have none"


@pytest.mark.parametrize("overlap", [False, True])
def test_states_that_are_kept_and_gone_on_from_are_the_same_with_graphs(
    checkpoints: Callable[..., Path], overlap: bool
) -> None:
    folder, short = checkpoints("qwen3_5"), SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    picture = pictures.photograph("coffee").resize((400, 300))
    prompts = [make_prompt(folder, ["Look at this. " * 12, picture, what]) for what in ("Why? " * 9, "How? " * 9)]
    expected = [LocalEngine(folder).run([prompt], short)[0].tokens for prompt in prompts]
    engine, _ = graphed(folder, tokens=512, step_tokens=512, prefix_cache=True, overlap=overlap)
    first, other, again = (engine.run([prompts[number]], short)[0] for number in (0, 1, 0))
    assert [each.tokens for each in (first, other, again)] == [*expected, expected[0]]
    assert 0 < other.cached < again.cached
    assert engine.runner.graphs is not None
    assert engine.runner.graphs.replays == engine.scheduler.counters.steps


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # attention leaves padding's rows as they are
def test_our_kernels_may_be_captured(checkpoints: Callable[..., Path]) -> None:
    folder = checkpoints("qwen3_vl")
    prompts = prompts_of(folder)[:2]
    short = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    expected = [outcome.tokens for outcome in LocalEngine(folder, step_tokens=64).run(prompts, short)]
    engine, _ = graphed(folder, "triton")
    assert [outcome.tokens for outcome in engine.run(prompts, short)] == expected


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
@pytest.mark.parametrize(
    ("family", "attention", "method"),
    [
        ("qwen3_vl", "", "half"),
        pytest.param("qwen3_vl", "triton", "model", marks=pytest.mark.soak),
        ("qwen3_5", "", "half"),
        ("qwen3_5", "", "mtp"),
        ("qwen3_vl", "", "eagle"),
        pytest.param("qwen3_5_moe", "triton", "half", marks=pytest.mark.soak),
    ],
)
def test_steps_that_verify_drafts_have_graphs_of_their_own(
    family: Family, attention: str, method: str, checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    folder, many = checkpoints(family), not attention
    if method == "mtp":
        folder = with_mtp_layer(folder, tmp_path)
    prompts = prompts_of(folder)[: 4 if many else 2]
    wanted = SamplingParams(max_tokens=24 if many else 6, temperature=0.0, ignore_eos=True)
    expected = [outcome.tokens for outcome in LocalEngine(folder, step_tokens=64).run(prompts, wanted)]
    said = {array("i", prompt.layout.ids).tobytes(): each for prompt, each in zip(prompts, expected, strict=True)}

    def half_right(sequence: Sequence, count: int) -> array[int]:
        answer, begin = said[sequence.tokens[: sequence.prompt_tokens].tobytes()], len(sequence.output)
        return array("i", [token + (begin % 5 == place == 1) for place, token in enumerate(answer[begin:][:count])])

    given: dict[str, dict[str, Any]] = {
        "half": {"draft": half_right},
        "model": {"draft_model": folder},
        "mtp": {"mtp": True},
        "eagle": {"eagle": eagle_head(folder, tmp_path / "head")} if method == "eagle" else {},
    }
    engine, _ = graphed(folder, attention, drafts=3, **given[method])
    graphs = engine.runner.graphs
    assert graphs is not None
    assert graphs.sizes == sizes(decode_sizes(PEOPLE), prefill_sizes(64), [2, 4, 8, 16])
    found: list[GraphKind] = []
    find = graphs.find

    def watched(*given: Any, **named: Any) -> Graph | None:
        graph = find(*given, **named)
        found.extend([] if graph is None else [graph.kind])
        return graph

    graphs.find = watched  # type: ignore[method-assign]
    proposed = watch_proposer(engine)
    assert [outcome.tokens for outcome in engine.run(prompts, wanted)] == expected
    counters = engine.scheduler.counters
    assert 0 < counters.accepted_draft_tokens < counters.draft_tokens or method != "half"
    assert graphs.replays == counters.steps == len(found)
    assert GraphKind.VERIFY in found
    if isinstance(proposer := engine.runner.proposer, DraftModel):
        assert proposer.graphs is not None
        assert proposer.graphs.replays >= counters.draft_tokens / 3
        eager = LocalEngine(
            folder, step_tokens=64, max_running=PEOPLE, blocks=256, speculative_tokens=3, **given[method]
        )
        without = watch_proposer(eager)
        eager.run(prompts, wanted)
        assert proposed == without, "graphs propose what is proposed without"
        assert sum(map(len, proposed)) >= counters.draft_tokens > 0


def watch_proposer(engine: LocalEngine) -> list[list[int]]:
    """What its proposer says for each chunk, from now on."""
    found: list[list[int]] = []
    if (proposer := engine.runner.proposer) is not None:
        propose = proposer.propose

        def watched(*given: Any) -> Callable[[], list[list[int]]]:
            drafts = propose(*given)()
            found.extend(drafts)
            return lambda: drafts

        vars(proposer)["propose"] = watched
    return found


@pytest.mark.parametrize("family", ["qwen3_vl", pytest.param("qwen3_5_moe", marks=pytest.mark.soak)])
def test_steps_with_adapters_have_graphs_of_their_own(family: Family, checkpoints: Callable[..., Path]) -> None:
    folder, short = checkpoints(family), SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    folders = [make_adapter(folder, folder.parent / f"{folder.name}-graphs" / str(seed), seed=seed) for seed in (1, 2)]
    prompts, numbers = prompts_of(folder)[1:], [1, 0, 2]
    given: dict[str, Any] = {"adapters": folders, "max_loras": 2}
    eager = LocalEngine(folder, step_tokens=64, **given)
    mixed, plain = ([each.tokens for each in eager.run(prompts, short, these)] for these in (numbers, [0] * 3))
    assert mixed != plain
    engine, capture = graphed(folder, adapter_kernel=AdapterKernel.GPU, **given)
    graphs = engine.runner.graphs
    assert graphs is not None
    assert capture.captured == 2 * sum(map(len, graphs.sizes.values())), (
        "of each size one with adapters and one without"
    )
    for these in (numbers, [0] * 3, numbers):
        said = [outcome.tokens for outcome in engine.run(prompts, short, these)]
        assert said == (mixed if these is numbers else plain)
    assert graphs.replays == engine.scheduler.counters.steps


def test_what_no_graph_fits_runs_eagerly_with_the_same_tokens(checkpoints: Callable[..., Path]) -> None:
    folder = checkpoints("qwen3_vl")
    prompts = prompts_of(folder)
    expected = [outcome.tokens for outcome in LocalEngine(folder).run(prompts, GREEDY)]
    engine, _ = graphed(folder, step_tokens=4096)
    assert [outcome.tokens for outcome in engine.run(prompts, GREEDY)] == expected
    assert engine.runner.graphs is not None
    assert 0 < engine.runner.graphs.replays < engine.scheduler.counters.steps


def test_graphs_are_left_out_where_memory_is_used_up_on_some_rank(checkpoints: Callable[..., Path]) -> None:
    folder = checkpoints("qwen3_vl")
    everything = graphed(folder)[0].runner.graphs
    assert everything is not None
    assert everything.sizes == sizes(decode_sizes(PEOPLE), prefill_sizes(64))
    engine, capture = graphed(folder, room=2)
    assert engine.runner.graphs is not None
    assert capture.most == 3, "one that is left out is gone before the next is captured"
    assert engine.runner.graphs.sizes == sizes([], [32, 64])

    answers = iter([1, 0, 1, 1, 1, 1, 1])  # another rank has no room for the second one

    engine.runner.capture(
        CaptureBounds(PEOPLE, 64, 4096, 3), Again(), max_bytes=0, agree=lambda mine: mine * next(answers)
    )
    assert engine.runner.graphs.sizes == sizes(decode_sizes(PEOPLE), [16, 64])


class Refusing(Again):
    """Captures a number of graphs, and then no more."""

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        if self.captured == 2:
            raise CaptureFailed("operation not permitted when stream is capturing")
        return super().__call__(run)


def test_steps_that_cannot_be_captured_run_eagerly(checkpoints: Callable[..., Path]) -> None:
    folder = checkpoints("qwen3_vl")
    prompts = [make_prompt(folder, [said]) for said in ("Tell me about two red circles.", "Hello")]
    expected = [outcome.tokens for outcome in LocalEngine(folder).run(prompts, GREEDY)]
    engine = LocalEngine(folder, max_running=PEOPLE, blocks=256, attention=PlainTables)
    bounds, said = CaptureBounds(PEOPLE, 64, 4096, 3), list[int]()

    def agree(mine: int) -> int:
        said.append(mine)
        return mine

    engine.runner.capture(bounds, Refusing(), max_bytes=0, agree=agree)
    assert engine.runner.graphs is not None
    assert engine.runner.graphs.sizes == sizes([], [32, 64])
    assert said == [1, 1, -1, -1], "all ranks are told, and of a kind that fails no second one is tried"
    assert [outcome.tokens for outcome in engine.run(prompts, GREEDY)] == expected


def test_replays_have_room_for_the_largest_graph_and_no_more(checkpoints: Callable[..., Path]) -> None:
    engine, capture = LocalEngine(checkpoints("qwen3_vl"), max_running=PEOPLE, attention=PlainTables), Refusing()
    capture.captured = 2
    for tokens, rows in ((8192, 1024), (20, 16), (4, PEOPLE)):
        bounds = CaptureBounds(PEOPLE, tokens, 4096, 3)
        engine.runner.capture(bounds, capture, max_bytes=0, agree=lambda number: number)
        assert engine.runner.graphs is not None
        buffers = engine.runner.graphs._buffers
        assert [len(each) for each in (buffers.hidden, buffers.out, buffers.deep[0], buffers.token_ids)] == [rows] * 4


def test_what_another_rank_cannot_capture_is_left_out_here(checkpoints: Callable[..., Path]) -> None:
    engine = LocalEngine(checkpoints("qwen3_vl"), max_running=PEOPLE, blocks=256, attention=PlainTables)
    answers = iter([1, -1, 1, 1, 1, 1])
    bounds = CaptureBounds(PEOPLE, 64, 4096, 3)
    engine.runner.capture(bounds, Again(), max_bytes=0, agree=lambda mine: min(mine, next(answers)))
    assert engine.runner.graphs is not None
    assert engine.runner.graphs.sizes == sizes(decode_sizes(PEOPLE), [64])


class Pool(Again):
    """Memory as torch's pools have it: as much as the largest graph needs, here a byte for each token; it stays until
    the last graph is gone."""

    def __init__(self) -> None:
        super().__init__()
        self._size = 0

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        self._size = max(self.held, _tokens(run))
        return super().__call__(run)

    @property
    def held(self) -> int:
        return self._size if self._alive else 0


def _tokens(run: Callable[[], None]) -> int:
    """Of the batch that is computed, as plain attention makes room for its results."""
    seen: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.new_full.default:
                seen.append(len(out))
            return out

    with Watch():
        run()
    return max(seen)


def test_one_graph_that_needs_too_much_takes_no_room_from_smaller_ones(checkpoints: Callable[..., Path]) -> None:
    engine = LocalEngine(checkpoints("qwen3_vl"), max_running=PEOPLE, blocks=256, attention=PlainTables)
    engine.runner.capture(CaptureBounds(PEOPLE, 64, 4096, 3), Pool(), max_bytes=40, agree=lambda number: number)
    assert engine.runner.graphs is not None
    assert engine.runner.graphs.sizes == sizes(decode_sizes(PEOPLE), [16, 32])


def test_a_batch_is_padded_to_the_next_size(checkpoints: Callable[..., Path]) -> None:
    graphs = graphed(checkpoints("qwen3_vl"))[0].runner.graphs
    assert graphs is not None

    def size(chunks: list[Chunk], *, deep: bool = False) -> int | None:
        found = graphs.find(chunks, deep=deep)
        return found and found.tokens

    three = [Chunk(4, 1, n) for n in range(3)]
    assert size(three) == 4
    assert size(three, deep=True) == 16, "a decode graph has no place for deepstack rows"
    assert size([*three, Chunk(0, 20, 3)]) == 32
    assert size([Chunk(0, 65, 0)]) is None
    assert size([Chunk(4, 1, n) for n in range(PEOPLE + 1)]) is None


def test_a_step_with_drafts_takes_the_graph_for_it_that_it_fits(checkpoints: Callable[..., Path]) -> None:
    graphs = graphed(checkpoints("qwen3_vl"), drafts=3)[0].runner.graphs
    assert graphs is not None

    def chosen(counts: list[int], *, deep: bool = False) -> tuple[GraphKind, int] | None:
        found = graphs.find([Chunk(20, count, row) for row, count in enumerate(counts)], deep=deep)
        return found and (found.kind, found.tokens)

    assert chosen([1, 4, 1]) == (GraphKind.VERIFY, 8)
    assert chosen([4] * 4) == (GraphKind.VERIFY, 16)
    assert chosen([1, 1, 1]) == (GraphKind.DECODE, 4)
    assert chosen([1, 5]) == (GraphKind.PREFILL, 16), "more than a token and its drafts"
    assert chosen([4] * 5) == (GraphKind.PREFILL, 32), "more tokens than a step with drafts has"
    assert chosen([1, 4], deep=True) == (GraphKind.PREFILL, 16)
