"""How tiny checkpoints of the library's models are made, by `model_type`: of those that the installed one has."""

from __future__ import annotations

from importlib.metadata import version

from tools.models.recipes import axes, codes, indexed, marked, nemotron, plain, sounds, spans, states, timm, windowed
from tools.models.recipes.recipe import Recipe

_GROUPS = plain, marked, windowed, spans, states, axes, codes, indexed, timm, sounds, nemotron
_RELEASE = tuple(map(int, version("transformers").split(".")[:2]))
RECIPES: dict[str, Recipe] = {
    kind: recipe for each in _GROUPS for kind, recipe in each.RECIPES.items() if recipe.since <= _RELEASE
}
