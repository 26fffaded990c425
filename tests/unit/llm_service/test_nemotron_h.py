"""Layers that are one part alone, as Nemotron-H has them: transformers' logits, and shares of ranks that sum up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from testkit import reference as _reference  # isort: skip  # noqa: F401 - before transformers
from transformers import NemotronHConfig, NemotronHForCausalLM

from common.checkpoints.checkpoint import CheckpointError
from common.hf.small_models import redraw_corrections
from llm_service.families.family import FeedForwardKind, Mixer
from llm_service.families.nemotron_h import NEMOTRON_H
from llm_service.layers.attention.backend import PagedChunk
from llm_service.layers.attention.torch_backend import TorchBackend
from llm_service.layers.cache_spec import PagedKV, Segment, cache_shapes
from llm_service.layers.mamba2.layer import Mamba2
from llm_service.layers.moe.sparse_mlp import SparseMLP
from llm_service.layers.tensor_parallel import ALONE, TensorGroup
from llm_service.model_config.text import TextConfig
from llm_service.models.decoder import Decoder
from llm_service.models.filling import InMemory, fill_plain, targets

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "layers_block_type": ["moe", "linear_attention", "full_attention", "mlp", "linear_attention"],
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 16,
    "n_routed_experts": 4,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 56,
    "moe_latent_size": 32,
    "routed_scaling_factor": 2.5,
}


@pytest.fixture(scope="module")
def model() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = NemotronHForCausalLM(NemotronHConfig(**SIZES)).eval().requires_grad_(requires_grad=False)
    generator = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        if parameter.dim() > 1:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    redraw_corrections(made, generator)
    return made


def shape_of(**changed: Any) -> TextConfig:
    return TextConfig.of({**NemotronHConfig(**SIZES).to_dict(), **changed})


def named(model: Any) -> dict[str, Tensor]:
    """The model's tensors, by the decoder's names."""
    outer = {"model.embeddings.weight": "embed_tokens.weight", "lm_head.weight": "lm_head.weight"}
    tensors = model.state_dict().items()
    return {outer.get(name) or NEMOTRON_H.own_name(name.removeprefix("model.")): tensor for name, tensor in tensors}


def test_a_decoder_of_single_parts_has_transformers_logits(model: Any) -> None:
    decoder = fill_plain(Decoder(shape_of(), ALONE, torch.float32, CPU), named(model).items())
    ids = torch.arange(70) * 7 % 96
    specs = [mixer.cache_spec() for mixer in decoder.mixers()]
    assert [isinstance(spec, PagedKV) for spec in specs] == [False, True, False]
    ((paged, shape),) = cache_shapes(specs, 5, 16).items()
    chunks = [PagedChunk(0, 70, list(range(5)))]
    attention, states = TorchBackend(shape, CPU).batch(chunks), Segment.of(chunks, [0])
    batches = [
        attention if spec == paged else mixer.state_backend().batch(states)
        for mixer, spec in zip(decoder.mixers(), specs, strict=True)
    ]
    caches = [
        spec.new_cache(1, CPU) if not isinstance(spec, PagedKV) else shape.new_cache(torch.float32, CPU)[0]
        for spec in specs
    ]
    places = torch.tensor([3, 69])
    with torch.inference_mode():
        given = decoder.embed_tokens(ids), torch.arange(70).expand(3, -1), caches, batches, None
        found = decoder.logits(decoder(*given, places))
        expected = model(ids.unsqueeze(0), use_cache=False).logits[0, places]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_ranks_shares_of_mamba2_and_of_experts_sum_up(model: Any) -> None:
    x, tensors = torch.randn(9, 48, generator=torch.Generator().manual_seed(1)), named(model)
    for prefix, make in (("layers.1.mixer.", mixed), ("layers.0.mlp.", experts)):
        own = {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}
        whole = make(ALONE, own, x)
        for alone in (False, True):
            parts = [make(TensorGroup(rank, 2, expert_parallel=alone), own, x) for rank in range(2)]
            torch.testing.assert_close(parts[0] + parts[1], whole, rtol=1e-4, atol=1e-5)


def mixed(group: TensorGroup, tensors: dict[str, Tensor], x: Tensor) -> Tensor:
    mixer = filled(Mamba2(shape_of(), group, torch.float32), tensors)
    batch = mixer.state_backend().batch([Segment(0, len(x), 0, fresh=True)])
    inputs = mixer.project(x, (x, x))
    return mixer.join(mixer.mix(inputs, mixer.cache_spec().new_cache(1, CPU), batch))


def experts(group: TensorGroup, tensors: dict[str, Tensor], x: Tensor) -> Tensor:
    shape = shape_of()
    made = SparseMLP(
        *(shape.experts, shape.experts_per_token, shape.hidden_size, shape.expert_size, group, torch.float32),
        shared_inner=shape.shared_expert_size,
        shared_gate=False,
        grouped=shape.grouped,
        has_gates=False,
        latent=shape.latent_size,
    )
    out: Tensor = filled(made, tensors)(x)
    return out


def filled(part: Any, tensors: dict[str, Tensor]) -> Any:
    for name, (_, place) in targets(part):
        if name in tensors:  # of experts either the stacked ones or all others
            place(InMemory(tensors[name]))
    return part


def test_a_layer_is_what_its_type_says() -> None:
    kinds = [shape_of().layer_kind(layer) for layer in range(5)]
    assert [kind.mixer for kind in kinds[:4]] == [Mixer.NONE, Mixer.MAMBA2, Mixer.ATTENTION, Mixer.NONE]
    parts = [FeedForwardKind.EXPERTS, FeedForwardKind.NONE, FeedForwardKind.NONE, FeedForwardKind.DENSE]
    assert [kind.feed_forward for kind in kinds[:4]] == parts


@pytest.mark.parametrize("changed", [{"use_bias": True}, {"mlp_bias": True}, {"mamba_hidden_act": "gelu"}], ids=str)
def test_what_is_not_served_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="not supported"):
        shape_of(**changed)
