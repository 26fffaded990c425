"""Passes done again by their operators alone: rows of other content, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from encoder_service.worker import op_trace
from encoder_service.worker.op_trace import Trace, UntraceableError

SIZES = torch.tensor([2, 1])
MASK = torch.tensor([True, False, True])
KEPT = torch.zeros(3)


def drawn(seed: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))


def reads_sizes(x: Tensor) -> Tensor:
    parts = x.split([int(size) for size in SIZES])
    return torch.cat([part * len(part) for part in parts])


def reads_masks(x: Tensor) -> Tensor:
    out = torch.zeros(5, 4)
    out[:, 1:3] = 2.0
    out[torch.tensor([True, False, True, True, False])] = x
    return torch.cat([out, x[MASK], x.masked_select(MASK[:, None]).view(-1, 4), x[torch.where(MASK)]])


def adds_up(x: Tensor) -> Tensor:
    """What was zero before a pass is zero before the next."""
    total = torch.zeros(4)
    head = total[:2]
    for row in x:
        total += row
    head += 1
    return torch.cat([total, head])


def writes_to_constants(x: Tensor) -> Tensor:
    """Each product with what the table was then."""
    table = torch.arange(4.0)
    first = x * table
    table[1:] = 5.0
    second = x * table
    table.mul_(2)
    return first + second * table


def looks_past(x: Tensor) -> Tensor:
    """At other tensors of a storage."""
    y = x + 1
    y.data.mul_(2)
    return torch.view_as_real(torch.view_as_complex(y.view(3, 2, 2)) * torch.ones(2)).flatten(1)


def repeats(x: Tensor) -> Tensor:
    places = torch.arange(2).repeat_interleave(SIZES)
    return x + places.unique_consecutive(return_counts=True)[1].cumsum(0)[-1] + torch.tensor([[1.0]]) * places[:, None]


@pytest.mark.parametrize("run", [reads_sizes, reads_masks, adds_up, writes_to_constants, looks_past, repeats])
def test_a_pass_is_repeated_by_its_operators(run: Callable[[Tensor], Tensor]) -> None:
    buffer = drawn(0)
    trace = Trace(lambda: run(buffer), [buffer])
    assert (trace.looks, trace.holds.numel()) == ([], 0)
    for seed in (1, 2, 0):
        buffer.copy_(drawn(seed))
        assert torch.equal(trace(), run(drawn(seed)))


def test_what_follows_from_no_source_is_not_done_again() -> None:
    buffer = drawn(0)

    def run() -> Tensor:
        turns = torch.arange(3.0).outer(torch.arange(4.0)).cos()
        return buffer * turns.add(torch.zeros_like(buffer)).sin()

    trace = Trace(run, [buffer])
    assert len(trace) == 1
    assert torch.equal(trace(), run())


@pytest.mark.parametrize(
    ("run", "name"),
    [
        (lambda x: x * (2 if (x > 0).all() else 3), "aten::_local_scalar_dense"),
        (lambda x: x[(x > 0).all(1)].sum(0), "aten::index"),
        (lambda x: x.masked_select(x > 0).sum(), "aten::masked_select"),
        (lambda x: x * len((x > 0).nonzero()), "aten::nonzero"),
        (lambda x: x + x.new_zeros(3, 4).index_put_((x > 0,), torch.tensor(2.0)), "aten::index_put_"),
    ],
)
def test_what_the_host_sees_of_a_source_is_compared(run: Callable[[Tensor], Tensor], name: str) -> None:
    buffer = drawn(0).abs()
    trace = Trace(lambda: run(buffer), [buffer])
    assert trace.looks == [name]
    for values, same in ((drawn(1).abs(), True), (-drawn(1).abs(), False), (drawn(2).abs(), True)):
        buffer.copy_(values)
        rows = trace()
        assert bool(trace.holds.all()) == same
        assert not same or torch.equal(rows, run(values))


def test_numbers_that_come_from_the_host_and_go_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where tensors of 64 bits are the host's."""
    monkeypatch.setattr(op_trace, "_is_host", lambda tensor: tensor.dtype == torch.float64)
    buffer, table = drawn(0), torch.arange(4.0, dtype=torch.float64)

    def run() -> Tensor:
        on_host = torch.zeros(3, 4, dtype=torch.float64).copy_((buffer > 0).float())
        return buffer * table.float() + buffer.new_tensor(float((buffer > 9).double().sum() + on_host.numel()))

    trace = Trace(run, [buffer])
    assert trace.looks == ["aten::copy_", "aten::_to_copy"]
    buffer.copy_(drawn(0) * 2)
    rows = trace()
    assert trace.holds.all(), "signs are the same"
    assert torch.equal(rows, run())
    buffer.neg_()
    trace()
    assert trace.holds.tolist() == [False, True]


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (lambda x: x + torch.rand(3, 4), "aten::rand draws"),
        (lambda x: x * KEPT.add_(1).sum(), "writes to what it keeps"),
        (lambda x: x * KEPT.add_(x[:, 0]).sum(), "to what it keeps"),
        (torch.ones_like, "does not follow from its item"),
        (lambda x: x + sum(float(each) for each in x.new_zeros(65) + x.sum()), "looks too often"),
    ],
)
def test_other_passes_are_refused(run: Callable[[Tensor], Tensor], why: str) -> None:
    buffer = drawn(0)
    with pytest.raises(UntraceableError, match=why):
        Trace(lambda: run(buffer), [buffer])
