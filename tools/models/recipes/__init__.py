"""How tiny checkpoints of transformers' models are made, by `model_type`."""

from __future__ import annotations

from tools.models.recipes import axes, codes, indexed, marked, nemotron, plain, sounds, spans, states, timm, windowed
from tools.models.recipes.recipe import Recipe

_GROUPS = plain, marked, windowed, spans, states, axes, codes, indexed, timm, sounds, nemotron
RECIPES: dict[str, Recipe] = {kind: recipe for each in _GROUPS for kind, recipe in each.RECIPES.items()}
