"""dots3-note's text by our decoder: latent attention to what an index chooses, and in windows, with all that is for
models of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from common.checkpoint import Checkpoint, CheckpointError
from llm_service.families.family import SpanRule
from llm_service.layers.cpu import selection
from llm_service.layers.group import ALONE, TensorGroup
from llm_service.model_config.text import TextConfig
from llm_service.models.decoder import Decoder
from llm_service.models.loader import load_decoder
from llm_service.models.trial import try_ours_of
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

KIND, TEXT = "dots3_note", "model.layers."
ASKED = [PROMPTS["text"], PROMPTS["one picture"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(KIND, tmp_path_factory.mktemp("dots3"))


@pytest.fixture(scope="module")
def served(folder: Path) -> Served:
    return Served.of(folder)


@pytest.fixture(scope="module")
def said(folder: Path) -> list[list[int]]:
    """What the library says."""
    library = Reference(folder)
    return [library.tokens(library.inputs(parts)) for parts in ASKED]


def test_tokens_are_the_library_s_in_short_steps_and_beside_others(served: Served, said: list[list[int]]) -> None:
    prompts = [served.prompt(parts) for parts in ASKED]
    engine = served.engine(step_tokens=16, prefix_cache=True)
    assert isinstance(engine.decoder, Decoder)
    for _ in range(2):
        assert [outcome.tokens for outcome in engine.run(prompts, GREEDY)] == said


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
    "kinds",
    [
        ["full_attention", "full_attention", "sliding_attention", "sliding_attention"],
        ["full_attention", "indexed_attention", "sliding_attention", "indexed_attention"],
    ],
    ids=["without an index", "layers of all kinds"],
)
def test_layers_of_other_kinds_give_the_library_s_logits(kinds: list[str]) -> None:
    config: Any = config_of_recipe(KIND)
    stated = config.text_config.to_dict()
    windowed = stated["per_layer_config"]["2"]
    apart = {layer: windowed for layer, kind in enumerate(kinds) if kind == "sliding_attention"}
    del stated["rope_parameters"]
    config.text_config = type(config.text_config)(**stated | {"layer_types": kinds, "per_layer_config": apart})
    assert try_ours_of(config, drawn_prompt).spans is SpanRule.NOWHERE


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"num_key_value_heads": 1}, "layers whose latents are for 1 heads of keys and 2 of queries do not fit"),
        ({"head_dim": 24}, "layers whose heads have 24 numbers do not fit latents for 20"),
    ],
)
def test_heads_of_layers_with_a_window_that_do_not_fit_their_latents_are_refused(
    changed: dict[str, int], why: str
) -> None:
    stated: dict[str, Any] = config_of_recipe(KIND).text_config.to_dict()
    TextConfig.of(stated)
    for own in stated["per_layer_config"].values():
        own.update(changed)
    with pytest.raises(CheckpointError, match=why):
        TextConfig.of(stated)


def test_weights_in_int8_are_rounded_and_say_nearly_the_same(folder: Path, served: Served) -> None:
    """What the index multiplies with is not, so that as much is chosen as may be."""
    plain, engine = served.engine(), served.engine(weight_dtype="int8")
    assert weights_of(engine.decoder, "int8").bits == 8
    whole, rounded = _logits(plain.decoder, KIND), _logits(engine.decoder, KIND)
    assert 0 < (whole - rounded).norm() / whole.norm() < 0.12


@pytest.mark.parametrize("form", ["int-quantized", pytest.param("fp8 in ragged blocks", marks=pytest.mark.soak)])
def test_tokens_of_quantised_weights_are_the_library_s_on_the_weights_that_they_are(
    folder: Path, form: str, tmp_path: Path
) -> None:
    """Experts, and what is made of latents, among them."""
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
