"""What towers share: patch embedding, attention, feed-forward blocks, mergers.

A batch is one packed sequence of patches [N, …]; see `tower` and `attention`.
"""

from __future__ import annotations

import functools
import importlib
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from common.checkpoints.checkpoint import CheckpointError
from common.cpu.linear import Linear
from common.telemetry import log
from encoder_service.models.attention import Segments
from encoder_service.models.row_kernels import blocks_for, kernels_for
from encoder_service.models.tower import Rotary

EPSILON = 1e-6

_log = log.get("kernels")


def apply_rotary(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotates [N, heads, head_dim] in float32, the first half of a head against the second."""
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    left, right = rotated.chunk(2, dim=-1)
    half = first.shape[-1]
    torch.mul(first, rotary.cos[..., :half], out=left).addcmul_(second, rotary.sin[..., :half], value=-1)
    torch.mul(second, rotary.cos[..., -half:], out=right).addcmul_(first, rotary.sin[..., -half:])
    return rotated.to(x.dtype)


def turn(x: Tensor, rotary: Rotary, *, fresh: bool = False) -> Tensor:
    """As `apply_rotary`; on GPUs, and on CPUs that have one, by a single kernel, which changes x in place unless the
    result is to be `fresh`."""
    if (kernels := kernels_for(x)) is not None:
        rotated: Tensor = kernels.turn(x.clone() if fresh else x, rotary.cos, rotary.sin)
        return rotated
    kernel = _kernel(x.device)
    return apply_rotary(x, rotary) if kernel is None else kernel(x, rotary, fresh=fresh)


@functools.cache
def _kernel(device: torch.device) -> Callable[..., Tensor] | None:
    """The rotary kernel; None if it does not run: Triton may be missing, or lack a compiler."""
    if device.type != "cuda":
        return None
    try:
        kernel = importlib.import_module("encoder_service.models.rotary_kernel").turn
        x, one = torch.ones(1, 2, 8, device=device), torch.ones(1, 1, 4, device=device)
        torch.testing.assert_close(kernel(x.clone(), Rotary(one, one)), apply_rotary(x, Rotary(one, one)))
    except Exception as error:  # noqa: BLE001 - whatever it fails with, torch computes the same
        _log.warning("the rotary kernel does not run here", cause=str(error)[:500])
        return None
    found: Callable[..., Tensor] = kernel
    return found


class PatchEmbed(nn.Module):
    """Flat patches to hidden states, [N, channels · temporal · patch²] → [N, width].

    In checkpoints it is a convolution whose stride equals its kernel, which is a matrix product; `load_tower` flattens
    it.
    """

    def __init__(self, config: Mapping[str, Any], width: int, *, bias: bool) -> None:
        super().__init__()
        channels = config.get("in_channels", config.get("in_chans", 3))
        self.proj = Linear(channels * config["temporal_patch_size"] * config["patch_size"] ** 2, width, bias=bias)

    def forward(self, patches: Tensor) -> Tensor:
        out: Tensor = self.proj(patches)
        return out


class Attention(nn.Module):
    """Multi-head attention over a packed sequence, [N, width] → [N, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = Linear(width, 3 * width)
        self.proj = Linear(width, width)

    def forward(self, x: Tensor, segments: Segments, positions: Rotary) -> Tensor:
        heads = self.qkv(x).view(len(x), 3 * self.heads, -1)
        q, k = turn(heads[:, : 2 * self.heads], positions).chunk(2, dim=1)
        out = segments(q, k, heads[:, 2 * self.heads :])
        projected: Tensor = self.proj(out.flatten(1))
        return projected


class FeedForwardPart(nn.Module):
    """A block's feed-forward part, [N, width] → [N, width], made of two products, or of three."""

    act: nn.Module

    @property
    @abstractmethod
    def products(self) -> tuple[Sequence[Linear], Linear]:
        """The layers before the activation (gates and values, if there are two), and the last layer."""


class Block(nn.Module):
    """A pre-norm transformer block; the family gives the norms and the feed-forward part."""

    def __init__(self, width: int, heads: int, norms: tuple[nn.Module, nn.Module], mlp: FeedForwardPart) -> None:
        super().__init__()
        self.norm1, self.norm2 = norms
        self.attn = Attention(width, heads)
        self.mlp = mlp
        self._fused: Any = None
        self._fits = True

    def forward(self, x: Tensor, segments: Segments, positions: Rotary) -> Tensor:
        if (fused := self._fused_for(x)) is not None:
            whole: Tensor = fused.behind(segments(*fused.before(x, positions.cos, positions.sin)), x)
            return whole
        x, normed = add_and_norm(x, self.attn(self.norm1(x), segments, positions), self.norm2)
        out: Tensor = x + self.mlp(normed)
        return out

    def _fused_for(self, x: Tensor) -> Any:
        """Two kernels that compute x, made of this block's weights on first use; None if there are none."""
        kernels = blocks_for(x)
        if kernels is None or not self._fits:
            return None
        if self._fused is None:
            norms, opens = [norm_of(norm) for norm in (self.norm1, self.norm2)], _opens(self.mlp.act, kernels)
            self._fits = None not in norms and opens is not None
            if self._fits:
                layers = self.attn.qkv, self.attn.proj
                self._fused = kernels.FusedBlock(layers, self.mlp.products, norms, opens, self.attn.heads)
        return self._fused


def _opens(act: nn.Module, kernels: ModuleType) -> tuple[float, float] | None:
    """Slope and bend of an activation in our kernels; None if they do not have it."""
    if isinstance(act, nn.GELU) and act.approximate == "tanh":
        gelu: tuple[float, float] = kernels.GELU
        return gelu
    if isinstance(act, QuickGELU):
        return QUICK_SLOPE, 0.0
    return (1.0, 0.0) if isinstance(act, nn.SiLU) else None


def norm_of(norm: nn.Module) -> tuple[Tensor, Tensor | None, float] | None:
    """The weight, the bias and the epsilon of a norm; None for one that our kernels do not have."""
    if isinstance(norm, nn.LayerNorm):
        return norm.weight, norm.bias, norm.eps
    return (norm.weight, None, norm.epsilon) if isinstance(norm, RMSNorm) else None


def add_and_norm(x: Tensor, more: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """x + more, and its norm."""
    if (kernels := kernels_for(x)) is not None and (parameters := norm_of(norm)) is not None:
        both: tuple[Tensor, Tensor] = kernels.add_and_norm(x, more, *parameters)
        return both
    x = x + more
    return x, norm(x)


def activated(layer: Linear, act: nn.Module, x: Tensor) -> Tensor:
    """A layer's outputs [N, outputs] through an activation."""
    kernels = kernels_for(x)
    if kernels is not None and isinstance(act, nn.GELU) and act.approximate == "tanh":
        opened: Tensor = kernels.gelu(layer(x))
    elif kernels is not None and isinstance(act, QuickGELU):
        opened = kernels.gelu(layer(x), QUICK_SLOPE, 0.0)
    else:
        opened = layer(x, act)
    return opened


class FeedForward(FeedForwardPart):
    """One with names as in Qwen2-VL and InternVL."""

    def __init__(self, width: int, inner: int, act: str) -> None:
        super().__init__()
        self.fc1 = Linear(width, inner)
        self.act = activation(act)
        self.fc2 = Linear(inner, width)

    @property
    def products(self) -> tuple[Sequence[Linear], Linear]:
        return (self.fc1,), self.fc2

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(activated(self.fc1, self.act, x))
        return out


class Merger(nn.Module):
    """Joins each merge × merge square into one row, [N, width] → [N / merge², out]; names as in Qwen2-VL."""

    def __init__(self, width: int, out: int, merge: int, norm: nn.Module) -> None:
        super().__init__()
        self.joined = width * merge * merge
        self.ln_q = norm
        self.mlp = nn.Sequential(Linear(self.joined, self.joined), nn.GELU(), Linear(self.joined, out))

    def forward(self, x: Tensor) -> Tensor:
        first, act, second = self.mlp
        rows: Tensor = second(first(self.ln_q(x).view(-1, self.joined), act))
        return rows


def layer_norm(width: int) -> nn.LayerNorm:
    """The LayerNorm of towers that have one."""
    return nn.LayerNorm(width, eps=EPSILON)


class RMSNorm(nn.Module):
    """Divides by the root of the mean square, in float32."""

    def __init__(self, width: int, epsilon: float = EPSILON) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        if (kernels := kernels_for(x)) is not None and x.dim() == 2:
            normed: Tensor = kernels.norm(x, self.weight, None, self.epsilon)
            return normed
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return self.weight * wide.to(x.dtype)


QUICK_SLOPE = 1.702


class QuickGELU(nn.Module):
    """x · sigmoid(1.702 x)."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(QUICK_SLOPE * x)


ACTIVATIONS: dict[str, type[nn.Module]] = {"quick_gelu": QuickGELU, "silu": nn.SiLU, "gelu": nn.GELU}


def activation(name: str) -> nn.Module:
    """The activation that config.json names; raises CheckpointError for one that is not known."""
    if name == "gelu_pytorch_tanh":
        return nn.GELU(approximate="tanh")
    if name not in ACTIVATIONS:
        raise CheckpointError(f"the activation {name} is not supported")
    return ACTIVATIONS[name]()
