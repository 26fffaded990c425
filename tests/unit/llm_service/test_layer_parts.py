"""Parts of decoder layers that some families have, each against transformers' own module with the same weights."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from llm_service.families.gates import BoundedGates, RaisedGates
from llm_service.layers.cache_spec import Segment
from llm_service.layers.gdn.layer import GatedDeltaNet
from llm_service.layers.linear.parallel import VocabParallelEmbedding
from llm_service.layers.mlp import MLP
from llm_service.layers.norms import RMSNorm
from llm_service.layers.residual.gated_residual import ResidualGate
from llm_service.layers.tensor_parallel import ALONE, TensorGroup
from llm_service.model_config.feed_forward import gates_of
from llm_service.model_config.state import DeltaNetConfig
from llm_service.models.filling import InMemory
from testkit import reference  # noqa: F401 - makes transformers importable beside a CPU torch
from tests.layer_cases import CPU, HIDDEN, SIZES, TOKENS, config, drawn, noise, read

from transformers.models.qwen3_5.modeling_qwen3_5 import (  # isort: skip
    Qwen3_5GatedDeltaNet,
    Qwen3_5RMSNorm,
    Qwen3_5TextConfig,
)
from transformers.models.muse_spark.modeling_muse_spark import (  # isort: skip
    MuseSparkResidualGate,
    MuseSparkTextConfig,
)
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLDenseMLP  # isort: skip
from transformers.models.muse_glimmer.modeling_muse_glimmer import (  # isort: skip
    MuseGlimmerTextNormedEmbedding,
)
from transformers.models.step3p7.modeling_step3p7 import Step3p7MLP  # isort: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_a_zero_centred_norm(dtype: torch.dtype) -> None:
    theirs = drawn(Qwen3_5RMSNorm(HIDDEN)).to(dtype)
    holder = nn.Module()
    holder.norm = RMSNorm(HIDDEN, 1e-6, dtype, zero_centred=True)
    read(holder, nn.ModuleDict({"norm": theirs}))
    x = 3 * noise(5, HIDDEN).to(dtype)
    torch.testing.assert_close(holder.norm(x), theirs(x), rtol=4 * torch.finfo(dtype).eps, atol=1e-6)


@torch.inference_mode()
def test_gates_that_are_more_than_an_activation() -> None:
    """With limits that noise passes."""
    x = 4 * noise(9, HIDDEN)
    settings = SimpleNamespace(hidden_size=HIDDEN, dense_intermediate_size=96, swiglu_alpha=1.7, swiglu_limit=0.5)
    raised = drawn(MiniMaxM3VLDenseMLP(settings))
    ours = MLP(HIDDEN, 96, ALONE, torch.float32, activation=RaisedGates(1.7, 0.5), fused=True)
    read(ours, raised)
    torch.testing.assert_close(ours(x), raised(x), rtol=1e-4, atol=1e-5)
    settings = SimpleNamespace(
        hidden_size=HIDDEN, intermediate_size=96, mlp_bias=False, hidden_act="silu", swiglu_limits_shared=[0.5]
    )
    bounded = drawn(Step3p7MLP(settings, 0))
    ours = MLP(HIDDEN, 96, ALONE, torch.float32, activation=BoundedGates(0.5))
    read(ours, bounded)
    torch.testing.assert_close(ours(x), bounded(x), rtol=1e-4, atol=1e-5)


def test_limits_of_gates_are_of_single_layers_and_none_is_0() -> None:
    text = {"num_hidden_layers": 3, "swiglu_limits": [0.0, 7, None, 9]}
    assert gates_of(text, "swiglu_limits") == (None, BoundedGates(7.0), None)
    assert gates_of(text, "swiglu_limits_shared") == ()
    raised = {"num_hidden_layers": 2, "swiglu_alpha": 1.7, "swiglu_limit": 7.0}
    assert gates_of(raised, "swiglu_limits") == (RaisedGates(1.7, 7.0),) * 2


def test_embeddings_are_normed_as_they_are_read_by_each_rank() -> None:
    theirs = drawn(MuseGlimmerTextNormedEmbedding(10, HIDDEN, 0, norm_eps=1e-2))
    expected = theirs(torch.arange(10))
    for ranks in (1, 3):
        parts = []
        for rank in range(ranks):
            group = TensorGroup(rank, ranks) if ranks > 1 else ALONE
            holder = nn.ModuleDict({"table": VocabParallelEmbedding(10, HIDDEN, group, torch.float32, norm_eps=1e-2)})
            read(holder, nn.ModuleDict({"table": theirs}))
            parts.append(holder["table"].weight)
        torch.testing.assert_close(torch.cat(parts), expected)


@torch.inference_mode()
def test_residuals_by_gates_of_a_layer_s_own() -> None:
    theirs = drawn(MuseSparkResidualGate(MuseSparkTextConfig(**SIZES | {"rope_parameters": None})))
    ours = ResidualGate(HIDDEN, 0.3, "gate_of")
    ours.targets("")["gate_of.gate"](InMemory(theirs.gate))
    residual, more = noise(5, HIDDEN), noise(5, HIDDEN, seed=2)
    torch.testing.assert_close(sum(ours(residual, more)), theirs(residual, more))


@torch.inference_mode()
def test_ranks_share_the_heads_of_a_gated_delta_net() -> None:
    sizes = {"key_heads": 4, "value_heads": 8, "key_dim": 16, "value_dim": 32}
    names = {
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 32,
    }
    settings = Qwen3_5TextConfig(**{**SIZES, **names, "layer_types": ["linear_attention"]})
    theirs = drawn(Qwen3_5GatedDeltaNet(settings, 0))
    x = noise(TOKENS, HIDDEN)
    expected = theirs(x.unsqueeze(0))[0]
    shape = replace(config(), delta_net=DeltaNetConfig(**sizes, width=4))
    for size in (1, 2, 4):
        parts = []
        for rank in range(size):
            ours = GatedDeltaNet(shape, TensorGroup(rank, size), torch.float32)
            read(ours, theirs)
            batch = ours.state_backend().batch([Segment(0, TOKENS, 0, fresh=True)])
            mixed = ours.mix(ours.project(x, (x, x)), ours.cache_spec().new_cache(1, CPU), batch)
            parts.append(ours.out(mixed))
        torch.testing.assert_close(sum(parts), expected, rtol=1e-4, atol=1e-5)
