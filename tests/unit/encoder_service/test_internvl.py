"""InternVL's tiles and settings where the reference has nothing to say; where it has, the parity tests compare."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from common.errors import InvalidInput
from common.media.item import Grid, Modality, Options, Pixels
from encoder_service.families import config
from encoder_service.families.internvl import FrameTiles, PictureTiles, TileSettings
from encoder_service.families.pixel_settings import PixelSettings
from encoder_service.families.registry import find_family
from encoder_service.item import Inspection

AREA = 448**2
SETTINGS = TileSettings(448, PixelSettings(AREA, 12 * AREA, 14, 1, 2, (0.5,) * 3, (0.5,) * 3, 1 / 255))
PICTURES = PictureTiles(SETTINGS)
VIDEOS = FrameTiles(SETTINGS, sampled=False, count=None, fps=None, shift=None)
NONE = Options()


def test_a_picture_of_two_tiles_has_a_copy_and_one_of_one_tile_has_none() -> None:
    plan = PICTURES.plan(Inspection(900, 450), NONE)
    assert (plan.grid, plan.tokens, plan.resized, plan.frames) == (Grid(1, 96, 32), 3 * 256, (448, 896), (0,))
    plan = PICTURES.plan(Inspection(200, 200), NONE)
    assert (plan.grid, plan.tokens, plan.resized) == (Grid(1, 32, 32), 256, (448, 448))


@pytest.mark.parametrize(
    ("options", "bounds"),
    [
        (NONE, (1, 12)),
        (Options(max_pixels=3 * AREA - 1), (1, 2)),
        (Options(max_pixels=1), (1, 1)),
        (Options(min_pixels=2 * AREA + 1), (3, 12)),
        (Options(min_pixels=20 * AREA - 1), (20, 20)),
        (Options(min_pixels=AREA + 1, max_pixels=2 * AREA - 1), (1, 1)),
    ],
)
def test_a_caller_s_bounds_in_pixels_are_bounds_on_tiles(options: Options, bounds: tuple[int, int]) -> None:
    """The least area holds even where it is above the model's greatest; where no number is between both, the greatest
    does."""
    assert SETTINGS.bounds(options) == bounds


@given(width=st.integers(28, 3000), height=st.integers(28, 3000), least=st.integers(1, 12), most=st.integers(1, 40))
def test_every_picture_has_as_many_tiles_as_it_may(width: int, height: int, least: int, most: int) -> None:
    least = min(least, most)
    plan = PICTURES.plan(Inspection(width, height), Options(min_pixels=least * AREA, max_pixels=most * AREA))
    tiles = plan.resized[0] * plan.resized[1] // AREA
    assert least <= tiles <= most
    assert plan.grid == Grid(1, 32 * (tiles + (tiles > 1)), 32)
    assert PICTURES.rows(plan.grid) == plan.tokens == plan.grid.patches // 4


@pytest.mark.parametrize("name", ["min_pixels", "max_pixels"])
def test_more_tiles_than_can_be_chosen_among_are_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidInput, match=f"{name} asks for more than 512 tiles") as error:
        PICTURES.plan(Inspection(64, 64), Options(**{name: 600 * AREA}))  # type: ignore[arg-type]
    assert error.value.reason == "BAD_OPTION"


@pytest.mark.parametrize("name", ["min_pixels", "max_pixels"])
def test_bounds_on_frames_are_refused_by_name(name: str) -> None:
    options = Options(**{name: AREA})  # type: ignore[arg-type]
    for plan in (
        lambda: VIDEOS.plan(Inspection(64, 48, 4, 8.0), options),
        lambda: VIDEOS.plan_pixels(Pixels(b"", 2, 48, 64), options),
    ):
        with pytest.raises(InvalidInput, match=f"{name}: a frame is one tile") as error:
            plan()
        assert error.value.reason == "BAD_OPTION"


def test_frames_that_are_given_are_all_kept_and_have_their_times() -> None:
    plan = VIDEOS.plan_pixels(Pixels(b"", 3, 48, 64, (0.0, 1.5, 3.0)), NONE)
    assert (plan.grid, plan.frames, plan.timestamps, plan.seconds_per_grid) == (
        Grid(3, 32, 32),
        (0, 1, 2),
        (0.0, 1.5, 3.0),
        1.5,
    )
    plan = VIDEOS.plan_pixels(Pixels(b"", 2, 48, 64), Options(fps=4.0))
    assert (plan.timestamps, plan.seconds_per_grid) == ((0.0, 0.25), 0.25)


@given(
    total=st.integers(1, 3000),
    rate=st.floats(0.5, 240),
    fps=st.none() | st.floats(0.01, 60),
    most=st.none() | st.integers(1, 768),
    count=st.none() | st.integers(1, 64),
    shift=st.none() | st.floats(0, 4000),
)
def test_every_video_has_frames_of_its_own_in_order(
    total: int, rate: float, fps: float | None, most: int | None, count: int | None, shift: float | None
) -> None:
    videos = replace(VIDEOS, sampled=count is not None, count=count, shift=shift)
    plan = videos.plan(Inspection(64, 48, total, rate), Options(fps=fps, max_frames=most))
    assert all(0 <= frame < total for frame in plan.frames)
    assert list(plan.frames) == sorted(plan.frames)
    assert 1 <= len(plan.frames) == plan.grid.t == len(plan.timestamps)
    assert len(plan.frames) <= (most or total) + (shift is not None)


def test_only_grids_of_whole_tiles_have_rows() -> None:
    assert [PICTURES.rows(Grid(*each)) for each in ((1, 64, 32), (2, 32, 32), (1, 48, 32), (1, 32, 64))] == [
        512,
        0,
        0,
        0,
    ]
    assert [VIDEOS.rows(Grid(*each)) for each in ((3, 32, 32), (1, 64, 32))] == [768, 0]


CONFIG: dict[str, Any] = {
    "model_type": "internvl",
    "text_config": {"model_type": "qwen2", "hidden_size": 64},
    "vision_config": {},
}
PROCESSOR = {"size": {"height": 448, "width": 448}}


def read(folder: Path, about: dict[str, Any], image: dict[str, Any] | None = None, **files: Any) -> config.ModelConfig:
    for name, content in {"config": about, "preprocessor_config": image or PROCESSOR, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return config.read(Checkpoint(folder))


def test_what_a_checkpoint_leaves_out_is_as_transformers_has_it(tmp_path: Path) -> None:
    found = read(tmp_path, CONFIG)
    assert (found.levels, found.width, list(found.modalities)) == (1, 64, [Modality.IMAGE, Modality.VIDEO])
    assert found.processors[Modality.IMAGE].plan(Inspection(5000, 3000), NONE).grid == Grid(1, 32 * 7, 32)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"downsample_ratio": 0.25}, "downsample_ratio 0.25 is not supported"),
        ({"vision_feature_layer": -2}, "vision_feature_layer -2"),
        ({"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy full"),
        ({"vision_config": {"image_size": [448, 224]}}, "only a square image_size"),
        ({"vision_config": {"image_size": 434}}, "no whole number of rows"),
        ({"vision_config": {"image_size": 224}}, "have 448 pixels a side, the tower's 224"),
        ({"text_config": {"model_type": "qwen2"}}, "does not state out_hidden_size"),
        ({"text_config": {"model_type": "gpt_oss"}}, "the tower of internvl is not supported"),
    ],
)
def test_other_settings_are_refused_by_name(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=says):
        read(tmp_path, CONFIG | change)


@pytest.mark.parametrize(
    ("video", "says"),
    [
        ({"do_sample_frames": True}, "neither num_frames nor fps"),
        ({"do_center_crop": True}, "do_center_crop"),
        ({"do_resize": False}, "do_resize off"),
    ],
)
def test_other_processors_of_videos_are_refused_by_name(video: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=says):
        read(tmp_path, CONFIG, video_preprocessor_config=PROCESSOR | video)


def test_with_a_text_that_no_family_is_for_transformers_has_all_of_it() -> None:
    assert find_family(CONFIG) is not None
    assert find_family(CONFIG | {"text_config": {"model_type": "gpt_oss"}}) is None
    assert find_family({"model_type": "internvl"}) is None
