"""Latent attention to what an index chooses, and in windows, as dots3-note has them: the layers against transformers'
own with the same weights, whatever the chunks and the company."""

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
from llm_service.layers.gpu import index_kernels
from llm_service.layers.gpu.index_kernels import score_tokens
from llm_service.layers.mla.latent_attention import LatentAttention
from llm_service.layers.mla.sparse import SparseLatentAttention
from llm_service.layers.rotary.tables import rotary_of
from llm_service.layers.sparse_attention import token_decodes
from llm_service.layers.sparse_attention.index import IndexQuery, TokenIndex
from llm_service.layers.sparse_attention.token_decodes import ScoreTokens, score_by_torch
from llm_service.layers.tensor_parallel import ALONE, TensorGroup
from llm_service.model_config.latent import LatentHeads
from llm_service.model_config.text import TextConfig
from llm_service.worker.adapters import shapes_of
from llm_service.worker.caches import Caches
from testkit import reference  # noqa: F401 - makes transformers importable beside a CPU torch
from testkit.plain_attention import PlainTables
from tests.layer_cases import drawn, noise, read

from transformers.models.dots3_note.modeling_dots3_note import (  # isort: skip
    Dots3NoteTextAttention,
    Dots3NoteTextConfig,
    Dots3NoteTextRotaryEmbedding,
)

CPU = torch.device("cpu")
HIDDEN, TOKENS, BLOCK, WINDOW, MOST = 48, 40, 8, 7, 9
SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": HIDDEN,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "layer_types": ["indexed_attention", "sliding_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "head_dim": 20,
    "v_head_dim": 10,
    "index_topk": MOST,
    "index_head_dim": 14,
    "index_n_heads": 24,  # so that no two tokens have one score
    "sliding_window": WINDOW,
    "swa_num_attention_heads": 2,
    "swa_num_key_value_heads": 2,
    "swa_q_lora_rank": 12,
    "swa_kv_lora_rank": 28,
    "swa_head_dim": 18,
    "swa_qk_nope_head_dim": 14,
    "swa_v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "n_shared_experts": 2,
    "shared_experts_intermediate_size": 6,
    "rms_norm_eps": 1e-2,
}
CHUNKS = [(0, TOKENS)], [(0, 6), (6, 29), (29, 30), (30, 31), (31, TOKENS)]


def settings_of(**more: Any) -> Dots3NoteTextConfig:
    made = Dots3NoteTextConfig(**SIZES | more)
    made._attn_implementation = "eager"
    return made


def shape_of(**more: Any) -> TextConfig:
    return TextConfig.of(settings_of(**more).to_dict())


def expected_of(theirs: nn.Module, settings: Dots3NoteTextConfig, layer: int, x: Tensor) -> Tensor:
    angles = Dots3NoteTextRotaryEmbedding(settings)(x, torch.arange(len(x))[None], settings.layer_types[layer])
    mask = torch.full((len(x), len(x)), -torch.inf).triu(1)
    if settings.layer_types[layer] == "sliding_attention":
        mask = mask + torch.full_like(mask, -torch.inf).tril(-WINDOW)
    found: Tensor = theirs(x[None], angles, mask[None, None])[0][0]
    return found


def joined(ours: LatentAttention, shape: TextConfig, each: list[Tensor], cuts: list[tuple[int, int]]) -> list[Tensor]:
    """What comes out of the heads of several sequences at once, computed from cut to cut."""
    caches, found = Caches([ours], 24, BLOCK, torch.float32, CPU, attention="torch"), list[Tensor]()
    for kept in caches.layers:
        for part in (kept.kv, kept.index) if isinstance(kept, IndexedCache) else (kept,):
            part.fill_(torch.nan)
    local = shape.window_rotary if ours.kept.kind.sight.is_local else None
    rotary = rotary_of(local or shape.rotary, CPU)
    tables = [[2, 0, 1, 9, 5, 7], [11, 3, 23, 4, 13, 8]]
    for begin, end in cuts:
        places = torch.arange(begin, end).repeat(len(each))
        angles = rotary.tables(places.expand(3, -1), torch.float32)
        chunks = [PagedChunk(begin, end - begin, table) for table, _ in zip(tables, each, strict=False)]
        inputs = ours.project(torch.cat([x[begin:end] for x in each]), angles)
        (batch,) = caches.batches(chunks)
        found.append(ours.o(ours.mix(inputs, caches.layers[0], batch)))
    parts = [part.view(len(each), -1, HIDDEN) for part in found]
    return list(torch.cat(parts, dim=1))


@pytest.mark.parametrize("layer", [0, 1], ids=SIZES["layer_types"])
@pytest.mark.parametrize("copied", [1, 256, 1 << 20], ids=["gathered", "either", "masked"])
@torch.inference_mode()
def test_a_layer_gives_what_transformers_gives_at_once_in_chunks_beside_others_and_of_ranks(
    layer: int, copied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(general_backend, "_COPIED", copied)
    settings, shape = settings_of(), shape_of()
    theirs = drawn(Dots3NoteTextAttention(settings, layer))
    each = [noise(TOKENS, HIDDEN), noise(TOKENS, HIDDEN, seed=2)]
    expected = [expected_of(theirs, settings, layer, x) for x in each]
    kind = shape.layer_kind(layer)
    for groups in ([ALONE], [TensorGroup(rank, 2) for rank in range(2)]):
        for cuts in CHUNKS:
            sums = [torch.zeros(TOKENS, HIDDEN) for _ in each]
            for group in groups:
                ours = MIXERS[kind.mixer](kind, shape, group, torch.float32)
                assert isinstance(ours, LatentAttention)
                read(ours, theirs)
                for total, part in zip(sums, joined(ours, shape, each, cuts), strict=True):
                    total += part
            for found, wanted in zip(sums, expected, strict=True):
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("expands", [True, False])
@torch.inference_mode()
def test_what_is_masked_is_the_same_in_either_form(expands: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(general_backend, "_COPIED", 1 << 20)
    monkeypatch.setattr(LatentHeads, "expands", lambda *_: expands)
    settings, shape = settings_of(), shape_of()
    theirs, x = drawn(Dots3NoteTextAttention(settings, 0)), noise(TOKENS, HIDDEN)
    kind = shape.layer_kind(0)
    ours = MIXERS[kind.mixer](kind, shape, ALONE, torch.float32)
    assert isinstance(ours, LatentAttention)
    read(ours, theirs)
    (found,) = joined(ours, shape, [x], CHUNKS[1])
    torch.testing.assert_close(found, expected_of(theirs, settings, 0, x), rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_sequences_that_are_seen_whole_go_beside_one_that_is_not() -> None:
    settings, shape = settings_of(), shape_of()
    theirs, short, long = drawn(Dots3NoteTextAttention(settings, 0)), noise(MOST, HIDDEN), noise(30, HIDDEN, seed=3)
    kind = shape.layer_kind(0)
    ours = MIXERS[kind.mixer](kind, shape, ALONE, torch.float32)
    assert isinstance(ours, LatentAttention)
    read(ours, theirs)
    caches = Caches([ours], 24, BLOCK, torch.float32, CPU, attention="torch")
    places = torch.cat([torch.arange(MOST), torch.arange(30)])
    angles = rotary_of(shape.rotary, CPU).tables(places.expand(3, -1), torch.float32)
    (batch,) = caches.batches([PagedChunk(0, MOST, [3, 1]), PagedChunk(0, 30, [6, 9, 7, 0])])
    found = ours.o(ours.mix(ours.project(torch.cat([short, long]), angles), caches.layers[0], batch))
    expected = torch.cat([expected_of(theirs, settings, 0, x) for x in (short, long)])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("most", [1, MOST, 64], ids=["one", "some", "all"])
@pytest.mark.parametrize("score", [score_by_torch, score_tokens], ids=["torch", "triton"])
@torch.inference_mode()
def test_a_token_of_each_sequence_follows_metadata(
    score: ScoreTokens, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences that are seen whole and such that are not, and one of nobody, a few at a time."""
    monkeypatch.setattr(token_decodes, "score_by", lambda _: score)
    monkeypatch.setattr(token_decodes, "ROOM", 4 * 4 * 8 * 40)
    shape = shape_of(index_topk=most)
    kind = shape.layer_kind(0)
    ours = MIXERS[kind.mixer](kind, shape, ALONE, torch.float32)
    assert isinstance(ours, SparseLatentAttention)
    drawn(ours)
    tables, begun, steps = [[2, 0, 1, 9, 5], [11, 3, 23, 4, 13], [8, 22, 6, 7, 10]], (33, 3, MOST - 1), 4
    each = [noise(TOKENS, HIDDEN, seed=seed) for seed in range(3)]
    expected = [
        joined(ours, shape, [x], CHUNKS[0])[0][first : first + steps] for x, first in zip(each, begun, strict=True)
    ]
    caches = Caches([ours], 24, BLOCK, torch.float32, CPU, attention=PlainTables)
    rotary, cache = rotary_of(shape.rotary, CPU), caches.layers[0]
    assert isinstance(cache, IndexedCache)
    for part in (cache.kv, cache.index):
        part.fill_(torch.nan)
    for x, table, first in zip(each, tables, begun, strict=True):
        angles = rotary.tables(torch.arange(first).expand(3, -1), torch.float32)
        (batch,) = caches.batches([PagedChunk(0, first, table)])
        ours.mix(ours.project(x[:first], angles), cache, batch)
    metadata = AttentionMetadata.of([PagedChunk(TOKENS - 1, 1, [0] * 5)] * 4, BLOCK, CPU)
    (batch,) = caches.batches_over(metadata, {})
    for step in range(steps):
        places = torch.tensor([first + step for first in begun])
        metadata.block_table.fill_(10**6)
        metadata.seq_lens.copy_(torch.cat([places + 1, torch.zeros(1)]))
        metadata.slot_mapping.fill_(24 * BLOCK)
        for row, (table, place) in enumerate(zip(tables, places.tolist(), strict=True)):
            blocks = table[: place // BLOCK + 1]
            metadata.block_table[row, : len(blocks)] = torch.tensor(blocks)
            metadata.slot_mapping[row] = table[place // BLOCK] * BLOCK + place % BLOCK
        given = torch.cat([torch.stack(each)[torch.arange(3), places], noise(1, HIDDEN, seed=9)])
        angles = rotary.tables(torch.cat([places, torch.zeros(1, dtype=torch.int64)]).expand(3, -1), torch.float32)
        made = ours.o(ours.mix(ours.project(given, angles), cache, batch))
        wanted = torch.stack([rows[step] for rows in expected])
        torch.testing.assert_close(made[:3], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@torch.inference_mode()
def test_our_kernel_scores_tokens_as_torch_does(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """More tokens than its programs take at once, of several blocks."""
    monkeypatch.setattr(index_kernels, "_AT_ONCE", 16)
    monkeypatch.setattr(index_kernels, "_PROGRAMS", 2)
    lengths, heads, width = [70, 5, 33], 5, 20
    cache, tables = noise(30, BLOCK, width).to(dtype), [[*range(9)], [9], [*range(28, 10, -1)]]
    chunks = [PagedChunk(count - 1, 1, table) for count, table in zip(lengths, tables, strict=True)]
    metadata = AttentionMetadata.of(chunks, BLOCK, CPU)
    query, weights = noise(3, heads, width, seed=2).to(dtype), noise(3, heads, seed=3)
    asked = IndexQuery(TokenIndex(4), query, weights, cache[0, :3], 0.3)
    found, expected = score_tokens(asked, cache, metadata), score_by_torch(asked, cache, metadata)
    for row, length in enumerate(lengths):
        torch.testing.assert_close(found[row, :length], expected[row, :length], rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_latents_that_are_kept_in_16_bits_are_seen_by_what_computes_in_32() -> None:
    shape = shape_of()
    kind = shape.layer_kind(0)
    ours = MIXERS[kind.mixer](kind, shape, ALONE, torch.float32)
    drawn(ours)  # type: ignore[arg-type]
    angles = rotary_of(shape.rotary, CPU).tables(torch.arange(TOKENS).expand(3, -1), torch.float32)
    inputs, found = ours.project(noise(TOKENS, HIDDEN), angles), list[Tensor]()
    inputs = *inputs[:1], *(each.bfloat16().to(each.dtype) for each in inputs[1:])
    for kept in (torch.float32, torch.bfloat16):
        caches = Caches([ours], 8, BLOCK, kept, CPU, attention="torch")
        (batch,) = caches.batches([PagedChunk(0, TOKENS, [2, 0, 1, 7, 5])])
        found.append(ours.mix(inputs, caches.layers[0], batch))
    torch.testing.assert_close(*found)


def test_what_is_kept_of_a_token_in_layers_of_either_kind() -> None:
    shape = shape_of()
    mixers = [MIXERS[kind.mixer](kind, shape, ALONE, torch.float32) for kind in map(shape.layer_kind, range(2))]
    specs = [mixer.cache_spec() for mixer in mixers]
    assert isinstance(specs[0], IndexedKV)
    assert block_bytes(specs, BLOCK, torch.float32) == 4 * BLOCK * (24 + 8 + 14 + 28 + 4)
    assert shape.shared_expert_size == 12


def test_adapters_may_change_gates_and_the_index_as_well() -> None:
    found = {name.removeprefix("layers.0.self_attn.") for name in shapes_of(shape_of()) if "layers.0.self_attn" in name}
    index = {"indexer.wq_b", "indexer.wk", "indexer.weights_proj"}
    assert found == {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "g_proj", "o_proj"} | index


def test_layers_with_an_index_whose_rotary_positions_are_others_than_those_of_full_ones_are_refused() -> None:
    stated = settings_of().to_dict()
    rope = stated["rope_parameters"]
    stated["rope_parameters"] = {**rope, "full_attention": {**rope["indexed_attention"], "rope_theta": 5.0}}
    with pytest.raises(CheckpointError, match="layers with an index and others whose rotary positions differ"):
        TextConfig.of(stated)
    stated["rope_parameters"] = {**rope, "full_attention": rope["indexed_attention"]}
    assert TextConfig.of(stated).rotary == shape_of().rotary
