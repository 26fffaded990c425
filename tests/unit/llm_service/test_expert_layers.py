"""Experts, alone, beside others and over ranks: outputs are those of transformers, of the same weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from llm_service.families.muse import MUSE_SPARK_TEXT
from llm_service.layers.moe.experts import Experts
from llm_service.layers.moe.input_scaled import InputScaledMLP
from llm_service.layers.moe.latent_experts import LatentExperts
from llm_service.layers.moe.modality_experts import ModalityExperts
from llm_service.layers.moe.sparse_mlp import SparseMLP
from llm_service.layers.tensor_parallel import ALONE, TensorGroup
from llm_service.model_config.experts import GroupedExperts
from llm_service.model_config.text import TextConfig
from llm_service.models.filling import InMemory, targets
from testkit import reference  # noqa: F401 - makes transformers importable beside a CPU torch
from tests.layer_cases import HIDDEN, SIZES, config, drawn, noise, read
from tests.parity.thread_ranks import on_ranks

from transformers.models.ernie4_5_vl_moe.modeling_ernie4_5_vl_moe import (  # isort: skip
    Ernie4_5_VLMoeMoeBlock,
    Ernie4_5_VLMoeTextConfig,
)
from transformers.models.muse_spark.modeling_muse_spark import (  # isort: skip
    MuseSparkMoE,
    MuseSparkTextConfig,
)
from transformers.models.glm4v_moe.modeling_glm4v_moe import (  # isort: skip
    Glm4vMoeTextConfig,
    Glm4vMoeTextMoE,
)
from transformers.models.llama4.modeling_llama4 import (  # isort: skip
    Llama4TextConfig,
    Llama4TextMoe,
)
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import (  # isort: skip
    Qwen3_5MoeSparseMoeBlock,
    Qwen3_5MoeTextConfig,
)


GROUPS = (
    [ALONE],
    *(
        [TensorGroup(rank, size, expert_parallel=whole) for rank in range(size)]
        for size in (2,)
        for whole in (False, True)
    ),
)
"""Of one rank; of some that have a part of each expert; of some that have some experts each."""


@torch.inference_mode()
def test_experts_with_a_shared_one_beside_them() -> None:
    settings = Qwen3_5MoeTextConfig(
        **SIZES,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=48,
    )
    theirs = drawn(Qwen3_5MoeSparseMoeBlock(settings))
    x = noise(9, HIDDEN)
    expected = theirs(x.unsqueeze(0))[0]
    for groups in GROUPS:
        ranks = [SparseMLP(6, 2, HIDDEN, 24, group, torch.float32, shared_inner=48) for group in groups]
        for rank in ranks:
            read(rank, theirs)
        torch.testing.assert_close(sum(rank(x) for rank in ranks), expected, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize("per_token", [1, 2])
def test_experts_whose_inputs_are_scaled(per_token: int) -> None:
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 24, "num_attention_heads": 4}
    theirs = drawn(Llama4TextMoe(Llama4TextConfig(**sizes, num_local_experts=6, num_experts_per_tok=per_token)))
    names = {"router": "gate", "shared_expert": "shared_experts"}
    stored = nn.ModuleDict({names.get(name, name): part for name, part in theirs.named_children()})
    x = noise(9, HIDDEN)
    expected = theirs(x.unsqueeze(0))[0]
    for groups in GROUPS:
        parts = []
        for group in groups:
            given = 6, per_token, HIDDEN, 24, group, torch.float32
            ours = InputScaledMLP(*given, shared_inner=24, shared_gate=False)
            read(ours, stored)
            parts.append(ours(x))
        torch.testing.assert_close(sum(parts), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("inputs_first", [False, True])
def test_stacked_experts_are_read_as_they_are_said_to_lie_whatever_their_shape(*, inputs_first: bool) -> None:
    """As many numbers go in as come out, twice over for gates, so that no shape tells."""
    gates, down = noise(3, HIDDEN, HIDDEN), noise(3, HIDDEN, HIDDEN // 2, seed=2)
    stored = {"gate_up_proj": gates, "down_proj": down}
    if inputs_first:
        stored = {name: each.transpose(1, 2) for name, each in stored.items()}
    ours = Experts(3, HIDDEN, HIDDEN // 2, ALONE, torch.float32, inputs_first=inputs_first)
    places = ours.targets("experts")
    for name, each in stored.items():
        places[f"experts.{name}"](InMemory(each))
    assert torch.equal(ours.gate_up_proj, gates)
    assert torch.equal(ours.down_proj, down)


def test_stacked_experts_with_inputs_first_are_told_by_their_shape() -> None:
    """As Qwen3-VL's published ones lie."""
    gates, down = noise(3, 48, HIDDEN), noise(3, HIDDEN, 24, seed=2)
    ours = Experts(3, HIDDEN, 24, ALONE, torch.float32)
    places = ours.targets("experts")
    for name, each in {"gate_up_proj": gates, "down_proj": down}.items():
        places[f"experts.{name}"](InMemory(each.transpose(1, 2)))
    assert torch.equal(ours.gate_up_proj, gates)
    assert torch.equal(ours.down_proj, down)


def test_stacked_experts_may_have_gates_and_what_they_open_apart() -> None:
    whole = Experts(3, HIDDEN, 24, ALONE, torch.float32)
    share = Experts(3, HIDDEN, 24, TensorGroup(1, 2), torch.float32)
    gates, down = noise(3, 48, HIDDEN), noise(3, HIDDEN, 24, seed=2)
    for each in (whole, share):
        places = each.targets("")
        halves = zip(("gate_proj", "up_proj"), gates.split(24, dim=1), strict=True)
        for name, half in halves:
            places[f".{name}"](InMemory(half))
        assert not each.whole()
        places[".down_proj"](InMemory(down))
        assert each.whole()
    assert torch.equal(whole.gate_up_proj, gates)
    assert torch.equal(share.gate_up_proj, torch.cat([gates[:, 12:24], gates[:, 36:]], dim=1))


@torch.inference_mode()
def test_experts_of_narrower_rows_whose_outputs_are_normed() -> None:
    """Over ranks they are normed once they are whole, which an expert's are where it is."""
    sizes = {"num_local_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "moe_hidden_size": 40}
    settings = MuseSparkTextConfig(**SIZES | {"rope_parameters": None}, **sizes, routed_scaling_factor=1.5)
    theirs = drawn(MuseSparkMoE(settings))
    theirs.gate.e_score_correction_bias.copy_(0.5 * noise(6, seed=3))
    shape = replace(
        config(),
        norm_eps=settings.rms_norm_eps,
        out_eps=settings.post_norm_eps,
        grouped=GroupedExperts(1, 1, 1.5),
        experts=6,
        experts_per_token=2,
        expert_size=24,
        pooled_size=40,
        router_multiplier=settings.output_multiplier,
    )
    x, name = noise(9, HIDDEN), MUSE_SPARK_TEXT.own_name
    expected = theirs(x.unsqueeze(0))[0]
    stored = {name(f"mlp.{each}").removeprefix("mlp."): tensor for each, tensor in theirs.state_dict().items()}

    def ours(group: TensorGroup) -> Tensor:
        made = LatentExperts(shape, group, torch.float32)
        places = {each: place for each, (_, place) in targets(made)}
        for each, tensor in stored.items():
            places[each](InMemory(tensor))
        return made(x)

    for found in (ours(ALONE), *on_ranks(2, ours), *on_ranks(3, ours, expert_parallel=True)):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def modality_config() -> TextConfig:
    sizes = {"experts": 6, "experts_per_token": 2, "expert_size": 24, "media_expert_size": 8, "shared_expert_size": 48}
    return replace(config(), least_weight=1e-12, **sizes)


def modality_experts() -> nn.Module:
    sizes = {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": [24, 8], "moe_num_shared_experts": 2}
    settings = Ernie4_5_VLMoeTextConfig(**SIZES | {"rope_parameters": None}, **sizes)
    theirs = drawn(Ernie4_5_VLMoeMoeBlock(settings))
    for part in (theirs.text_moe, theirs.vision_moe):
        part.gate.moe_statics.e_score_correction_bias.copy_(0.3 * noise(1, 6, seed=3))
    return theirs


@torch.inference_mode()
@pytest.mark.parametrize("kinds", [[0, 1, 1, 0, 1], [0] * 5, [1] * 5], ids=["both", "text", "media"])
def test_experts_by_modality(kinds: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU all tokens go through both."""
    theirs, x, media = modality_experts(), noise(5, HIDDEN), torch.tensor(kinds)
    expected = theirs(x.unsqueeze(0), media.unsqueeze(0))[0][0]

    def check(groups: list[TensorGroup]) -> None:
        ranks = [ModalityExperts(modality_config(), group, torch.float32) for group in groups]
        for rank in ranks:
            read(rank, theirs)
        torch.testing.assert_close(sum(rank(x, media.bool()) for rank in ranks), expected, rtol=1e-4, atol=1e-5)

    for groups in GROUPS:
        check(groups)
    monkeypatch.setattr(ModalityExperts, "_apart", ModalityExperts._both)
    for groups in GROUPS:
        check(groups)


@torch.inference_mode()
def test_experts_by_modality_are_read_as_they_are_published() -> None:
    theirs = modality_experts()
    stored = theirs.state_dict()
    gates = [stored[f"{of}.gate.weight"].t() for of in ("text_moe", "vision_moe")]
    published = {"gate.weight": gates[0], "gate.weight_1": gates[1]}
    bias = "moe_statics.e_score_correction_bias"
    published[bias] = torch.cat([stored[f"{of}.gate.{bias}"] for of in ("text_moe", "vision_moe")])
    for first, of in ((0, "text_moe"), (6, "vision_moe")):
        for number in range(6):
            gate, up = stored[f"{of}.experts.gate_up_proj"][number].chunk(2)
            matrices = {"gate_proj": gate, "up_proj": up, "down_proj": stored[f"{of}.experts.down_proj"][number]}
            published |= {f"experts.{first + number}.{kind}.weight": each for kind, each in matrices.items()}
    published |= {name: each for name, each in stored.items() if name.startswith("shared_experts")}
    for group in (ALONE, TensorGroup(1, 2, expert_parallel=True)):
        ours, wanted = (ModalityExperts(modality_config(), group, torch.float32) for _ in range(2))
        places = {name: place for name, (_, place) in targets(ours)}
        for name, each in published.items():
            places[name](InMemory(each))
        read(wanted, theirs)
        assert ours.routers.whole()
        assert ours.media.experts.whole()
        for one, other in zip(ours.parameters(), wanted.parameters(), strict=True):
            assert torch.equal(one, other)


@torch.inference_mode()
@pytest.mark.parametrize(("groups", "kept"), [(4, 2), (1, 1)], ids=["in four groups", "in one group"])
def test_experts_in_groups(groups: int, kept: int) -> None:
    settings = Glm4vMoeTextConfig(
        hidden_size=HIDDEN,
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        n_shared_experts=2,
        n_group=groups,
        topk_group=kept,
        routed_scaling_factor=2.5,
    )
    theirs = drawn(Glm4vMoeTextMoE(settings))
    theirs.gate.e_score_correction_bias.copy_(0.5 * noise(8, seed=3))
    grouped = GroupedExperts(groups, kept, 2.5)
    x = noise(9, HIDDEN)
    expected = theirs(x.unsqueeze(0))[0]
    for groups in GROUPS:
        parts = []
        for group in groups:
            ours = SparseMLP(
                8, 3, HIDDEN, 24, group, torch.float32, shared_inner=48, shared_gate=False, grouped=grouped
            )
            read(ours, theirs)
            parts.append(ours(x))
        torch.testing.assert_close(sum(parts), expected, rtol=1e-4, atol=1e-5)
