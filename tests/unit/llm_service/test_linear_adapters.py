"""What adapters add to a layer: each rank its share, to rows without one nothing, by our kernel what torch adds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save

from common.checkpoints.checkpoint import Checkpoint
from common.gpu.transfer import to_device
from llm_service.layers.gpu.lora_tiles import LowRankTiles
from llm_service.layers.linear.parallel import PackedLinear
from llm_service.layers.lora.linear_adapters import AdaptedRows, AdapterKernel, AdapterRows, LinearAdapters
from llm_service.layers.lora.slots import LowRank, PlainSlots
from llm_service.layers.tensor_parallel import ALONE, TensorGroup
from llm_service.model_config.adapter_folder import Adapter
from llm_service.model_config.text import TextConfig
from llm_service.models.decoder import Decoder
from llm_service.plan import StepAdapters, StepPlan
from llm_service.worker import adapters as rank_adapters
from llm_service.worker.adapters import RankAdapters, adapted_linears, shapes_of
from llm_service.worker.dummy_plans import prompt_plan

RANK, ROWS = 5, 9
SLOTS = np.array([0, -1, 1, 1, -1, 0, 0, 0, 0])


each_kernel = pytest.mark.parametrize("kernel", AdapterKernel)


def use(rows: AdapterRows, places: np.ndarray) -> None:
    rows.use(SLOTS, places)
    rows.put([torch.from_numpy(numbers) for numbers in rows.numbers()])


def linears(directory: Path, group: TensorGroup) -> dict[str, tuple[PackedLinear, str]]:
    decoder = Decoder(TextConfig.of(Checkpoint(directory).config), group, torch.float32, torch.device("cpu"))
    return {name: (linear, part) for name, linear, part in adapted_linears(decoder.layers, "layers.")}


def added(
    linear: PackedLinear, part: str, halves: list[torch.Tensor], x: torch.Tensor, *, kernel: AdapterKernel
) -> torch.Tensor:
    """To zeros, by an adapter in slot 1 and twice that in slot 0."""
    rows = AdapterRows(kernel=kernel)
    adapters = LinearAdapters(linear, 2, RANK + 3, rows, torch.empty(0))
    adapters.warm_up()
    assert not rows.any
    a, b = linear.partition(part, *halves)
    adapters.put(0, {part: LowRank(a, b, 2.0)})
    adapters.put(1, {part: LowRank(a, b, 1.0)})
    use(rows, np.arange(ROWS))
    return adapters.add(x, torch.zeros(ROWS, linear.outputs))


@pytest.mark.parametrize(
    ("family", "kernel"),
    [
        *(("qwen3_vl", kernel) for kernel in AdapterKernel),
        *(
            (family, kernel)
            for family in ("qwen3_5", "qwen3_5_moe")
            for kernel in (AdapterKernel.NONE, AdapterKernel.CPU)
        ),
        *(pytest.param(family, AdapterKernel.GPU, marks=pytest.mark.soak) for family in ("qwen3_5", "qwen3_5_moe")),
    ],
)
def test_two_ranks_add_what_one_does(checkpoints: Callable[..., Path], family: str, kernel: AdapterKernel) -> None:
    directory = checkpoints(family)
    whole = linears(directory, ALONE)
    ranks = [linears(directory, TensorGroup(rank, 2)) for rank in range(2)]
    seen: set[tuple[str, int, int]] = set()
    for name, (linear, part) in whole.items():
        kind = (name.split(".", 2)[2], linear.inputs, linear.outputs)
        if kind in seen:  # another layer of the same kind
            continue
        seen.add(kind)
        outputs = len(linear.places(part))
        halves = [torch.randn(RANK, linear.inputs), torch.randn(outputs, RANK)]
        x = torch.randn(ROWS, linear.inputs)
        y = added(linear, part, halves, x, kernel=kernel)
        factors = torch.tensor([{0: 2.0, 1: 1.0, -1: 0.0}[slot] for slot in SLOTS.tolist()]).unsqueeze(1)
        mine = y[:, linear.places(part)]
        torch.testing.assert_close(mine, factors * (x @ halves[0].T @ halves[1].T), rtol=1e-4, atol=1e-4)
        assert y.count_nonzero() == mine.count_nonzero(), "another part has changed"
        shares = [(its[name][0], added(*its[name], halves, x[:, its[name][0]._inputs], kernel=kernel)) for its in ranks]
        if shares[0][0].inputs < linear.inputs:
            torch.testing.assert_close(shares[0][1] + shares[1][1], y, rtol=1e-4, atol=1e-4)
            continue
        for its, out in shares:
            rows = torch.cat([torch.arange(outputs)[each] for each in its.parts[part]])
            torch.testing.assert_close(out[:, its.places(part)], mine[:, rows], rtol=1e-4, atol=1e-4)


@each_kernel
def test_rows_without_an_adapter_keep_every_bit(checkpoint: Path, kernel: AdapterKernel) -> None:
    linear, part = linears(checkpoint, ALONE)["layers.0.self_attn.k_proj"]
    rows = AdapterRows(kernel=kernel)
    adapters = linear.adapters = LinearAdapters(linear, 2, RANK, rows, torch.empty(0))
    linear.weight.data.normal_()
    x = torch.randn(ROWS, linear.inputs)
    base = linear(x)
    halves = torch.randn(RANK, linear.inputs), torch.randn(len(linear.places(part)), RANK)
    for slot in (0, 1):
        adapters.put(slot, {part: LowRank(*linear.partition(part, *halves), 1.0)})
    use(rows, np.arange(ROWS))
    out = linear(x)
    assert torch.equal(out[SLOTS < 0], base[SLOTS < 0])
    assert not torch.equal(out, base)
    adapters.put(0, {})
    assert torch.equal(linear(x)[SLOTS <= 0], base[SLOTS <= 0]), "a slot is stale"
    rows.clear()
    assert torch.equal(linear(x), base)


@each_kernel
def test_a_part_of_the_rows_is_told_apart(checkpoint: Path, kernel: AdapterKernel) -> None:
    linear, part = linears(checkpoint, ALONE)["layers.0.mlp.down_proj"]
    rows = AdapterRows(kernel=kernel)
    adapters = LinearAdapters(linear, 2, RANK, rows, torch.empty(0))
    halves = torch.randn(RANK, linear.inputs), torch.randn(linear.outputs, RANK)
    adapters.put(1, {part: LowRank(*linear.partition(part, *halves), 1.0)})
    x, places = torch.randn(ROWS, linear.inputs), np.array([1, 3, 8])
    use(rows, places)
    every = adapters.add(x, torch.zeros(ROWS, linear.outputs))
    some = adapters.add(x[places], torch.zeros(3, linear.outputs))
    torch.testing.assert_close(some, every[places])
    assert some[1].abs().sum() > 0


@pytest.mark.parametrize("least", [1, ROWS], ids=["torch", "kernel"])
@pytest.mark.parametrize("inputs", [70, 71])
def test_an_adapter_of_16_bits_is_what_it_is_in_32(inputs: int, least: int) -> None:
    """In a slot that has held others, of parts whose outputs lie in turns."""
    order = torch.cat([torch.arange(0, 100), torch.arange(107, 140), torch.arange(100, 107)]).flip(0)
    parts = {"one": slice(0, 90), "two": (slice(0, 30), slice(40, 60))}
    linear = PackedLinear(slice(0, inputs), parts, bias=False, dtype=torch.float32, order=order)
    rows = AdapterRows(kernel=AdapterKernel.CPU)
    adapters, x = LinearAdapters(linear, 2, RANK + 9, rows, torch.empty(0)), torch.randn(ROWS, inputs)
    rows._by_count = {ROWS: AdaptedRows.of(SLOTS, least)}
    random = torch.Generator().manual_seed(inputs)
    for ranks in ((RANK, RANK + 4), (RANK + 9, 1)):
        halves = {
            part: (torch.randn(rank, inputs, generator=random), torch.randn(count, rank, generator=random))
            for part, rank, count in zip(parts, ranks, (90, 50), strict=True)
        }
        for kinds in (
            (torch.bfloat16,) * 2,
            (torch.float16,) * 2,
            (torch.float32, torch.bfloat16),
            (torch.float32,) * 2,
        ):
            expected = torch.zeros(ROWS, linear.outputs, dtype=torch.float64)
            for slot, scale in enumerate((0.7, 1.9)):
                pairs = {
                    part: LowRank(a.to(kind), b.to(kind), scale)
                    for (part, (a, b)), kind in zip(halves.items(), kinds, strict=True)
                }
                adapters.put(slot, pairs)
                for part, pair in pairs.items():
                    change = pair.scale * (x.double() @ pair.a.double().T @ pair.b.double().T)
                    expected[np.ix_(slot == SLOTS, linear.places(part))] = change[slot == SLOTS]
            out = adapters.add(x, torch.zeros(ROWS, linear.outputs))
            torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kinds", [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16)])
def test_slots_for_16_bits_have_each_matrix_as_it_is_stored(kinds: tuple[torch.dtype, torch.dtype]) -> None:
    """And a row has the same bits alone as in company, whose slots are not in its order."""
    linear = PackedLinear(slice(0, 130), {"one": slice(0, 150), "two": slice(0, 70)}, bias=False, dtype=torch.float32)
    rows = AdapterRows(kernel=AdapterKernel.CPU)
    adapters = LinearAdapters(linear, 3, RANK, rows, torch.empty(0, dtype=torch.bfloat16))
    expected, x = torch.zeros(4, linear.outputs), torch.randn(4, 130)
    slots = np.array([2, -1, 0, 1])
    for row in np.flatnonzero(slots >= 0):
        slot, rank = int(slots[row]), RANK - int(slots[row])
        halves = {
            part: (torch.randn(rank, 130), torch.randn(count, rank)) for part, count in (("one", 150), ("two", 70))
        }
        pairs = {part: LowRank(a.to(kinds[0]), b.to(kinds[1]), 0.3) for part, (a, b) in halves.items()}
        adapters.put(slot, pairs)
        for part, pair in pairs.items():
            expected[row, linear.places(part)] = 0.3 * (x[row] @ pair.a.float().T @ pair.b.float().T)
    rows.use(slots, np.arange(4))
    out = adapters.add(x, torch.zeros(4, linear.outputs))
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-4)
    for row in (0, 2, 3):
        rows.use(slots[row : row + 1], np.arange(1))
        assert torch.equal(adapters.add(x[row : row + 1], torch.zeros(1, linear.outputs))[0], out[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_adapter_goes_to_a_gpu_in_as_few_copies_as_it_has_portions(
    checkpoint: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of matrices in 16 and 32 bits, with layers that it says nothing of, over slots that held another."""
    decoder = Decoder(TextConfig.of(Checkpoint(checkpoint).config), ALONE, dtype, torch.device("cpu"))
    sizes: list[int] = []

    def counted(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
        sizes.append(len(arrays))
        return to_device(arrays, device)

    monkeypatch.setattr(rank_adapters, "to_device", counted)
    packed = RankAdapters(decoder, 2, RANK + 3, AdapterKernel.GPU)
    packed._loaded = {1: shares(decoder, 0, 1), 2: shares(decoder, 1, 3)}
    whole = len(packed._slots)
    for number in (1, 2):
        packed.begin(filling(number))
    assert len(sizes) == 2, "a copy for all layers"
    assert sizes[0] > sizes[1] > whole
    monkeypatch.setattr(rank_adapters, "_PORTION", 1)
    sizes.clear()
    packed.begin(filling(2))
    assert len(sizes) > 2
    expected = RankAdapters(decoder, 2, RANK + 3, AdapterKernel.NONE)
    expected._loaded = packed._loaded
    for number in (1, 2):
        expected.begin(filling(number))
    for linear, layer in packed._slots.items():
        own, other = layer._slots, expected._slots[linear]._slots
        assert isinstance(own, LowRankTiles)
        assert isinstance(other, PlainSlots)
        for part in range(len(linear.parts)):
            assert torch.equal(own.first(1, part), other.first(1, part))
            for one, two in zip(own.second(1, part), other.second(1, part), strict=True):
                assert torch.equal(one[2], two[2])
        assert np.array_equal(own._ranks.numpy(), other.ranks)
        assert np.array_equal(own._scales.numpy(), other.scales)


def shares(decoder: Decoder, seed: int, every: int) -> dict[PackedLinear, dict[str, LowRank]]:
    """An adapter of some of the matrices."""
    random, found = torch.Generator().manual_seed(seed), dict[PackedLinear, dict[str, LowRank]]()
    for index, (_, linear, part) in enumerate(adapted_linears(decoder.layers, "layers.")):
        if index % every == 0:
            kind = torch.bfloat16 if index % 2 else torch.float32
            a = torch.randn(RANK - seed, linear.inputs, generator=random).to(kind)
            b = torch.randn(len(linear.places(part)), RANK - seed, generator=random).to(kind)
            found.setdefault(linear, {})[part] = LowRank(a, b, 0.5 + index)
    return found


def filling(number: int) -> StepPlan:
    """A step without rows that an adapter would add to."""
    return msgspec.structs.replace(prompt_plan(1, 16)[0], adapters=StepAdapters(filled=[(1, number)]))


def test_what_adapts_gates_and_what_they_open_as_one_goes_to_each_where_a_checkpoint_has_two() -> None:
    text: dict[str, Any] = {"model_type": "glm4v_text", "vocab_size": 16, "hidden_size": 16, "intermediate_size": 24}
    text |= {"num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    shape = TextConfig.of(text)
    apart = replace(shape, family=replace(shape.family, mlp=replace(shape.family.mlp, fused_gate_up=False)))
    target, stem = "layers.0.mlp.gate_up_proj", "base_model.gates"
    halves = torch.randn(3, 16), torch.randn(48, 3)
    tensors = {f"{stem}.lora_{half}.weight": each for half, each in zip("AB", halves, strict=True)}
    adapter = Adapter(b"", 3, save(tensors), {target: 2.0}, {target: stem})
    x, found = torch.randn(ROWS, 16), []
    assert target in shapes_of(shape)
    for each in (shape, apart):
        decoder = Decoder(each, ALONE, torch.float32, torch.device("cpu"))
        loaded = RankAdapters(decoder, 1, 4, AdapterKernel.NONE)
        loaded.load(1, adapter)
        ((linear, parts),) = loaded._loaded[1].items()
        rows = AdapterRows(kernel=AdapterKernel.NONE)
        slots = LinearAdapters(linear, 1, 4, rows, torch.empty(0))
        slots.put(0, parts)
        rows.use(np.zeros(ROWS, np.int64), np.arange(ROWS))
        rows.put([torch.from_numpy(numbers) for numbers in rows.numbers()])
        found.append(slots.add(x, torch.zeros(ROWS, linear.outputs)))
    torch.testing.assert_close(found[0], 2.0 * x @ halves[0].t() @ halves[1].t())
    torch.testing.assert_close(*found)
