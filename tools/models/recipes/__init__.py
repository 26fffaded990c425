"""How tiny checkpoints of the library's models are made, by `model_type`."""

from __future__ import annotations

from tools.models.recipes import axes, marked, plain, sounds, spans, states, windowed
from tools.models.recipes.recipe import Recipe

_GROUPS = plain, marked, windowed, spans, states, axes, sounds
RECIPES: dict[str, Recipe] = {kind: recipe for each in _GROUPS for kind, recipe in each.RECIPES.items()}
