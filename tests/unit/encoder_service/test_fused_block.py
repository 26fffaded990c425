"""A block of a tower by two kernels gives what it gives by one after the other, and rows are the same to the bit in any
company and by any number of threads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numba
import pytest
import torch
from torch import Tensor, nn

from common.checkpoints.checkpoint import Checkpoint
from common.cpu import short_rows
from common.cpu.jit import find, use_threads
from common.cpu.linear import BlockedWeight, Linear, finalize_linears
from common.hardware import multiplies_tiles
from encoder_service.models import attention, block_kernel, blocks, fused_block, qwen2_5_vl, qwen3_vl, row_kernels
from encoder_service.models.attention import Numba, Sdpa
from encoder_service.models.fused_block import TilePanels
from encoder_service.models.tower import Rotary, load_tower
from tests.parity.test_encoder_parity import PHOTOGRAPHS, Ours

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    attention._obstacle("numba", CPU, torch.bfloat16, wanted=True) != "" or not multiplies_tiles(),
    reason="this processor lacks AMX",
)


@dataclass(frozen=True)
class Kind:
    """Of a block."""

    norm: type[nn.Module]
    part: type[blocks.FeedForwardPart]
    act: str
    width: int = 128
    heads: int = 2
    inner: int = 256

    def block(self, dtype: torch.dtype = torch.bfloat16) -> blocks.Block:
        """With random weights that bfloat16 has, which are final."""
        norms = self.norm(self.width), self.norm(self.width)
        made = blocks.Block(self.width, self.heads, norms, self.part(self.width, self.inner, self.act))
        generator = torch.Generator().manual_seed(0)
        for name, parameter in made.named_parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.2
            numbers = scale * torch.randn(parameter.shape, generator=generator) + ("norm" in name and "weight" in name)
            parameter.data = numbers.bfloat16().to(dtype)
        finalize_linears(made.requires_grad_(requires_grad=False))
        return made


KINDS = {
    "gelu": Kind(nn.LayerNorm, qwen3_vl.FeedForward, "gelu_pytorch_tanh"),
    "quick gelu": Kind(nn.LayerNorm, blocks.FeedForward, "quick_gelu", inner=320),
    "gates": Kind(blocks.RMSNorm, qwen2_5_vl.FeedForward, "silu", inner=192),
    "within panels": Kind(nn.LayerNorm, qwen3_vl.FeedForward, "gelu_pytorch_tanh", width=90, heads=5, inner=101),
    "gates within panels": Kind(blocks.RMSNorm, qwen2_5_vl.FeedForward, "silu", width=72, heads=3, inner=107),
    "wide": Kind(blocks.RMSNorm, qwen2_5_vl.FeedForward, "silu", width=640, heads=8, inner=1100),
    "wide, gelu": Kind(nn.LayerNorm, qwen3_vl.FeedForward, "gelu_pytorch_tanh", width=576, heads=8, inner=2152),
}
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))


@pytest.fixture(autouse=True)
def by_two_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """They compute until the test is over."""
    monkeypatch.setattr(row_kernels._state, "kernels", short_rows)
    monkeypatch.setattr(row_kernels._state, "blocks", fused_block)


def given(kind: Kind, rows: int, *, whole: bool = False) -> tuple[Tensor, Rotary]:
    generator = torch.Generator().manual_seed(rows)
    angles = torch.randn(rows, 1, kind.width // kind.heads // (1 if whole else 2), generator=generator)
    return torch.randn(rows, kind.width, generator=generator).bfloat16(), Rotary(angles.cos(), angles.sin())


def passed(block: blocks.Block, x: Tensor, rotary: Rotary, lengths: list[int] | None = None) -> Tensor:
    out: Tensor = block(x, Sdpa().over(lengths or [len(x)], CPU), rotary)
    return out


@each_kind
@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 33, 100, 600])
@torch.inference_mode()
def test_a_block_is_no_further_off_than_by_one_kernel_after_the_other(
    kind: Kind, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, rotary = given(kind, rows)
    fused = kind.block()
    ours = passed(fused, x, rotary)
    assert fused._fused is not None
    exact = passed(kind.block(torch.float32), x.float(), rotary)
    monkeypatch.setattr(row_kernels._state, "blocks", None)
    theirs = passed(kind.block(), x, rotary)
    # The mean of a hundred thousand roundings has hardly any luck in it; that of a hundred has some.
    luck = 1.02 if rows >= 100 else 1.3
    assert (ours - exact).pow(2).mean() <= luck * (theirs - exact).pow(2).mean()
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=2**-5, atol=2**-4)


@torch.inference_mode()
def test_tables_may_have_both_halves_of_a_head() -> None:
    kind = KINDS["gelu"]
    block, (x, rotary) = kind.block(), given(kind, 40, whole=True)
    query, key, _ = block._fused_for(x).before(x, rotary.cos, rotary.sin)
    plain = kind.block()
    heads = plain.attn.qkv(plain.norm1(x)).view(40, 6, 64)
    for ours, theirs in zip((query, key), blocks.apply_rotary(heads[:, :4], rotary).chunk(2, dim=1), strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=2**-6, atol=2**-6)


@each_kind
@torch.inference_mode()
def test_a_row_is_the_same_to_the_bit_in_any_company_and_by_any_number_of_threads(kind: Kind) -> None:
    block, rows = kind.block(), block_kernel.AT_ONCE + 150
    x, rotary = given(kind, rows)
    segments = [rows - 150, 100, 30, 1, 19]
    before = numba.get_num_threads(), torch.get_num_threads()
    try:
        use_threads(1)
        whole, begin = passed(block, x, rotary, segments), 0
        for threads in {1, before[0]}:
            use_threads(threads)
            assert passed(block, x, rotary, segments).equal(whole)
        for length in segments:
            part = slice(begin, begin + length)
            assert passed(block, x[part], Rotary(rotary.cos[part], rotary.sin[part])).equal(whole[part])
            begin += length
    finally:
        use_threads(before[1])
        numba.set_num_threads(before[0])


@torch.inference_mode()
def test_what_is_given_stays_as_it_is_and_need_not_lie_together() -> None:
    kind = KINDS["gelu"]
    block, (x, rotary) = kind.block(), given(kind, 40)
    copy, apart = x.clone(), torch.cat([x, x], dim=1)[:, : kind.width]
    assert passed(block, x, rotary).equal(passed(block, apart, rotary))
    assert x.equal(copy)


@torch.inference_mode()
def test_a_number_that_is_none_stays_in_its_row() -> None:
    kind = KINDS["gates within panels"]
    block, (x, rotary) = kind.block(), given(kind, 40)
    whole = passed(block, x, rotary, [1] * 40)
    x[7, 3] = torch.nan
    spoilt = passed(block, x, rotary, [1] * 40)
    assert spoilt[7].isnan().all()
    others = torch.arange(40) != 7
    assert spoilt[others].equal(whole[others])


@each_kind
@torch.inference_mode()
def test_weights_lie_in_one_form_at_a_time_and_torch_multiplies_with_either(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    block, (x, rotary) = kind.block(), given(kind, 40)
    linears = [part for part in block.modules() if isinstance(part, Linear)]
    weights = [linear.plain() for linear in linears]
    assert all(isinstance(linear.laid_out, BlockedWeight) for linear in linears)
    ours = passed(block, x, rotary)
    for linear, weight in zip(linears, weights, strict=True):
        assert isinstance(linear.laid_out, TilePanels)
        assert linear.laid_out.nbytes >= weight.nbytes
        assert not linear.weight.numel()
    monkeypatch.setattr(row_kernels._state, "blocks", None)
    torch.testing.assert_close(passed(block, x, rotary).float(), ours.float(), rtol=2**-5, atol=2**-4)


@pytest.mark.parametrize(
    "kind",
    [
        Kind(nn.LayerNorm, blocks.FeedForward, "gelu"),
        Kind(nn.Identity, blocks.FeedForward, "quick_gelu"),  # type: ignore[arg-type]
    ],
    ids=["gelu itself", "another norm"],
)
@torch.inference_mode()
def test_blocks_of_other_parts_are_computed_as_before(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    block, (x, rotary) = kind.block(), given(kind, 20)
    ours = passed(block, x, rotary)
    assert block._fused is None
    monkeypatch.setattr(row_kernels._state, "blocks", None)
    assert passed(block, x, rotary).equal(ours)


@torch.inference_mode()
def test_float32_is_computed_as_before() -> None:
    kind = KINDS["gelu"]
    block, (x, rotary) = kind.block(torch.float32), given(kind, 20)
    assert passed(block, x.float(), rotary).dtype == torch.float32
    assert block._fused is None


def test_their_kernels_come_with_the_attention_s(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(attention, "not_kept", lambda names: asked.extend(names) or [])
    backend = Numba(wait=True)
    assert {f"{block_kernel.__name__}:{name}" for name in block_kernel.TYPED} <= set(asked)
    assert all(find(name) for name in asked)
    monkeypatch.setattr(row_kernels._state, "blocks", None)
    backend.over([4], CPU)
    assert row_kernels.blocks_for(torch.empty(1, dtype=torch.bfloat16)) is fused_block
    monkeypatch.setattr(attention, "multiplies_tiles", lambda: False)
    Numba(wait=True).over([4], CPU)
    assert row_kernels.blocks_for(torch.empty(1, dtype=torch.bfloat16)) is None


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
@torch.inference_mode()
def test_a_tower_is_no_further_off_than_by_one_kernel_after_the_other(
    family: str, checkpoints: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoints(family)
    ours = Ours.load(folder)
    patches, plan = ours.image(PHOTOGRAPHS[0])
    exact = ours.tower(patches, [plan.grid])

    def error(*, fused: bool) -> float:
        tower = load_tower(Checkpoint(folder), ours.config, CPU, torch.bfloat16, "sdpa")
        monkeypatch.setattr(row_kernels._state, "blocks", fused_block if fused else None)
        rows = tower(patches.bfloat16(), [plan.grid])
        assert all((block._fused is not None) is fused for block in tower.blocks)
        return float((rows - exact).pow(2).mean())

    assert error(fused=True) <= 1.1 * error(fused=False)
