"""How tiny checkpoints of the library's models are made, by `model_type`."""

from __future__ import annotations

from tools.models.recipes import axes, marked, plain, sounds, spans, windowed
from tools.models.recipes.recipe import Recipe

RECIPES: dict[str, Recipe] = {
    kind: recipe for each in (plain, marked, windowed, spans, axes, sounds) for kind, recipe in each.RECIPES.items()
}
