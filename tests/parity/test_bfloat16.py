"""Answers of a CPU that multiplies bfloat16: nearer to float32's than transformers' own in bfloat16, and the same
whatever the chunks, the company and the caches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec import structs
from PIL import Image

from common.checkpoints.checkpoint import Checkpoint
from llm_service.layers.cpu import quantized_kernel, selection
from llm_service.layers.cpu.pair_panels import PairPanels
from llm_service.layers.cpu.quantized_panels import QuantizedPanels
from llm_service.layers.linear.parallel import PackedLinear
from llm_service.models.loader import load_decoder
from llm_service.request import SamplingParams
from testkit import reference
from testkit.checkpoints import make_checkpoint
from testkit.local_engine import LocalEngine, Prompt, make_prompt
from tests.adapters import make_adapter
from tests.parity.cases import prompt_logits
from tests.quantized import FORMATS, quantize_checkpoint
from tests.tiles import WAYS, multiply_by

pytestmark = pytest.mark.skipif(not selection.computes_bfloat16(), reason="this processor lacks AVX512-BF16")

_CPU = torch.device("cpu")
_GREEDY = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)


@pytest.fixture(autouse=True, params=WAYS)
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    multiply_by(request.param, monkeypatch)


FAMILIES = (
    "qwen3_vl",
    "qwen3_5",
    pytest.param("qwen2_vl", marks=pytest.mark.soak),
    pytest.param("qwen3_vl_moe", marks=pytest.mark.soak),
)
EIGHT_BITS = "int8", "float-quantized, a scale an output"


@pytest.fixture(scope="module", params=FAMILIES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(request.param, tmp_path_factory.mktemp(request.param), dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def prompts(directory: Path) -> list[Prompt]:
    pixels = np.random.default_rng(1).integers(0, 255, (90, 120, 3), np.uint8)
    parts = (["Tell me about two red circles."], [Image.fromarray(pixels), "What is in the picture?"])
    return [make_prompt(directory, list(each)) for each in parts]


def test_logits_are_nearer_to_float32_s_than_those_of_transformers(directory: Path, prompts: list[Prompt]) -> None:
    prompt = prompts[0]
    exact, theirs = (
        reference.reference_logits(directory, prompt.inputs, kind).float() for kind in (torch.float32, torch.bfloat16)
    )
    ours = prompt_logits(load_decoder(Checkpoint(directory), torch.bfloat16, _CPU), prompt)
    # By place, and of these the middle one: where two experts are nearly alike, rounding takes a token to the other.
    mine, other = ((each - exact).norm(dim=1).median() for each in (ours, theirs))
    assert 0 < mine <= other


def test_the_matrices_are_in_pairs_and_nothing_between_them_is_rounded(directory: Path) -> None:
    decoder = load_decoder(Checkpoint(directory), torch.bfloat16, _CPU)
    assert isinstance(decoder.lm_head.laid_out, PairPanels)
    assert decoder.dtype == torch.float32
    assert decoder.embed_tokens(torch.tensor([1])).dtype == torch.float32


def test_chunks_company_and_cached_prefixes_change_no_token(directory: Path, prompts: list[Prompt]) -> None:
    whole = LocalEngine(directory, dtype=torch.bfloat16)
    right = [whole.run([prompt], _GREEDY)[0].tokens for prompt in prompts]
    company = LocalEngine(directory, dtype=torch.bfloat16, step_tokens=48, max_running=8, prefix_cache=True)
    for _ in range(2):  # the second time from the cache
        outcomes = company.run([*prompts, *prompts], _GREEDY)
        assert [outcome.tokens for outcome in outcomes] == right * 2
    if Checkpoint(directory).config["model_type"] != "qwen3_5":  # whose snapshots are further apart than these are long
        assert any(outcome.cached for outcome in outcomes)


def test_what_is_kept_of_tokens_is_bfloat16_and_torch_computes_the_same_over_it(
    directory: Path, prompts: list[Prompt]
) -> None:
    decoder = load_decoder(Checkpoint(directory), torch.bfloat16, _CPU)
    assert decoder.kv_dtype == torch.bfloat16
    assert load_decoder(Checkpoint(directory), torch.float32, _CPU).kv_dtype == torch.float32
    ours, theirs = (prompt_logits(decoder, prompts[0], attention) for attention in ("numba", "torch"))
    # By place, and of these the middle one, as above. Our kernel rounds queries and weights, torch's operators do not.
    apart = ((ours - theirs).norm(dim=1) / theirs.norm(dim=1)).median()
    assert 0 < apart < 0.01


def test_adapters_in_float32_are_rounded_as_the_base_is(directory: Path, prompts: list[Prompt], tmp_path: Path) -> None:
    kinds = {"long": torch.float32, "short": torch.bfloat16}
    folders = [make_adapter(directory, tmp_path / name, seed=1, dtype=dtype) for name, dtype in kinds.items()]
    engine = LocalEngine(directory, dtype=torch.bfloat16, adapters=folders)
    long, short, none = engine.run([prompts[0]] * 3, structs.replace(_GREEDY, logprobs=1), [1, 2, 0])
    assert (long.tokens, long.logprobs) == (short.tokens, short.logprobs)
    assert long.tokens != none.tokens


@pytest.mark.parametrize(
    ("directory", "form"),
    [
        ("qwen3_vl", EIGHT_BITS[0]),
        ("qwen3_5", EIGHT_BITS[1]),
        pytest.param("qwen3_vl", EIGHT_BITS[1], marks=pytest.mark.soak),
        pytest.param("qwen3_5", EIGHT_BITS[0], marks=pytest.mark.soak),
        *(
            pytest.param(family, form, marks=pytest.mark.soak)
            for family in ("qwen2_vl", "qwen3_vl_moe")
            for form in EIGHT_BITS
        ),
    ],
    indirect=["directory"],
)
def test_weights_of_8_bits_are_multiplied_in_pairs_and_company_changes_no_token(
    directory: Path, prompts: list[Prompt], tmp_path: Path, form: str
) -> None:
    weight_dtype, folder = form, directory
    if form != "int8":
        weight_dtype = ""
        folder, _ = quantize_checkpoint(directory, FORMATS[form], tmp_path)
    decoder = load_decoder(Checkpoint(folder), torch.bfloat16, _CPU, weight_dtype=weight_dtype)
    exact = load_decoder(Checkpoint(folder), torch.float32, _CPU, weight_dtype=weight_dtype)
    forms = [part.laid_out for part in decoder.layers.modules() if isinstance(part, PackedLinear)]
    in_pairs = [isinstance(each, QuantizedPanels) and each.kernel is not quantized_kernel for each in forms]
    assert sum(in_pairs) >= 2 * len(decoder.layers)
    ours, longer = prompt_logits(decoder, prompts[0]), prompt_logits(exact, prompts[0])
    apart = ((ours - longer).norm(dim=1) / longer.norm(dim=1)).median()
    experts = "moe" in Checkpoint(directory).config["model_type"]  # two may be nearly alike
    assert 0 < apart < (0.06 if experts else 0.02)
    given = {"dtype": torch.bfloat16, "weight_dtype": weight_dtype}
    alone = [LocalEngine(folder, **given).run([prompt], _GREEDY)[0].tokens for prompt in prompts]
    company = LocalEngine(folder, step_tokens=48, max_running=8, **given)
    assert [outcome.tokens for outcome in company.run([*prompts, *prompts], _GREEDY)] == alone * 2
