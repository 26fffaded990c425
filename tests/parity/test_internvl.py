"""InternVL's patches, rows, prompts and tokens against transformers' own, on tiny random checkpoints."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from common.checkpoints.checkpoint import Checkpoint
from common.cpu.linear import Linear
from common.hf import classes as hf_classes
from common.hf import processors as hf_processors
from common.media.item import Grid, Header, Key, Modality, Options
from encoder_service.families import config
from encoder_service.item import Inspection, Plan
from encoder_service.media.video import open_reader
from encoder_service.models.tower import Tower, load_tower
from encoder_service.worker.tiles import preprocess
from llm_service.prompt.builder import PromptBuilder
from llm_service.request import ChatPrompt, MediaItem, Message, SamplingParams
from testkit.internvl_checkpoint import KINDS, MOST_TILES, PROMPTS, make_internvl
from testkit.local_engine import LocalEngine, Prompt
from tools.demo_media import film
from tools.models.prompts import Film, Part, picture
from tools.models.reference import TOKENS, Reference

CPU = torch.device("cpu")
ROWS = {"rtol": 1e-4, "atol": 1e-4}
GREEDY = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
UNCHANGED = Options()
SIDE, PATCHES = 56, 4
"""Pixels, and patches, on a side of a tile."""
SIZES = [(56, 56), (30, 40), (190, 100), (57, 500), (1024, 40), (640, 480), (112, 113)]
"""A tile as it is, a smaller picture, two tiles and the copy, columns, rows, a square of four, and one nearly so."""


@dataclass(frozen=True)
class Ours:
    """Both halves of a checkpoint."""

    folder: Path
    config: config.ModelConfig
    tower: Tower
    builder: PromptBuilder

    @classmethod
    def load(cls, folder: Path) -> Ours:
        checkpoint = Checkpoint(folder)
        settings = config.read(checkpoint)
        tower = load_tower(checkpoint, settings, CPU, torch.float32)
        return cls(folder, settings, tower, PromptBuilder(checkpoint))

    def patches(self, part: Image.Image | Film, options: Options = UNCHANGED) -> tuple[Tensor, Plan, Modality]:
        if isinstance(part, Film):
            modality, reader = Modality.VIDEO, open_reader(part.file)
            height, width = reader[0].shape[:2]
            seen = Inspection(width, height, len(reader), float(reader.get_avg_fps()))
            plan = self.config.processors[modality].plan(seen, options)
            pixels = reader.get_batch(plan.frames).asnumpy()
        else:
            modality, pixels = Modality.IMAGE, np.asarray(part)[None]
            plan = self.config.processors[modality].plan(Inspection(*part.size), options)
        made = preprocess(torch.from_numpy(pixels.copy()), plan.resized, self.config.processors[modality])
        return made, plan, modality

    @torch.inference_mode()
    def prompt(self, parts: Sequence[Part]) -> Prompt:
        """One user message, encoded and laid out by us."""
        headers, rows = [], []
        for part in parts:
            if isinstance(part, str):
                continue
            patches, plan, modality = self.patches(part)
            key = hashlib.sha256(patches.numpy().tobytes()).digest()
            headers.append(Header(key, modality, plan.grid, plan.tokens, timestamps=plan.timestamps))
            rows.append(self.tower(patches, [plan.grid]).clone())
        kinds = [header.modality for header in headers]
        items = iter(MediaItem(kind, Key(b""), index=n) for n, kind in enumerate(kinds))
        message = Message("user", tuple(part if isinstance(part, str) else next(items) for part in parts))
        pieces = self.builder.pieces(ChatPrompt((message,)), kinds)
        return Prompt(self.builder.layout(pieces, headers), rows, {})


@pytest.fixture(
    scope="module", params=[each if each != "llama" else pytest.param(each, marks=pytest.mark.soak) for each in KINDS]
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    layout = "hub" if request.param == "qwen3" else "saved"
    return make_internvl(tmp_path_factory.mktemp(request.param), request.param, layout=layout)


@pytest.fixture(scope="module")
def ours(folder: Path) -> Ours:
    return Ours.load(folder)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Reference:
    return Reference(folder)


def cut(pixels: Tensor) -> Tensor:
    """transformers' tiles [n, 3, side, side] as patches [n · patches, dim], squares together."""
    half, patch = PATCHES // 2, SIDE // PATCHES
    parts = pixels.reshape(len(pixels), 3, half, 2, patch, half, 2, patch)
    return parts.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(-1, 3 * patch * patch)


def test_pictures_give_the_reference_patches_and_rows(ours: Ours, theirs: Reference) -> None:
    parts, grids, expected = [], [], []
    for width, height in SIZES:
        shown = picture(width, width, height)
        given = theirs.inputs([shown, "?"])
        patches, plan, _ = ours.patches(shown)
        assert torch.equal(patches, cut(given["pixel_values"])), (width, height)
        assert plan.tokens == int((given["input_ids"] == 259).sum())
        rows = theirs.rows("image", given).flatten(0, 1)
        torch.testing.assert_close(ours.tower(patches, [plan.grid])[:, 0], rows, **ROWS)
        parts.append(patches)
        grids.append(plan.grid)
        expected.append(rows)
    together = ours.tower(torch.cat(parts), grids)
    alone = [ours.tower(part, [grid]) for part, grid in zip(parts, grids, strict=True)]
    assert torch.equal(together, torch.cat(alone)), "to the bit"
    assert together.shape == (sum(map(len, expected)), ours.config.levels, ours.config.width)
    torch.testing.assert_close(together[:, 0], torch.cat(expected), **ROWS)
    assert (expected[0] - expected[1]).abs().mean() > 0.05, "every row would do"


def test_a_video_gives_the_reference_patches_and_rows(ours: Ours, theirs: Reference) -> None:
    given = theirs.inputs([Film(film()), "?"])
    patches, plan, _ = ours.patches(Film(film()))
    assert torch.equal(patches, cut(given["pixel_values"]))
    assert len(plan.timestamps) == plan.grid.t == len(given["pixel_values"])
    rows = theirs.rows("image", given).flatten(0, 1)
    whole = ours.tower(patches, [plan.grid])[:, 0]
    torch.testing.assert_close(whole, rows, **ROWS)
    frame = Grid(1, PATCHES, PATCHES)
    cut_apart = [ours.tower(part, [frame])[:, 0] for part in patches.split(PATCHES**2)]
    torch.testing.assert_close(torch.cat(cut_apart), rows, **ROWS)


def test_ids_and_greedy_tokens_are_the_reference_s_whatever_the_chunks_and_the_company(
    ours: Ours, theirs: Reference
) -> None:
    inputs = {name: theirs.inputs(parts) for name, parts in PROMPTS.items()}
    expected = {name: theirs.tokens(given) for name, given in inputs.items()}
    assert len(set(map(tuple, expected.values()))) == len(expected), "the prompts prove nothing"
    prompts = {name: ours.prompt(parts) for name, parts in PROMPTS.items()}
    whole, chunked = LocalEngine(ours.folder), LocalEngine(ours.folder, step_tokens=16)
    for name, prompt in prompts.items():
        assert prompt.layout.ids == inputs[name]["input_ids"][0].tolist(), name
        assert whole.run([prompt], GREEDY)[0].tokens == expected[name], name
        assert chunked.run([prompt], GREEDY)[0].tokens == expected[name], f"{name}, in chunks of 16"
    company = LocalEngine(ours.folder, step_tokens=48, prefix_cache=True)
    for cached in (False, True):
        outcomes = company.run([*prompts.values()], GREEDY)
        for (name, prompt), outcome in zip(prompts.items(), outcomes, strict=True):
            assert outcome.tokens == expected[name], f"{name}, {'from the cache' if cached else 'beside others'}"
            assert not cached or outcome.cached >= (len(prompt.layout.ids) - 1) // 16 * 16


def test_positions_count_on(ours: Ours) -> None:
    layout = ours.prompt(PROMPTS["a video and a picture"]).layout
    positions = np.frombuffer(layout.positions, np.int32).reshape(3, -1)
    assert (positions == np.arange(len(layout.ids))).all()
    assert layout.mrope_delta == 0


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Ours:
    """One of all, for what its text and its tower have no part in."""
    return Ours.load(make_internvl(tmp_path_factory.mktemp("internvl")))


@pytest.fixture(scope="module")
def processor(plain: Ours) -> Any:
    return Reference(plain.folder).processor


def test_every_size_gets_the_reference_s_tiles(plain: Ours, processor: Any) -> None:
    pictures, draw = plain.config.processors[Modality.IMAGE], np.random.default_rng(0)
    sides = [(int(width), int(height)) for width, height in draw.integers(28, 2000, (400, 2))]
    sides += [(side, side) for side in range(28, 400, 12)] + [(3 * side, 2 * side) for side in range(28, 200, 9)]
    counts = set()
    for width, height in sides:
        tiles = processor.image_processor.get_number_of_image_patches(height, width, {"crop_to_patches": True})
        plan = pictures.plan(Inspection(width, height), UNCHANGED)
        assert (plan.grid.t, plan.grid.h, plan.grid.w) == (1, PATCHES * tiles, PATCHES), (width, height)
        assert plan.tokens == pictures.rows(plan.grid)
        counts.add(tiles)
    assert counts == {1, 3, 4, 5}


@pytest.mark.parametrize(("least", "most"), [(1, 1), (1, 2), (3, 6), (5, 5), (1, 12)])
def test_bounds_that_a_caller_gives_hold_as_the_reference_s_own(
    plain: Ours, processor: Any, least: int, most: int
) -> None:
    options = Options(min_pixels=least * SIDE**2, max_pixels=most * SIDE**2 + 17)
    tiles = {"crop_to_patches": True, "min_patches": least, "max_patches": most}
    for width, height in SIZES:
        shown = picture(width, width, height)
        expected = processor.image_processor(images=[shown], return_tensors="pt", **tiles)["pixel_values"]
        assert torch.equal(plain.patches(shown, options)[0], cut(expected))


@pytest.mark.parametrize(
    "settings",
    [
        {"num_frames": 1},
        {"num_frames": 5},
        {"num_frames": 12, "initial_shift": False},
        {"num_frames": 9, "initial_shift": 2.5},
        {"fps": 1.3},
        {"fps": 24.0},
    ],
    ids=str,
)
def test_frames_are_the_video_processor_s_own_choice(plain: Ours, settings: dict[str, Any], tmp_path: Path) -> None:
    folder = with_videos(plain.folder, tmp_path, do_sample_frames=True, **settings)
    ours, theirs = config.read(Checkpoint(folder)).processors[Modality.VIDEO], hf_processors.processor_of(folder)
    compared = 0
    for total in (5, 12, 31, 90, 1001):
        for rate in (7.5, 25.0, 29.97):
            plan = ours.plan(Inspection(40, 32, total, rate), UNCHANGED)
            assert plan.timestamps == tuple(frame / rate for frame in plan.frames)
            count = settings.get("num_frames") or int(total / rate * settings["fps"])
            if 1 <= count <= total:  # else the reference fails
                assert list(plan.frames) == hf_processors.frames_of(theirs, total, rate)
                compared += 1
    assert compared >= 10


@pytest.mark.parametrize("settings", [{}, {"do_sample_frames": True, "fps": 1.3}], ids=str)
def test_frames_that_a_caller_asks_for_are_the_reference_s(
    plain: Ours, settings: dict[str, Any], tmp_path: Path
) -> None:
    folder = with_videos(plain.folder, tmp_path, **settings)
    ours, theirs = config.read(Checkpoint(folder)).processors[Modality.VIDEO], hf_processors.processor_of(folder)
    for total, rate, fps in ((90, 7.5, 0.7), (90, 29.97, 2.0), (31, 29.97, 3.7), (1001, 60.0, 24.0)):
        about = hf_classes.transformers().video_utils.VideoMetadata(total_num_frames=total, fps=rate)
        expected = theirs.video_processor.sample_frames(about, fps=fps).tolist()
        assert list(ours.plan(Inspection(40, 32, total, rate), Options(fps=fps)).frames) == expected


def with_videos(folder: Path, where: Path, **settings: Any) -> Path:
    """The checkpoint with other settings of its video processor."""
    other = Path(shutil.copytree(folder, where / "model"))
    saved = json.loads((other / "processor_config.json").read_text())
    saved["video_processor"] |= settings
    (other / "processor_config.json").write_text(json.dumps(saved))
    return other


def test_no_more_frames_are_taken_than_a_caller_allows(plain: Ours) -> None:
    videos = plain.config.processors[Modality.VIDEO]
    assert videos.plan(Inspection(40, 32, 20, 8.0), Options(max_frames=4)).frames == (2, 7, 12, 17)
    assert videos.plan(Inspection(40, 32, 3, 8.0), Options(max_frames=4)).frames == (0, 1, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_both_layouts_hold_the_same_model(kind: str, tmp_path: Path) -> None:
    saved, hub = (make_internvl(tmp_path / layout, kind, layout=layout) for layout in ("saved", "hub"))
    one, other = Ours.load(saved), Ours.load(hub)
    assert one.config.processors == other.config.processors
    patches, plan, _ = one.patches(picture(9, 130, 60))
    assert torch.equal(one.tower(patches, [plan.grid]), other.tower(patches, [plan.grid]))
    prompt = one.prompt(PROMPTS["one small picture"])
    answers = [LocalEngine(each).run([prompt], GREEDY)[0].tokens for each in (saved, hub)]
    assert answers[0] == answers[1]


@pytest.mark.parametrize(("dtype", "share"), [(torch.bfloat16, 0.05), (torch.float16, 0.01)])
def test_shorter_types_differ_by_rounding_alone(plain: Ours, dtype: torch.dtype, share: float) -> None:
    short = load_tower(Checkpoint(plain.folder), plain.config, CPU, dtype)
    patches, plan, _ = plain.patches(picture(8, 300, 200))
    exact, near = plain.tower(patches, [plan.grid]), short(patches.to(dtype), [plan.grid])
    assert near.dtype == dtype
    assert 0 < (exact - near.float()).norm() / exact.norm() < share


def test_videos_of_another_size_are_left_out(plain: Ours, tmp_path: Path) -> None:
    """As in InternVL3.5, whose frames the reference resizes to what the tower cannot divide into rows."""
    folder = with_videos(plain.folder, tmp_path, size={"height": 48, "width": 48})
    assert list(config.read(Checkpoint(folder)).processors) == [Modality.IMAGE]


@pytest.mark.parametrize(("capability", "laid_out"), [("AVX2", False), ("AVX512", True)])
def test_products_of_large_tiles_are_torch_s_own_where_those_are_faster(
    capability: str, laid_out: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    ours = Ours.load(make_internvl(tmp_path, "qwen3", side=448))
    linears = [part for part in ours.tower.modules() if isinstance(part, Linear)]
    assert {part.laid_out is not None for part in linears} == {laid_out}
    theirs, shown = Reference(ours.folder), picture(6, 500, 400)
    patches, plan, _ = ours.patches(shown)
    rows = theirs.rows("image", theirs.inputs([shown, "?"])).flatten(0, 1)
    torch.testing.assert_close(ours.tower(patches, [plan.grid])[:, 0], rows, **ROWS)


def test_the_checkpoint_s_own_bounds_are_read(plain: Ours) -> None:
    assert plain.config.processors[Modality.IMAGE].tiles.bounds(UNCHANGED) == (1, MOST_TILES)
