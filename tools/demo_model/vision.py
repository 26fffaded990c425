"""The vision transformer of Qwen3-VL for training: all pictures of a batch share one grid.

So attention is a plain batched product, and the position table is interpolated once for the batch.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.demo_model.shape import VisionShape


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of `x` [..., n, head] by tables [..., n, head] in the half-split layout."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Plain attention over [batch, heads, n, head]; `mask` is added to the scores.

    At a few hundred tokens two batched products are about twice as quick on a CPU as the fused kernel and its backward.
    """
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    if mask is not None:
        scores = scores + mask
    mixed: Tensor = scores.softmax(dim=-1, dtype=torch.float32).to(v.dtype) @ v
    return mixed


def patch_order(height: int, width: int, merge: int) -> tuple[Tensor, Tensor]:
    """Row and column [height * width] of each patch, every merge x merge square contiguous.

    Example: height 2, width 4, merge 2 gives rows 0 0 1 1 0 0 1 1 and columns 0 1 0 1 2 3 2 3.
    """
    index = torch.arange(height * width).view(height // merge, merge, width // merge, merge)
    index = index.transpose(1, 2).reshape(-1)
    return index // width, index % width


class VisionAttention(nn.Module):
    """Full attention within a segment, a picture or one frame pair of a film."""

    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.proj = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [segments, patches, width]; attention stays within a segment."""
        segments, patches, width = x.shape
        q, k, v = self.qkv(x).view(segments, patches, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        out = attend(apply_rotary(q, cos, sin), apply_rotary(k, cos, sin), v, None)
        y: Tensor = self.proj(out.transpose(1, 2).reshape(segments, patches, width))
        return y


class VisionMLP(nn.Module):
    """Two layers with GELU between."""

    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(shape.width, shape.mlp)
        self.linear_fc2 = nn.Linear(shape.mlp, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear_fc2(F.gelu(self.linear_fc1(x), approximate="tanh"))
        return y


class VisionBlock(nn.Module):
    """Attention and MLP, each behind its norm and beside a residual."""

    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.width, eps=1e-6)
        self.norm2 = nn.LayerNorm(shape.width, eps=1e-6)
        self.attn = VisionAttention(shape)
        self.mlp = VisionMLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), cos, sin)
        y: Tensor = x + self.mlp(self.norm2(x))
        return y


class Merger(nn.Module):
    """Four patches to one row; the deepstack mergers normalise after the four are joined, the last one before."""

    def __init__(self, shape: VisionShape, out: int, after: bool) -> None:
        super().__init__()
        joined = shape.width * shape.merge**2
        self.joined, self.after = joined, after
        self.norm = nn.LayerNorm(joined if after else shape.width, eps=1e-6)
        self.linear_fc1 = nn.Linear(joined, joined)
        self.linear_fc2 = nn.Linear(joined, out)

    def forward(self, x: Tensor) -> Tensor:
        """x [segments, patches, width] to rows [segments, patches / 4, out]."""
        segments = x.shape[0]
        if self.after:
            x = self.norm(x.reshape(segments, -1, self.joined))
        else:
            x = self.norm(x).reshape(segments, -1, self.joined)
        y: Tensor = self.linear_fc2(F.gelu(self.linear_fc1(x)))
        return y


class PatchEmbed(nn.Module):
    """Patches to hidden states; a convolution whose stride is its kernel."""

    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        kernel = (shape.temporal, shape.patch, shape.patch)
        self.proj = nn.Conv3d(3, shape.width, kernel, stride=kernel)

    def forward(self, patches: Tensor) -> Tensor:
        """patches [..., 3 * temporal * patch * patch] to [..., width]: the convolution is one product."""
        return F.linear(patches, self.proj.weight.flatten(1), self.proj.bias)


class Vision(nn.Module):
    """Patches to rows: one set from the last layer, one for each deepstack level."""

    def __init__(self, shape: VisionShape, out: int) -> None:
        super().__init__()
        self.shape = shape
        self.patch_embed = PatchEmbed(shape)
        self.pos_embed = nn.Embedding(shape.position_side**2, shape.width)
        self.blocks = nn.ModuleList(VisionBlock(shape) for _ in range(shape.depth))
        self.merger = Merger(shape, out, after=False)
        self.deepstack_merger_list = nn.ModuleList(Merger(shape, out, after=True) for _ in shape.levels)

    def positions(self, height: int, width: int) -> Tensor:
        """The learned table, bilinear to (height, width) with aligned corners: [height * width, width of model]."""
        side = self.shape.position_side
        table = self.pos_embed.weight.view(1, side, side, -1).permute(0, 3, 1, 2)
        grid = F.interpolate(table, (height, width), mode="bilinear", align_corners=True)[0].flatten(1).T
        rows, columns = patch_order(height, width, self.shape.merge)
        return grid[rows * width + columns]

    def rotary(self, height: int, width: int) -> tuple[Tensor, Tensor]:
        head = self.shape.width // self.shape.heads
        frequency = self.shape.theta ** -(torch.arange(0, head // 2, 2).float() / (head // 2))
        rows, columns = patch_order(height, width, self.shape.merge)
        angle = torch.cat((rows[:, None] * frequency, columns[:, None] * frequency), dim=-1).repeat(1, 2)
        return angle.cos(), angle.sin()

    def forward(self, patches: Tensor, table: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """patches [segments, patches, 1536] to (rows [1 + levels, segments, patches / 4, out], last hidden states).

        `table` [patches, width] is added to the embedded patches; `cos` and `sin` [patches, head] rotate.
        """
        x = self.patch_embed(patches) + table
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        levels: list[Tensor] = []
        for index, block in enumerate(self.blocks):
            x = block(x, cos, sin)
            if index in self.shape.levels:
                levels.append(self.deepstack_merger_list[len(levels)](x))
        return torch.stack([self.merger(x), *levels]), x


@torch.no_grad()
def whiten(embed: PatchEmbed, patches: Tensor, least: float = 0.05) -> None:
    """Set the first layer to the principal components of `patches` [n, 3 * 2 * 16 * 16], each brought to unit variance.

    Pictures are mostly flat, so random filters see little but a patch's mean colour, and edges drown in it; with
    components of equal size what is rare and tells shapes apart counts as much. `least` keeps noise from growing.
    """
    still = patches.view(len(patches), 3, 2, -1)[:, :, 0].flatten(1).double()
    mean = still.mean(dim=0)
    centred = still - mean
    values, vectors = torch.linalg.eigh(centred.T @ centred / len(still))
    width = embed.proj.weight.shape[0]
    filters = (vectors / (values.clamp(min=0) + least).sqrt()).T.flip(0)[:width]
    embed.proj.weight.copy_((filters / 2).view(width, 3, 1, 16, 16).expand_as(embed.proj.weight))
    if embed.proj.bias is not None:
        embed.proj.bias.copy_(-filters @ mean)
