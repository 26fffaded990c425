"""Parts of GLM-5 Next's layers: Kimi Delta Attention, gates that are cut, and streams in balance, as transformers', and
of shares."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from common.checkpoints.checkpoint import CheckpointError
from llm_service.families.gates import CutGates
from llm_service.layers.cache_spec import Segment
from llm_service.layers.elementwise import sigmoid
from llm_service.layers.kda.layer import KimiDeltaAttention
from llm_service.layers.residual.manifold_hyper_connections import (
    ManifoldLayer,
    MeanNorm,
    StreamBalance,
    balanced,
    rebalanced,
)
from llm_service.layers.tensor_parallel import ALONE, TensorGroup
from llm_service.model_config.text import TextConfig
from llm_service.models.decoder import Decoder
from llm_service.models.mtp import load_mtp
from llm_service.worker.adapters import shapes_of
from testkit import reference  # noqa: F401 - makes transformers importable beside a CPU torch
from tests.layer_cases import drawn, noise, read
from tests.unit.llm_service.test_pooled_latents import HIDDEN, UNROTATED, settings_of

from transformers.models.glm5_next import modeling_glm5_next as library  # isort: skip

LINEAR: dict[str, Any] = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "linear_attention"],
    "linear_num_heads": 4,
    "linear_head_dim": 12,
    "hc_mult": 3,
    "swiglu_limit": 0.4,
}


def shape_of(**more: Any) -> TextConfig:
    return TextConfig.of(settings_of(**LINEAR | more).to_dict())


@pytest.mark.parametrize("least", [-5.0, None], ids=str)
@torch.inference_mode()
def test_kimi_delta_attention_is_that_of_transformers_and_of_ranks(least: float | None) -> None:
    settings = settings_of(**LINEAR, linear_lower_bound=least)
    theirs, x = drawn(library.Glm5NextTextLinearAttention(settings, 0)), noise(70, HIDDEN)
    expected = theirs(x[None])[0]
    for groups in ([ALONE], [TensorGroup(rank, 2) for rank in range(2)]):
        total = torch.zeros(70, HIDDEN)
        for group in groups:
            ours = KimiDeltaAttention(shape_of(linear_lower_bound=least), group, torch.float32)
            read(ours, theirs)
            cache, parts = ours.cache_spec().new_cache(3, torch.device("cpu")), list[Tensor]()
            for begin, end in ((0, 64), (64, 65), (65, 70)):
                batch = ours.state_backend().batch([Segment(0, end - begin, 1, begin == 0, context=begin)])
                parts.append(ours.out(ours.mix(ours.project(x[begin:end], UNROTATED), cache, batch)))
            total += torch.cat(parts)
        torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_gates_are_cut_before_they_open() -> None:
    theirs, x = library.Glm5NextTextMLP(settings_of(**LINEAR)), noise(9, 2 * 32)
    shape = shape_of()
    assert shape.gates == shape.expert_gates == (CutGates(0.4),) * 2
    theirs.gate_proj, theirs.up_proj, theirs.down_proj = (torch.nn.Identity() for _ in range(3))
    for gate in (x, -x):
        torch.testing.assert_close(CutGates(0.4).opened(gate, gate, sigmoid), theirs(gate))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_streams_are_mixed_as_transformers_mixes_them(dtype: torch.dtype) -> None:
    settings, shape = (
        settings_of(**LINEAR, hc_sinkhorn_iters=3, hc_eps=0.02),
        shape_of(hc_sinkhorn_iters=3, hc_eps=0.02),
    )
    theirs, streams = drawn(library.Glm5NextTextHyperConnection(settings)), noise(5, 3, HIDDEN).to(dtype)
    ours = StreamBalance(shape, "attn_hc")
    holder = torch.nn.Module()
    holder.attn_hc = ours
    read(holder, torch.nn.ModuleDict({"attn_hc": theirs}))
    post, comb, collapsed = (each[0] for each in theirs(streams[None]))
    one, out, mixing = ours(streams.flatten(1))
    near: dict[str, float] = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(one, collapsed, **near)
    torch.testing.assert_close(out, post.to(dtype), **near)
    torch.testing.assert_close(mixing, comb.to(dtype), **near)
    made = noise(5, HIDDEN, seed=3).to(dtype)
    expected = post.to(dtype).unsqueeze(-1) * made.unsqueeze(-2) + comb.to(dtype).transpose(-1, -2) @ streams
    torch.testing.assert_close(rebalanced(streams.flatten(1), made, out, mixing), expected.flatten(1), **near)


def test_rows_and_columns_that_are_balanced_sum_up_to_1() -> None:
    found = balanced(noise(7, 4, 4), 1e-6, 20)
    for dim in (1, 2):
        torch.testing.assert_close(found.sum(dim), torch.ones(7, 4), rtol=0, atol=1e-3)
    assert not torch.allclose(balanced(noise(7, 4, 4), 1e-6, 1), found, atol=1e-3)


@pytest.mark.parametrize("streams", [1, 3])
@torch.inference_mode()
def test_a_layer_is_that_of_transformers_and_may_be_for_some_places_alone(streams: int) -> None:
    settings, shape = settings_of(**LINEAR | {"hc_mult": streams}), shape_of(hc_mult=streams)
    theirs, x = drawn(library.Glm5NextTextDecoderLayer(settings, 1)), noise(20, streams * HIDDEN)
    for each in theirs.modules():
        if isinstance(each, library.Glm5NextTextTopkRouter):
            each.e_score_correction_bias.copy_(noise(4))
    expected = theirs(x.view(1, 20, streams, HIDDEN))[0][0].flatten(1)
    ours = ManifoldLayer(shape.layer_kind(1), shape, ALONE, torch.float32)
    read(ours, theirs)
    for places in (None, torch.tensor([3, 19])):
        cache = ours.mixer.cache_spec().new_cache(1, torch.device("cpu"))
        batch = ours.mixer.state_backend().batch([Segment(0, 20, 0, fresh=True)])
        found, more = ours(x, None, UNROTATED, cache, batch, places)
        assert more is None
        torch.testing.assert_close(found, expected if places is None else expected[places], rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_behind_all_layers_the_mean_of_streams_is_normed() -> None:
    ours, theirs = MeanNorm(shape_of(), torch.float32), drawn(library.Glm5NextTextRMSNorm(HIDDEN, 1e-2))
    holder, streams = torch.nn.Module(), noise(4, 3 * HIDDEN)
    holder.norm = ours
    read(holder, torch.nn.ModuleDict({"norm": theirs}))
    expected = theirs(library.Glm5NextTextHyperHead()(streams.view(1, 4, 3, HIDDEN))[0])
    torch.testing.assert_close(ours.after_adding(streams, None)[1], expected)


def test_adapters_may_change_what_fades_and_gates_as_well() -> None:
    found = {name.removeprefix("layers.0.self_attn.") for name in shapes_of(shape_of()) if "layers.0.self_attn" in name}
    fading = {"forget_gate.f_a_proj", "forget_gate.f_b_proj"}
    assert found == {"q_proj", "k_proj", "v_proj", "b_proj", "g_a_proj", "g_b_proj", "o_proj"} | fading


def test_heads_that_cannot_be_shared_are_refused() -> None:
    with pytest.raises(ValueError, match="3 cannot be split over 2 ranks"):
        KimiDeltaAttention(shape_of(linear_num_heads=3), TensorGroup(0, 2), torch.float32)


def test_no_layer_for_multi_token_prediction_is_known() -> None:
    decoder, checkpoint = Decoder(shape_of(hc_mult=1), ALONE, torch.float32, torch.device("cpu")), SimpleNamespace()
    checkpoint.config = {}
    with pytest.raises(CheckpointError, match="several streams between layers"):
        load_mtp(checkpoint, decoder, torch.float32)  # type: ignore[arg-type]
