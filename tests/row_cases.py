"""The decoder's small kernels against torch's operators, on any device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from llm_service.layers.ops import TORCH, RowOps, apply_rotary
from llm_service.request import SamplingParams
from testkit.local_engine import LocalEngine, Outcome, make_prompt
from tests import kernel_layout, pictures

TYPES = (torch.float32, torch.bfloat16, torch.float16)
NORMS = ((1, 64), (3, 96), (2, 4096))
"""Rows, and how long they are."""
HEADS = ((4, 2, 16, 16), (9, 3, 80, 80), (1, 1, 128, 128), (3, 1, 96, 24))
"""Query heads, key heads, their size, and how much of it is rotated."""
GATES = (24, 1500)
ROUTES = ((1, 4, 1), (2, 128, 8), (130, 12, 8))
"""Rows, experts, and how many of them each row goes to."""


def check_norm(ops: RowOps, rows: int, size: int, dtype: torch.dtype, device: str) -> None:
    """Of rows that are a part of longer ones, with a gain of their type and with one in float32."""
    x = _drawn(rows, size + 16, dtype, device)[:, :size]
    for kind in {dtype, torch.float32}:
        gain = _drawn(1, size, kind, device, 1)[0]
        _same(ops.rms_norm(x, gain, 1e-6), _norm(x, gain))
        more = _drawn(rows, size + 32, dtype, device, 2)[:, 16:-16]
        total, normed = ops.add_rms_norm(x, more, gain, 1e-6)
        _same(total, x + more)
        _same(normed, _norm(total, gain))


def check_qk_norm_rotary(
    ops: RowOps,
    queries: int,
    keys: int,
    head: int,
    rotary: int,
    dtype: torch.dtype,
    device: str,
    *,
    normed: bool,
    tokens: int = 5,
) -> None:
    """Of heads that lie before the values; normed with gains of their type and with such in float32."""
    x = _drawn(tokens, (queries + 2 * keys) * head, dtype, device).view(tokens, queries + 2 * keys, head)
    angles = _drawn(tokens, rotary // 2, torch.float32, device, 1).repeat(1, 2).unsqueeze(1)
    cosine, sine = angles.cos().to(dtype), angles.sin().to(dtype)
    for kind in {dtype, torch.float32} if normed else {None}:
        query, key, _ = x.split([queries, keys, keys], dim=1)
        gains = None
        if kind is not None:
            gains = (_drawn(1, head, kind, device, 2)[0], _drawn(1, head, kind, device, 3)[0])
            query, key = _norm(query, gains[0]), _norm(key, gains[1])
        expected = torch.cat([apply_rotary(query, cosine, sine), apply_rotary(key, cosine, sine)], dim=1)
        _same(ops.qk_norm_rotary(x, (cosine, sine), queries, keys, gains, 1e-6), expected)


def check_gates(ops: RowOps, inner: int, dtype: torch.dtype, device: str, size: float = 1.0) -> None:
    """Of gates around nought, so large."""
    x = _drawn(4, 2 * inner, dtype, device)
    first, second = x.chunk(2, dim=-1)
    first *= size
    _same(ops.silu_and_mul(x), torch.nn.functional.silu(first) * second)
    _same(ops.gelu_and_mul(x), torch.nn.functional.gelu(first, approximate="tanh") * second)
    ends = torch.tensor([1, 3], dtype=torch.int32, device=device)
    for call in (ops.silu_and_mul, ops.gelu_and_mul):
        assert torch.equal(call(x, ends)[:3], call(x)[:3])


def check_routes(ops: RowOps, rows: int, experts: int, per_token: int, dtype: torch.dtype, device: str) -> None:
    """From a router's logits to rows sorted by expert, and back; half of the experts are hardly ever chosen."""
    logits = torch.randperm(rows * experts, generator=torch.Generator().manual_seed(1)).view(rows, experts)
    logits = (8 * logits / logits.numel()).to(device, dtype)
    logits[:, ::2] -= 4
    weights, chosen = ops.route(logits, per_token)
    likely = logits.float().softmax(-1)
    expected = likely.topk(per_token, dim=-1).values
    assert weights.dtype == dtype
    _same(weights, (expected / expected.sum(-1, keepdim=True)).to(dtype))
    torch.testing.assert_close(likely.gather(1, chosen.long()), expected)  # of equal ones another may be chosen
    assert all(len(set(row)) == per_token for row in chosen.tolist())

    plain = TORCH.sort_by_expert(chosen.long(), experts)
    routes = ops.sort_by_expert(chosen, experts)
    assert all(torch.equal(given.long(), other.long()) for given, other in zip(routes, plain, strict=True))
    assert torch.equal(chosen.flatten()[routes.places.argsort()].sort().values, chosen.flatten().sort().values)

    own = slice(experts // 4, experts // 2)
    plain, here = TORCH.sort_by_expert(chosen.long(), experts, own), ops.sort_by_expert(chosen, experts, own)
    assert all(torch.equal(given.long(), other.long()) for given, other in zip(here, plain, strict=True))
    assert torch.equal(here.places.flatten() >= 0, ((chosen >= own.start) & (chosen < own.stop)).flatten())
    x = _drawn(rows * per_token, 40, dtype, device, 2)
    x[int(here.ends[-1]) :] = torch.nan  # of others' experts nothing is computed
    mine = torch.zeros(rows, 40, dtype=torch.float32, device=device)
    for row, choice in (here.places.view(rows, per_token) >= 0).nonzero().tolist():
        mine[row] += (x[here.places[row * per_token + choice]] * weights[row, choice]).float()
    _same(ops.weighted_sum(x, here.places, weights), mine.to(dtype))

    plain, x = TORCH.sort_by_expert(chosen.long(), experts), _drawn(rows * per_token, 40, dtype, device, 2)
    expected = (x[plain.places].view(rows, per_token, -1) * weights.unsqueeze(-1)).sum(1)
    _same(ops.weighted_sum(x, routes.places, weights), expected)


def check_routes_of_broken_rows(ops: RowOps, device: str) -> None:
    """A row that is not finite goes to experts that there are, and to no row but its own."""
    logits = torch.zeros(3, 5, device=device)
    logits[1, 2], logits[2, 0] = torch.nan, torch.inf
    weights, chosen = ops.route(logits, 2)
    assert weights.isfinite().all(1).tolist() == [True, False, False]
    assert ((chosen >= 0) & (chosen < 5)).all()
    routes = ops.sort_by_expert(chosen, 5)
    assert sorted(routes.places.tolist()) == list(range(6))
    assert routes.ends[-1] == 6
    summed = ops.weighted_sum(torch.ones(6, 3, device=device), routes.places, weights)
    assert summed.isfinite().all(1).tolist() == [True, False, False]


CALLS = ("rms_norm", "add_rms_norm", "qk_norm_rotary", "silu_and_mul", "route", "sort_by_expert", "weighted_sum")
"""Of `RowOps`."""


def check_layouts(ops: RowOps, call: str, layout: str, device: str) -> None:
    """How each of a call's tensors lies makes no difference."""
    x, more, gains = (_drawn(rows, 32, torch.float32, device, rows) for rows in (6, 6, 2))
    cosine, sine = _drawn(6, 32, torch.float32, device, 1).view(2, 6, 1, 16)
    chosen = torch.tensor([[0, 2], [3, 1], [2, 0]], dtype=torch.int32, device=device)
    calls: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
        "rms_norm": (lambda *given: ops.rms_norm(*given, 1e-6), (x, gains[0])),
        "add_rms_norm": (lambda *given: ops.add_rms_norm(*given, 1e-6), (x, more, gains[0])),
        "qk_norm_rotary": (
            lambda heads, cos, sin, *norms: ops.qk_norm_rotary(heads, (cos, sin), 1, 1, norms, 1e-6),
            (x.view(6, 2, 16), cosine, sine, gains[0, :16], gains[1, :16]),
        ),
        "silu_and_mul": (ops.silu_and_mul, (x,)),
        "route": (lambda logits: ops.route(logits, 2), (x,)),
        "sort_by_expert": (lambda of: ops.sort_by_expert(of, 4), (chosen,)),
        "weighted_sum": (ops.weighted_sum, (x, ops.sort_by_expert(chosen, 4).places, x[:3, :2].contiguous())),
    }
    run, given = calls[call]
    expected = run(*given)
    for at, tensor in enumerate(given):
        lying = kernel_layout.LAYOUTS[layout](tensor)
        assert torch.equal(lying, tensor)
        torch.testing.assert_close(run(*given[:at], lying, *given[at + 1 :]), expected)


def greedy_tokens(folder: Path, weight_dtype: str = "") -> list[Outcome]:
    """What a whole decoder says of a picture."""
    prompts = [make_prompt(folder, [pictures.photograph("coffee").resize((90, 60)), "What is it?"])]
    return LocalEngine(folder, weight_dtype=weight_dtype).run(
        prompts, SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    )


def _drawn(rows: int, size: int, dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
    return (3 * torch.randn(rows, size, generator=torch.Generator().manual_seed(seed))).to(device, dtype)


def _norm(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    normal = torch.nn.functional.rms_norm(x.float(), gain.shape, None, 1e-6)
    return (gain * (normal if gain.dtype == torch.float32 else normal.to(x.dtype))).to(x.dtype)


def _same(given: torch.Tensor, expected: torch.Tensor) -> None:
    """But for the last digits: sums are in another order, roots approximate, and the interpreter cuts off where a GPU
    rounds."""
    assert given.dtype == expected.dtype
    near = (16 if given.dtype == torch.float32 else 3) * torch.finfo(given.dtype).eps
    torch.testing.assert_close(given, expected, rtol=near, atol=8 * near)
