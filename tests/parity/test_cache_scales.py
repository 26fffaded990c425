"""Scales of keys and values that checkpoints state, under each name and however many there are: tokens are
transformers' own over a cache that rounds by these scales."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DynamicCache

from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from llm_service.layers.cache_spec import SharedKV
from llm_service.layers.self_attention.layer import SelfAttention
from llm_service.layers.tensor_parallel import TensorGroup
from llm_service.models.decoder import Decoder
from llm_service.models.loader import load_decoder
from llm_service.request import SamplingParams
from llm_service.settings import CacheDtype
from testkit import reference
from testkit.hf_side import Served
from testkit.local_engine import LocalEngine, make_prompt
from tests.cache_scales import STATED, WEIGHTS, Scales, publish
from tests.mtp_checkpoint import with_mtp_layer
from tests.parity.cases import PROMPTS
from tests.quantized import FORMATS, quantize_checkpoint
from tools.models.prompts import PROMPTS as PICTURES
from tools.models.recipes import RECIPES
from tools.models.tiny import make_by

TOKENS = 24
GREEDY = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
CPU = torch.device("cpu")


class ScalingCache(DynamicCache):
    """Keys and values as they are once they were e4m3 with a layer's scales."""

    def __init__(self, scales: Scales) -> None:
        super().__init__()
        self._scales = scales

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *given: Any, **more: Any) -> tuple[Tensor, Tensor]:
        near = [_rounded(each, scale) for each, scale in zip((key, value), self._scales[layer_idx], strict=True)]
        return super().update(*near, layer_idx, *given, **more)


def _rounded(x: Tensor, scale: Tensor) -> Tensor:
    """[1, heads, n, head_dim]."""
    by = scale.view(1, -1, 1, 1)
    return (x / by).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) * by


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=pytest.mark.soak if form == "AutoFP8" else ()) for form in STATED]
)
def test_tokens_are_the_reference_s_over_a_cache_of_these_scales(
    form: str, checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    plain = checkpoints("qwen3_vl")
    published, wide = tmp_path / "published", plain
    if written := WEIGHTS.get(form):
        published, wide = quantize_checkpoint(plain, FORMATS[written], tmp_path)
    scales = publish(published if written else plain, published, form)
    prompts = [make_prompt(wide, PROMPTS[name]) for name in ("text", "image, text, image")]
    expected = [
        reference.reference_generate(wide, prompt.inputs, TOKENS, **{reference.CACHE: ScalingCache(scales)})
        for prompt in prompts
    ]
    for settings in ({}, {"step_tokens": 40, "prefix_cache": True}):
        engine = LocalEngine(published, kv_cache_dtype=CacheDtype.FP8, **settings)
        assert [outcome.tokens for outcome in engine.run(prompts, GREEDY)] == expected
        (again,) = engine.run(prompts[1:], GREEDY)
        assert (again.tokens, again.cached > 0) == (expected[1], "prefix_cache" in settings)
    unscaled = LocalEngine(wide, kv_cache_dtype=CacheDtype.FP8).run(prompts, GREEDY)
    assert [outcome.tokens for outcome in unscaled] != expected


def test_a_cache_of_another_kind_knows_no_scales(checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    plain = checkpoints("qwen3_vl")
    publish(plain, tmp_path / "published", "modelopt")
    prompt = make_prompt(plain, PROMPTS["text"])
    for kept in (CacheDtype.AUTO, CacheDtype.INT8):
        said = [
            LocalEngine(folder, kv_cache_dtype=kept).run([prompt], GREEDY)[0].tokens
            for folder in (plain, tmp_path / "published")
        ]
        assert said[0] == said[1]


@pytest.mark.parametrize(("form", "ranks"), [("a scale a head", 2), ("modelopt", 2), ("a scale a head", 4)])
def test_each_rank_has_the_scales_of_its_heads(
    form: str, ranks: int, checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    scales = publish(checkpoints("qwen3_vl"), tmp_path / "published", form)
    for rank in range(ranks):
        group = TensorGroup(rank, ranks)
        decoder = load_decoder(Checkpoint(tmp_path / "published"), torch.float32, CPU, group, cache_scales=True)
        for number, layer in enumerate(decoder.layers):
            mixer = layer.mixer
            assert isinstance(mixer, SelfAttention)
            assert mixer.kv_scales is not None
            expected = torch.stack([each.expand(2)[group.kv_partition(2)] for each in scales[number]])
            assert torch.equal(mixer.kv_scales, expected)


@pytest.mark.parametrize(
    ("part", "scale", "why"),
    [
        ("k_proj.k_scale", torch.ones(3), "neither one scale nor one for each of 2 heads"),
        ("v_proj.v_scale", torch.tensor(0.0), "no positive number"),
        ("k_proj.k_scale", torch.tensor(torch.nan), "no positive number"),
        ("k_proj.k_bias", torch.ones(()), "with biases are not served"),
    ],
)
def test_what_is_no_scale_is_refused(
    part: str, scale: Tensor, why: str, checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    publish(checkpoints("qwen3_vl"), tmp_path / "published", "modelopt")
    file = tmp_path / "published" / "model.safetensors"
    tensors = load_file(file)
    module = next(name for name in tensors if name.endswith("k_proj.k_scale")).removesuffix("k_proj.k_scale")
    save_file(tensors | {module + part: scale}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=why):
        load_decoder(Checkpoint(tmp_path / "published"), torch.float32, CPU, cache_scales=True)
    load_decoder(Checkpoint(tmp_path / "published"), torch.float32, CPU)


def test_scales_of_a_cache_that_is_no_e4m3_are_not_taken_for_its(
    checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    publish(checkpoints("qwen3_vl"), tmp_path / "published", "modelopt")
    path = tmp_path / "published" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["kv_cache_quant_algo"] = "NVFP4"
    path.write_text(json.dumps(config))
    decoder = load_decoder(Checkpoint(tmp_path / "published"), torch.float32, CPU, cache_scales=True)
    assert all(layer.mixer.kv_scales is None for layer in decoder.layers)  # type: ignore[union-attr]


def test_drafts_of_a_model_s_own_layer_change_no_token(checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    """Multi-token prediction, whose layer has scales as well: its own keys and values are as they are computed."""
    folder = with_mtp_layer(checkpoints("qwen3_5"), tmp_path / "mtp")
    publish(folder, folder, "modelopt")
    prompts = [make_prompt(folder, PROMPTS[name]) for name in ("text", "image, text, image")]
    expected, said = (
        [each.tokens for each in LocalEngine(folder, kv_cache_dtype=CacheDtype.FP8, **given).run(prompts, GREEDY)]
        for given in ({}, {"mtp": True, "speculative_tokens": 3})
    )
    assert said == expected


def test_a_layer_without_keys_of_its_own_has_the_scales_of_those_that_it_shares(tmp_path: Path) -> None:
    """Beside a decoder that rounds keys and values before it keeps them; of Gemma 4, with windows."""
    folder = make_by(RECIPES["gemma4"], tmp_path / "model")
    prompts = [Served.of(folder).prompt(PICTURES[name]) for name in ("text", "one picture")]
    scales = publish(folder, folder, "modelopt")
    served = Served.of(folder)
    given, rounding, plain = (
        served.engine(kv_cache_dtype=kept) for kept in (CacheDtype.FP8, CacheDtype.AUTO, CacheDtype.AUTO)
    )
    mixers = [cast(SelfAttention, layer.mixer) for layer in cast(Decoder, rounding.decoder).layers]
    shared = 0
    for number, mixer in enumerate(mixers):
        spec = mixer.cache_spec()
        shared += isinstance(spec, SharedKV)
        by = scales[spec.layer if isinstance(spec, SharedKV) else number]
        mixer.mix = partial(_round_and_mix, mixer.mix, by)  # type: ignore[method-assign]
    assert shared
    said, expected, unrounded = (
        [each.tokens for each in engine.run(prompts, GREEDY)] for engine in (given, rounding, plain)
    )
    assert said == expected != unrounded


def _round_and_mix(
    mix: Callable[..., Tensor], scales: tuple[Tensor, Tensor], inputs: tuple[Tensor, ...], *given: Any
) -> Tensor:
    query, key, value, *gates = inputs
    near = (
        _rounded(each.transpose(0, 1), scale)[0].transpose(0, 1)
        for each, scale in zip((key, value), scales, strict=True)
    )
    return mix((query, *near, *gates), *given)
