"""Texts that transformers computes over the paged kernels of our decoder, and in graphs: without a GPU, as
`test_llm_graphs` has it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from common.checkpoints.checkpoint import CheckpointError
from common.hf.small_models import made_up
from llm_service.families.sight import Sight, SpanRule
from llm_service.layers.attention.backend import AttentionKind
from llm_service.layers.attention.general_backend import AttentionRule
from llm_service.models.hf import decoder as hf_decoder
from llm_service.models.hf.attention import beyond_kernels
from llm_service.models.hf.decoder import HfDecoder
from llm_service.models.hf.text import text_alone
from llm_service.worker.caches import Caches
from llm_service.worker.capture_trial import what_waits
from llm_service.worker.capture_watch import WaitWatch
from llm_service.worker.graphs import GraphKind, decode_sizes
from testkit.hf_side import GREEDY, Served
from testkit.plain_attention import PlainTables
from tests.parity.graphed import PEOPLE, graphed
from tests.quantized import FORMATS, quantize_checkpoint
from tools.models.prompts import PROMPTS
from tools.models.reference import Reference
from tools.models.tiny import config_of_recipe, make

CPU = torch.device("cpu")
ASKED = list(PROMPTS.values())
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of transformers' processors


@pytest.fixture(scope="module")
def cohere2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with windows, and a head that scales."""
    return make("cohere2_vision", tmp_path_factory.mktemp("cohere2"))


@pytest.fixture(scope="module")
def said(cohere2: Path) -> list[list[int]]:
    """By transformers."""
    library = Reference(cohere2)
    return [library.tokens(library.inputs(parts)) for parts in ASKED]


def captured(served: Served) -> Any:
    """An engine with graphs of decode steps, whose buffers are poisoned after each replay."""
    engine, _ = graphed(served.folder, hf=served.found, finding=served.finding())
    assert isinstance(engine.decoder, HfDecoder)
    assert engine.runner.not_capturable() == ""
    return engine


def test_decode_steps_replay_and_give_the_same_tokens(cohere2: Path, said: list[list[int]]) -> None:
    served = Served.of(cohere2)
    engine = captured(served)
    graphs = engine.runner.graphs
    assert graphs.sizes == {
        GraphKind.PREFILL: [],
        GraphKind.VERIFY: [],
        GraphKind.DECODE: decode_sizes(PEOPLE),
    }
    for _ in range(2):
        before, steps = graphs.replays, engine.scheduler.counters.steps
        outcomes = engine.run([served.prompt(parts) for parts in ASKED], GREEDY)
        assert [outcome.tokens for outcome in outcomes] == said
        done = engine.scheduler.counters.steps - steps
        assert 0 < len(said[0]) - 1 <= graphs.replays - before < done, "prompts are computed eagerly, and nothing else"


@pytest.mark.parametrize(
    "kind",
    [
        "granite4_vision",  # levels of rows
        pytest.param("exaone4_5", marks=pytest.mark.soak),
        pytest.param("paddleocr_vl", marks=pytest.mark.soak),  # positions on three axes
    ],
)
def test_other_texts_do_as_well(kind: str, tmp_path: Path) -> None:
    served, library = Served.of(make(kind, tmp_path)), Reference(tmp_path)
    engine = captured(served)
    expected = [library.tokens(library.inputs(parts)) for parts in ASKED]
    assert [each.tokens for each in engine.run([served.prompt(parts) for parts in ASKED], GREEDY)] == expected
    assert engine.runner.graphs.replays > 0


def test_quantised_weights_do_as_well(cohere2: Path, tmp_path: Path) -> None:
    quantized, wide = quantize_checkpoint(cohere2, FORMATS["awq"], tmp_path, "model.language_model.")
    served, library = Served.of(quantized), Reference(wide)
    engine = captured(served)
    assert engine.run([served.prompt(ASKED[0])], GREEDY)[0].tokens == library.tokens(library.inputs(ASKED[0]))
    assert engine.runner.graphs.replays > 0


@pytest.mark.parametrize("attention", [pytest.param("triton", marks=pytest.mark.soak), "numba"])
def test_kernels_of_our_decoder_attend(attention: str, cohere2: Path, said: list[list[int]]) -> None:
    """Those for GPUs in their interpreter: prompts in chunks, packed, and answers."""
    served = Served.of(cohere2)
    engine = served.engine(by_hf=True, attention=attention, step_tokens=40)
    assert {kind.backend.name for kind in engine.runner.caches.paged.values()} == {attention}
    assert {spec.kind.sight.window for spec in engine.runner.caches.paged} == {0, 24}
    few = [1, 0] if attention == "triton" else range(len(ASKED))
    outcomes = engine.run([served.prompt(ASKED[each]) for each in few], GREEDY)
    assert [outcome.tokens for outcome in outcomes] == [said[each] for each in few]


def test_they_know_rows_that_see_each_other(tmp_path: Path) -> None:
    served, library = Served.of(make("gemma3", tmp_path)), Reference(tmp_path)
    engine = served.engine(by_hf=True, attention="numba")
    assert all(spec.kind.sight.spans is SpanRule.EVERYWHERE for spec in engine.runner.caches.paged)
    expected = [library.tokens(library.inputs(parts)) for parts in ASKED]
    assert [each.tokens for each in engine.run([served.prompt(parts) for parts in ASKED], GREEDY)] == expected


def test_a_step_that_the_host_waits_for_is_not_captured(cohere2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served.of(cohere2)
    engine = served.engine(by_hf=True, attention=PlainTables, max_running=PEOPLE)
    assert engine.runner.not_capturable() == ""
    text: Any = type(engine.decoder._text)
    forward: Callable[..., Any] = text.forward

    def looks(self: Any, *given: Any, **more: Any) -> Any:
        assert more["position_ids"].max() >= 0
        return forward(self, *given, **more)

    monkeypatch.setattr(text, "forward", looks)
    why = "transformers waits for what the device has computed (aten::_local_scalar_dense)"
    assert engine.runner.not_capturable() == why


@pytest.mark.parametrize(("kind", "waits"), [("kimi_k25", False), ("muse_glimmer", False), ("gemma3n", True)])
def test_a_step_of_a_small_model_says_whether_its_text_can_be_captured(kind: str, waits: bool) -> None:
    """Gemma 3n looks at numbers that are on the device."""
    model = made_up(config_of_recipe(kind), text_alone)
    decoder = HfDecoder(model, torch.float32, CPU, attention=PlainTables)
    caches = Caches(decoder.mixers(), 4, 16, torch.float32, CPU, attention=decoder.backend)
    assert bool(what_waits(decoder, caches)) == waits


@pytest.mark.parametrize(
    ("compute", "name"),
    [
        (lambda x: x[x > 0], "aten::index.Tensor"),
        (lambda x: x.nonzero(), "aten::nonzero"),
        (lambda x: torch.where(x > 0), "aten::nonzero"),
        (lambda x: x.index_put_((x > 0,), x.new_ones(())), "aten::index_put_"),
        (lambda x: x.unique(), "aten::_unique2"),
        (lambda x: bool(x.any()), "aten::_local_scalar_dense"),
        (lambda x: x.repeat_interleave(x.int()), "aten::repeat_interleave.Tensor"),
        (lambda x: x.masked_fill(x > 0, 1.0)[x.argsort()].cumsum(0), ""),
        (lambda x: x.to("meta"), "aten::_to_copy"),
        (lambda x: x[0].to("meta"), "aten::_to_copy"),
        (lambda x: x.new_empty(3, device="meta").copy_(x), "aten::copy_"),
        (lambda x: x.new_empty(3, device="meta")[x.long()], "aten::index.Tensor"),
        (lambda x: x.new_zeros(3, device="meta") * x.sum(), ""),  # a number, which a kernel is given
    ],
)
def test_what_a_graph_cannot_hold_is_seen(compute: Callable[[torch.Tensor], Any], name: str) -> None:
    watch = WaitWatch()
    with watch:
        compute(torch.tensor([1.0, 0.0, 2.0]))
    assert watch.waits == name


def test_what_kernels_do_not_know_is_left_to_torch_or_refused() -> None:
    sinks = torch.zeros(2)
    assert beyond_kernels(AttentionRule(AttentionKind(Sight(window=4), 0.5, softcap=30.0))) == ""
    assert beyond_kernels(AttentionRule(AttentionKind(Sight(answer_window=9)))) == ""
    beyond = Sight(chunk=8), Sight(window=4, answer_window=9)
    assert beyond_kernels(AttentionRule(sinks=sinks)) == "heads have sinks"
    assert beyond_kernels(AttentionRule(chosen=(sinks,))) == "layers choose by an index what they see"
    assert all(beyond_kernels(AttentionRule(AttentionKind(sight))) for sight in beyond)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("llama4", "layers attend within chunks"),
        ("kimi_k25", "keys are wider than values"),
        ("mistral_large4", "layers choose by an index what they see"),
        ("ernie4_5_vl_moe", "what it is told of tokens depends on where they stand in a step"),
    ],
)
def test_a_back_end_that_does_not_know_a_layer_s_rule_is_refused_by_name(
    kind: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "kimi_k25":  # as where what makes keys of latents is quantised
        monkeypatch.setattr(hf_decoder, "take_latents", lambda _: None)

    def decoder(attention: str) -> HfDecoder:
        config = config_of_recipe(kind)
        if kind == "kimi_k25":
            config.text_config.v_head_dim = 12
        return HfDecoder(made_up(config, text_alone), torch.float32, CPU, attention=attention)

    with pytest.raises(CheckpointError, match=f"--attention triton is not for this model, .*: {why}"):
        decoder("triton")
    assert decoder("auto").not_capturable() == "torch computes its attention"
