"""Texts that transformers computes, with weights in 8 and 4 bits: transformers' tokens on the weights that they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from common.hf.classes import load
from common.hf.models import describe
from common.hf.small_models import made_up
from llm_service.layers.cpu import selection
from llm_service.layers.cpu.quad_panels import QuadPanels
from llm_service.layers.linear.parallel import PackedLinear
from llm_service.layers.tensor_parallel import ALONE, TensorGroup
from llm_service.models.hf.decoder import HfDecoder
from llm_service.models.hf.linear import Fill, TextLinear, fill_quantised, leave_quantised, round_linears
from llm_service.models.hf.loader import load_hf_decoder
from llm_service.models.hf.text import text_alone
from llm_service.models.quantized import quantized_modules
from llm_service.models.trial_chunks import logits_in_chunks
from llm_service.worker.weights import describe as weights_of
from testkit.hf_side import GREEDY, Served
from tests.parity.thread_ranks import on_ranks
from tests.quantized import FORMATS, quantize_checkpoint
from tools.models.drawn_prompts import drawn_prompt
from tools.models.prompts import PROMPTS
from tools.models.reference import Reference
from tools.models.tiny import config_of_recipe, make

CPU = torch.device("cpu")
PREFIXES = {"ernie4_5_vl_moe": "model.", "llama4": "language_model.", "paddleocr_vl": "model."}
"""How names of the text's tensors begin, as checkpoints are saved; of others as `TEXT`."""
TEXT = "model.language_model."

KINDS = [
    ("cohere2_vision", "fp8 in blocks"),  # windows, scaled logits
    ("ernie4_5_vl_moe", "awq"),  # what is dense; its experts are not quantised
    pytest.param("llama4", "nvfp4", marks=pytest.mark.soak),  # feed-forward parts of another name
    pytest.param("exaone4_5", "gptq", marks=pytest.mark.soak),
    pytest.param("exaone4_5", "modelopt NVFP4", marks=pytest.mark.soak),
    pytest.param("granite4_vision", "pack-quantized, with zeros", marks=pytest.mark.soak),
    pytest.param("paddleocr_vl", "float-quantized, a scale an output", marks=pytest.mark.soak),
]


def quantised(kind: str, form: str, root: Path, *, experts_too: bool = False) -> tuple[Path, Path]:
    """A quantised checkpoint, and one of the weights that it is."""
    plain = make(kind, root / "plain")
    return quantize_checkpoint(plain, FORMATS[form], root, PREFIXES.get(kind, TEXT), experts_too=experts_too)


@pytest.mark.parametrize(("kind", "form"), KINDS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of transformers' processors
def test_greedy_tokens_are_those_of_transformers_on_the_weights_that_they_are(
    kind: str, form: str, tmp_path: Path
) -> None:
    quantized, wide = quantised(kind, form, tmp_path)
    served, library = Served.of(quantized), Reference(wide)
    asked = [PROMPTS["text"], PROMPTS["one picture"]]
    expected = [library.tokens(library.inputs(parts)) for parts in asked]
    engine = served.engine(by_hf=True, step_tokens=64)
    assert isinstance(engine.decoder, HfDecoder)
    method = json.loads((quantized / "config.json").read_text())["quantization_config"]["quant_method"]
    told = weights_of(engine.decoder.weights(), method)
    assert (told.quantization, told.bits) == (method, 8 if "quantized, a" in form or "fp8" in form else 4)
    assert len(linears(engine.decoder)) == len(quantized_modules(Checkpoint(quantized))) > 0
    outcomes = engine.run([served.prompt(parts) for parts in asked], GREEDY)
    assert [outcome.tokens for outcome in outcomes] == expected


def linears(decoder: HfDecoder) -> list[TextLinear]:
    """Ours in the places of transformers'; none of them has a weight in a longer form."""
    found = {id(part): part for part in decoder.weights().modules() if isinstance(part, TextLinear)}
    for part in found.values():
        for inner in part.modules():
            assert not isinstance(inner, PackedLinear) or (inner.laid_out is not None and not inner.weight.numel())
    return list(found.values())


def test_logits_of_two_ranks_are_those_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "allows_panels", lambda: False)  # whose kernels take one thread's calls at a time
    quantized, wide = quantised("cohere2_vision", "fp8 in blocks", tmp_path)
    prompt = drawn_prompt(made_up(config_of_recipe("cohere2_vision"), text_alone))
    positions, cuts = torch.arange(len(prompt.ids)).expand(3, -1), [(0, 20), (20, len(prompt.ids))]

    def loaded(folder: Path) -> tuple[Any, Fill]:
        checkpoint, names = Checkpoint(folder), dict[str, str]()

        def strip(model: Any) -> None:
            text_alone(model)
            names.update(leave_quantised(checkpoint, model))

        model = load(folder, strip, torch.float32, CPU)
        return model, fill_quantised(checkpoint, names, CPU)

    def logits(given: tuple[Any, Fill], group: TensorGroup) -> tuple[Tensor, int]:
        model, fill = given
        decoder = HfDecoder(model, torch.float32, CPU, group=group, fill=fill)
        with torch.inference_mode():
            made = logits_in_chunks(decoder, prompt, positions, cuts, [])
        return made, sum(part.inputs.stop - part.inputs.start for part in linears(decoder))

    plain, _ = logits(loaded(wide), ALONE)
    expected, inputs = logits(loaded(quantized), ALONE)
    torch.testing.assert_close(expected, plain, rtol=1e-4, atol=1e-4)
    models = [loaded(quantized) for _ in range(2)]  # not by threads: transformers changes what all of them have
    for split, fewer in on_ranks(2, lambda group: logits(models[group.rank], group)):
        torch.testing.assert_close(split, expected, rtol=1e-4, atol=1e-4)
        assert fewer < inputs, "rows are shared as well as columns"


@pytest.fixture
def rounded() -> Callable[..., tuple[Tensor, Tensor, HfDecoder]]:
    """Logits of an architecture's prompt by plain weights and by those in 8 bits, and the decoder that has these."""

    def make_both(kind: str, weight_dtype: str = "int8") -> tuple[Tensor, Tensor, HfDecoder]:
        logits, decoder = [], None
        for short in (False, True):
            model = made_up(config_of_recipe(kind), text_alone)
            prompt = drawn_prompt(model)
            positions, cuts = torch.arange(len(prompt.ids)).expand(3, -1), [(0, len(prompt.ids))]
            fill = round_linears(model, CPU, weight_dtype) if short else None
            decoder = HfDecoder(model, torch.float32, CPU, fill=fill)
            with torch.inference_mode():
                logits.append(logits_in_chunks(decoder, prompt, positions, cuts, []))
        assert decoder is not None
        return logits[0], logits[1], decoder

    return make_both


def test_weights_in_int8_are_rounded_and_say_nearly_the_same(
    rounded: Callable[[str], tuple[Tensor, Tensor, HfDecoder]],
) -> None:
    whole, short, decoder = rounded("cohere2_vision")
    assert 0 < (whole - short).norm() / whole.norm() < 0.06
    assert weights_of(decoder.weights(), "int8").number == "int8"
    assert len(linears(decoder)) == 7 * decoder._text.config.num_hidden_layers + 1, "and the head"
    assert not [part for part in decoder.weights().modules() if type(part) is nn.Linear]


@pytest.mark.skipif(not selection.computes_bytes(), reason="this processor lacks AVX512-VNNI")
def test_inputs_are_rounded_as_well_but_for_the_head_s(
    rounded: Callable[..., tuple[Tensor, Tensor, HfDecoder]],
) -> None:
    whole, short, decoder = rounded("cohere2_vision", "w8a8")
    assert 0.001 < (whole - short).norm() / whole.norm() < 0.08
    assert weights_of(decoder.weights(), "w8a8").inputs == "int8"
    forms = {isinstance(part._product.laid_out, QuadPanels) for part in linears(decoder) if part._product is not None}
    assert forms == {True, False}
    (head,) = (part for part in linears(decoder) if part.out_features == whole.shape[1])
    assert head._product is not None
    assert not isinstance(head._product.laid_out, QuadPanels)


def test_what_chooses_experts_is_not_rounded(
    rounded: Callable[[str], tuple[Tensor, Tensor, HfDecoder]],
) -> None:
    *_, decoder = rounded("ernie4_5_vl_moe")
    routers = [part for name, part in decoder._text.named_modules() if name.endswith(".gate")]
    assert routers
    assert not any(isinstance(part, TextLinear) for part in routers)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("ernie4_5_vl_moe", r"mlp\.experts\.0\.\w+ is quantised, and transformers puts it together with others"),
        (
            "llama4",
            r"the checkpoint lacks .*\.experts\.down_proj, or has it quantised in parts that transformers",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of transformers' processors
def test_quantised_experts_that_transformers_stacks_are_refused_by_name(kind: str, why: str, tmp_path: Path) -> None:
    quantized, _ = quantised(kind, "awq", tmp_path, experts_too=True)
    with pytest.raises(CheckpointError, match=why):
        Served.of(quantized).engine(by_hf=True)


def test_what_asks_for_a_weight_that_stays_short_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made_up(config_of_recipe("cohere2_vision"), text_alone)
    feed_forward: Any = type(model.get_decoder().layers[0].mlp)
    fill = round_linears(model, CPU, "int8")
    monkeypatch.setattr(feed_forward, "forward", lambda self, x: x @ self.up_proj.weight.T)
    with pytest.raises(CheckpointError, match=r"asks a linear layer in 8 or 4 bits: .* no attribute 'weight'"):
        HfDecoder(model, torch.float32, CPU, fill=fill)


def test_what_a_text_asks_of_itself_in_vain_is_told_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made_up(config_of_recipe("cohere2_vision"), text_alone)
    feed_forward: Any = type(model.get_decoder().layers[0].mlp)
    monkeypatch.setattr(feed_forward, "forward", lambda self, x: self.upward(x))
    with pytest.raises(CheckpointError, match=r"Cohere2Model cannot compute a token: .* no attribute 'upward'"):
        HfDecoder(model, torch.float32, CPU)


def test_int8_beside_quantised_weights_is_refused(tmp_path: Path) -> None:
    quantized, _ = quantised("cohere2_vision", "awq", tmp_path)
    with pytest.raises(CheckpointError, match="--weight-dtype int8 is for weights that"):
        load_hf_decoder(Checkpoint(quantized), describe(quantized), torch.float32, CPU, weight_dtype="int8")
