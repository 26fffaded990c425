"""GLM-5 Next's text by our decoder: Kimi Delta Attention, and latent attention to pools that an index chooses, with all
that is for models of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from common.checkpoint import Checkpoint, CheckpointError
from llm_service.families.family import SpanRule
from llm_service.layers.cpu import selection
from llm_service.layers.group import ALONE, TensorGroup
from llm_service.models.decoder import Decoder
from llm_service.models.library_decoder import LibraryDecoder
from llm_service.models.loader import load_decoder
from llm_service.models.trial import try_ours_of
from llm_service.worker.load import check_int8_cache
from llm_service.worker.weights import describe as weights_of
from tests.parity.library_side import GREEDY, Served
from tests.parity.test_known_text_options import _logits
from tests.parity.test_library_ranks import on_ranks
from tests.parity.test_llm_graphs import graphed
from tests.quantized import FORMATS, quantize_checkpoint
from tools.models.drawn_prompts import drawn_prompt
from tools.models.prompts import PROMPTS
from tools.models.reference import TOKENS, Reference
from tools.models.tiny import config_of_recipe, make

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the library's processor
KIND, TEXT = "glm5_next", "model.language_model.layers."
ASKED = [PROMPTS["text"], PROMPTS["one picture"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(KIND, tmp_path_factory.mktemp("glm5"))


@pytest.fixture(scope="module")
def served(folder: Path) -> Served:
    return Served.of(folder)


@pytest.fixture(scope="module")
def said(folder: Path) -> list[list[int]]:
    """What the library says."""
    library = Reference(folder)
    return [library.tokens(library.inputs(parts)) for parts in ASKED]


def test_tokens_are_the_library_s_in_short_steps_beside_others_and_behind_snapshots(
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
    engine, _ = graphed(folder, attention, library=served.found, text=served.text())
    outcomes = engine.run(list(map(served.prompt, ASKED)), GREEDY)
    assert [outcome.tokens for outcome in outcomes] == said
    assert engine.runner.graphs is not None
    assert engine.runner.graphs.replays >= TOKENS - 1


@pytest.mark.parametrize(
    "changed",
    [
        {"indexer_types": ["full"] * 5},
        {"layer_types": ["indexed_attention"] * 5, "indexer_types": ["full", "shared"] * 2 + ["full"]},
        {"layer_types": ["linear_attention"] * 4 + ["indexed_attention"], "indexer_types": ["full"] * 5},
        {"linear_lower_bound": None},
        {"hc_mult": 1},
        {"mlp_layer_types": ["dense"] * 5},
    ],
    ids=["each chooses", "no states", "one that chooses", "no bound", "one stream", "no experts"],
)
def test_other_settings_give_the_library_s_logits(changed: dict[str, Any]) -> None:
    config: Any = config_of_recipe(KIND)
    config.text_config = type(config.text_config)(**config.text_config.to_dict() | changed)
    assert try_ours_of(config, drawn_prompt).spans is SpanRule.NOWHERE


def test_biases_of_latents_are_the_library_s() -> None:
    config: Any = config_of_recipe(KIND)
    config.text_config = type(config.text_config)(**config.text_config.to_dict() | {"attention_bias": True})
    with pytest.raises(CheckpointError, match="biases"):
        try_ours_of(config, drawn_prompt)


def test_keys_in_8_bits_are_refused(served: Served) -> None:
    with pytest.raises(CheckpointError, match="not for layers that choose by an index what they see"):
        check_int8_cache(served.engine().decoder)


@pytest.mark.soak
def test_weights_in_int8_are_rounded_and_say_nearly_the_same(folder: Path, served: Served) -> None:
    plain, engine = served.engine(), served.engine(weight_dtype="int8")
    assert weights_of(engine.decoder, "int8").bits == 8
    whole, rounded = _logits(plain.decoder, KIND), _logits(engine.decoder, KIND)
    apart = (whole - rounded).norm(dim=1) / whole.norm(dim=1)
    assert 0 < apart.median() < 0.06, "of a few tokens other pools are the best, which is far apart"


@pytest.mark.parametrize("form", ["int-quantized", pytest.param("fp8 in ragged blocks", marks=pytest.mark.soak)])
def test_tokens_of_quantised_weights_are_the_library_s_on_the_weights_that_they_are(
    folder: Path, form: str, tmp_path: Path
) -> None:
    quantized, wide = quantize_checkpoint(folder, FORMATS[form], tmp_path, TEXT)
    served, library = Served.of(quantized), Reference(wide)
    engine = served.engine(step_tokens=80)
    assert isinstance(engine.decoder, Decoder)
    outcome = engine.run([served.prompt(PROMPTS["one picture"])], GREEDY)[0]
    assert outcome.tokens == library.tokens(library.inputs(PROMPTS["one picture"]))


def test_logits_of_two_ranks_are_those_of_one(folder: Path, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "allows_panels", lambda: False)  # whose kernels take one thread's calls at a time
    checkpoint, text = Checkpoint(folder), served.text()
    assert text is not None

    def logits(group: TensorGroup) -> torch.Tensor:
        return _logits(load_decoder(checkpoint, torch.float32, torch.device("cpu"), group, text=text), KIND)

    expected = logits(ALONE)
    for found in on_ranks(2, logits):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.soak
def test_either_decoder_gives_the_same_tokens(served: Served) -> None:
    prompts = [served.prompt(parts) for parts in PROMPTS.values()]
    engines = served.engine(), served.engine(by_library=True)
    assert [type(engine.decoder) for engine in engines] == [Decoder, LibraryDecoder]
    ours, theirs = ([outcome.tokens for outcome in engine.run(prompts, GREEDY)] for engine in engines)
    assert ours == theirs
