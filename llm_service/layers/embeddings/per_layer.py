"""Per-layer embeddings (PLE), as in Gemma 4: inputs of each layer for a token besides the previous layer's output,
looked up by the token and computed from its embedding."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from llm_service.layers.linear.parallel import PackedLinear, VocabParallelEmbedding
from llm_service.layers.mlp import act_and_mul
from llm_service.layers.norms import RMSNorm
from llm_service.layers.ops import TORCH, RowOps
from llm_service.layers.tensor_parallel import TensorGroup
from llm_service.model_config.layer_shapes import LayerInputs
from llm_service.model_config.text import TextConfig

_HALF = 2**-0.5
"""The factor that restores a variance of 1 to the sum of two numbers."""


class PerLayerEmbeddings(nn.Module):
    """Computes those of all layers. Every rank has all of them."""

    stored_as: ClassVar[str] = ""

    def __init__(self, inputs: LayerInputs, config: TextConfig, group: TensorGroup, dtype: torch.dtype) -> None:
        super().__init__()
        self.padding, self._width, self._layers = inputs.padding, inputs.width, config.layers
        self._scale = config.hidden_size**-0.5
        total, scale = config.layers * inputs.width, inputs.width**0.5
        whole, parts = slice(0, config.hidden_size), {"per_layer_model_projection": slice(0, total)}
        self._rows = inputs.rows
        self.embed_tokens_per_layer = VocabParallelEmbedding(inputs.rows, total, group, dtype, scale=scale)
        self.projection = PackedLinear(whole, parts, bias=False, dtype=dtype, rounds=False)
        self.norm = RMSNorm.of(config, inputs.width, dtype, "per_layer_projection_norm")

    def forward(self, embedded: Tensor, token_ids: Tensor) -> Tensor:
        """Embeddings [n, hidden], and tokens int [n] → [layers, n, width]."""
        made = self.norm((self.projection(embedded) * self._scale).view(-1, self._width))
        known = token_ids.masked_fill(token_ids >= self._rows, 0)
        looked_up = self.embed_tokens_per_layer(known).view(-1, self._width)
        both: Tensor = (made + looked_up) * _HALF
        return both.view(-1, self._layers, self._width).transpose(0, 1)

    def finalize(self) -> None:
        """Called when the weights are final."""
        self.embed_tokens_per_layer.finalize()


class LayerEnd(nn.Module):
    """The end of a layer: adds its per-layer input, opened by a gate, if it has one, and multiplies the sum by a
    number. In a checkpoint its parts are among the layer's."""

    stored_as: ClassVar[str] = ""
    ops: RowOps = TORCH

    def __init__(self, config: TextConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self._activation = config.activation
        self.gate: PackedLinear | None = None
        if config.layer_inputs is not None:
            whole, narrow = slice(0, config.hidden_size), slice(0, config.layer_inputs.width)
            self.gate = PackedLinear(whole, {"per_layer_input_gate": narrow}, bias=False, dtype=dtype)
            self.projection = PackedLinear(narrow, {"per_layer_projection": whole}, bias=False, dtype=dtype)
            self.norm = RMSNorm.of(config, config.hidden_size, dtype, "post_per_layer_input_norm")
        self.layer_scalar: nn.Parameter | None = None
        if config.family.layers.scalars:
            self.layer_scalar = nn.Parameter(torch.empty(1, dtype=dtype), requires_grad=False)

    def forward(self, x: Tensor, given: Tensor | None) -> Tensor:
        """x [n, hidden], which it may overwrite, and per-layer inputs [n, width] → [n, hidden]."""
        if self.gate is not None:
            x += self.added(x, given)
        return x if self.layer_scalar is None else x.mul_(self.layer_scalar)

    def added(self, x: Tensor, given: Tensor | None) -> Tensor:
        """What per-layer inputs [n, width] add, opened by x [n, hidden] → [n, hidden]."""
        assert self.gate is not None, "it has some"
        assert given is not None, "the layer has inputs of its own"
        opened = act_and_mul(self.ops, self._activation, torch.cat([self.gate(x), given], dim=1))
        out: Tensor = self.norm(self.projection(opened))
        return out
