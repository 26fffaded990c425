"""Experts that ranks have whole: each reads and computes its own alone, in every form of weights, and adds nothing for
others'."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from llm_service.layers.linear.placement import Place
from llm_service.layers.linear.quantized_weight import Number, QuantizedWeight
from llm_service.layers.linear.weight_dtype import Rounded
from llm_service.layers.moe.experts import Experts
from llm_service.layers.moe.sparse_mlp import SparseMLP
from llm_service.layers.ops import TORCH, use_ops
from llm_service.layers.tensor_parallel import TensorGroup
from llm_service.models.filling import InMemory
from llm_service.models.float_formats import EightBits
from tests.layer_cases import HIDDEN, noise

COUNT, INNER, PER_TOKEN = 6, 24, 2
GATES, DOWN = noise(COUNT, 2 * INNER, HIDDEN) / 8, noise(COUNT, HIDDEN, INNER, seed=2) / 5
X = noise(9, HIDDEN, seed=3)
WEIGHTS = noise(9, PER_TOKEN, seed=4).softmax(-1)
CHOSEN = noise(9, COUNT, seed=5).topk(PER_TOKEN).indices
RANKS = [TensorGroup(rank, 3, expert_parallel=True) for rank in range(3)]
KINDS = "gate_proj", "up_proj", "down_proj"

Tensors = dict[str, Any]


class Noted(InMemory):
    """Says which experts of a stack are read."""

    def __init__(self, tensor: Tensor, seen: set[int]) -> None:
        super().__init__(tensor)
        self._seen = seen

    def __getitem__(self, index: Any) -> Tensor:
        first = index[0] if isinstance(index, tuple) else index
        self._seen.update(range(*first.indices(COUNT)))
        return super().__getitem__(index)


class Whole(InMemory):
    """One expert's matrix; `read` notes that it was."""

    def __init__(self, tensor: Tensor, read: Callable[[], None]) -> None:
        super().__init__(tensor)
        self._read = read

    def __getitem__(self, index: Any) -> Any:
        self._read()
        return super().__getitem__(index)


class Quantized:
    """The same of a quantised one, of which some outputs may be read."""

    def __init__(self, matrix: Tensor, read: Callable[[], None]) -> None:
        self._weight, self._read = QuantizedWeight.rounded(matrix), read

    def get_shape(self) -> list[int]:
        return list(self._weight.shape)

    def __getitem__(self, index: Any) -> QuantizedWeight:
        self._read()
        rows, columns = index if isinstance(index, tuple) else (index, slice(None))
        assert columns.indices(self._weight.inputs) == (0, self._weight.inputs, 1)
        return replace(self._weight, codes=self._weight.codes[rows], scale=self._weight.scale[rows])


class QuantizedStack:
    """Those of all experts in one tensor."""

    def __init__(self, every: Tensor, seen: set[int]) -> None:
        self._every, self._seen = every, seen

    def get_shape(self) -> list[int]:
        return list(self._every.shape)

    def __getitem__(self, _: Any) -> Any:
        raise AssertionError("they are read one by one")

    def of_expert(self, number: int, *, inputs_first: bool) -> Quantized:
        assert not inputs_first
        return Quantized(self._every[number], partial(self._seen.add, number))


def of_kinds(expert: int) -> dict[str, Tensor]:
    return dict(zip(KINDS, (*GATES[expert].chunk(2), DOWN[expert]), strict=True))


def stacked(seen: set[int], *, inputs_first: bool = False) -> Tensors:
    both = {"gate_up_proj": GATES, "down_proj": DOWN}
    return {name: Noted(each.transpose(1, 2) if inputs_first else each, seen) for name, each in both.items()}


def halves(seen: set[int]) -> Tensors:
    gate, up = GATES.chunk(2, dim=1)
    return {name: Noted(each, seen) for name, each in zip(KINDS, (gate, up, DOWN), strict=True)}


def apart(seen: set[int], name: str, *, quantized: bool = False) -> Tensors:
    found: Tensors = {}
    for expert in range(COUNT):
        for kind, matrix in of_kinds(expert).items():
            made = Quantized if quantized else Whole
            found[name.format(expert=expert, kind=kind)] = made(matrix, partial(seen.add, expert))
    return found


def quantized_stacks(seen: set[int]) -> Tensors:
    both = {"gate_up_proj": GATES, "down_proj": DOWN}
    return {name: QuantizedStack(each, seen) for name, each in both.items()}


FORMS: dict[str, Callable[[set[int]], Tensors]] = {
    "stacked": stacked,
    "inputs first": partial(stacked, inputs_first=True),
    "halves": halves,
    "numbers before names": partial(apart, name="{expert}.{kind}.weight"),
    "numbers behind names": partial(apart, name="{kind}.{expert}.weight"),
    "quantized": partial(apart, name="{expert}.{kind}.weight", quantized=True),
    "quantized stacks": quantized_stacks,
}


def layer_of(group: TensorGroup, tensors: Tensors, rounded: Rounded | None = None) -> SparseMLP:
    """As a checkpoint's tensors fill one, in their order."""
    layer = SparseMLP(COUNT, PER_TOKEN, HIDDEN, INNER, group, torch.float32)
    places: dict[str, Place] = layer.experts.targets("")
    for name, stored in tensors.items():
        places[f".{name}"](stored)
    assert layer.experts.whole()
    if rounded is not None:
        layer.experts.finalize(rounded=rounded)
    return layer


def expected(chosen: Tensor = CHOSEN) -> Tensor:
    """By the definition."""
    out = torch.zeros_like(X)
    for token, (weights, experts) in enumerate(zip(WEIGHTS, chosen.tolist(), strict=True)):
        for weight, expert in zip(weights, experts, strict=True):
            gate, up = (GATES[expert] @ X[token]).chunk(2)
            out[token] += weight * (DOWN[expert] @ (torch.nn.functional.silu(gate) * up))
    return out


@torch.inference_mode()
@pytest.mark.parametrize("rounded", [None, Rounded(), Rounded(int8=True)], ids=["as read", "laid out", "int8"])
@pytest.mark.parametrize("form", FORMS)
def test_ranks_read_their_own_experts_alone_and_sum_up_to_the_whole(form: str, rounded: Rounded | None) -> None:
    if form.startswith("quantized"):
        rounded = Rounded()
    parts = []
    for group in RANKS:
        seen = set[int]()
        layer = layer_of(group, FORMS[form](seen), rounded)
        assert seen == set(range(2 * group.rank, 2 * group.rank + 2))
        parts.append(layer.mixture(X, WEIGHTS, CHOSEN))
    short = form.startswith("quantized") or (rounded is not None and rounded.int8)
    near = 2e-2 if short else 1e-5
    torch.testing.assert_close(sum(parts), expected(), rtol=near, atol=near)


@torch.inference_mode()
@pytest.mark.parametrize("form", [name for name in FORMS if not name.startswith("quantized")])
def test_experts_in_one_product_are_those_in_turn_on_each_rank(form: str) -> None:
    for group in RANKS:
        layer = layer_of(group, FORMS[form](set()))
        turn = layer._in_turn(X, WEIGHTS, CHOSEN)
        torch.testing.assert_close(layer._together(X, WEIGHTS, CHOSEN), turn, rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_what_a_product_leaves_in_rows_of_others_experts_reaches_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing writes them, so that they may be anything."""
    run = Experts.run_grouped

    def spoilt(self: Experts, x: Tensor, ends: Tensor) -> Tensor:
        out = run(self, x, ends)
        out[int(ends[-1]) :] = torch.nan
        return out

    monkeypatch.setattr(Experts, "run_grouped", spoilt)
    parts = [layer_of(group, stacked(set()))._together(X, WEIGHTS, CHOSEN) for group in RANKS]
    torch.testing.assert_close(sum(parts), expected(), rtol=1e-5, atol=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize("way", ["_in_turn", "_together"])
def test_a_step_none_of_whose_tokens_goes_to_a_rank_gives_zeros_there(way: str) -> None:
    idle, busy, other = (layer_of(group, stacked(set())) for group in RANKS)
    chosen = 2 + CHOSEN % 2  # the second rank's
    assert not getattr(idle, way)(X, WEIGHTS, chosen).any()
    assert not getattr(other, way)(X, WEIGHTS, chosen).any()
    assert getattr(busy, way)(X, WEIGHTS, chosen).any(1).all()
    assert not getattr(idle, way)(X[:0], WEIGHTS[:0], chosen[:0]).numel()


@pytest.fixture
def spoilt_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is allocated and not written is no number, and no row or expert that there is."""

    def spoil(made: Tensor) -> Tensor:
        return made.fill_(torch.nan if made.is_floating_point() else torch.iinfo(made.dtype).min)

    empty, new_empty = torch.empty, Tensor.new_empty
    monkeypatch.setattr(torch, "empty", lambda *given, **more: spoil(empty(*given, **more)))
    monkeypatch.setattr(Tensor, "new_empty", lambda self, *given, **more: spoil(new_empty(self, *given, **more)))


SHORT = {
    "int8": QuantizedWeight.rounded,
    "int8 by int8": partial(QuantizedWeight.rounded, inputs=True),
    "e4m3": lambda matrix: QuantizedWeight(Number.E4M3, e4m3(matrix), matrix.shape[1], ones(matrix), columns=1 << 20),
}
"""What a matrix becomes."""


def e4m3(matrix: Tensor) -> Tensor:
    return matrix.to(torch.float8_e4m3fn).view(torch.uint8)


def ones(matrix: Tensor) -> Tensor:
    return torch.ones(len(matrix), 1)


@torch.inference_mode()
@pytest.mark.usefixtures("spoilt_memory")
@pytest.mark.parametrize(
    "chosen", [CHOSEN, CHOSEN % 2, 5 - CHOSEN % 2], ids=["all", "the first rank's", "the last rank's"]
)
@pytest.mark.parametrize("form", ["plain", *SHORT])
def test_mixtures_by_the_kernels_for_gpus_sum_up_over_ranks(form: str, chosen: Tensor) -> None:
    row_ops = pytest.importorskip("llm_service.layers.gpu.row_ops")
    parts = []
    for group in RANKS:
        layer = layer_of(group, stacked(set()))
        use_ops(layer, row_ops)
        if form in SHORT:
            layer.experts._stay_short(
                *([[SHORT[form](each)] for each in weight] for weight in layer.experts._weights())
            )
        parts.append(layer._together(X, WEIGHTS, chosen.int()))
    wanted = expected(chosen)
    assert (sum(parts) - wanted).norm() <= (1e-5 if form == "plain" else 0.06) * wanted.norm()


@torch.inference_mode()
def test_nothing_is_asked_of_the_device_of_how_many_tokens_a_rank_s_experts_get() -> None:
    """A tensor without numbers could not tell."""
    layer = layer_of(RANKS[1], stacked(set())).to("meta", torch.bfloat16)
    given = X.to("meta", torch.bfloat16), WEIGHTS.to("meta", torch.bfloat16), CHOSEN.to("meta")
    assert layer._together(*given).shape == X.shape


def test_rows_of_others_experts_are_behind_all_and_have_no_place() -> None:
    chosen = torch.tensor([[0, 4], [3, 2], [5, 1]])
    routes = TORCH.sort_by_expert(chosen, 6, slice(2, 4))
    assert routes.ends.tolist() == [1, 2]
    assert routes.rows.tolist()[:2] == [1, 1]
    assert routes.places.tolist() == [-1, -1, 1, 0, -1, -1]
    assert sorted(routes.rows.tolist()) == [0, 0, 1, 1, 2, 2]


def test_a_stack_of_another_number_of_experts_is_refused() -> None:
    for name, stored in {"gate_up_proj": GATES, "gate_proj": GATES[:, :INNER], "down_proj": DOWN}.items():
        whole = torch.cat([stored, stored[:1]])
        experts = Experts(COUNT, HIDDEN, INNER, RANKS[0], torch.float32)
        with pytest.raises(ValueError, match=r"it is \(7|of 7 experts"):
            experts.targets("")[f".{name}"](InMemory(whole))


@pytest.mark.parametrize(("columns", "cut"), [(8, True), (16, True), (12, False), (INNER, False)])
def test_parts_of_experts_may_cut_groups_of_scales_and_whole_experts_do_not(columns: int, *, cut: bool) -> None:
    """A scale for all inputs is for any of them."""
    codes, groups = torch.zeros(HIDDEN, INNER).to(torch.float8_e4m3fn), -(-INNER // columns)
    down = EightBits(Number.E4M3, InMemory(codes), InMemory(torch.ones(HIDDEN, groups)), block=(1, columns))
    for whole in (False, True):
        experts = Experts(COUNT, HIDDEN, INNER, TensorGroup(1, 2, expert_parallel=whole), torch.float32)
        experts.targets("")[".5.down_proj.weight"](down)
        assert experts.cuts_groups == (cut and not whole)


def test_ranks_that_do_not_divide_the_experts_are_refused() -> None:
    with pytest.raises(ValueError, match="6 experts cannot be given whole to 4 ranks"):
        Experts(COUNT, HIDDEN, INNER, TensorGroup(0, 4, expert_parallel=True), torch.float32)


def test_one_rank_has_all_experts_whole_anyway() -> None:
    experts = Experts(COUNT, HIDDEN, INNER, TensorGroup(expert_parallel=True), torch.float32)
    assert (experts.own, experts.down_proj.shape) == (slice(0, COUNT), (COUNT, HIDDEN, INNER))
