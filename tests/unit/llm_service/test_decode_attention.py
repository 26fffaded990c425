"""The CPU's decoding kernel against the same in torch: lengths around what it takes together, tasks of any size."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from llm_service.families.sight import Sight
from llm_service.layers.attention.backend import CAUSAL, AttentionKind
from llm_service.layers.cpu import decode_attention
from llm_service.layers.cpu.decode_attention import Decodes
from llm_service.layers.cpu.selection import wide_vectors

SIZE, DIM, WIDEST = 4, 24, 5


@pytest.mark.parametrize("lengths", [[1], [2, 3], [4], [5, 1, 8], [13, 16, 17, 2, 9]])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 3), (14, 2), (5, 1), (12, 6)])
@pytest.mark.parametrize("threads", [1, 2, 7])
def test_tokens_are_written_and_attended_to(
    lengths: list[int], heads: int, kv_heads: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_attention, "threads_used", lambda: threads)
    random = torch.Generator().manual_seed(heads + len(lengths))
    count = len(lengths)
    table = torch.randperm(count * WIDEST, generator=random).view(count, WIDEST).int()
    keys, values = torch.randn(2, count * WIDEST, SIZE, kv_heads, DIM, generator=random)
    query, key, value = (torch.randn(count, many, DIM, generator=random) for many in (heads, kv_heads, kv_heads))
    expected_keys, expected_values = keys.clone(), values.clone()
    expected = torch.empty_like(query)
    for row, length in enumerate(lengths):
        block, offset = int(table[row, (length - 1) // SIZE]), (length - 1) % SIZE
        expected_keys[block, offset], expected_values[block, offset] = key[row], value[row]
        known = [every[table[row].long()].flatten(0, 1)[:length] for every in (expected_keys, expected_values)]
        one = query[row].unsqueeze(1), *(every.transpose(0, 1) for every in known)
        expected[row] = functional.scaled_dot_product_attention(*one, enable_gqa=True).squeeze(1)
    out = decode_attention.decode(
        query, key, value, keys, values, Decodes.of(table, torch.tensor(lengths, dtype=torch.int32))
    )
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(keys, expected_keys)
    assert torch.equal(values, expected_values)


@pytest.mark.parametrize(
    "kind",
    [CAUSAL, *map(AttentionKind, (Sight(window=7), Sight(chunk=6))), AttentionKind(Sight(window=50), softcap=1.5)],
    ids=["all", "window", "chunk", "cap"],
)
@pytest.mark.parametrize(("dtype", "size", "group"), [("float32", 4, 2), ("bfloat16", 4, 2), ("bfloat16", 16, 3)])
@pytest.mark.parametrize("threads", [1, 3])
def test_tokens_of_a_sequence_together_are_the_same_to_the_bit_as_one_by_one(
    kind: AttentionKind, dtype: str, size: int, group: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nobody has written may be anything."""
    if dtype == "bfloat16" and not wide_vectors():
        pytest.skip("the processor has no AVX-512")
    monkeypatch.setattr(decode_attention, "threads_used", lambda: threads)
    lengths, counts, random = [5, 9, 38, 1, 90], [5, 1, 3, 1, 16], torch.Generator().manual_seed(5)
    widest = -(-max(lengths) // size)
    table = torch.randperm(5 * widest, generator=random).view(5, widest).int()
    keys, values = torch.full((2, 5 * widest, size, 3, DIM), torch.nan, dtype=getattr(torch, dtype))
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        for cache in (keys, values):
            known = cache[table[row].long()].flatten(0, 1)
            known[: length - count] = torch.randn(length - count, 3, DIM, generator=random).to(cache.dtype)
            cache[table[row].long()] = known.view(widest, size, 3, DIM)
    given = [torch.randn(sum(counts), many, DIM, generator=random) for many in (3 * group, 3, 3)]
    kept, ends = (keys.clone(), values.clone()), torch.tensor(counts).cumsum(0).int()
    together = decode_attention.decode(*given, keys, values, Decodes.of(table, torch.tensor(lengths).int(), ends), kind)
    alone: list[torch.Tensor] = []
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        for index in range(count):
            place = len(alone)
            one = [each[place : place + 1] for each in given]
            known = torch.tensor([length - count + index + 1]).int()
            alone.append(decode_attention.decode(*one, *kept, Decodes.of(table[row : row + 1], known), kind))
    assert not together.isnan().any()
    assert torch.equal(together, torch.cat(alone))
    assert torch.equal(keys.nan_to_num(9), kept[0].nan_to_num(9))
    assert torch.equal(values.nan_to_num(9), kept[1].nan_to_num(9))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scores_are_drawn_below_a_cap(dtype: torch.dtype) -> None:
    """Caps that are nearly reached, and one that is far above all: each number of a tangent counts."""
    if dtype == torch.bfloat16 and not wide_vectors():
        pytest.skip("the processor has no AVX-512")
    random = torch.Generator().manual_seed(1)
    keys, values = torch.randn(2, 40, SIZE, 2, DIM, generator=random).to(dtype)
    query, key, value = (torch.randn(1, many, DIM, generator=random).to(dtype).float() for many in (4, 2, 2))
    table, length = torch.randperm(40, generator=random).view(1, 40).int(), torch.tensor([157]).int()
    seen = []
    for cache, own in ((keys, key), (values, value)):
        known = cache[table[0].long()].flatten(0, 1)[:157].double()
        known[156] = own[0]
        seen.append(known.transpose(0, 1).repeat_interleave(2, 0))
    plain = query[0].double().unsqueeze(1) @ seen[0].transpose(1, 2)
    for softcap in (0.1, 3.0, 50.0, 1e4):
        weights = (softcap * (plain / softcap).tanh()).softmax(2)
        kind = AttentionKind(scale=1.0, softcap=softcap)
        out = decode_attention.decode(query, key, value, keys.clone(), values.clone(), Decodes.of(table, length), kind)
        torch.testing.assert_close(out[0].double(), (weights @ seen[1]).squeeze(1), rtol=2e-5, atol=2e-5)


WINDOWS = [
    *(AttentionKind(Sight(window=window), scale=0.3) for window in (1, 5, 8, 13, 40)),
    *(AttentionKind(Sight(chunk=chunk), scale=0.3) for chunk in (1, 5, 8, 40)),
]


@pytest.mark.parametrize("kind", WINDOWS, ids=lambda kind: f"{kind.sight.window} {kind.sight.chunk}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_window_hides_what_is_before_it(dtype: torch.dtype, kind: AttentionKind) -> None:
    """What is hidden may be any number."""
    if dtype == torch.bfloat16 and not wide_vectors():
        pytest.skip("the processor has no AVX-512")
    lengths, random = [1, 5, 13, 18, 20], torch.Generator().manual_seed(1)
    table = torch.randperm(25, generator=random).view(5, WIDEST).int()
    keys, values = torch.randn(2, 25, SIZE, 2, DIM, generator=random)
    query, key, value = (torch.randn(5, many, DIM, generator=random) for many in (4, 2, 2))
    expected = []
    for row, length in enumerate(lengths):
        block, offset = int(table[row, (length - 1) // SIZE]), (length - 1) % SIZE
        first = kind.first_seen(length - 1)
        for every, own in ((keys, key), (values, value)):
            known = every[table[row].long()].flatten(0, 1)
            known[:first] = 1e4
            every[table[row].long()] = known.view(WIDEST, SIZE, 2, DIM)
            every[block, offset] = own[row]
        seen = [each[table[row].long()].flatten(0, 1)[first:length].transpose(0, 1) for each in (keys, values)]
        attended = functional.scaled_dot_product_attention(
            query[row].unsqueeze(1), *seen, scale=kind.scale, enable_gqa=True
        )
        expected.append(attended.squeeze(1))
    decodes = Decodes.of(table, torch.tensor(lengths, dtype=torch.int32))
    given = query, key, value, keys.to(dtype), values.to(dtype), decodes, kind
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(decode_attention.decode(*given), torch.stack(expected), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("sequences", "kv_heads", "threads", "parts"),
    [(1, 8, 1, 1), (1, 8, 2, 2), (3, 8, 2, 2), (8, 8, 2, 1), (9, 8, 2, 1), (1, 2, 16, 2), (5, 6, 4, 6), (1, 1, 2, 1)],
)
def test_a_sequence_is_divided_as_little_as_keeps_all_threads_busy(
    sequences: int, kv_heads: int, threads: int, parts: int
) -> None:
    assert decode_attention.parts(sequences, kv_heads, threads) == parts


def test_one_sequence_or_several_the_kernel_is_compiled_once() -> None:
    """Whoever comes first, or is alone, waits for no compiler: the engine has run one token before it is ready."""
    keys, values = torch.zeros(2, 2, SIZE, 2, DIM)
    for count in (1, 2):
        heads = torch.zeros(count, 8, DIM)
        query, key, value = heads.split([4, 2, 2], dim=1)
        table = torch.arange(count, dtype=torch.int32).unsqueeze(1)
        decode_attention.decode(
            query, key, value, keys, values, Decodes.of(table, torch.ones(count, dtype=torch.int32))
        )
    assert len(decode_attention._kernel.signatures) == 1


@pytest.mark.skipif(not wide_vectors(), reason="the processor has no AVX-512")
@pytest.mark.parametrize("lengths", [[1], [7, 8, 9], [13, 80, 17, 2, 75]])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "size"), [(2, 2, 32, 16), (6, 2, 24, 5), (5, 1, 128, 4)])
@pytest.mark.parametrize("threads", [1, 3])
def test_keys_and_values_in_bfloat16_are_widened_exactly(
    lengths: list[int], heads: int, kv_heads: int, dim: int, size: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_attention, "threads_used", lambda: threads)
    random, count, widest = torch.Generator().manual_seed(heads), len(lengths), -(-max(lengths) // size)
    table = torch.randperm(count * widest, generator=random).view(count, widest).int()
    keys, values = torch.randn(2, count * widest, size, kv_heads, dim, generator=random).bfloat16()
    for row, length in enumerate(lengths):  # what nobody has written may be anything
        for cache in (keys, values):
            known = cache[table[row].long()].flatten(0, 1)
            known[length - 1 :] = torch.nan
            cache[table[row].long()] = known.view(widest, size, kv_heads, dim)
    query, key, value = (torch.randn(count, many, dim, generator=random) for many in (heads, kv_heads, kv_heads))
    wide = keys.float(), values.float()
    ends = torch.tensor(lengths, dtype=torch.int32)
    rounded = key.bfloat16().float(), value.bfloat16().float()
    expected = decode_attention.decode(query, *rounded, *wide, Decodes.of(table, ends))
    out = decode_attention.decode(query, key, value, keys, values, Decodes.of(table, ends))
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(keys.nan_to_num(9).float(), wide[0].nan_to_num(9))
    assert torch.equal(values.nan_to_num(9).float(), wide[1].nan_to_num(9))


@pytest.mark.skipif(not wide_vectors(), reason="the processor has no AVX-512")
def test_a_token_s_attention_over_bfloat16_is_the_same_to_the_bit_in_any_company_and_division(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    random = torch.Generator().manual_seed(3)
    keys, values = torch.randn(2, 12, 16, 4, 64, generator=random).bfloat16()
    query, key, value = (torch.randn(3, many, 64, generator=random) for many in (8, 4, 4))
    table, lengths = torch.randperm(12, generator=random).view(3, 4).int(), torch.tensor([50, 64, 3]).int()
    alone = [
        decode_attention.decode(
            *(each[row : row + 1] for each in (query, key, value)),
            keys,
            values,
            Decodes.of(table[row : row + 1], lengths[row : row + 1]),
        )
        for row in range(3)
    ]
    for threads in (1, 2, 4):
        monkeypatch.setattr(decode_attention, "threads_used", lambda threads=threads: threads)
        together = decode_attention.decode(query, key, value, keys, values, Decodes.of(table, lengths))
        assert torch.equal(together, torch.cat(alone))
