"""Attention to blocks that an index chooses, as MiniMax M3 has it: a layer against transformers' own with the same
weights, whatever the chunks and the company."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from common.checkpoints.checkpoint import CheckpointError
from llm_service.layers.attention import general_backend
from llm_service.layers.attention.backend import PagedChunk
from llm_service.layers.attention.metadata import AttentionMetadata
from llm_service.layers.cache_spec import IndexedCache, IndexedKV, block_bytes
from llm_service.layers.gpu import index_kernels
from llm_service.layers.gpu.index_kernels import score_blocks
from llm_service.layers.rotary.tables import rotary_of
from llm_service.layers.sparse_attention import block_decodes as block_decode
from llm_service.layers.sparse_attention.block_attention import BlockSparseAttention
from llm_service.layers.sparse_attention.block_decodes import ScoreBlocks, score_by_torch
from llm_service.layers.sparse_attention.index import BlockIndex, IndexQuery
from llm_service.layers.tensor_parallel import ALONE, TensorGroup
from llm_service.model_config.text import TextConfig
from llm_service.worker.adapters import shapes_of
from llm_service.worker.caches import Caches
from testkit import reference  # noqa: F401 - makes transformers importable beside a CPU torch
from testkit.plain_attention import PlainTables
from tests.layer_cases import drawn, noise, read

from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import (  # isort: skip
    MiniMaxM3VLAttention,
    MiniMaxM3VLRotaryEmbedding,
    MiniMaxM3VLTextConfig,
)

CPU = torch.device("cpu")
HIDDEN, TOKENS, CACHED = 48, 45, 8
SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": HIDDEN,
    "intermediate_size": 16,
    "dense_intermediate_size": 32,
    "shared_intermediate_size": 16,
    "num_hidden_layers": 2,
    "layer_types": ["full_attention", "minimax_m3_sparse"],
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "rotary_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "index_n_heads": 4,
    "index_head_dim": 12,
    "index_block_size": 6,
    "index_topk_blocks": 3,
    "index_local_blocks": 1,
    "rms_norm_eps": 1e-2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}
CUTS = [(0, TOKENS)], [(0, 6), (6, 29), (29, 30), (30, 31), (31, TOKENS)]


def settings_of(**more: Any) -> MiniMaxM3VLTextConfig:
    made = MiniMaxM3VLTextConfig(**SIZES | more)
    made._attn_implementation = "eager"
    return made


def shape_of(**more: Any) -> TextConfig:
    return TextConfig.of(settings_of(**more).to_dict())


def layer_of(shape: TextConfig, theirs: nn.Module, group: TensorGroup = ALONE) -> BlockSparseAttention:
    ours = BlockSparseAttention(shape.layer_kind(1), shape, group, torch.float32)
    read(ours, theirs)
    return ours


def expected_of(theirs: nn.Module, settings: MiniMaxM3VLTextConfig, x: Tensor) -> Tensor:
    places = torch.arange(len(x))[None]
    mask = torch.full((len(x), len(x)), -torch.inf).triu(1)[None, None]
    angles = MiniMaxM3VLRotaryEmbedding(settings)(x[None], places)
    found: Tensor = theirs(x[None], angles, mask, position_ids=places)[0][0]
    return found


def joined(ours: BlockSparseAttention, shape: TextConfig, each: list[Tensor], cuts: list[tuple[int, int]]) -> Tensor:
    """What comes out of the heads of several sequences at once, [sequences, n, hidden], computed from cut to cut."""
    caches, found = Caches([ours], 24, CACHED, torch.float32, CPU, attention="torch"), list[Tensor]()
    kept = caches.layers[0]
    assert isinstance(kept, IndexedCache)
    kept.kv.fill_(torch.nan)
    kept.index.fill_(torch.nan)
    rotary, tables = rotary_of(shape.rotary, CPU), [[2, 0, 1, 9, 5, 7], [11, 3, 23, 4, 13, 8]]
    for begin, end in cuts:
        places = torch.arange(begin, end).repeat(len(each))
        angles = rotary.tables(places.expand(3, -1), torch.float32)
        chunks = [PagedChunk(begin, end - begin, table) for table, _ in zip(tables, each, strict=False)]
        (batch,) = caches.batches(chunks)
        inputs = ours.project(torch.cat([x[begin:end] for x in each]), angles)
        found.append(ours.o(ours.mix(inputs, kept, batch)).view(len(each), -1, HIDDEN))
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("more", [{}, {"index_local_blocks": 2}, {"index_local_blocks": 0}, {"index_head_dim": 6}])
@pytest.mark.parametrize("copied", [1, 1 << 20], ids=["gathered", "masked"])
@torch.inference_mode()
def test_a_layer_gives_what_transformers_gives_at_once_in_chunks_beside_others_and_of_ranks(
    copied: int, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(general_backend, "_COPIED", copied)
    settings, shape = settings_of(**more), shape_of(**more)
    theirs = drawn(MiniMaxM3VLAttention(settings, 1))
    each = [noise(TOKENS, HIDDEN), noise(TOKENS, HIDDEN, seed=2)]
    expected = torch.stack([expected_of(theirs, settings, x) for x in each])
    for ranks in (1, 2, 8):
        for cuts in CUTS:
            parts = (layer_of(shape, theirs, TensorGroup(rank, ranks)) for rank in range(ranks))
            found = sum(joined(part, shape, each, cuts) for part in parts)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_each_head_of_keys_sees_blocks_of_its_own() -> None:
    """Which a layer that let one head choose for all would not."""
    settings, shape = settings_of(), shape_of()
    theirs, x = drawn(MiniMaxM3VLAttention(settings, 1)), noise(TOKENS, HIDDEN)
    ours = layer_of(shape, theirs)
    expected, dim = expected_of(theirs, settings, x), SIZES["index_head_dim"]
    ours.index.qk.weight[: 4 * dim] = ours.index.qk.weight[:dim].repeat(4, 1)
    found = joined(ours, shape, [x], CUTS[0])[0]
    seen_whole = SIZES["index_topk_blocks"] * SIZES["index_block_size"]
    torch.testing.assert_close(found[:seen_whole], expected[:seen_whole], rtol=1e-4, atol=1e-5)
    assert (found - expected)[seen_whole:].abs().max() > 1e-2


@torch.inference_mode()
def test_sequences_that_are_seen_whole_go_beside_one_that_is_not() -> None:
    settings, shape = settings_of(), shape_of()
    theirs, short, long = drawn(MiniMaxM3VLAttention(settings, 1)), noise(18, HIDDEN), noise(30, HIDDEN, seed=3)
    ours = layer_of(shape, theirs)
    caches = Caches([ours], 24, CACHED, torch.float32, CPU, attention="torch")
    places = torch.cat([torch.arange(18), torch.arange(30)])
    angles = rotary_of(shape.rotary, CPU).tables(places.expand(3, -1), torch.float32)
    (batch,) = caches.batches([PagedChunk(0, 18, [3, 1, 2]), PagedChunk(0, 30, [6, 9, 7, 0])])
    found = ours.o(ours.mix(ours.project(torch.cat([short, long]), angles), caches.layers[0], batch))
    expected = torch.cat([expected_of(theirs, settings, x) for x in (short, long)])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_a_cache_in_16_bits_is_seen_by_what_computes_in_32() -> None:
    shape = shape_of()
    ours = layer_of(shape, drawn(MiniMaxM3VLAttention(settings_of(), 1)))
    angles = rotary_of(shape.rotary, CPU).tables(torch.arange(TOKENS).expand(3, -1), torch.float32)
    inputs, found = ours.project(noise(TOKENS, HIDDEN), angles), list[Tensor]()
    inputs = inputs[0], *(each.bfloat16().float() for each in inputs[1:3]), inputs[3], inputs[4].bfloat16().float()
    for kept in (torch.float32, torch.bfloat16):
        caches = Caches([ours], 8, CACHED, kept, CPU, attention="torch")
        (batch,) = caches.batches([PagedChunk(0, TOKENS, [2, 0, 1, 7, 5, 3])])
        found.append(ours.mix(inputs, caches.layers[0], batch))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("most", [1, 3, 9], ids=["one", "some", "all"])
@pytest.mark.parametrize("score", [score_by_torch, score_blocks], ids=["torch", "triton"])
@torch.inference_mode()
def test_a_token_of_each_sequence_follows_metadata(
    score: ScoreBlocks, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences that are seen whole and such that are not, and one of nobody, a few at a time."""
    monkeypatch.setattr(block_decode, "score_by", lambda _: score)
    monkeypatch.setattr(block_decode, "ROOM", 4 * 4 * 18 * 16)
    settings, shape = settings_of(index_topk_blocks=most), shape_of(index_topk_blocks=most)
    theirs, steps = drawn(MiniMaxM3VLAttention(settings, 1)), 4
    ours = layer_of(shape, theirs)
    tables, begun = [[2, 0, 1, 9, 5], [11, 3, 23, 4, 13], [8, 22, 6, 7, 10]], (33, 3, 17)
    each = [noise(TOKENS, HIDDEN, seed=seed) for seed in range(3)]
    expected = [expected_of(theirs, settings, x)[first : first + steps] for x, first in zip(each, begun, strict=True)]
    caches = Caches([ours], 24, CACHED, torch.float32, CPU, attention=PlainTables)
    rotary, cache = rotary_of(shape.rotary, CPU), caches.layers[0]
    assert isinstance(cache, IndexedCache)
    for part in (cache.kv, cache.index):
        part.fill_(torch.nan)
    for x, table, first in zip(each, tables, begun, strict=True):
        angles = rotary.tables(torch.arange(first).expand(3, -1), torch.float32)
        (batch,) = caches.batches([PagedChunk(0, first, table)])
        ours.mix(ours.project(x[:first], angles), cache, batch)
    metadata = AttentionMetadata.of([PagedChunk(39, 1, [0] * 5)] * 4, CACHED, CPU)
    (batch,) = caches.batches_over(metadata, {})
    assert batch[1].sees_all == (most == 9)
    for step in range(steps):
        places = torch.tensor([first + step for first in begun])
        metadata.block_table.fill_(10**6)
        metadata.seq_lens.copy_(torch.cat([places + 1, torch.zeros(1)]))
        metadata.slot_mapping.fill_(24 * CACHED)
        for row, (table, place) in enumerate(zip(tables, places.tolist(), strict=True)):
            blocks = table[: place // CACHED + 1]
            metadata.block_table[row, : len(blocks)] = torch.tensor(blocks)
            metadata.slot_mapping[row] = table[place // CACHED] * CACHED + place % CACHED
        given = torch.cat([torch.stack(each)[torch.arange(3), places], noise(1, HIDDEN, seed=9)])
        angles = rotary.tables(torch.cat([places, torch.zeros(1, dtype=torch.int64)]).expand(3, -1), torch.float32)
        made = ours.o(ours.mix(ours.project(given, angles), cache, batch))
        wanted = torch.stack([rows[step] for rows in expected])
        torch.testing.assert_close(made[:3], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@torch.inference_mode()
def test_our_kernel_scores_blocks_as_torch_does(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than its programs take at once, some of more tokens."""
    monkeypatch.setattr(index_kernels, "_AT_ONCE", 16)
    monkeypatch.setattr(index_kernels, "_PROGRAMS", 2)
    lengths, heads, width = [70, 5, 33], 3, 20
    cache, tables = noise(30, CACHED, width).to(dtype), [[*range(9)], [9], [*range(28, 10, -1)]]
    chunks = [PagedChunk(count - 1, 1, table) for count, table in zip(lengths, tables, strict=True)]
    metadata = AttentionMetadata.of(chunks, CACHED, CPU)
    for size in (6, 20):
        asked = IndexQuery(BlockIndex(2, size, 1), noise(3, heads, width, seed=2).to(dtype), None, cache[0, :3])
        given = cache, metadata, size
        found, expected = score_blocks(asked, *given), score_by_torch(asked, *given)
        for row, length in enumerate(lengths):
            here = slice(0, -(-length // size))
            torch.testing.assert_close(found[row, :, here], expected[row, :, here], rtol=1e-4, atol=1e-4)


def test_an_index_key_is_kept_beside_keys_and_values_and_adapters_may_change_the_index() -> None:
    shape = shape_of()
    spec = BlockSparseAttention(shape.layer_kind(1), shape, ALONE, torch.float32).cache_spec()
    assert isinstance(spec, IndexedKV)
    assert block_bytes([spec], CACHED, torch.float32) == 4 * CACHED * (2 * 4 * 16 + 12)
    index = {name.rpartition("indexer.")[2] for name in shapes_of(shape) if "indexer." in name}
    assert index == {"q_proj", "k_proj"}


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"index_n_heads": 2}, "an index of blocks with other heads than keys have is not supported"),
        ({"index_local_blocks": 4}, "an index that keeps 3 blocks, and 4 local ones, is not supported"),
        ({"attn_logit_softcapping": 50.0}, "soft caps of scores are not supported in attention to blocks"),
    ],
)
def test_an_index_that_is_not_known_is_refused_by_name(more: dict[str, Any], why: str) -> None:
    with pytest.raises(CheckpointError, match=why):
        shape_of(**more)
