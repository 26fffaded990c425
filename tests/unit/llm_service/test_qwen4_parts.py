"""Parts of Qwen4's layers: as transformers', of shares, and in any pieces."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from common.checkpoints.checkpoint import CheckpointError
from llm_service.families.family import FeedForwardKind, LayerKind, Mixer
from llm_service.layers.attention.backend import PagedChunk
from llm_service.layers.attention.choose import choose
from llm_service.layers.attention.metadata import AttentionMetadata
from llm_service.layers.cache_spec import IndexedCache, Segment, StateCache, cache_shapes
from llm_service.layers.embeddings.ngrams import Ngrams
from llm_service.layers.gdn.layer import GatedDeltaNet
from llm_service.layers.gdn.torch_backend import TorchBackend as TorchDeltas
from llm_service.layers.mixer import Rotary
from llm_service.layers.residual.hyper_connections import StreamMix
from llm_service.layers.rotary.multimodal import MultimodalRotary
from llm_service.layers.sparse_attention import stretch_batches
from llm_service.layers.sparse_attention.stretch_attention import StretchSparseAttention
from llm_service.layers.sparse_attention.stretch_batches import StretchBatch
from llm_service.layers.tensor_parallel import ALONE, TensorGroup
from llm_service.model_config.text import TextConfig
from llm_service.models.filling import InMemory, targets
from llm_service.models.mtp import load_mtp
from testkit import reference  # noqa: F401 - makes transformers importable beside a CPU torch
from testkit.plain_attention import PlainTables

from transformers.models.qwen4_exp import modeling_qwen4_exp as library  # isort: skip
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig  # isort: skip

CPU = torch.device("cpu")
HIDDEN, BLOCK, TOKENS, END = 24, 4, 45, 7
TEXT: dict[str, Any] = {
    "model_type": "qwen4_exp_text",
    "vocab_size": 32,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 100.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "hc_count": 3,
    "hc_lowrank": 5,
    "output_gate_type": "sigmoid",
    "indexer_n_heads": 5,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 12,
    "indexer_budget": 9,
    "indexer_compress_ratio": 3,
    "ple_layer_ids": [1],
    "ple_embed_dim": 16,
    "ple_conv_kernel_size": 3,
    "ngram_size": 3,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 30,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 3,
    "eos_token_id": END,
}


def _noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _theirs(part: str, *given: Any, **more: Any) -> nn.Module:
    config = Qwen4ExpTextConfig(**TEXT)
    config._attn_implementation = "sdpa"
    made: nn.Module = getattr(library, part)(config, *given, **more).eval().requires_grad_(requires_grad=False)
    for seed, parameter in enumerate(made.parameters()):
        parameter.copy_(_noise(seed, *parameter.shape) * (0.3 if parameter.dim() < 2 else parameter[0].numel() ** -0.5))
    return made


def _fill(ours: nn.Module, theirs: nn.Module) -> Any:
    tensors = theirs.state_dict()
    for name, (_, place) in targets(ours):
        if name in tensors:
            place(InMemory(tensors.pop(name)))
    assert not tensors
    return ours


def _config(**more: Any) -> TextConfig:
    return TextConfig.of({**TEXT, **more})


def _positions() -> Tensor:
    """Of three axes: text, a picture of 3 · 4 rows, text."""
    picture = torch.stack([torch.full((12,), 20), 20 + torch.arange(12) // 4, 20 + torch.arange(12) % 4])
    return torch.cat([torch.arange(20).expand(3, -1), picture, 24 + torch.arange(TOKENS - 32).expand(3, -1)], dim=1)


class _Attending:
    """An attention of ours over a paged cache of a sequence's own blocks, whatever these hold at first."""

    def __init__(self, ours: StretchSparseAttention, attention: str = "torch") -> None:
        self._ours, spec = ours, ours.cache_spec()
        ((_, shape),) = cache_shapes([spec], 40, BLOCK).items()
        self.shape, self._backend = shape, choose(attention, shape, torch.float32, CPU)
        index = torch.full((41, BLOCK, spec.index_dim), torch.nan)
        self._cache = IndexedCache(torch.full_like(shape.new_cache(torch.float32, CPU)[0], torch.nan), index)

    def __call__(self, x: Tensor, rotary: Rotary, chunks: list[PagedChunk]) -> Tensor:
        batch = self._backend.batch(chunks), self._ours.index_backend(self._backend, 40, BLOCK).batch(chunks)
        return self._ours.join(self._ours.mix(self._ours.project(x, rotary), self._cache, batch))


def _rotary(positions: Tensor) -> Rotary:
    return MultimodalRotary.of(_config().rotary, CPU).tables(positions, torch.float32)


@pytest.fixture(scope="module")
def attention() -> tuple[nn.Module, StretchSparseAttention]:
    theirs = _theirs("Qwen4ExpTextAttention", 1)
    kind = LayerKind(Mixer.INDEXED_ATTENTION, FeedForwardKind.EXPERTS)
    return theirs, _fill(StretchSparseAttention(kind, _config(), ALONE, torch.float32), theirs)


@pytest.mark.parametrize("by", ["torch", "numba"])
@torch.inference_mode()
def test_tokens_see_what_transformers_chooses_however_a_prompt_is_cut(
    by: str, attention: tuple[nn.Module, StretchSparseAttention]
) -> None:
    theirs, ours = attention
    one, other = _noise(90, 2, TOKENS, HIDDEN)
    positions = _positions()
    cosine, sine = _rotary(positions)
    mask = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool).tril()
    given = one.unsqueeze(0), (cosine.transpose(0, 1), sine.transpose(0, 1)), mask
    expected = theirs(*given, None)[0][0]
    full = theirs.indexer(*given, None)[0, 0]
    assert full.sum(1).max() < 12, "not all are seen"

    asked, _ = ours.index.project(one, (cosine, sine))
    blocks, others = list(range(20, 32))[::-1], list(range(12))
    whole = _Attending(ours, by)
    torch.testing.assert_close(whole(one, (cosine, sine), [PagedChunk(0, TOKENS, blocks)]), expected)
    keys = whole._cache.index.flatten(0, 1)
    slots = torch.tensor([blocks[at // BLOCK] * BLOCK + at % BLOCK for at in range(TOKENS)])
    batch = ours.index_backend(whole._backend, 40, BLOCK).batch([PagedChunk(0, TOKENS, blocks)])
    seen = batch.seen(batch.best(asked, keys[slots[2::3], :12], 0), 0, TOKENS)
    assert torch.equal(seen, full & mask[0, 0])

    pieces, found, begin = _Attending(ours, by), list[Tensor](), 0
    for count in (2, 5, 1, 1, 1, 14, 1, 20):
        end = begin + count
        both = torch.cat([other[begin:end], one[begin:end]])
        angles = cosine[begin:end].repeat(2, 1, 1), sine[begin:end].repeat(2, 1, 1)
        chunks = [PagedChunk(begin, count, others), PagedChunk(begin, count, blocks)]
        found.append(pieces(both, angles, chunks)[count:])
        begin = end
    torch.testing.assert_close(torch.cat(found), expected)


@torch.inference_mode()
def test_a_token_of_each_sequence_follows_metadata(attention: tuple[nn.Module, StretchSparseAttention]) -> None:
    """Sequences that see all and such that do not, one of nobody, and stretches that end or do not."""
    _, ours = attention
    x = _noise(94, 3, TOKENS, HIDDEN)
    cosine, sine = _rotary(torch.arange(TOKENS).expand(3, -1))
    tables = [list(range(first, first + 12))[::-1] for first in (0, 12, 24)]
    begun, steps = (40, 3, 11), 4
    metadata = AttentionMetadata.of([PagedChunk(TOKENS - 1, 1, [0] * 12)] * 4, BLOCK, CPU)
    attending, expected = _Attending(ours), list[Tensor]()
    for own, table, first in zip(x, tables, begun, strict=True):
        attending(own[:first], (cosine[:first], sine[:first]), [PagedChunk(0, first, table)])
        whole = _Attending(ours)(own, (cosine, sine), [PagedChunk(0, TOKENS, table)])
        expected.append(whole[first : first + steps])
    index = ours.index_backend(attending._backend, 40, BLOCK)
    batch = PlainTables(attending.shape).over(metadata), index.over(metadata)
    for step in range(steps):
        places = torch.tensor([first + step for first in begun])
        metadata.block_table.fill_(10**6)
        metadata.seq_lens.copy_(torch.cat([places + 1, torch.zeros(1)]))
        metadata.slot_mapping.fill_(40 * BLOCK)
        for row, (table, place) in enumerate(zip(tables, places.tolist(), strict=True)):
            blocks = table[: place // BLOCK + 1]
            metadata.block_table[row, : len(blocks)] = torch.tensor(blocks)
            metadata.slot_mapping[row] = table[place // BLOCK] * BLOCK + place % BLOCK
        given = torch.cat([x[torch.arange(3), places], _noise(95, 1, HIDDEN)])
        angles = torch.cat([cosine[places], cosine[:1]]), torch.cat([sine[places], sine[:1]])
        made = ours.join(ours.mix(ours.project(given, angles), attending._cache, batch))
        torch.testing.assert_close(made[:3], torch.stack([each[step] for each in expected]))


@torch.inference_mode()
def test_masks_are_of_as_many_rows_as_there_is_room_for(
    attention: tuple[nn.Module, StretchSparseAttention], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, ours = attention
    x, chunk = _noise(96, TOKENS, HIDDEN), PagedChunk(0, TOKENS, list(range(12)))
    rotary, made = _rotary(torch.arange(TOKENS).expand(3, -1)), StretchBatch.seen
    expected, rows = _Attending(ours)(x, rotary, [chunk]), list[int]()

    def seen(*given: Any) -> Tensor:
        mask = made(*given)
        rows.append(len(mask))
        return mask

    monkeypatch.setattr(StretchBatch, "seen", seen)
    monkeypatch.setattr(stretch_batches, "ROOM", 7 * 4 * 4 * TOKENS)
    torch.testing.assert_close(_Attending(ours)(x, rotary, [chunk]), expected)
    assert rows == [7] * 6 + [3]


@torch.inference_mode()
def test_what_sees_all_is_computed_beside_what_does_not(attention: tuple[nn.Module, StretchSparseAttention]) -> None:
    _, ours = attention
    one, other = _noise(91, 2, TOKENS, HIDDEN)
    cosine, sine = _rotary(torch.arange(TOKENS).expand(3, -1))
    blocks, others = list(range(12)), list(range(20, 32))
    alone = _Attending(ours)(one, (cosine, sine), [PagedChunk(0, TOKENS, blocks)])
    short = _Attending(ours)(other[:8], (cosine[:8], sine[:8]), [PagedChunk(0, 8, others)])
    both = torch.cat([other[:8], one])
    angles = torch.cat([cosine[:8], cosine]), torch.cat([sine[:8], sine])
    made = _Attending(ours)(both, angles, [PagedChunk(0, 8, others), PagedChunk(0, TOKENS, blocks)])
    torch.testing.assert_close(made, torch.cat([short, alone]))


@torch.inference_mode()
def test_rejected_drafts_leave_nothing_in_a_stretch(attention: tuple[nn.Module, StretchSparseAttention]) -> None:
    """Drafts end a stretch, other tokens take their places, and a sequence with the same blocks before goes on."""
    _, ours = attention
    x, blocks = _noise(92, TOKENS, HIDDEN), list(range(12))
    cosine, sine = _rotary(torch.arange(TOKENS).expand(3, -1))

    def part(begin: int, end: int) -> Rotary:
        return cosine[begin:end], sine[begin:end]

    expected = _Attending(ours)(x, (cosine, sine), [PagedChunk(0, TOKENS, blocks)])
    drafting = _Attending(ours)
    drafting(x[:16], part(0, 16), [PagedChunk(0, 16, blocks)])
    drafting(_noise(93, 4, HIDDEN), part(16, 20), [PagedChunk(16, 4, blocks)])
    made = drafting(x[16:], part(16, TOKENS), [PagedChunk(16, TOKENS - 16, blocks)])
    torch.testing.assert_close(made, expected[16:])
    shared = [*blocks[:4], *range(20, 28)]
    made = drafting(x[16:], part(16, TOKENS), [PagedChunk(16, TOKENS - 16, shared)])
    torch.testing.assert_close(made, expected[16:])


@torch.inference_mode()
def test_n_grams_are_those_of_transformers_in_pieces_and_over_ends_of_texts() -> None:
    theirs = _theirs("Qwen4ExpTextPLELayer", 0, 0)
    theirs.ple_embedding.ngram_embedding.weight.copy_(_noise(5, *theirs.ple_embedding.ngram_embedding.weight.shape))
    ours = _fill(Ngrams(_config(), 0, ALONE, torch.float32), theirs)
    ids = torch.randint(0, 12, (2, TOKENS), generator=torch.Generator().manual_seed(6))
    ids[:, 20:24] = torch.tensor([3, END, END, 4])
    one, other = _noise(7, 2, TOKENS, 3 * HIDDEN)
    expected = theirs(one.unsqueeze(0), ids[:1], None)[0]

    def empty() -> StateCache:
        cache = ours.cache_spec().new_cache(4, CPU)
        for each in cache.tensors:
            each.fill_(99)  # whoever had it before
        return cache

    batch = ours.state_backend().batch([Segment(0, TOKENS, 0, fresh=True)])
    torch.testing.assert_close(ours(one, ids[0], empty(), batch), expected)
    cache, found, begin = empty(), list[Tensor](), 0
    for count in (1, 1, 2, 16, 1, 1, 1, 22):
        fresh, end = begin == 0, begin + count
        both = torch.cat([other[begin:end], one[begin:end]])
        tokens = torch.cat([ids[1, begin:end], ids[0, begin:end]])
        pieces = [Segment(0, count, 2, fresh=fresh), Segment(count, 2 * count, 1, fresh=fresh)]
        if count == 16:  # the state behind four tokens of it is kept
            pieces[1:] = [Segment(16, 20, 1, fresh=False, copy=3), Segment(20, 32, 1, fresh=False)]
        found.append(ours(both, tokens, cache, ours.state_backend().batch(pieces))[count:])
        begin = end
    torch.testing.assert_close(torch.cat(found), expected)
    batch = ours.state_backend().batch([Segment(0, TOKENS - 8, 3, fresh=False)])
    torch.testing.assert_close(ours(one[8:], ids[0, 8:], cache, batch), expected[8:])

    metadata = ours.state_backend().padding(4, 4, decodes_only=True)  # one token more than there are sequences
    replayed, found = ours.state_backend().over(metadata), list[Tensor]()
    for place in range(TOKENS):
        segments = [Segment(row, row + 1, slot, fresh=place == 0) for row, slot in enumerate((2, 0))]
        metadata.packed.copy_(torch.from_numpy(metadata.numbers(segments)))
        streams = torch.stack([other[place], one[place], one[place], one[place]])
        found.append(ours(streams, ids[[1, 0, 0, 0], place], cache, replayed)[1])
    torch.testing.assert_close(torch.stack(found), expected)


@torch.inference_mode()
def test_rows_of_padding_have_n_grams_that_are_numbers() -> None:
    """Their keys and values go into the null block, which kernels may multiply by 0."""
    ours = _fill(Ngrams(_config(), 0, ALONE, torch.float32), _theirs("Qwen4ExpTextPLELayer", 0, 0))
    metadata = ours.state_backend().padding(4, 4, decodes_only=True)
    metadata.packed.copy_(torch.from_numpy(metadata.numbers([Segment(0, 1, 2, fresh=True)])))
    torch.use_deterministic_algorithms(mode=True)  # what is not written is no number then
    try:
        made = ours(
            torch.ones(4, 3 * HIDDEN),
            torch.arange(4),
            ours.cache_spec().new_cache(4, CPU),
            ours.state_backend().over(metadata),
        )
    finally:
        torch.use_deterministic_algorithms(mode=False)
    assert made.isfinite().all()


@torch.inference_mode()
def test_ranks_share_a_table_of_n_grams_whole_or_in_parts() -> None:
    theirs = _theirs("Qwen4ExpTextPLELayer", 0, 0).ple_embedding
    table = theirs.ngram_embedding.weight
    for size in (1, 2, 3):
        for parts in (1, 3):
            ranks = [Ngrams(_config(), 0, TensorGroup(rank, size), torch.float32).embedding for rank in range(size)]
            for rank in ranks:
                places = {name: place for name, (_, place) in targets(rank)}
                assert not rank.ngram_embedding.whole()
                for number, rows in enumerate(table.chunk(parts)):
                    name = "ngram_embedding.weight" if parts == 1 else f"ngram_embedding.shard_{number}.weight"
                    places[name](InMemory(rows))
                assert rank.ngram_embedding.whole()
            assert torch.equal(torch.cat([rank.ngram_embedding.weight for rank in ranks]), table)
            with pytest.raises(ValueError, match="expected"):
                places["ngram_embedding.weight"](InMemory(table[:, 1:]))


@torch.inference_mode()
def test_streams_are_mixed_as_those_of_transformers() -> None:
    theirs, streams = _theirs("Qwen4ExpTextGatedResidual"), _noise(8, 5, 3 * HIDDEN)
    ours = _fill(StreamMix(_config(), torch.float32, ""), theirs)
    mixed, _, weights = theirs(streams)
    for made, expected in zip(ours(streams), (mixed, weights), strict=True):
        torch.testing.assert_close(made, expected)


@torch.inference_mode()
def test_gates_of_delta_nets_are_sigmoids_where_the_configuration_says_so() -> None:
    theirs, x = _theirs("Qwen4ExpTextGatedDeltaNet", 0), _noise(9, 20, HIDDEN)
    ours = _fill(GatedDeltaNet(_config(), ALONE, torch.float32), theirs)
    cache = ours.cache_spec().new_cache(1, CPU)
    batch = TorchDeltas(ours.shape, CPU).batch([Segment(0, 20, 0, fresh=True)])
    made = ours.join(ours.mix(ours.project(x, (x, x)), cache, batch))
    torch.testing.assert_close(made, theirs(x.unsqueeze(0))[0], rtol=1e-4, atol=1e-5)


def test_what_is_not_known_is_refused_by_name() -> None:
    for more, why in (
        ({"indexer_kv_heads": 2}, "an index with several heads of keys is not supported"),
        ({"indexer_budget": 10}, "keeps 10 tokens in stretches of 3 is not supported"),
        ({"eos_token_id": None}, "need the eos_token_id"),
        ({"ple_layer_ids": [3]}, "ple_layer_ids names layers that are not there"),
        ({"output_gate_type": "tanh"}, "gates of delta nets by tanh are not supported"),
    ):
        with pytest.raises(CheckpointError, match=why):
            _config(**more)


def test_drafts_of_the_checkpoint_s_own_layer_are_refused_by_name() -> None:
    checkpoint: Any = SimpleNamespace(config={})
    target: Any = SimpleNamespace(config=_config())
    with pytest.raises(CheckpointError, match="multi-token prediction is not known for texts with several streams"):
        load_mtp(checkpoint, target, torch.float32)
