"""Texts whose layers choose by an index what latents they see, by our decoder, with all that is for models of ours:
what one kind alone has is in a file of its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from llm_service.layers.cpu import selection
from llm_service.layers.tensor_parallel import ALONE, TensorGroup
from llm_service.models.decoder import Decoder
from llm_service.models.loader import load_decoder
from llm_service.worker.cache_dtype import check_small_cache
from llm_service.worker.weights import describe as weights_of
from testkit.hf_side import GREEDY, Served, foreseen
from tests.parity.cases import drawn_logits
from tests.parity.graphed import graphed
from tests.parity.thread_ranks import on_ranks
from tests.quantized import FORMATS, quantize_checkpoint
from tools.models.prompts import PROMPTS
from tools.models.reference import TOKENS, Reference
from tools.models.tiny import make

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of transformers' processors
ASKED = [PROMPTS["text"], PROMPTS["one picture"]]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of model, how names of its layers' tensors begin in a checkpoint, how far rounded weights take the logits
    of the middle one of its tokens, and whether quantised checkpoints have each expert's weights apart."""

    name: str
    layers: str
    rounded_apart: float
    experts_apart: bool = True


KINDS = (
    Kind("glm5_next", "model.language_model.layers.", 0.06),  # pools that layers choose together, layers with states
    Kind("dots3_note", "model.layers.", 0.06),  # latents in windows as well
    Kind("hy_v4_vl", "model.layers.", 0.06, experts_apart=False),  # sinks and gates, over several streams
    Kind("mistral_large4", "layers.", 0.12),  # latents and choices of earlier layers, learned positions
)
OFTEN = "glm5_next"
"""Of these, the one with most parts. Those of the others are tried in files of their own, where logits are compared."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(kind, marks=() if kind.name == OFTEN else pytest.mark.soak) for kind in KINDS],
    ids=lambda kind: kind.name,
)
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


@pytest.fixture(scope="module")
def folder(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(kind.name, tmp_path_factory.mktemp(kind.name))


@pytest.fixture(scope="module")
def served(folder: Path) -> Served:
    return Served.of(folder)


@pytest.fixture(scope="module")
def said(folder: Path) -> list[list[int]]:
    """What transformers says."""
    library = Reference(folder)
    return [library.tokens(library.inputs(parts)) for parts in ASKED]


def test_tokens_are_those_of_transformers_in_short_steps_beside_others_and_where_some_are_cached(
    served: Served, said: list[list[int]]
) -> None:
    prompts = [served.prompt(parts) for parts in ASKED]
    engine = served.engine(step_tokens=16, prefix_cache=True)
    assert isinstance(engine.decoder, Decoder)
    for _ in range(2):
        assert [outcome.tokens for outcome in engine.run(prompts, GREEDY)] == said
    assert engine.scheduler.counters.prefix_hit_tokens > 0


@pytest.mark.parametrize("attention", ["", pytest.param("triton", marks=pytest.mark.soak)])
def test_steps_with_a_token_of_each_sequence_have_graphs(
    folder: Path, served: Served, said: list[list[int]], attention: str
) -> None:
    engine, _ = graphed(folder, attention, hf=served.found, text=served.text())
    assert [outcome.tokens for outcome in engine.run(list(map(served.prompt, ASKED)), GREEDY)] == said
    assert engine.runner.graphs is not None
    assert engine.runner.graphs.replays >= TOKENS - 1


def test_drafts_change_no_token(served: Served, said: list[list[int]]) -> None:
    """Of each three drafts the last is wrong, and neither a state is gone on from it, nor is what it chose seen."""
    for parts, expected in zip(ASKED, said, strict=True):
        prompt = served.prompt(parts)
        engine = served.engine(speculative_tokens=3, draft=foreseen(prompt, expected))
        assert engine.run([prompt], GREEDY)[0].tokens == expected
        assert 0 < engine.scheduler.counters.accepted_draft_tokens < engine.scheduler.counters.draft_tokens


def test_weights_in_int8_are_rounded_and_say_nearly_the_same(kind: Kind, served: Served) -> None:
    """What the index multiplies with is not, so that as much is chosen as may be; of a few tokens something else is,
    which is far apart."""
    plain, engine = served.engine(), served.engine(weight_dtype="int8")
    assert weights_of(engine.decoder, "int8").bits == 8
    whole, rounded = drawn_logits(plain.decoder, kind.name), drawn_logits(engine.decoder, kind.name)
    apart = (whole - rounded).norm(dim=1) / whole.norm(dim=1)
    assert 0 < apart.median() < kind.rounded_apart


@pytest.mark.parametrize("form", ["int-quantized", pytest.param("fp8 in ragged blocks", marks=pytest.mark.soak)])
def test_tokens_of_quantised_weights_are_those_of_transformers_on_the_weights_that_they_are(
    kind: Kind, folder: Path, form: str, tmp_path: Path
) -> None:
    """What is made of latents among them, and experts, where a checkpoint has not all in one tensor."""
    quantized, wide = quantize_checkpoint(folder, FORMATS[form], tmp_path, kind.layers, experts_too=kind.experts_apart)
    served, library = Served.of(quantized), Reference(wide)
    engine = served.engine(step_tokens=80)
    assert isinstance(engine.decoder, Decoder)
    outcome = engine.run([served.prompt(PROMPTS["one picture"])], GREEDY)[0]
    assert outcome.tokens == library.tokens(library.inputs(PROMPTS["one picture"]))


def test_logits_of_two_ranks_are_those_of_one(
    kind: Kind, folder: Path, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has its heads' gates and sinks."""
    monkeypatch.setattr(selection, "allows_panels", lambda: False)  # whose kernels take one thread's calls at a time
    checkpoint, text = Checkpoint(folder), served.text()
    assert text is not None

    def logits(group: TensorGroup) -> Tensor:
        decoder = load_decoder(checkpoint, torch.float32, torch.device("cpu"), group, text=text)
        return drawn_logits(decoder, kind.name)

    expected = logits(ALONE)
    for found in on_ranks(2, logits):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_latents_in_8_bits_are_refused(served: Served) -> None:
    with pytest.raises(CheckpointError, match="not for layers that choose tokens by an index"):
        check_small_cache(served.engine().decoder, "int8")
