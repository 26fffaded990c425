"""A decoder layer: pre-norm, a mixer and a gated feed-forward part, dense or a mixture of experts, or both."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from llm_service.families.family import FeedForwardKind, LayerKind, Mixer
from llm_service.layers.embeddings.per_layer import LayerEnd
from llm_service.layers.gdn.layer import GatedDeltaNet
from llm_service.layers.kda.layer import KimiDeltaAttention
from llm_service.layers.mamba2.layer import Mamba2
from llm_service.layers.mixer import CachedPart, HandedOn, MixerPart, Rotary
from llm_service.layers.mla.latent_attention import LatentAttention
from llm_service.layers.mla.pooled import PooledSparseLatentAttention
from llm_service.layers.mla.sparse import SparseLatentAttention
from llm_service.layers.mlp import MLP, CutMLP, PlainReluMLP, SquaredMLP
from llm_service.layers.moe.dense_hybrid import DenseHybridExperts
from llm_service.layers.moe.input_scaled import InputScaledMLP
from llm_service.layers.moe.latent_experts import LatentExperts
from llm_service.layers.moe.modality_experts import ModalityExperts
from llm_service.layers.moe.sparse_mlp import SparseMLP
from llm_service.layers.norms import Unnormed, norm_of
from llm_service.layers.one_part_layers import FeedForwardLayer, MixerLayer
from llm_service.layers.recurrent.short_convolution import ShortConvolution
from llm_service.layers.self_attention.layer import SelfAttention
from llm_service.layers.self_attention.qk_norms import LateNormedAttention, NormedOutputAttention, OwnNormedAttention
from llm_service.layers.self_attention.tempered import TemperedAttention
from llm_service.layers.sparse_attention.block_attention import BlockSparseAttention
from llm_service.layers.sparse_attention.stretch_attention import StretchSparseAttention
from llm_service.layers.tensor_parallel import TensorGroup
from llm_service.layers.xielu import XieluMLP
from llm_service.model_config.feed_forward import Activation
from llm_service.model_config.text import TextConfig

_UNGATED: dict[Activation, type[SquaredMLP]] = {Activation.RELU: PlainReluMLP, Activation.XIELU: XieluMLP}


def _dense(kind: LayerKind, config: TextConfig, group: TensorGroup, dtype: torch.dtype) -> MLP | SquaredMLP:
    inner = kind.inner or config.intermediate_size * (2 if kind.wide else 1)
    given = config.hidden_size, inner, group, dtype
    if config.family.mlp.ungated:
        made = _UNGATED.get(config.activation, SquaredMLP)
        return made(*given, biases=config.family.layers.output_biases)
    if kind.cut_share:
        return CutMLP(*given, activation=config.activation, share=kind.cut_share)
    return MLP(*given, activation=kind.gates or config.activation, fused=config.family.mlp.fused_gate_up)


def _experts(
    kind: LayerKind, config: TextConfig, group: TensorGroup, dtype: torch.dtype, made: type[SparseMLP] = SparseMLP
) -> SparseMLP:
    return made(
        config.experts,
        config.experts_per_token,
        config.hidden_size,
        config.expert_size,
        group,
        dtype,
        shared_inner=config.shared_expert_size,
        shared_gate=not config.family.moe.ungated_shared,
        has_gates=not config.family.mlp.ungated,
        latent=config.latent_size,
        grouped=config.grouped,
        scale=config.expert_scale,
        activation=kind.expert_gates or config.activation,
        shared_activation=kind.gates or config.activation,
        fused=config.family.mlp.fused_gate_up,
        inputs_first=config.family.moe.inputs_first,
    )


MIXERS: dict[Mixer, Callable[[LayerKind, TextConfig, TensorGroup, torch.dtype], MixerPart]] = {
    Mixer.ATTENTION: SelfAttention,
    Mixer.LATENT_ATTENTION: LatentAttention,
    Mixer.INDEXED_ATTENTION: StretchSparseAttention,
    Mixer.BLOCK_INDEXED_ATTENTION: BlockSparseAttention,
    Mixer.INDEXED_LATENT_ATTENTION: SparseLatentAttention,
    Mixer.POOLED_LATENT_ATTENTION: PooledSparseLatentAttention,
    Mixer.OWN_NORMED_ATTENTION: OwnNormedAttention,
    Mixer.LATE_NORMED_ATTENTION: LateNormedAttention,
    Mixer.NORMED_OUTPUT_ATTENTION: NormedOutputAttention,
    Mixer.TEMPERED_ATTENTION: TemperedAttention,
    Mixer.GATED_DELTA_NET: lambda _, *given: GatedDeltaNet(*given),
    Mixer.KIMI_DELTA_ATTENTION: lambda _, *given: KimiDeltaAttention(*given),
    Mixer.SHORT_CONVOLUTION: lambda _, *given: ShortConvolution(*given),
    Mixer.MAMBA2: lambda _, *given: Mamba2(*given),
}
FEED_FORWARDS: dict[FeedForwardKind, Callable[[LayerKind, TextConfig, TensorGroup, torch.dtype], nn.Module]] = {
    FeedForwardKind.DENSE: _dense,
    FeedForwardKind.EXPERTS: _experts,
    FeedForwardKind.LATENT_EXPERTS: lambda _, *given: LatentExperts(*given),
    FeedForwardKind.BY_MODALITY: lambda _, *given: ModalityExperts(*given),
    FeedForwardKind.SCALED_EXPERTS: partial(_experts, made=InputScaledMLP),
    FeedForwardKind.BOTH: _dense,
}


class DecoderLayer(nn.Module):
    """One decoder layer of the parts that its kind describes. Outputs of the mixer and of the feed-forward part are
    normed before they are added if the family has norms for that. `beside` adds experts to the output of a dense part,
    and `end` is what follows everything."""

    compiled: ClassVar[tuple[str, ...]] = ("before", "after")
    """Methods that are for each token alone."""

    def __init__(self, kind: LayerKind, config: TextConfig, group: TensorGroup, dtype: torch.dtype) -> None:
        super().__init__()
        names, norm = config.family.norms.names, partial(norm_of, config, dtype)
        norm_in = partial(norm, eps=config.residual_eps)
        self.mixer_in_norm = norm_in(names.mixer_in) if names.mixer_in else Unnormed()
        self.mixer = MIXERS[kind.mixer](kind, config, group, dtype)
        norm_out = partial(norm, eps=config.out_eps)
        self.mixer_out_norm = norm_out(names.mixer_out) if names.mixer_out else None
        self.mlp_in_norm = norm_in(names.feed_forward_in) if names.feed_forward_in else Unnormed()
        self.mlp = FEED_FORWARDS[kind.feed_forward](kind, config, group, dtype)
        both = kind.feed_forward is FeedForwardKind.BOTH
        self.beside = DenseHybridExperts(config, group, dtype) if both else None
        self.mlp_out_norm = norm_out(names.feed_forward_out) if names.feed_forward_out else None
        ends = config.family.layers.scalars or config.layer_inputs is not None
        self.end = LayerEnd(config, dtype) if ends else None
        self.is_local, self._window, self._shares = kind.sight.is_local, kind.sight.reach, kind.keys_of is not None
        self.ranks, self.hidden_size = group.size, config.hidden_size
        self.arrays: Any = None

    @property
    def companion(self) -> CachedPart | None:
        """The part besides the mixer that keeps something of sequences, if any."""
        return None

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        rotary: Rotary,
        cache: Any,
        batch: Any,
        places: Tensor | None = None,
        *,
        given: Tensor | None = None,
        kept: HandedOn | None = None,
        beside: tuple[Any, Any] | None = None,  # noqa: ARG002 - it has no companion
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states [n, hidden] and the residual to add, if any → the same two, not added yet, so that the next
        norm does both at once. With `places` int64 [m], everything behind the mixer is computed for these only. `cache`
        and `batch` are the mixer's; `given` [n, width] are per-layer inputs. `kept` is where layers leave what later
        ones share. `beside` are the cache and the batch of its companion."""
        residual, inputs = self.before(x, residual, rotary)
        mixed = self.mixed(inputs, cache, batch, kept)
        if places is not None:
            residual, mixed = residual[places], mixed[places]
        out, residual = self.after(residual, mixed)
        if self.end is None:
            return out, residual
        return self.end(residual + out, given if given is None or places is None else given[places]), None

    def mixed(self, inputs: tuple[Tensor, ...], cache: Any, batch: Any, kept: HandedOn | None) -> Tensor:
        """The mixer's output for what it projects. A layer that shares keys and values writes those in `kept` into
        their cache again."""
        if isinstance(self.mixer, SparseLatentAttention):
            return self.mixer.mix(inputs, cache, batch, kept)
        if kept is not None and self._shares:
            inputs = *inputs, *kept.keys[self._window]
        elif kept is not None:
            kept.keys[self._window] = inputs[1:3]
        return self.mixer.mix(inputs, cache, batch)

    def use_arrays(self, arrays: Any) -> None:
        """Has the parts before and after the mixer computed by methods of the same names, on a CPU."""
        self.arrays, self.before, self.after = arrays, arrays.before, arrays.after  # type: ignore[method-assign]

    def before(self, x: Tensor, residual: Tensor | None, rotary: Rotary) -> tuple[Tensor, tuple[Tensor, ...]]:
        """[n, hidden] each → their sum, and the mixer's input."""
        residual, normed = self.mixer_in_norm.after_adding(x, residual)
        return residual, self.mixer.project(normed, rotary)

    def after(self, residual: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """[n, hidden], and this rank's part of the mixer's output → [n, hidden] twice, still to be added."""
        joined = self.mixer.join(mixed)
        if self.mixer_out_norm is not None:
            joined = self.mixer_out_norm(joined)
        residual, normed = self.mlp_in_norm.after_adding(residual, joined)
        out = self.mlp(normed)
        if self.beside is not None:
            out = self.beside(residual, out)
        return out if self.mlp_out_norm is None else self.mlp_out_norm(out), residual


class ParallelLayer(DecoderLayer):
    """A layer whose feed-forward part has the same input as its mixer, so that neither waits for the other (Wang and
    Komatsuzaki 2021, GPT-J)."""

    def after(self, residual: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """See `DecoderLayer.after`."""
        return self.mixer.join(mixed) + self.mlp(self.mixer_in_norm.after_adding(residual, None)[1]), residual


Layer = DecoderLayer | MixerLayer | FeedForwardLayer


def make_layer(kind: LayerKind, config: TextConfig, group: TensorGroup, dtype: torch.dtype) -> Layer:
    """The layer of a kind, as its family has layers."""
    if not config.family.layers.single_parts:
        return (ParallelLayer if config.family.layers.parallel_residual else DecoderLayer)(kind, config, group, dtype)
    norm = norm_of(config, dtype)
    if kind.mixer is Mixer.NONE:
        return FeedForwardLayer(norm, FEED_FORWARDS[kind.feed_forward](kind, config, group, dtype))
    return MixerLayer(norm, MIXERS[kind.mixer](kind, config, group, dtype))
