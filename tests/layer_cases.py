"""Small layers with drawn weights, ours and transformers', that are compared."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from llm_service.families.family import AttentionRules, Family, Mixer, NormRules, OutputGate, QkNorm, RopeRules
from llm_service.layers.linear.placement import Stored
from llm_service.model_config.rotary import RotaryConfig
from llm_service.model_config.text import TextConfig
from llm_service.models.filling import InMemory, targets

CPU = torch.device("cpu")
HIDDEN, HEADS, KV_HEADS, HEAD, TOKENS = 64, 4, 2, 32, 40
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "num_hidden_layers": 1,
    "layer_types": ["full_attention"],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
FAMILY = Family(
    {},
    attention=AttentionRules(qk_norm=QkNorm(), output_gate=OutputGate.FUSED),
    norms=NormRules(zero_centred=True),
    rope=RopeRules(partial_factor=0.25),
)


def config() -> TextConfig:
    return TextConfig(
        family=FAMILY,
        vocab_size=8,
        hidden_size=HIDDEN,
        intermediate_size=96,
        mixers=(Mixer.ATTENTION,),
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=HEAD,
        norm_eps=1e-6,
        rotary=RotaryConfig(HEAD // 4, 10000.0, (2, 1, 1), interleaved=True),
        tied=False,
        max_position=100,
        qk_norm=True,
    )


def drawn(module: nn.Module, seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    return module.eval()


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def read(ours: nn.Module, theirs: nn.Module) -> None:
    """All of their weights, by the names under which they are saved."""
    stored: dict[str, Stored] = {name: InMemory(tensor) for name, tensor in theirs.state_dict().items()}
    placed = {name: place for name, (_, place) in targets(ours)}
    for name, tensor in stored.items():
        placed.pop(name)(tensor)
    single = (".experts.", "gate.weight", ".moe_statics.")
    assert all(any(part in f".{name}" for part in single) for name in placed), "all but names of other layouts"
