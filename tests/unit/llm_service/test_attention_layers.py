"""Attention with gates, and norms before or behind rotation: outputs are those of transformers, of the same weights."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from llm_service.families.family import AttentionRules, Family, OutputGate, QkNorm
from llm_service.families.hunyuan import HUNYUAN_TEXT
from llm_service.layers.attention.backend import CacheShape, PagedChunk
from llm_service.layers.attention.torch_backend import TorchBackend
from llm_service.layers.cache_spec import PagedKV
from llm_service.layers.mixer import Rotary
from llm_service.layers.rotary.multimodal import MultimodalRotary
from llm_service.layers.rotary.tables import rotary_of
from llm_service.layers.self_attention.layer import SelfAttention, gates_last
from llm_service.layers.self_attention.qk_norms import LateNormedAttention
from llm_service.layers.tensor_parallel import ALONE, TensorGroup
from llm_service.model_config.rotary import RotaryConfig, Tempering
from llm_service.models.filling import InMemory, targets
from testkit import reference  # noqa: F401 - makes transformers importable beside a CPU torch
from tests.layer_cases import CPU, HEAD, HIDDEN, SIZES, TOKENS, config, drawn, noise, read

from transformers.models.qwen3_5.modeling_qwen3_5 import (  # isort: skip
    Qwen3_5Attention,
    Qwen3_5TextConfig,
    Qwen3_5TextRotaryEmbedding,
)
from transformers.models.hunyuan_vl.modeling_hunyuan_vl import (  # isort: skip
    HunYuanVLDenseV1Attention,
    HunYuanVLRotaryEmbedding,
    HunYuanVLTextConfig,
)
from transformers.models.muse_glimmer.modeling_muse_glimmer import (  # isort: skip
    MuseGlimmerTextAttention,
    MuseGlimmerTextConfig,
)


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
def test_gates_of_heads_from_a_projection_of_their_own() -> None:
    """Beside norms of heads without weights."""
    settings = MuseGlimmerTextConfig(**SIZES)
    settings._attn_implementation = "eager"
    theirs = drawn(MuseGlimmerTextAttention(settings, 0))
    family = Family({}, attention=AttentionRules(qk_norm=QkNorm(weights=False), output_gate=OutputGate.SEPARATE))
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


@torch.inference_mode()
def test_heads_that_are_normed_once_they_are_rotated_by_four_axes() -> None:
    """Each number of a head, not each pair, has an axis."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 50.0, "mrope_section": [5, 4, 4, 3]}
    settings = HunYuanVLTextConfig(**SIZES | {"rope_parameters": rope, "layer_types": None})
    settings._attn_implementation = "eager"
    theirs = drawn(HunYuanVLDenseV1Attention(settings, 0))
    family = replace(HUNYUAN_TEXT, checkpoint=replace(HUNYUAN_TEXT.checkpoint, text_defaults={}))
    turns = RotaryConfig.of(rope, {}, family, HEAD, 100, 100)
    assert turns.own_sections == (5, 4, 4, 3)
    shape = replace(config(), family=family, norm_eps=settings.rms_norm_eps, rotary=turns)
    positions = torch.stack([torch.arange(TOKENS) // (axis + 1) + axis for axis in range(4)])
    x, mask = noise(TOKENS, HIDDEN), torch.full((TOKENS, TOKENS), -torch.inf).triu(1)[None, None]
    angles = HunYuanVLRotaryEmbedding(settings)(x, positions.unsqueeze(1))
    expected = theirs(x.unsqueeze(0), angles, mask)[0][0]
    tables = rotary_of(turns, CPU).tables(positions, x.dtype)
    assert all(table.is_contiguous() for table in tables), "kernels read them by their places"
    stored = {family.own_name(name): each for name, each in theirs.state_dict().items()}
    parts = []
    for rank in range(2):
        ours = LateNormedAttention(shape.layer_kind(0), shape, TensorGroup(rank, 2), torch.float32)
        for name, (_, place) in targets(ours):
            place(InMemory(stored[name]))
        parts.append(ours.o(attended(ours, x, tables)))
    torch.testing.assert_close(sum(parts), expected, rtol=1e-4, atol=1e-5)


def test_queries_grow_from_a_place_on() -> None:
    """As Llama 4 counts, whose first token is the first, and as Ministral 3 does, whose first is none."""
    places = torch.tensor([0, 14, 15, 16, 31])
    grown = [1 + 0.5 * math.log(1 + number) for number in (0, 0, 1, 1, 2)]
    torch.testing.assert_close(Tempering(16, 0.5).factors(places), torch.tensor(grown))
    grown = [1 + 0.5 * math.log(1 + number) for number in (0, 0, 0, 1, 1)]
    torch.testing.assert_close(Tempering(16, 0.5, ahead=0.0).factors(places), torch.tensor(grown))


def test_gates_lie_behind_what_is_attended_with() -> None:
    """Rows as a checkpoint has them: query and gate of each head, keys, values."""
    rows = torch.tensor([10, 11, 50, 51, 20, 21, 60, 61, 1, 2, 3, 4])
    placed = torch.empty_like(rows)
    placed[gates_last(2, 1, 2)] = rows
    assert placed.tolist() == [10, 11, 20, 21, 1, 2, 3, 4, 50, 51, 60, 61]
