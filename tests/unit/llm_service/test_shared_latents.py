"""Latent attention whose layers share latents and what an index chose, rotated or not, as in Mistral Large 4: the
layers against transformers' own with the same weights, whatever the chunks, the company, and the way of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from common.checkpoints.checkpoint import CheckpointError
from llm_service.layers.attention import general_backend
from llm_service.layers.attention.backend import PagedChunk
from llm_service.layers.attention.metadata import AttentionMetadata
from llm_service.layers.cache_spec import IndexedCache, IndexedKV, block_bytes
from llm_service.layers.gpu.index_kernels import score_tokens
from llm_service.layers.mixer import HandedOn
from llm_service.layers.mla.sparse import SparseLatentAttention
from llm_service.layers.moe.routers import GroupedRouter
from llm_service.layers.rotary.tables import rotary_of
from llm_service.layers.sparse_attention import token_decodes
from llm_service.layers.sparse_attention.token_decodes import ScoreTokens, score_by_torch
from llm_service.layers.tensor_parallel import ALONE, TensorGroup
from llm_service.model_config.experts import GroupedExperts
from llm_service.model_config.text import TextConfig
from llm_service.models.filling import InMemory
from llm_service.worker.adapters import shapes_of
from llm_service.worker.caches import Caches
from testkit import reference  # noqa: F401 - makes transformers importable beside a CPU torch
from testkit.plain_attention import PlainTables
from tests.layer_cases import drawn, noise, read

from transformers.models.mistral_large4.modeling_mistral_large4 import (  # isort: skip
    MistralLarge4TextAttention,
    MistralLarge4TextConfig,
    MistralLarge4TextRotaryEmbedding,
    MistralLarge4TextTopkRouter,
)

CPU = torch.device("cpu")
HIDDEN, TOKENS, BLOCK, BLOCKS, MOST = 48, 40, 8, 24, 9
SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 5,
    "no_rope_layers": [1, 1, 0, 1, 1],
    "kv_source_layers": [0, 0, 2, 0, 0],
    "indexer_types": ["full", "shared", "full", "shared", "full"],
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "index_topk": MOST,
    "index_head_dim": 14,
    "index_n_heads": 24,  # so that no two tokens have one score
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "rms_norm_eps": 1e-2,
}
CHUNKS = [(0, TOKENS)], [(0, 6), (6, 29), (29, 30), (30, 31), (31, TOKENS)]
TABLES = [[2, 0, 1, 9, 5], [11, 3, 23, 4, 13], [8, 22, 6, 7, 10]]
ALPHA = noise(4, seed=5) * 0.3


def settings_of(**more: Any) -> MistralLarge4TextConfig:
    made = MistralLarge4TextConfig(**SIZES | more)
    made._attn_implementation = "eager"
    return made


def shape_of(**more: Any) -> TextConfig:
    return TextConfig.of(settings_of(**more).to_dict())


def tables_of(shape: TextConfig, places: Tensor) -> tuple[Tensor, ...]:
    rotary = rotary_of(shape.rotary, CPU)
    rotary.targets("rotary_emb")["rotary_emb.alpha"](InMemory(ALPHA))
    return rotary.tables(places.expand(3, -1), torch.float32)


def theirs_of(settings: MistralLarge4TextConfig) -> list[MistralLarge4TextAttention]:
    layers = range(settings.num_hidden_layers)
    return [drawn(MistralLarge4TextAttention(settings, layer), seed=layer) for layer in layers]


def expected_of(theirs: Sequence[Any], settings: MistralLarge4TextConfig, x: Tensor) -> Tensor:
    """[layers, n, hidden] of layers that are all given the same."""
    rotary, places = MistralLarge4TextRotaryEmbedding(settings), torch.arange(len(x))[None]
    rotary.alpha.copy_(ALPHA)
    mask = torch.full((1, 1, len(x), len(x)), -torch.inf).triu(1)
    angles, shared, chosen, found = rotary(x, places), dict[str, Any](), None, list[Tensor]()
    for layer in theirs:
        out, _, chosen = layer(x[None], angles, mask, shared, places, prev_topk_indices=chosen)
        found.append(out[0])
    return torch.stack(found)


def ours_of(shape: TextConfig, theirs: Sequence[Any] = (), group: TensorGroup = ALONE) -> list[SparseLatentAttention]:
    kinds = map(shape.layer_kind, range(shape.layers))
    made = [SparseLatentAttention(kind, shape, group, torch.float32) for kind in kinds]
    for own, other in zip(made, theirs, strict=False):
        read(own, other)
    return made


def caches_of(ours: Sequence[SparseLatentAttention], attention: Any = "torch") -> Caches:
    """Where no number stands before one is written."""
    made = Caches(ours, BLOCKS, BLOCK, torch.float32, CPU, attention=attention)
    for kept in made.layers:
        assert isinstance(kept, IndexedCache)
        kept.kv.fill_(torch.nan)
        kept.index.fill_(torch.nan)
    return made


def step(
    ours: Sequence[SparseLatentAttention], caches: Caches, batches: list[Any], x: Tensor, angles: tuple[Tensor, ...]
) -> Tensor:
    """[layers, n, hidden] of layers that are all given the same."""
    handed, found = HandedOn(), list[Tensor]()
    for part, cache, batch in zip(ours, caches.layers, batches, strict=True):
        found.append(part.o(part.mix(part.project(x, angles), cache, batch, handed)))
    return torch.stack(found)


def joined(
    ours: Sequence[SparseLatentAttention], shape: TextConfig, each: Sequence[Tensor], cuts: list[tuple[int, int]]
) -> Tensor:
    """[layers, sequences, n, hidden] of several sequences at once, computed from cut to cut."""
    caches, found = caches_of(ours), list[Tensor]()
    for begin, end in cuts:
        angles = tables_of(shape, torch.arange(begin, end).repeat(len(each)))
        chunks = [PagedChunk(begin, end - begin, table) for table, _ in zip(TABLES, each, strict=False)]
        made = step(ours, caches, caches.batches(chunks), torch.cat([x[begin:end] for x in each]), angles)
        found.append(made.view(len(ours), len(each), -1, HIDDEN))
    return torch.cat(found, dim=2)


@pytest.mark.parametrize("copied", [1, 256, 1 << 20], ids=["gathered", "either", "masked"])
@torch.inference_mode()
def test_layers_give_what_transformers_give_in_chunks_beside_others_and_of_ranks(
    copied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(general_backend, "_COPIED", copied)
    settings, shape = settings_of(), shape_of()
    theirs, each = theirs_of(settings), [noise(TOKENS, HIDDEN), noise(TOKENS, HIDDEN, seed=2)]
    expected = torch.stack([expected_of(theirs, settings, x) for x in each], dim=1)
    for groups in ([ALONE], [TensorGroup(rank, 2) for rank in range(2)]):
        for cuts in CHUNKS:
            total = sum(joined(ours_of(shape, theirs, group), shape, each, cuts) for group in groups)
            torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_sequences_that_are_seen_whole_go_beside_one_that_is_not() -> None:
    settings, shape = settings_of(), shape_of()
    theirs, short, long = theirs_of(settings), noise(MOST, HIDDEN), noise(30, HIDDEN, seed=3)
    ours = ours_of(shape, theirs)
    caches = caches_of(ours)
    angles = tables_of(shape, torch.cat([torch.arange(MOST), torch.arange(30)]))
    batches = caches.batches([PagedChunk(0, MOST, [3, 1]), PagedChunk(0, 30, [6, 9, 7, 0])])
    found = step(ours, caches, batches, torch.cat([short, long]), angles)
    expected = torch.cat([expected_of(theirs, settings, x) for x in (short, long)], dim=1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("most", [1, MOST, 64], ids=["one", "some", "all"])
@pytest.mark.parametrize("score", [score_by_torch, score_tokens], ids=["torch", "triton"])
@torch.inference_mode()
def test_a_token_of_each_sequence_follows_metadata(
    score: ScoreTokens, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences that are seen whole and such that are not, and one of nobody."""
    monkeypatch.setattr(token_decodes, "score_by", lambda _: score)
    settings, shape = settings_of(index_topk=most), shape_of(index_topk=most)
    theirs, begun, steps = theirs_of(settings), (33, 3, MOST - 1), 3
    ours = ours_of(shape, theirs)
    each = [noise(TOKENS, HIDDEN, seed=seed) for seed in range(3)]
    expected = [expected_of(theirs, settings, x) for x in each]
    caches = caches_of(ours, PlainTables)
    for x, table, first in zip(each, TABLES, begun, strict=True):
        angles = tables_of(shape, torch.arange(first))
        step(ours, caches, caches.batches([PagedChunk(0, first, table)]), x[:first], angles)
    metadata = AttentionMetadata.of([PagedChunk(TOKENS - 1, 1, [0] * 5)] * 4, BLOCK, CPU)
    batches = caches.batches_over(metadata, {})
    for number in range(steps):
        places = torch.tensor([first + number for first in begun])
        metadata.seq_lens.copy_(torch.cat([places + 1, torch.zeros(1)]))
        metadata.slot_mapping.fill_(BLOCKS * BLOCK)
        metadata.block_table.zero_()
        for row, (table, place) in enumerate(zip(TABLES, places.tolist(), strict=True)):
            metadata.block_table[row] = torch.tensor(table)
            metadata.slot_mapping[row] = table[place // BLOCK] * BLOCK + place % BLOCK
        given = torch.cat([torch.stack(each)[torch.arange(3), places], noise(1, HIDDEN, seed=9)])
        found = step(ours, caches, batches, given, tables_of(shape, torch.cat([places, torch.zeros(1).long()])))
        wanted = torch.stack([rows[:, place] for rows, place in zip(expected, places.tolist(), strict=True)], dim=1)
        torch.testing.assert_close(found[:, :3], wanted, rtol=1e-4, atol=1e-5)


def test_nothing_is_kept_twice() -> None:
    """Two latents, of which one has rotated numbers, and the keys of three indices."""
    ours = ours_of(shape_of())
    specs = [part.cache_spec() for part in ours]
    assert all(isinstance(spec, IndexedKV) for spec in specs)
    assert block_bytes(specs, BLOCK, torch.float32) == 4 * BLOCK * (24 + 8 + 24 + 3 * 14)
    caches = caches_of(ours)
    first, *others = (cache for cache in caches.layers if isinstance(cache, IndexedCache))
    assert [cache.kv.data_ptr() == first.kv.data_ptr() for cache in others] == [True, False, True, True]
    assert len(caches.paged) == 2


def test_adapters_change_what_a_layer_has_of_its_own() -> None:
    shapes = shapes_of(shape_of())
    found = [{name.rpartition(".")[2] for name in shapes if f"layers.{at}.self_attn" in name} for at in range(2)]
    assert found == [{"q_proj", "kv_a_proj_with_mqa", "o_proj", "wq_b", "wk", "weights_proj"}, {"q_proj", "o_proj"}]


@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (4, 2), (2, 1)])
@torch.inference_mode()
def test_experts_are_chosen_by_their_probabilities_within_groups(groups: int, kept: int) -> None:
    settings = settings_of(n_group=groups, topk_group=kept, routed_scaling_factor=2.5)
    theirs, x = drawn(MistralLarge4TextTopkRouter(settings)), noise(64, HIDDEN) * 3
    grouped = TextConfig.of(settings.to_dict()).grouped
    assert grouped == GroupedExperts(groups, kept, 2.5, probabilities=True)
    ours = GroupedRouter(8, 2, HIDDEN, grouped)
    ours.load_state_dict(theirs.state_dict())
    (weights, chosen), (_, expected, theirs_chosen) = ours(x), theirs(x)
    dense = [torch.zeros(64, 8).scatter(1, *each) for each in ((chosen, weights), (theirs_chosen, expected))]
    torch.testing.assert_close(*dense)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"indexer_types": ["shared", "full", "full", "full", "full"]}, "comes before all that choose"),
        ({"kv_source_layers": [0, 0, 0, 0, 4]}, "layer 2 shares other latents than the last"),
        ({"kv_source_layers": [0, 1, 2, 0, 1]}, "layer 3 shares other latents than the last"),
        ({"layer_types": ["full_attention"] * 5}, "layers of the type full_attention are not supported"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "longrope is not supported here"),
        ({"attention_bias": True}, "biases of latents are not supported"),
    ],
)
def test_what_our_decoder_computes_otherwise_is_refused(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(CheckpointError, match=why):
        TextConfig.of(settings_of().to_dict() | wrong)


def test_the_published_sizes_are_known() -> None:
    shape = TextConfig.of(MistralLarge4TextConfig().to_dict())
    kinds = [shape.layer_kind(layer) for layer in range(72)]
    assert [kind.rotated for kind in kinds[:5]] == [True, True, True, False, True]
    assert all(kind.chooses and kind.keys_of is None for kind in kinds)
    assert {shape.latent_heads(kind).width for kind in kinds} == {576, 512}
    assert (shape.logit_cap, shape.experts, shape.dense_layers) == (30.0, 128, frozenset({0}))
