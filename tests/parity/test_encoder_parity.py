"""The encoder's patches and rows against transformers' own processors and towers, on tiny random checkpoints."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from common.checkpoints.checkpoint import Checkpoint
from common.media.item import Grid, Modality, Options
from encoder_service.families import config
from encoder_service.families.qwen_processors import ImageProcessor, VideoProcessor
from encoder_service.item import Inspection, Plan
from encoder_service.models.tower import Tower, load_tower
from encoder_service.worker.patches import preprocess
from testkit import reference
from testkit.checkpoints import TOWERS, Family
from tests import pictures

PHOTOGRAPHS = [
    pictures.photograph("astronaut"),
    pictures.photograph("coffee"),
    pictures.photograph("chelsea").crop((0, 0, 300, 60)),
]
ROWS = {"rtol": 1e-4, "atol": 1e-4}
UNCHANGED = Options()


@dataclass(frozen=True)
class Ours:
    """Our side of a checkpoint."""

    folder: Path
    config: config.ModelConfig
    tower: Tower

    @classmethod
    def load(cls, folder: Path) -> Ours:
        checkpoint = Checkpoint(folder)
        settings = config.read(checkpoint)
        tower = load_tower(checkpoint, settings, torch.device("cpu"), torch.float32)
        return cls(folder, settings, tower)

    @property
    def images(self) -> ImageProcessor:
        return self.config.processors[Modality.IMAGE]

    @property
    def videos(self) -> VideoProcessor:
        return self.config.processors[Modality.VIDEO]

    def image(self, image: Image.Image, options: Options = UNCHANGED) -> tuple[torch.Tensor, Plan]:
        plan = self.images.plan(Inspection(*image.size), options)
        pixels = torch.from_numpy(np.array(image))[None]
        return preprocess(pixels, plan.resized, self.images), plan

    def video(self, clip: reference.Video, options: Options = UNCHANGED) -> tuple[torch.Tensor, Plan]:
        count, height, width = clip.frames.shape[:3]
        seen = Inspection(width, height, count, clip.fps)
        plan = self.videos.plan(seen, options)
        pixels = torch.from_numpy(clip.frames[list(plan.frames)])
        return preprocess(pixels, plan.resized, self.videos), plan


@pytest.fixture(params=TOWERS)
def family(request) -> Family:
    return request.param


@pytest.fixture(params=["hub", "saved"])
def ours(request, family, checkpoints) -> Ours:
    return Ours.load(checkpoints(family, layout=request.param, sharded=request.param == "saved"))


@pytest.mark.parametrize("images", [PHOTOGRAPHS[:1], PHOTOGRAPHS], ids=["one", "three sizes in one batch"])
def test_pictures_give_the_reference_patches_and_rows(ours, images):
    expected, grids = reference.images_inputs(ours.folder, images)
    parts, plans = zip(*(ours.image(image) for image in images), strict=True)
    assert torch.equal(torch.cat(parts), expected)
    assert [[plan.grid.t, plan.grid.h, plan.grid.w] for plan in plans] == grids.tolist()

    rows = ours.tower(torch.cat(parts), [plan.grid for plan in plans])
    assert rows.shape == (sum(plan.tokens for plan in plans), ours.config.levels, ours.config.width)
    torch.testing.assert_close(rows, reference.rows(ours.folder, expected, grids), **ROWS)


def test_a_video_gives_the_reference_patches_and_rows(ours):
    data = pictures.video(pictures.frames(37), fps=10)
    clip = reference.Video.read(data)
    expected, grids, metadata = reference.video_inputs(ours.folder, clip)
    patches, plan = ours.video(clip)
    assert list(plan.frames)[: len(metadata.frames_indices)] == list(metadata.frames_indices)
    assert torch.equal(patches, expected)
    assert [[plan.grid.t, plan.grid.h, plan.grid.w]] == grids.tolist()
    torch.testing.assert_close(ours.tower(patches, [plan.grid]), reference.rows(ours.folder, expected, grids), **ROWS)


def test_two_photographs_have_different_rows(ours):
    first, second = (ours.image(image.resize((256, 256)))[0] for image in PHOTOGRAPHS[:2])
    grid = [ours.image(PHOTOGRAPHS[0].resize((256, 256)))[1].grid]
    one, other = ours.tower(first, grid), ours.tower(second, grid)
    assert (one - other).abs().mean() > 0.1


def test_rows_do_not_depend_on_what_else_is_in_the_batch(ours):
    parts, plans = zip(*(ours.image(image) for image in PHOTOGRAPHS), strict=True)
    together = ours.tower(torch.cat(parts), [plan.grid for plan in plans])
    alone = [ours.tower(part, [plan.grid]) for part, plan in zip(parts, plans, strict=True)]
    torch.testing.assert_close(together, torch.cat(alone), **ROWS)


def test_a_video_cut_at_frame_groups_has_the_same_rows(ours):
    patches, plan = ours.video(reference.Video(pictures.frames(48), 8.0))
    whole = ours.tower(patches, [plan.grid])
    group = plan.grid.h * plan.grid.w
    cuts = [(0, 1), (1, plan.grid.t)]
    pieces = [
        ours.tower(patches[first * group : end * group], [Grid(end - first, plan.grid.h, plan.grid.w)])
        for first, end in cuts
    ]
    torch.testing.assert_close(torch.cat(pieces), whole, **ROWS)


def test_both_layouts_hold_the_same_tower(family, checkpoints):
    hub, saved = (Ours.load(checkpoints(family, layout=layout)) for layout in ("hub", "saved"))
    patches, plan = hub.image(PHOTOGRAPHS[1])
    assert hub.config.processors == saved.config.processors
    assert torch.equal(hub.tower(patches, [plan.grid]), saved.tower(patches, [plan.grid]))


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_the_mixture_of_experts_has_the_same_tower(family, checkpoints, tmp_path):
    folder = Path(shutil.copytree(checkpoints(family), tmp_path / "moe"))
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**about, "model_type": f"{family}_moe"}))
    dense, sparse = Ours.load(checkpoints(family)), Ours.load(folder)
    patches, plan = dense.image(PHOTOGRAPHS[1])
    assert torch.equal(dense.tower(patches, [plan.grid]), sparse.tower(patches, [plan.grid]))
    assert dense.config.processors == sparse.config.processors


@pytest.mark.parametrize("size", [(30, 40), (640, 480), (57, 1999), (1024, 31), (224, 224), (2000, 1500)])
def test_every_size_gets_the_reference_grid(family, checkpoints, size):
    ours = Ours.load(checkpoints(family))
    image = pictures.noise(*size)
    expected, grids = reference.images_inputs(ours.folder, [image])
    patches, plan = ours.image(image)
    assert [[plan.grid.t, plan.grid.h, plan.grid.w]] == grids.tolist()
    assert torch.equal(patches, expected)


LENGTHS = [
    pytest.param(count, rate, fps, marks=() if (first + second + third) % 3 == 0 else pytest.mark.soak)
    for first, count in enumerate((2, 3, 4, 5, 7, 20, 61))
    for second, rate in enumerate((1.0, 7.5, 29.97))
    for third, fps in enumerate((0.5, 2.0, 3.7))
]
"""Each two of them together, and every three in the long suite."""


@pytest.mark.parametrize(("count", "rate", "fps"), LENGTHS)
def test_every_length_and_rate_gets_the_reference_frames(family, checkpoints, count, rate, fps):
    ours = Ours.load(checkpoints(family))
    clip = reference.Video(pictures.frames(count, 64, 48), rate)
    expected, grids, metadata = reference.video_inputs(ours.folder, clip, fps=fps)
    patches, plan = ours.video(clip, Options(fps=fps))
    kept = [int(frame) for frame in metadata.frames_indices]
    assert list(plan.frames) == kept + [kept[-1]] * (len(kept) % 2)
    assert [[plan.grid.t, plan.grid.h, plan.grid.w]] == grids.tolist()
    assert torch.equal(patches, expected)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_a_video_whose_frame_groups_stand_apart_tells_the_time_of_each_as_the_reference_does(family, checkpoints):
    clip = reference.Video(pictures.frames(30), 7.5)
    messages = [{"role": "user", "content": [{"type": "video"}]}]
    folder = checkpoints(family)
    _, plan = Ours.load(folder).video(clip)
    tokenizer = reference.processor(folder).tokenizer
    prompt = tokenizer.decode(reference.reference_inputs(folder, messages, videos=[clip])["input_ids"][0])
    assert len(plan.timestamps) == plan.grid.t
    for seconds in plan.timestamps:
        assert f"<{seconds:.1f} seconds>" in prompt


def test_a_video_tells_the_time_between_frame_groups_as_the_reference_does(checkpoints):
    clip = reference.Video(pictures.frames(30), 7.5)
    messages = [{"role": "user", "content": [{"type": "video"}]}]
    folder = checkpoints("qwen2_5_vl")
    _, plan = Ours.load(folder).video(clip)
    inputs = reference.reference_inputs(folder, messages, videos=[clip])
    assert torch.tensor([plan.seconds_per_grid]).tolist() == inputs["second_per_grid_ts"].tolist()


def test_bounds_that_a_caller_gives_hold_as_the_reference_s_own(family, checkpoints):
    ours = Ours.load(checkpoints(family))
    side = ours.images.pixels.factor
    size = {"shortest_edge": 2 * side * side, "longest_edge": 12 * side * side}
    out = reference.processor(ours.folder).image_processor(images=PHOTOGRAPHS[:1], size=size, return_tensors="pt")
    patches, _ = ours.image(PHOTOGRAPHS[0], Options(min_pixels=size["shortest_edge"], max_pixels=size["longest_edge"]))
    assert torch.equal(patches, out["pixel_values"])


@pytest.mark.parametrize("cap", [None, False, True], ids=["unset", "no", "yes"])
def test_a_cap_on_each_frame_s_pixels_holds_as_the_reference_s_own(family, checkpoints, tmp_path, cap):
    """The checkpoint says whether there is one; where it does not, the reference's newest default counts."""
    folder = Path(shutil.copytree(checkpoints(family), tmp_path / "model"))
    settings = folder / "video_preprocessor_config.json"
    given = json.loads(settings.read_text()) | {"max_video_tokens": 40}
    given |= {} if cap is None else {"cap_pixels_per_frame": cap}
    bounds = ("min_pixels", "max_pixels") if "min_pixels" in given else ("shortest_edge", "longest_edge")
    size = dict(zip(bounds, (4096, 10_000_000), strict=True))
    settings.write_text(json.dumps(given | (size if "min_pixels" in given else {"size": size})))
    videos = config.read(Checkpoint(folder)).processors[Modality.VIDEO]
    clip = reference.Video(pictures.frames(60, 320, 240), 10.0)
    plan = videos.plan(Inspection(320, 240, len(clip.frames), clip.fps), UNCHANGED)
    _, grids, _ = reference.video_inputs(folder, clip)
    assert [[plan.grid.t, plan.grid.h, plan.grid.w]] == grids.tolist()
    free = replace(videos, cap_pixels_per_frame=False)
    whole = free.plan(Inspection(320, 240, len(clip.frames), clip.fps), UNCHANGED)
    assert (plan.tokens < whole.tokens) is bool(cap), "the cap was not tight enough to prove anything"


@pytest.mark.parametrize(("dtype", "share"), [(torch.bfloat16, 0.05), (torch.float16, 0.01)])
def test_shorter_types_differ_by_rounding_alone(family, dtype, share, checkpoints):
    """bfloat16 has 8 bits, float16 has 11; a few layers add up to a few of the last ones."""
    folder = checkpoints(family)
    ours = Ours.load(folder)
    short = load_tower(Checkpoint(folder), ours.config, torch.device("cpu"), dtype)
    patches, plan = ours.image(PHOTOGRAPHS[0])
    exact, near = ours.tower(patches, [plan.grid]), short(patches.to(dtype), [plan.grid])
    assert near.dtype == dtype
    assert 0 < (exact - near.float()).norm() / exact.norm() < share
