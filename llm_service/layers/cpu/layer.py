"""The forms of a decoder's layers for CPUs in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from common.cpu.jit import Array
from common.cpu.linear import LaidOut
from common.cpu.weight_panels import WIDTH
from llm_service.layers.cpu import layer_kernel, layer_products, row_kernels, selection
from llm_service.layers.cpu.layer_kernel import Weight
from llm_service.layers.cpu.pair_panels import PairPanels
from llm_service.layers.cpu.panels import PanelWeight
from llm_service.layers.cpu.quad_panels import QuadPanels
from llm_service.layers.cpu.quantized_panels import QuantizedPanels
from llm_service.layers.cpu.row_kernels import NumbaOps
from llm_service.layers.cpu.selection import fused_vectors
from llm_service.layers.decoder_layer import DecoderLayer
from llm_service.layers.linear.parallel import PackedLinear
from llm_service.layers.mixer import Rotary
from llm_service.layers.mlp import MLP
from llm_service.layers.norms import LayerNorm, RMSNorm, Unnormed
from llm_service.layers.ops import use_ops
from llm_service.layers.self_attention.layer import SelfAttention
from llm_service.model_config.feed_forward import Activation


def finalize(decoder: nn.Module, activation: Activation) -> None:
    """Switches a decoder whose weights are final to numba's kernels; dense layers compute few rows without torch."""
    use_ops(decoder, NumbaOps(activation))
    for layer in decoder.modules():
        if isinstance(layer, DecoderLayer) and (arrays := FusedLayer.of(layer) or FewRows.of(layer)):
            layer.use_arrays(arrays)


class FewRows:
    """The parts of a dense layer before and after self-attention, over NumPy arrays, by the kernels that its modules
    call.

    For few rows a kernel takes microseconds, and torch's modules, views and operators in between take as long, since
    reading the weights has evicted their code from the caches. Many rows go through the layer's modules.
    """

    def __init__(
        self,
        layer: DecoderLayer,
        attention: SelfAttention,
        activation: Activation,
        products: Sequence[Callable[[Array], Array]],
    ) -> None:
        norms = layer.mixer_in_norm, layer.mixer_out_norm, layer.mlp_in_norm, layer.mlp_out_norm
        self._parts = attention.parts
        self._queries, self._keys, self._head_dim = attention.heads, attention.new_keys, attention.head_dim
        self._qkv, self._o, self._gate_up, self._down = products
        self._gains = row_kernels.both_gains(attention.gains, attention.eps, attention.head_dim)
        self._mixer_in, self._mixer_out, self._mlp_in, self._mlp_out = map(_normed_by, norms)
        silu = activation is Activation.SILU
        self._act_and_mul = row_kernels.silu_and_mul_rows if silu else row_kernels.gelu_and_mul_rows
        self._many_before, self._many_after = layer.before, layer.after

    @classmethod
    def of(cls, layer: DecoderLayer) -> FewRows | None:
        """None where this class does not compute what the layer does: the layer or one of its modules is of another
        class, since a subclass may compute otherwise; there are sums over ranks, or experts; norms subtract means;
        heads have gates from a product of their own; gates are no plain activation; a weight does not lie in panels; or
        the processor lacks the vectors that the kernel of gates is written for."""
        attention, mlp = layer.mixer, layer.mlp
        if type(layer) is not DecoderLayer or type(mlp) is not MLP or type(attention) is not SelfAttention:
            return None
        if layer.ranks > 1 or any(isinstance(norm, LayerNorm) for norm in layer.modules()):
            return None
        if layer.beside is not None or attention.head_gates is not None or not fused_vectors():
            return None
        if not isinstance(mlp.activation, Activation):
            return None
        linears = (attention.qkv, attention.o, mlp.gate_up, mlp.down)
        forms = [(linear.laid_out, linear.bias) for linear in linears]
        panels = PanelWeight, PairPanels, QuantizedPanels, QuadPanels
        products = [
            _adapted(linear, form.array_product(bias))
            for linear, (form, bias) in zip(linears, forms, strict=True)
            if isinstance(form, panels)
        ]
        return cls(layer, attention, mlp.activation, products) if len(products) == len(linears) else None

    def before(self, x: Tensor, residual: Tensor | None, rotary: Rotary) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See `DecoderLayer.before`."""
        if not _takes(x):
            return self._many_before(x, residual, rotary)
        total = x if residual is None else torch.from_numpy(x.numpy() + residual.numpy())
        product = self._qkv(self._mixer_in(total.numpy()))
        heads = product.reshape(x.shape[0], -1, self._head_dim)
        cosine, sine = (table.numpy() for table in rotary)
        rotated = row_kernels.qk_norm_rotary_rows(heads, cosine, sine, self._queries, self._keys, *self._gains)
        return total, self._parts(torch.from_numpy(rotated), torch.from_numpy(heads))

    def after(self, residual: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """See `DecoderLayer.after`."""
        if not _takes(residual):
            return self._many_after(residual, mixed)
        joined = self._mixer_out(self._o(mixed.numpy()))
        np.add(joined, residual.numpy(), out=joined)
        out = self._down(self._act_and_mul(self._gate_up(self._mlp_in(joined))))
        return torch.from_numpy(self._mlp_out(out)), torch.from_numpy(joined)


_FORMS = {
    form.name: form
    for form in (layer_products.TILES, layer_products.PAIRS, layer_products.QUADS, layer_products.NUMBERS)
}


class FusedLayer:
    """The parts of a dense layer before and after self-attention, by one kernel each, for any number of rows."""

    def __init__(self, layer: DecoderLayer, attention: SelfAttention, mlp: MLP, otherwise: FewRows, form: str) -> None:
        self._otherwise = otherwise
        self._parts = attention.parts
        self._linears = attention.qkv, attention.o, mlp.gate_up, mlp.down
        self._qkv, *behind = map(_panels_of, self._linears)
        self._behind = behind[0], behind[1], behind[2]
        self._form = _FORMS[form]
        self.kernels = layer_kernel.names(form, self._qkv[0])
        """See `NumbaCompiled`."""
        self._sizes = attention.qkv.outputs, attention.heads, attention.new_keys, attention.head_dim
        self._gains = row_kernels.both_gains(attention.gains, attention.eps, attention.head_dim)
        self._in_norm = _gain_of(layer.mixer_in_norm)
        self._norms = *_gain_of(layer.mixer_out_norm), *_gain_of(layer.mlp_in_norm)
        self._mlp_out = _normed_by(layer.mlp_out_norm)
        self._silu = mlp.activation is Activation.SILU

    @classmethod
    def of(cls, layer: DecoderLayer) -> FusedLayer | None:
        """None where a layer has no `FewRows`, its weights do not lie in panels of one form and dtype, or a panel
        contains outputs of both gates and values."""
        otherwise = FewRows.of(layer)
        if otherwise is None:
            return None
        attention, mlp = layer.mixer, layer.mlp
        assert isinstance(attention, SelfAttention), "few rows have none for others"
        assert isinstance(mlp, MLP), "nor for these"
        laid_out = [linear.laid_out for linear in (attention.qkv, attention.o, mlp.gate_up, mlp.down)]
        forms = {_form_of(each) for each in laid_out}
        if len(forms) > 1 or mlp.gate_up.outputs % (2 * WIDTH):
            return None
        form, _ = forms.pop()
        return cls(layer, attention, mlp, otherwise, form) if form else None

    def before(self, x: Tensor, residual: Tensor | None, rotary: Rotary) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See `DecoderLayer.before`."""
        if not self._takes():
            return self._otherwise.before(x, residual, rotary)
        more = None if residual is None else _array(residual)
        tables = _array(rotary[0]), _array(rotary[1])
        total, rotated, heads = layer_kernel.before(
            _array(x), more, self._in_norm, self._qkv, self._form, tables, self._sizes, self._gains
        )
        every = torch.from_numpy(heads).view(len(heads), -1, self._sizes[-1])
        return torch.from_numpy(total), self._parts(torch.from_numpy(rotated), every)

    def after(self, residual: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """See `DecoderLayer.after`."""
        if not self._takes():
            return self._otherwise.after(residual, mixed)
        out, joined = layer_kernel.behind(
            _array(mixed), _array(residual), self._norms, self._behind, self._form, silu=self._silu
        )
        return torch.from_numpy(self._mlp_out(out)), torch.from_numpy(joined)

    def _takes(self) -> bool:
        """Whether numba's kernels compute, and no adapter adds to a product."""
        active = any(linear.adapters is not None and linear.adapters.active for linear in self._linears)
        return selection.is_numba() and not active


def _array(x: Tensor) -> Array:
    """The tensor as an array for kernels."""
    return np.ascontiguousarray(x.numpy())


def _form_of(laid_out: LaidOut | None) -> tuple[str, str]:
    """The form of a weight's panels, empty for others, and the type of their array."""
    if isinstance(laid_out, PairPanels):
        return "tiles" if laid_out.tiles else "pairs", str(laid_out.panels.dtype)
    if isinstance(laid_out, QuadPanels):
        fused = not laid_out.tiles and not laid_out.step
        return ("quads", str(laid_out.panels.dtype)) if fused else ("", "")
    return ("numbers", str(laid_out.panels.dtype)) if isinstance(laid_out, PanelWeight) else ("", "")


def _panels_of(linear: PackedLinear) -> Weight:
    form = linear.laid_out
    if isinstance(form, QuadPanels):
        return form.panels, form.scale, form.padded(linear.bias)
    assert isinstance(form, PairPanels | PanelWeight), "others have products of their own"
    scale = form.scale if isinstance(form, PanelWeight) else None
    bias = None if linear.bias is None else linear.bias.float().numpy()
    nothing: Array = np.empty(0, np.float32)
    return form.panels, nothing if scale is None else scale, nothing if bias is None else bias


def _gain_of(norm: RMSNorm | Unnormed | None) -> tuple[Array, float]:
    """A norm's gain, [0] if it has none, and its eps."""
    return (norm.weight.numpy(), norm.eps) if isinstance(norm, RMSNorm) else (np.empty(0, np.float32), 0.0)


def _normed_by(norm: RMSNorm | Unnormed | None) -> Callable[[Array], Array]:
    """The function of a layer's norm; without a norm it returns rows as they are."""
    if not isinstance(norm, RMSNorm):
        return _as_it_is
    return partial(row_kernels.rms_norm_rows, gain=norm.weight.numpy(), eps=norm.eps)


def _as_it_is(x: Array) -> Array:
    return x


def _adapted(linear: PackedLinear, product: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """A linear layer's product, with what adapters add to it."""

    def adapted(x: Array) -> Array:
        out = product(x)
        if linear.adapters is not None and linear.adapters.active:
            linear.adapters.add_arrays(x, out)
        return out

    return adapted


def _takes(x: Tensor) -> bool:
    """Whether x [n, hidden] is few rows, and numba's kernels compute."""
    return x.shape[0] <= row_kernels.FEW and selection.is_numba()
