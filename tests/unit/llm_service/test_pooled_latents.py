"""Latent attention to pools that an index chooses, and to what an earlier layer has chosen, as GLM-5 Next has them: the
layers against transformers' own with the same weights, whatever the chunks and the company."""

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
from llm_service.layers.decoder_layer import MIXERS
from llm_service.layers.gpu.index_kernels import score_tokens
from llm_service.layers.mixer import HandedOn, Rotary
from llm_service.layers.mla.pooled import PooledSparseLatentAttention
from llm_service.layers.sparse_attention import pool_decodes as pool_decode
from llm_service.layers.sparse_attention import token_decodes
from llm_service.layers.sparse_attention.token_decodes import ScoreTokens, score_by_torch
from llm_service.layers.tensor_parallel import ALONE, TensorGroup
from llm_service.model_config.text import TextConfig
from llm_service.worker.adapters import shapes_of
from llm_service.worker.caches import Caches
from testkit import reference  # noqa: F401 - makes transformers importable beside a CPU torch
from testkit.plain_attention import PlainTables
from tests.layer_cases import drawn, noise, read

from transformers.models.glm5_next.modeling_glm5_next import (  # isort: skip
    Glm5NextTextAttention,
    Glm5NextTextConfig,
)

CPU = torch.device("cpu")
HIDDEN, TOKENS, BLOCK, MOST, POOL = 48, 40, 8, 9, 3
SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": HIDDEN,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "layer_types": ["indexed_attention", "indexed_attention"],
    "indexer_types": ["full", "shared"],
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 0,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "index_topk": MOST,
    "index_kpool": POOL,
    "index_head_dim": 14,
    "index_n_heads": 24,  # so that no two pools have one score
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "mlp_layer_types": ["dense", "sparse"],
    "rms_norm_eps": 1e-2,
}
CHUNKS = [(0, TOKENS)], [(0, 7), (7, 29), (29, 30), (30, 31), (31, TOKENS)]
UNROTATED: Rotary = (torch.empty(1, 1, 0), torch.empty(1, 1, 0))
TABLES = [2, 0, 1, 9, 5, 7], [11, 3, 23, 4, 13, 8]


def settings_of(**more: Any) -> Glm5NextTextConfig:
    made = Glm5NextTextConfig(**SIZES | more)
    made._attn_implementation = "eager"
    return made


def shape_of(**more: Any) -> TextConfig:
    return TextConfig.of(settings_of(**more).to_dict())


def layers_of(shape: TextConfig, group: TensorGroup = ALONE) -> list[PooledSparseLatentAttention]:
    made = [MIXERS[kind.mixer](kind, shape, group, torch.float32) for kind in map(shape.layer_kind, range(2))]
    ours = [each for each in made if isinstance(each, PooledSparseLatentAttention)]
    assert [each.index is None for each in ours] == [False, True]
    return ours


def theirs_of(settings: Glm5NextTextConfig) -> list[nn.Module]:
    return [drawn(Glm5NextTextAttention(settings, layer)) for layer in range(2)]


def expected_of(theirs: list[nn.Module], x: Tensor) -> Tensor:
    """Both layers' of one sequence, side by side."""
    seen, chosen, found = torch.ones(1, len(x), dtype=torch.bool), None, list[Tensor]()
    for each in theirs:
        out, _, chosen = each(x[None], seen, prev_topk_indices=chosen)
        found.append(out[0])
    return torch.cat(found, dim=1)


def caches_of(ours: list[PooledSparseLatentAttention], **more: Any) -> Caches:
    """In which nothing is a number."""
    caches = Caches(ours, 24, BLOCK, torch.float32, CPU, **more)
    for kept in caches.layers:
        for part in (kept.kv, kept.index) if isinstance(kept, IndexedCache) else (kept,):
            assert isinstance(part, Tensor)
            part.fill_(torch.nan)
    return caches


def mixed(ours: list[PooledSparseLatentAttention], caches: Caches, batches: list[Any], x: Tensor) -> Tensor:
    kept = HandedOn()
    parts = [
        each.o(each.mix(each.project(x, UNROTATED), cache, batch, kept))
        for each, cache, batch in zip(ours, caches.layers, batches, strict=True)
    ]
    return torch.cat(parts, dim=1)


def joined(ours: list[PooledSparseLatentAttention], each: list[Tensor], cuts: list[tuple[int, int]]) -> list[Tensor]:
    """What comes out of the heads of several sequences at once, computed from cut to cut."""
    caches, found = caches_of(ours, attention="torch"), list[Tensor]()
    for begin, end in cuts:
        chunks = [PagedChunk(begin, end - begin, table) for table, _ in zip(TABLES, each, strict=False)]
        found.append(mixed(ours, caches, caches.batches(chunks), torch.cat([x[begin:end] for x in each])))
    return list(torch.cat([part.view(len(each), -1, 2 * HIDDEN) for part in found], dim=1))


@pytest.mark.parametrize("copied", [1, 256, 1 << 20], ids=["gathered", "either", "masked"])
@torch.inference_mode()
def test_layers_give_what_transformers_give_at_once_in_chunks_beside_others_and_of_ranks(
    copied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(general_backend, "_COPIED", copied)
    theirs, shape = theirs_of(settings_of()), shape_of()
    each = [noise(TOKENS, HIDDEN), noise(TOKENS, HIDDEN, seed=2)]
    expected = [expected_of(theirs, x) for x in each]
    for groups in ([ALONE], [TensorGroup(rank, 2) for rank in range(2)]):
        for cuts in CHUNKS:
            sums = [torch.zeros(TOKENS, 2 * HIDDEN) for _ in each]
            for group in groups:
                ours = layers_of(shape, group)
                for own, their in zip(ours, theirs, strict=True):
                    read(own, their)
                for total, part in zip(sums, joined(ours, each, cuts), strict=True):
                    total += part
            for found, wanted in zip(sums, expected, strict=True):
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pool", [1, 9])
@torch.inference_mode()
def test_pools_may_be_single_tokens_or_all_that_is_chosen(pool: int) -> None:
    theirs, x = theirs_of(settings_of(index_kpool=pool)), noise(TOKENS, HIDDEN)
    ours = layers_of(shape_of(index_kpool=pool))
    for own, their in zip(ours, theirs, strict=True):
        read(own, their)
    for cuts in CHUNKS:
        torch.testing.assert_close(joined(ours, [x], cuts)[0], expected_of(theirs, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("short", [MOST + POOL - 1, MOST + POOL], ids=["whole", "but for its last token"])
@torch.inference_mode()
def test_sequences_that_are_seen_whole_go_beside_one_that_is_not(short: int) -> None:
    """The short one's pools have keys all the same, which its later tokens are chosen by."""
    theirs, ours = theirs_of(settings_of()), layers_of(shape_of())
    for own, their in zip(ours, theirs, strict=True):
        read(own, their)
    each, caches, steps = [noise(TOKENS, HIDDEN), noise(TOKENS, HIDDEN, seed=3)], None, [(0, short), (0, 30)]
    caches, found = caches_of(ours, attention="torch"), [list[Tensor](), list[Tensor]()]
    for cuts in (steps, [(end, TOKENS) for _, end in steps]):
        chunks = [PagedChunk(begin, end - begin, table) for (begin, end), table in zip(cuts, TABLES, strict=True)]
        given = torch.cat([x[begin:end] for x, (begin, end) in zip(each, cuts, strict=True)])
        made = mixed(ours, caches, caches.batches(chunks), given).split([end - begin for begin, end in cuts])
        for parts, part in zip(found, made, strict=True):
            parts.append(part)
    for parts, x in zip(found, each, strict=True):
        torch.testing.assert_close(torch.cat(parts), expected_of(theirs, x), rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_a_token_that_was_taken_back_is_in_no_pool() -> None:
    """A draft ends a pool, and another token comes in its place."""
    theirs, ours, x = theirs_of(settings_of()), layers_of(shape_of()), noise(TOKENS, HIDDEN)
    for own, their in zip(ours, theirs, strict=True):
        read(own, their)
    caches, begun = caches_of(ours, attention="torch"), 7 * POOL - 1
    mixed(ours, caches, caches.batches([PagedChunk(0, begun, TABLES[0])]), x[:begun])
    mixed(ours, caches, caches.batches([PagedChunk(begun, 2, TABLES[0])]), noise(2, HIDDEN, seed=5))
    chunk = PagedChunk(begun, TOKENS - begun, TABLES[0])
    found = mixed(ours, caches, caches.batches([chunk]), x[begun:])
    torch.testing.assert_close(found, expected_of(theirs, x)[begun:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("most", [POOL, MOST, 63], ids=["one pool", "some", "all"])
@pytest.mark.parametrize("score", [score_by_torch, score_tokens], ids=["torch", "triton"])
@torch.inference_mode()
def test_a_token_of_each_sequence_follows_metadata(
    score: ScoreTokens, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences that are seen whole and such that are not, and one of nobody, a few at a time."""
    monkeypatch.setattr(token_decodes, "score_by", lambda _: score)
    monkeypatch.setattr(token_decodes, "ROOM", 4 * 4 * 8 * 40)
    monkeypatch.setattr(pool_decode, "ROOM", 2 * 8 * 40 // POOL)
    ours = layers_of(shape_of(index_topk=most))
    for each in ours:
        drawn(each)
    tables, begun, steps = [[2, 0, 1, 9, 5], [11, 3, 23, 4, 13], [8, 22, 6, 7, 10]], (33, 2, MOST - 1), 5
    every = [noise(TOKENS, HIDDEN, seed=seed) for seed in range(3)]
    expected = [joined(ours, [x], CHUNKS[0])[0][first : first + steps] for x, first in zip(every, begun, strict=True)]
    caches = caches_of(ours, attention=PlainTables)
    for x, table, first in zip(every, tables, begun, strict=True):
        mixed(ours, caches, caches.batches([PagedChunk(0, first, table)]), x[:first])
    metadata = AttentionMetadata.of([PagedChunk(TOKENS - 1, 1, [0] * 5)] * 4, BLOCK, CPU)
    batches = caches.batches_over(metadata, {})
    for step in range(steps):
        places = torch.tensor([first + step for first in begun])
        metadata.block_table.fill_(10**6)
        metadata.seq_lens.copy_(torch.cat([places + 1, torch.zeros(1)]))
        metadata.slot_mapping.fill_(24 * BLOCK)
        for row, (table, place) in enumerate(zip(tables, places.tolist(), strict=True)):
            blocks = table[: place // BLOCK + 1]
            metadata.block_table[row, : len(blocks)] = torch.tensor(blocks)
            metadata.slot_mapping[row] = table[place // BLOCK] * BLOCK + place % BLOCK
        given = torch.cat([torch.stack(every)[torch.arange(3), places], noise(1, HIDDEN, seed=9)])
        wanted = torch.stack([rows[step] for rows in expected])
        torch.testing.assert_close(mixed(ours, caches, batches, given)[:3], wanted, rtol=1e-4, atol=1e-5)


def test_what_is_kept_of_a_token_in_layers_of_either_kind() -> None:
    specs = [each.cache_spec() for each in layers_of(shape_of())]
    assert [spec.index_dim for spec in specs if isinstance(spec, IndexedKV)] == [2 * 14, 0]
    assert block_bytes(specs, BLOCK, torch.float32) == 4 * BLOCK * (24 + 2 * 14 + 24)


def test_adapters_may_change_the_index_as_well() -> None:
    found = {name.removeprefix("layers.0.self_attn.") for name in shapes_of(shape_of()) if "layers.0.self_attn" in name}
    index = {"indexer.wq_b", "indexer.wk", "indexer.weights_proj"}
    assert found == {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"} | index


REFUSED: dict[str, dict[str, Any]] = {
    "an index that leaves the last tokens out is not supported": {"index_kpool_always_select_tail": False},
    "an index that keeps 9 tokens in pools of 4 is not supported": {"index_kpool": 4},
    "comes before all that choose": {"indexer_types": ["shared", "full"]},
    "an index of the kind other is not supported": {"indexer_types": ["full", "other"]},
    "latents with rotated numbers are not supported here": {"qk_rope_head_dim": 4},
    "gates of gelu_pytorch_tanh that are cut are not supported": {"hidden_act": "gelu_pytorch_tanh"},
    "experts whose weights do not sum up to 1 are not supported": {"norm_topk_prob": False},
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_not_known_is_refused(why: str) -> None:
    with pytest.raises(CheckpointError, match=why):
        TextConfig.of(settings_of().to_dict() | REFUSED[why])


def test_a_choice_is_not_shared_across_a_layer_that_chooses_nothing() -> None:
    kinds = ["indexed_attention", "linear_attention", "indexed_attention"]
    settings = settings_of(num_hidden_layers=3, layer_types=kinds, indexer_types=["full"] * 3, mlp_layer_types=None)
    with pytest.raises(CheckpointError, match="comes before all that choose"):
        TextConfig.of(settings.to_dict() | {"indexer_types": ["full", "full", "shared"]})


def test_the_configuration_s_own_sizes_are_read() -> None:
    shape = TextConfig.of(Glm5NextTextConfig().to_dict())
    assert shape.layers == 45
    assert shape.shared_choices == frozenset()
    assert shape.token_index is not None
    assert (shape.token_index.most, shape.token_index.pool) == (2048, 16)
    assert shape.balanced is not None
    assert shape.balanced.count == shape.stream_count == 4
    assert shape.kimi_delta is not None
    assert shape.kimi_delta.least == -5.0
