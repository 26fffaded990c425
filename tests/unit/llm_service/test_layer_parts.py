"""Parts of decoder layers that some families have, each against transformers' own module with the same weights."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llm_service.families.family import Family, Mixer
from llm_service.families.gates import BoundedGates, RaisedGates
from llm_service.families.hunyuan import HUNYUAN_TEXT
from llm_service.families.muse import MUSE_SPARK_TEXT
from llm_service.layers.attention.backend import CacheShape, PagedChunk
from llm_service.layers.attention.torch_backend import TorchBackend
from llm_service.layers.cache_spec import PagedKV, Segment
from llm_service.layers.experts import Experts, SparseMLP
from llm_service.layers.gated_delta_net import GatedDeltaNet
from llm_service.layers.gated_residual import ResidualGate
from llm_service.layers.group import ALONE, TensorGroup
from llm_service.layers.late_normed_attention import LateNormedAttention
from llm_service.layers.linear import Stored, VocabularyEmbedding
from llm_service.layers.mixer import Rotary
from llm_service.layers.mlp import MLP
from llm_service.layers.modality_experts import ModalityExperts
from llm_service.layers.ops import MultimodalRotary, RMSNorm
from llm_service.layers.pooled_experts import PooledExperts
from llm_service.layers.rotaries import rotary_of
from llm_service.layers.scaled_experts import InputScaledMLP
from llm_service.layers.self_attention import SelfAttention, gates_last
from llm_service.models.config import TextConfig
from llm_service.models.experts_config import GroupedExperts
from llm_service.models.feed_forward_config import gates_of
from llm_service.models.loader import InMemory, targets
from llm_service.models.rotary_config import RotaryConfig, Tempering
from llm_service.models.state_config import DeltaNetConfig
from tests import reference  # noqa: F401 - makes the library importable beside a CPU torch
from tests.parity.test_library_ranks import on_ranks

from transformers.models.qwen3_5.modeling_qwen3_5 import (  # isort: skip
    Qwen3_5Attention,
    Qwen3_5GatedDeltaNet,
    Qwen3_5RMSNorm,
    Qwen3_5TextConfig,
    Qwen3_5TextRotaryEmbedding,
)
from transformers.models.ernie4_5_vl_moe.modeling_ernie4_5_vl_moe import (  # isort: skip
    Ernie4_5_VLMoeMoeBlock,
    Ernie4_5_VLMoeTextConfig,
)
from transformers.models.hunyuan_vl.modeling_hunyuan_vl import (  # isort: skip
    HunYuanVLDenseV1Attention,
    HunYuanVLRotaryEmbedding,
    HunYuanVLTextConfig,
)
from transformers.models.muse_spark.modeling_muse_spark import (  # isort: skip
    MuseSparkMoE,
    MuseSparkResidualGate,
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
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLDenseMLP  # isort: skip
from transformers.models.muse_glimmer.modeling_muse_glimmer import (  # isort: skip
    MuseGlimmerTextAttention,
    MuseGlimmerTextConfig,
    MuseGlimmerTextNormedEmbedding,
)
from transformers.models.step3p7.modeling_step3p7 import Step3p7MLP  # isort: skip
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import (  # isort: skip
    Qwen3_5MoeSparseMoeBlock,
    Qwen3_5MoeTextConfig,
)

CPU = torch.device("cpu")
HIDDEN, HEADS, KV_HEADS, HEAD, TOKENS = 64, 4, 2, 32, 40
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "num_hidden_layers": 1,
    "layer_types": ["full_attention"],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
FAMILY = Family({}, qk_norm=True, output_gate=True, zero_centred_norms=True, rotary_share=0.25)


def config() -> TextConfig:
    return TextConfig(
        family=FAMILY,
        vocab_size=8,
        hidden_size=HIDDEN,
        intermediate_size=96,
        mixers=(Mixer.ATTENTION,),
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=HEAD,
        norm_eps=1e-6,
        rotary=RotaryConfig(HEAD // 4, 10000.0, (2, 1, 1), interleaved=True),
        tied=False,
        max_position=100,
        qk_norm=True,
    )


def drawn(module: nn.Module, seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    return module.eval()


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def read(ours: nn.Module, theirs: nn.Module) -> None:
    """All of their weights, by the names under which they are saved."""
    stored: dict[str, Stored] = {name: InMemory(tensor) for name, tensor in theirs.state_dict().items()}
    placed = {name: place for name, (_, place) in targets(ours)}
    for name, tensor in stored.items():
        placed.pop(name)(tensor)
    single = (".experts.", "gate.weight", ".moe_statics.")
    assert all(any(part in f".{name}" for part in single) for name in placed), "all but names of other layouts"


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
def test_attention_with_gates_and_a_part_of_each_head_rotated() -> None:
    settings = Qwen3_5TextConfig(**SIZES, attn_implementation="eager")
    settings._attn_implementation = "eager"
    theirs = drawn(Qwen3_5Attention(settings, 0))
    kind = config().layer_kind(0)
    ours = SelfAttention(kind, config(), ALONE, torch.float32)
    read(ours, theirs)
    x = noise(TOKENS, HIDDEN)
    positions = torch.stack([torch.arange(TOKENS), torch.arange(TOKENS) // 2, torch.arange(TOKENS) % 7])
    angles = Qwen3_5TextRotaryEmbedding(settings)(x, positions.unsqueeze(1))
    mask = torch.full((TOKENS, TOKENS), -torch.inf).triu(1)[None, None]
    expected = theirs(x.unsqueeze(0), angles, mask)[0][0]
    rotary = MultimodalRotary(HEAD // 4, 10000.0, (2, 1, 1), interleaved=True, device=CPU).tables(positions, x.dtype)
    torch.testing.assert_close(ours.join(attended(ours, x, rotary)), expected, rtol=1e-4, atol=1e-5)
    ranks = [SelfAttention(kind, config(), TensorGroup(rank, 2), torch.float32) for rank in range(2)]
    for rank in ranks:
        read(rank, theirs)
    parts = [rank.o(attended(rank, x, rotary)) for rank in ranks]
    torch.testing.assert_close(sum(parts), expected, rtol=1e-4, atol=1e-5)


def attended(attention: SelfAttention, x: Tensor, rotary: Rotary) -> Tensor:
    spec = attention.cache_spec()
    assert isinstance(spec, PagedKV)
    shape = CacheShape(1, 3, 16, attention.heads, attention.kv_heads, HEAD, spec.kind)
    batch = TorchBackend(shape, CPU).batch([PagedChunk(0, TOKENS, [0, 1, 2])])
    return attention.mix(attention.project(x, rotary), shape.new_cache(torch.float32, CPU)[0], batch)


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
    ours = SparseMLP(6, 2, HIDDEN, 24, ALONE, torch.float32, shared_inner=48)
    read(ours, theirs)
    x = noise(9, HIDDEN)
    expected = theirs(x.unsqueeze(0))[0]
    torch.testing.assert_close(ours(x), expected, rtol=1e-4, atol=1e-5)
    ranks = [SparseMLP(6, 2, HIDDEN, 24, TensorGroup(rank, 2), torch.float32, shared_inner=48) for rank in range(2)]
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
    for ranks in (1, 2):
        parts = []
        for rank in range(ranks):
            group = TensorGroup(rank, ranks) if ranks > 1 else ALONE
            given = 6, per_token, HIDDEN, 24, group, torch.float32
            ours = InputScaledMLP(*given, shared_inner=24, shared_gate=False)
            read(ours, stored)
            parts.append(ours(x))
        torch.testing.assert_close(sum(parts), expected, rtol=1e-4, atol=1e-5)


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
            holder = nn.ModuleDict({"table": VocabularyEmbedding(10, HIDDEN, group, torch.float32, norm_eps=1e-2)})
            read(holder, nn.ModuleDict({"table": theirs}))
            parts.append(holder["table"].weight)
        torch.testing.assert_close(torch.cat(parts), expected)


@torch.inference_mode()
def test_gates_of_heads_from_a_projection_of_their_own() -> None:
    """Beside norms of heads without weights."""
    settings = MuseGlimmerTextConfig(**SIZES)
    settings._attn_implementation = "eager"
    theirs = drawn(MuseGlimmerTextAttention(settings, 0))
    family = Family({}, qk_norm=True, plain_head_norms=True, output_gate=True, gates_apart=True)
    scale = settings.qk_scale_factor / HEAD**0.5
    shape = replace(config(), family=family, norm_eps=1e-5, attention_scale=scale)
    x, angles = noise(TOKENS, HIDDEN), noise(TOKENS, HEAD // 2, seed=2).repeat(1, 2)
    mask = torch.full((TOKENS, TOKENS), -torch.inf).triu(1)[None, None]
    expected = theirs(x.unsqueeze(0), (angles.cos()[None], angles.sin()[None]), mask)[0][0]
    parts = []
    for rank in range(2):
        ours = SelfAttention(shape.layer_kind(0), shape, TensorGroup(rank, 2), torch.float32)
        read(ours, theirs)
        parts.append(ours.o(attended(ours, x, (angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)))))
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
def test_heads_that_are_normed_once_they_are_rotated_by_four_axes() -> None:
    """Each number of a head, not each pair, has an axis."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 50.0, "mrope_section": [5, 4, 4, 3]}
    settings = HunYuanVLTextConfig(**SIZES | {"rope_parameters": rope, "layer_types": None})
    settings._attn_implementation = "eager"
    theirs = drawn(HunYuanVLDenseV1Attention(settings, 0))
    family = replace(HUNYUAN_TEXT, text_defaults={})
    turns = RotaryConfig.of(rope, {}, family, HEAD, 100, 100)
    assert turns.own_sections == (5, 4, 4, 3)
    shape = replace(config(), family=family, norm_eps=settings.rms_norm_eps, rotary=turns)
    positions = torch.stack([torch.arange(TOKENS) // (axis + 1) + axis for axis in range(4)])
    x, mask = noise(TOKENS, HIDDEN), torch.full((TOKENS, TOKENS), -torch.inf).triu(1)[None, None]
    angles = HunYuanVLRotaryEmbedding(settings)(x, positions.unsqueeze(1))
    expected = theirs(x.unsqueeze(0), angles, mask)[0][0]
    tables = rotary_of(turns, CPU).tables(positions, x.dtype)
    stored = {family.own_name(name): each for name, each in theirs.state_dict().items()}
    parts = []
    for rank in range(2):
        ours = LateNormedAttention(shape.layer_kind(0), shape, TensorGroup(rank, 2), torch.float32)
        for name, (_, place) in targets(ours):
            place(InMemory(stored[name]))
        parts.append(ours.o(attended(ours, x, tables)))
    torch.testing.assert_close(sum(parts), expected, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_experts_of_narrower_rows_whose_outputs_are_normed() -> None:
    """Over ranks they are normed once they are whole."""
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
        made = PooledExperts(shape, group, torch.float32)
        places = {each: place for each, (_, place) in targets(made)}
        for each, tensor in stored.items():
            places[each](InMemory(tensor))
        return made(x)

    for found in (ours(ALONE), *on_ranks(2, ours)):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_residuals_by_gates_of_a_layer_s_own() -> None:
    theirs = drawn(MuseSparkResidualGate(MuseSparkTextConfig(**SIZES | {"rope_parameters": None})))
    ours = ResidualGate(HIDDEN, 0.3, "gate_of")
    ours.targets("")["gate_of.gate"](InMemory(theirs.gate))
    residual, more = noise(5, HIDDEN), noise(5, HIDDEN, seed=2)
    torch.testing.assert_close(sum(ours(residual, more)), theirs(residual, more))


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
    parts = []
    for rank in range(2):
        ours = ModalityExperts(modality_config(), TensorGroup(rank, 2), torch.float32)
        read(ours, theirs)
        parts.append(ours(x, media.bool()))
    torch.testing.assert_close(sum(parts), expected, rtol=1e-4, atol=1e-5)
    monkeypatch.setattr(ModalityExperts, "_apart", ModalityExperts._both)
    whole = ModalityExperts(modality_config(), ALONE, torch.float32)
    read(whole, theirs)
    torch.testing.assert_close(whole(x, media.bool()), expected, rtol=1e-4, atol=1e-5)


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
    ours, wanted = (ModalityExperts(modality_config(), ALONE, torch.float32) for _ in range(2))
    places = {name: place for name, (_, place) in targets(ours)}
    for name, each in published.items():
        places[name](InMemory(each))
    read(wanted, theirs)
    assert ours.routers.whole()
    assert ours.media.experts.whole()
    for one, other in zip(ours.parameters(), wanted.parameters(), strict=True):
        assert torch.equal(one, other)


def test_queries_grow_from_a_place_on() -> None:
    """As Llama 4 counts, whose first token is the first, and as Ministral 3 does, whose first is none."""
    places = torch.tensor([0, 14, 15, 16, 31])
    grown = [1 + 0.5 * math.log(1 + number) for number in (0, 0, 1, 1, 2)]
    torch.testing.assert_close(Tempering(16, 0.5).factors(places), torch.tensor(grown))
    grown = [1 + 0.5 * math.log(1 + number) for number in (0, 0, 0, 1, 1)]
    torch.testing.assert_close(Tempering(16, 0.5, ahead=0.0).factors(places), torch.tensor(grown))


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
    for ranks in (1, 2):
        parts = []
        for rank in range(ranks):
            group = TensorGroup(rank, ranks) if ranks > 1 else ALONE
            ours = SparseMLP(
                8, 3, HIDDEN, 24, group, torch.float32, shared_inner=48, shared_gate=False, grouped=grouped
            )
            read(ours, theirs)
            parts.append(ours(x))
        torch.testing.assert_close(sum(parts), expected, rtol=1e-4, atol=1e-5)


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


def test_gates_lie_behind_what_is_attended_with() -> None:
    """Rows as a checkpoint has them: query and gate of each head, keys, values."""
    rows = torch.tensor([10, 11, 50, 51, 20, 21, 60, 61, 1, 2, 3, 4])
    placed = torch.empty_like(rows)
    placed[gates_last(2, 1, 2)] = rows
    assert placed.tolist() == [10, 11, 20, 21, 1, 2, 3, 4, 50, 51, 60, 61]
