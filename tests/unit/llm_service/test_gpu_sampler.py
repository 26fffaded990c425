"""The sampler of GPUs, its kernels in Triton's interpreter, against the one that is compared with transformers."""

from __future__ import annotations

from array import array
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from llm_service.engine.batch import uniform
from llm_service.plan import Draw
from llm_service.worker import gpu_sampler, sampler

SMALL, LARGE = 24, 300
"""Vocabularies; of the larger one a program sees `HEAD` words at first, and goes through it in two parts."""
HEAD, BLOCK = 64, 256
SEEN: dict[str, Any] = {"prompt": array("i", [3, 5, 9]).tobytes(), "output": array("i", [5, 7, 7, 7]).tobytes()}
ENDS = [0.0, 1.0 - 2.0**-53]
CUTS: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 20, "top_p": 0.95, "min_p": 0.1},
    {"top_k": 100_000, "top_p": 1.0},
    {"top_p": 0.9},
    {"top_p": 1e-6},
    {"min_p": 0.02},
    {"top_k": 200},
    {"top_k": 200, "top_p": 0.7},
    {"top_k": 200, "top_p": 0.7, "min_p": 0.3},
]


NONE = torch.empty(0, dtype=torch.int64)


def rows_of(count: int, vocabulary: int, spread: float, seed: int = 0) -> torch.Tensor:
    """Few values, as 16 bits leave them: many tokens are as likely as others."""
    rows = spread * torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(seed))
    return rows.bfloat16().float()


def same(rows: torch.Tensor, draws: list[Draw], chosen: torch.Tensor = NONE) -> list[int]:
    untouched = rows.clone()
    given, expected = gpu_sampler.draw(rows, draws, chosen).result(), sampler.draw(rows, draws, chosen).result()
    assert given == expected
    assert torch.equal(rows, untouched)
    return given.tokens


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_sampler, "HEAD", HEAD)
    monkeypatch.setattr(gpu_sampler, "_BLOCK", BLOCK)


@pytest.mark.parametrize(("vocabulary", "spread"), [(SMALL, 2.0), (LARGE, 4.0)])
def test_every_cut_leaves_the_same_tokens_at_the_same_places(vocabulary: int, spread: float) -> None:
    draws = [Draw(at=0, temperature=0.6 + 0.1 * n, uniform=uniform(n, 0, 0), **cut) for n, cut in enumerate(CUTS)]
    draws += [Draw(at=0, temperature=1.0, top_k=10, uniform=chance) for chance in ENDS]
    same(rows_of(len(draws), vocabulary, spread), draws)


def test_what_the_head_does_not_hold_is_drawn_from_the_whole_vocabulary() -> None:
    """Of flat rows, so that every cut lies behind the head."""
    cuts: list[dict[str, Any]] = [{}, {"top_k": 200}, {"top_p": 0.9}, {"top_k": 200, "top_p": 0.7}, {"min_p": 0.9}]
    draws = [Draw(at=0, temperature=1.0, uniform=uniform(n, 0, 0), **cut) for n, cut in enumerate(cuts)]
    draws += [Draw(at=0, temperature=1.0, uniform=chance) for chance in ENDS]
    same(rows_of(len(draws), LARGE, 0.05), draws)


def test_a_batch_of_everything_is_drawn_and_greedy_rows_stay_between() -> None:
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "top_k": 20},
        {"temperature": 0.8, "top_p": 0.7, "banned": (1, 2)},
        {"output": SEEN["output"], "frequency_penalty": 0.7},
        {"temperature": 1.0, **SEEN, "repetition_penalty": 1.4, "presence_penalty": 0.3, "logprobs": 2},
        {"temperature": 1.0, "prompt": SEEN["prompt"], "repetition_penalty": 0.6},
        {"temperature": 1.0, "logit_bias": {3: 4.0, 5: -4.0}, "banned": (3,), "logprobs": 0},
        {"temperature": 1.0, "allowed_mask": bytes([0b1010, 0, 0b11])},
        {"allowed_mask": bytes([0, 0xFF, 0]), "logprobs": 5},
    ]
    draws = [Draw(at=0, uniform=uniform(n, 0, 0), **kinds[n % len(kinds)]) for n in range(2 * len(kinds))]
    rows = rows_of(len(draws), SMALL, 2.0, 1)
    together = same(rows, draws)
    assert same(rows.flip(0), draws[::-1]) == together[::-1]
    assert same(rows[:, : SMALL - 1], [Draw(at=0, temperature=1.0, top_k=2)] * len(draws)), "rows may be apart"


@pytest.mark.parametrize("temperature", [1e-3, 1e-60, 5e-324])
def test_the_smallest_temperatures_are_greedy(temperature: float) -> None:
    rows = rows_of(1, SMALL, 2.0, 5).expand(3, -1)
    draws = [Draw(at=0, temperature=temperature, uniform=chance) for chance in (0.0, 0.5, 0.999999)]
    assert gpu_sampler.draw(rows, draws, NONE).result().tokens == [int(rows[0].argmax())] * 3


@pytest.mark.parametrize("penalty", [1e-30, 5e-324])
def test_the_smallest_repetition_penalties_leave_the_likeliest_token_that_was_seen(penalty: float) -> None:
    rows = torch.zeros(2, SMALL)
    rows[:, [5, 9, 11]] = torch.tensor([1.4, -0.3, 3.0])
    draws = [Draw(at=0, temperature=1.0, uniform=u, repetition_penalty=penalty, **SEEN) for u in (0.0, 0.99)]
    assert same(rows, draws) == [5, 5]


def test_a_token_that_the_step_before_chooses_counts_as_one_that_was_said() -> None:
    rows = torch.zeros(3, SMALL)
    rows[:, 11], rows[:, 12] = 2.0, 1.0
    output = array("i", [4, 0]).tobytes()
    draws = [Draw(at=n, output=output, presence_penalty=3.0, carried=carried) for n, carried in enumerate((1, -1, 0))]
    assert same(rows, draws, torch.tensor([12, 11])) == [12, 11, 11]


def test_what_is_banned_behind_a_token_is_banned_where_the_step_before_chose_that_one() -> None:
    rows = torch.zeros(4, SMALL)
    rows[:, 11], rows[:, 12], rows[:, 13] = 3.0, 2.0, 1.0
    pairs = ((7, 11), (7, 12), (8, 11), (8, 11))
    carried, more = (0, 1, 2, -1), [{}, {"banned": (12,)}, {"output": array("i", [4, 0]).tobytes()}, {}]
    draws = [
        Draw(at=n, carried=carried[n], banned_behind=pairs if carried[n] >= 0 else (), presence_penalty=0.1, **more[n])
        for n in range(4)
    ]
    assert same(rows, draws, torch.tensor([7, 8, 9])) == [13, 13, 11, 11]


def test_where_all_are_as_likely_as_the_last_one_kept_all_may_be_drawn() -> None:
    draws = [Draw(at=0, temperature=1.0, top_k=5, uniform=chance) for chance in (0.0, 0.5, ENDS[1])]
    assert same(torch.zeros(3, LARGE), draws) == [0, LARGE // 2, LARGE - 1]


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
def test_a_row_that_is_not_a_number_still_names_a_token_of_the_vocabulary() -> None:
    rows = torch.full((2, LARGE), torch.nan)
    draws = [Draw(at=0, temperature=1.0, top_k=5, uniform=0.7), Draw(at=0, temperature=1.0, uniform=0.7)]
    assert all(0 <= token < LARGE for token in gpu_sampler.draw(rows, draws, NONE).result().tokens)


class Operators(TorchDispatchMode):
    """Counts what is not a view or an empty tensor, and what would wait for the device, or copy to it."""

    FREE = (
        "aten.view",
        "aten.slice",
        "aten.empty",
        "aten.new_empty",
        "aten.expand",
        "aten.detach",
        "aten.unsqueeze",
        "aten.unbind",
    )
    WAITS = ("aten._local_scalar_dense", "aten.nonzero", "aten.item", "aten._unique2")

    def __init__(self) -> None:
        super().__init__()
        self.seen = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket)
        assert name not in self.WAITS, name
        if name not in self.FREE:
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


class Launches:
    """Stands in for a kernel, and counts."""

    def __init__(self) -> None:
        self.count = 0

    def __getitem__(self, grid: Any) -> Any:
        return self

    def __call__(self, *_: Any, **__: Any) -> None:
        self.count += 1


@pytest.mark.parametrize("many", [1, 64])
@pytest.mark.parametrize(
    ("settings", "operators", "launches"),
    [
        ({"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.1}, ["copy_", "topk"], 1),
        ({}, ["argmax"], 0),
        (
            {"temperature": 0.7, "repetition_penalty": 1.1, "logit_bias": {3: 1.0}, "banned": (2,), **SEEN},
            [
                *("copy_", "clone", "new_zeros", "repeat_interleave", "index_select", "add", "index_fill_", "new_ones"),
                *("scatter_add_", "scatter_add_", "topk"),
            ],
            2,
        ),
    ],
    ids=["usual", "greedy", "penalised"],
)
def test_a_step_takes_one_copy_and_as_few_operators_for_many_rows_as_for_one(
    settings: dict[str, Any], operators: list[str], launches: int, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = Launches()
    for kernel in ("draw_kernel", "adjust_kernel"):
        monkeypatch.setattr(gpu_sampler, kernel, launched)
    rows = torch.zeros(many, SMALL)
    with Operators() as counted:
        gpu_sampler.draw(rows, [Draw(at=n, **settings) for n in range(many)], NONE)
    assert counted.seen == Counter(f"aten.{name}" for name in operators)
    assert launched.count == launches


def test_nothing_is_sorted_for_rows_of_which_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_sampler, "draw_kernel", launched := Launches())
    for kinds, sorts in (([{}, {}], 0), ([{}, {"top_k": 5}], 1)):
        launched.count = 0
        with Operators() as counted:
            gpu_sampler.draw(torch.zeros(2, LARGE), [Draw(at=0, temperature=1.0, **kind) for kind in kinds], NONE)
        assert (counted.seen["aten.topk"], launched.count) == (sorts, 1 + sorts)
