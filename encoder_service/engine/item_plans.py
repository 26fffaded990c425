"""The plans of items: from what their files say, by a model's family or by transformers, within the limits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol

from common.aio.tasks import in_thread
from common.errors import InvalidInput, Unsupported
from common.media.item import Embedding, Grid, Modality, Options, Pixels
from common.rows.wire import RowLayout
from encoder_service.engine.pruning import pruned
from encoder_service.families.family import ModelConfig
from encoder_service.item import Footage, Inspection, Item, Plan, Pruning
from encoder_service.media import checks, limits
from encoder_service.media.hf_planner import HfPlanner
from encoder_service.media.modalities import SPECS

Inspect = Callable[[], Awaitable[Inspection]]
"""Has an item's file inspected."""


class ItemPlans(Protocol):
    """Plans items of one model."""

    async def plan(self, item: Item, inspect: Inspect) -> Plan:
        """The plan of an item. Raises InvalidInput if it exceeds a limit, or the model does not take it."""
        ...


class FamilyPlans:
    """Plans by the processors of a model's family."""

    def __init__(
        self, model: ModelConfig, layout: RowLayout, media_limits: limits.MediaLimits, *, max_patches: int
    ) -> None:
        self._model = model
        self._layout = layout
        self._limits = media_limits
        self._max_patches = max_patches

    async def plan(self, item: Item, inspect: Inspect) -> Plan:
        """See `ItemPlans`."""
        if item.options.with_sound:
            raise checks.no_video_sound(item.field)
        processor = self._model.processors[item.modality]
        planned: Callable[[Options], Plan]
        match item.source:
            case Embedding() as rows:
                squares = processor.rows(rows.grid)
                checks.check_rows(rows, item, self._layout, squares, self._max_patches, self._limits)
                await in_thread(checks.check_finite, rows, f"{item.field}.embedding")
                return _plan_of_rows(rows, squares)
            case Pixels() as pixels:
                planned = partial(processor.plan_pixels, pixels)
            case _:
                seen = await _inspected(item, inspect, self._limits)
                planned = (
                    partial(processor.plan_pixels, seen.as_given) if seen.listed else partial(processor.plan, seen)
                )
        try:
            plan = planned(item.options)
        except InvalidInput as error:
            raise error.at(item.field) from None
        if not isinstance(item.source, Pixels):
            plan = limits.fitted(plan, self._limits)
        limits.check_plan(plan, item.field, self._limits, self._max_patches)
        return pruned(plan, item.options, processor.merge, item.field)


class HfPlans:
    """Plans by transformers' processor, which `planner` asks."""

    def __init__(self, planner: HfPlanner, media_limits: limits.MediaLimits, *, max_patches: int) -> None:
        self._planner = planner
        self._limits = media_limits
        self._max_patches = max_patches

    async def plan(self, item: Item, inspect: Inspect) -> Plan:
        """See `ItemPlans`."""
        footage = None
        match item.source:
            case Embedding():
                why = "rows computed elsewhere do not say which tokens stand for them in this model's prompts"
                raise Unsupported(why, reason="NO_EMBEDDINGS", field=f"{item.field}.embedding")
            case Pixels() as pixels:
                seen = Inspection(pixels.width, pixels.height)
                if item.modality is Modality.VIDEO:
                    footage = Footage.of(pixels)
            case _:
                seen = await _inspected(item, inspect, self._limits)
                if item.modality is Modality.VIDEO:
                    footage = Footage.of(seen.as_given) if seen.listed else await self._planner.footage(item, seen)
        if footage is not None:  # before the planner computes with that many
            whole = (seen.height, seen.width)
            blank = Plan(Grid(1, 1, 1), 1, footage.decoded, *whole, whole)
            limits.check_plan(blank, item.field, self._limits, self._max_patches)
        plan = await self._planner.plan(item, seen, footage)
        limits.check_plan(plan, item.field, self._limits, self._max_patches)
        return plan


async def _inspected(item: Item, inspect: Inspect, media_limits: limits.MediaLimits) -> Inspection:
    seen = await inspect()
    SPECS[item.modality].check(seen, item.field, media_limits)
    checks.check_listed(seen, item)
    return seen


def _plan_of_rows(rows: Embedding, squares: int) -> Plan:
    """The plan of precomputed rows with so many squares, pruned if they say so."""
    pruning = Pruning(rows.count, rows.kept_rows) if rows.count < squares else None
    return Plan(rows.grid, squares, (), 0, 0, (0, 0), rows.timestamps, rows.seconds_per_grid, pruning)
