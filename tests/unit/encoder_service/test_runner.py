"""What a worker does with a batch, in this process; and that it asks no more of a tower than `tower.Tower` says."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType

import pytest
import torch
from msgspec import structs
from safetensors.torch import save_file
from torch import Tensor, nn

from common.checkpoints.checkpoint import Checkpoint
from common.media.item import Grid, Modality, Options
from common.process.core_share import CoreShare
from common.shm.arena import SharedBuffer
from encoder_service.families import config, registry
from encoder_service.families.family import Processor
from encoder_service.item import Inspection, Plan
from encoder_service.models.attention import AttentionUnavailable
from encoder_service.models.tower import Pass, load_tower
from encoder_service.worker.__main__ import _begun, ahead
from encoder_service.worker.graphs import GraphsUnavailable
from encoder_service.worker.messages import Batch, Piece, WorkerSettings
from encoder_service.worker.patches import preprocess
from encoder_service.worker.pixel_ring import PixelRing
from encoder_service.worker.row_ring import RowRing
from encoder_service.worker.runner import Runner
from testkit import audio_checkpoint
from tests import sounds
from tests.lazy_copier import LazyCopier, LazyLoader

SIDE = 64
ROOM = 1 << 20


class ForeignTower(nn.Module):
    """Not of blocks: one matrix over the mean of each square of patches."""

    def __init__(self, vision: dict) -> None:
        super().__init__()
        self.levels = 1 + len(vision["deepstack_visual_indexes"])
        self.proj = nn.Linear(3 * 2 * 16 * 16, self.levels * vision["out_hidden_size"])

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        assert sum(grid.patches for grid in grids) == len(patches)
        return self.proj(patches.view(-1, 4, patches.shape[1]).mean(1)).view(len(patches) // 4, self.levels, -1)


@dataclass(frozen=True)
class ForeignProcessor:
    """Pictures of one size: every other pixel, neither resized nor normalised."""

    merge: int = 2
    preprocess: str = "tests_foreign_tower:foreign_patches"

    def plan(self, seen: Inspection, options: Options) -> Plan:
        grid = Grid(1, seen.height // 32, seen.width // 32)
        return Plan(grid, grid.patches // 4, (0,), seen.height, seen.width, (seen.height // 2, seen.width // 2))


def foreign_patches(pixels: Tensor, size: tuple[int, int], processor: ForeignProcessor) -> Tensor:
    """[h·w, 3 · 2 · 16²] float32."""
    assert (processor.merge, pixels[0, ::2, ::2].shape[:2]) == (2, size)
    return pixels[0, ::2, ::2].float().reshape(-1, 3 * 16 * 16).repeat(1, 2)


@pytest.fixture
def buffers():
    made = [SharedBuffer.create(name, ROOM) for name in ("staging", "store")]
    yield made
    for each in made:
        each.close()


def worker_settings(folder, **settings) -> WorkerSettings:
    given = {"device": "cpu", "dtype": "float32", "threads": 0, "staging_bytes": ROOM, "store_bytes": ROOM}
    return WorkerSettings(folder=str(folder), **{**given, **settings})


def piece(at: int, rows: int) -> Piece:
    """A square picture, resized to itself."""
    grid = (1, SIDE // 16, SIDE // 16)
    tokens = SIDE * SIDE // 1024
    return Piece(
        modality="image",
        pixels=at,
        frames=1,
        height=SIDE,
        width=SIDE,
        resized=(SIDE, SIDE),
        grid=grid,
        tokens=tokens,
        rows=rows,
    )


def put(staging: SharedBuffer, at: int, seed: int) -> Tensor:
    """A picture in the staging arena."""
    pixels = torch.randint(0, 256, (1, SIDE, SIDE, 3), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    staging.view[at : at + pixels.numel()] = pixels.numpy().tobytes()
    return pixels


def rows_at(store: SharedBuffer, at: int, tokens: int, settings: config.ModelConfig) -> Tensor:
    count = tokens * settings.levels * settings.width
    return torch.frombuffer(bytearray(store.view[at : at + 4 * count]), dtype=torch.float32).view(tokens, -1)


def test_rows_are_written_where_each_piece_s_belong(checkpoints, buffers):
    folder = checkpoints("qwen3_vl")
    runner = Runner(worker_settings(folder), *buffers)
    ready = runner.warm_up()
    assert (ready.attention, ready.graphs) == ("sdpa", [])
    settings = config.read(Checkpoint(folder))
    tower = load_tower(Checkpoint(folder), settings, torch.device("cpu"), torch.float32)
    pixels = [put(buffers[0], at, seed=at) for at in (0, 65536)]
    (done,) = runner.run(Batch([piece(0, 4096), piece(65536, 512_000)]))
    assert (done.not_finite, done.replayed) == ([], False)
    for picture, at in zip(pixels, (4096, 512_000), strict=True):
        patches = preprocess(picture, (SIDE, SIDE), settings.processors[Modality.IMAGE])
        expected = tower(patches, [Grid(1, SIDE // 16, SIDE // 16)]).flatten(1)
        torch.testing.assert_close(rows_at(buffers[1], at, 4, settings), expected, rtol=1e-4, atol=1e-4)


def test_a_tower_may_compute_in_another_type_than_rows_have(checkpoints, buffers):
    folder = checkpoints("qwen3_vl")
    put(buffers[0], 0, seed=1)
    settings, rows = config.read(Checkpoint(folder)), []
    for given in ({}, {"dtype": "bfloat16", "tower_dtype": "float32"}):
        runner = Runner(worker_settings(folder, **given), *buffers)
        assert runner.dtype == torch.float32
        runner.run(Batch([piece(0, 4096)]))
        count = 4 * settings.levels * settings.width
        kind = torch.bfloat16 if given else torch.float32
        here = bytearray(buffers[1].view[4096 : 4096 + count * kind.itemsize])
        rows.append(torch.frombuffer(here, dtype=kind))
    assert torch.equal(rows[1], rows[0].bfloat16())


def test_a_worker_divides_the_cores_while_it_computes_and_looks_before_each_block(checkpoints, buffers, monkeypatch):
    name, used, looks = f"twinlens-test-{os.getpid()}", [], []
    look = CoreShare.look

    def counted(share: CoreShare) -> None:
        looks.append(share)
        look(share)

    monkeypatch.setattr(CoreShare, "of_this_host", lambda _, use: CoreShare(name, 2, use))
    monkeypatch.setattr(CoreShare, "look", counted)
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    runner, other = Runner(worker_settings(checkpoints("qwen3_vl"), core_share=True), *buffers), CoreShare(name, 2, int)
    put(buffers[0], 0, seed=0)
    with other.computing():
        looks.clear()
        runner.run(Batch([piece(0, 4096)]))
        assert used == [1]
        assert len(looks) == 1 + len(runner.blocks())
    runner.run(Batch([piece(0, 4096)]))
    assert used == [1, 2]
    used.clear()
    with other.computing():
        assert other._used == 2, "outside of a pass it holds no claim"
    other.close()
    runner._share_of_cores.close()


def test_a_batch_may_be_prepared_while_another_is_computed(checkpoints, buffers):
    runner = Runner(worker_settings(checkpoints("qwen3_vl")), *buffers)
    rows = 4 * runner._config.levels * runner._config.width * 4
    places = [65536 * number for number in range(8)]
    for at in places:
        put(buffers[0], at, seed=at)
    batches = [Batch([piece(at, at + 32768)]) for at in places]
    alone = []
    for batch in batches:
        assert [each.not_finite for each in runner.run(batch)] == [[]]
        first = batch.pieces[0].rows
        alone.append(bytes(buffers[1].view[first : first + rows]))
        buffers[1].view[first : first + rows] = bytes(rows)
    done = [runner.finish(begun.result()) for begun in ahead(ahead(batches, runner.parts), partial(_begun, runner))]
    assert [each.not_finite for each in done] == [[]] * 8
    assert all(each.preprocess_seconds > 0 < each.vit_seconds for each in done)
    assert [bytes(buffers[1].view[at + 32768 : at + 32768 + rows]) for at in places] == alone
    assert len(set(alone)) == 8


def test_batches_are_started_before_the_rows_of_others_have_left_a_device(checkpoints, buffers):
    """As a GPU's worker does it: two towers have begun before the first one's rows are asked for."""
    copier = LazyCopier()
    ring = RowRing(copier, buffers=2, size=1000)
    runner = Runner(worker_settings(checkpoints("qwen3_vl")), *buffers, way_out=ring)
    size = 4 * runner._config.levels * runner._config.width * 4
    batches = [Batch([piece(at, at + 32768), piece(at, at + 49152)]) for at in (0, 65536, 131_072)]
    for batch in batches:
        put(buffers[0], batch.pieces[0].pixels, seed=batch.pieces[0].pixels)
    plain = Runner(worker_settings(checkpoints("qwen3_vl")), *buffers)
    expected = []
    for batch in batches:
        assert [each.not_finite for each in plain.run(batch)] == [[]]
        expected.append([bytes(buffers[1].view[each.rows : each.rows + size]) for each in batch.pieces])
    buffers[1].view[:] = bytes(ROOM)
    begun = [runner.compute(runner.prepare(batch)) for batch in batches[:2]]
    assert not any(buffers[1].view), "nothing has left yet"
    done = [runner.finish(begun[0])]
    begun.append(runner.compute(runner.prepare(batches[2])))
    done += [runner.finish(each) for each in begun[1:]]
    assert [each.not_finite for each in done] == [[]] * 3
    found = [[bytes(buffers[1].view[each.rows : each.rows + size]) for each in batch.pieces] for batch in batches]
    assert found == expected
    assert all(each.vit_seconds > 0 for each in done)


def test_pixels_that_enter_through_a_ring_are_those_of_the_arena_when_a_batch_was_prepared(checkpoints, buffers):
    """As a GPU's worker has it: the arena's pages are given to other pictures while the tower computes."""
    settings = worker_settings(checkpoints("qwen3_vl"))
    loader = LazyLoader()
    runner = Runner(settings, *buffers, way_in=PixelRing(loader, buffers=2, size=5000))
    put(buffers[0], 0, seed=1)
    expected = Runner(settings, *buffers).prepare(Batch([piece(0, 4096)])).patches
    entered = []
    runner._preprocess = dict.fromkeys(runner._preprocess, lambda pixels, *_: entered.append(pixels) or torch.empty(0))
    runner.prepare(Batch([piece(0, 4096)]))
    buffers[0].view[:] = bytes(ROOM)
    with torch.inference_mode():
        loader.finish()
    found = preprocess(entered[0], (SIDE, SIDE), runner._config.processors[Modality.IMAGE])
    assert torch.equal(found, expected)


def test_rows_that_are_not_finite_are_reported_and_not_written(checkpoints, buffers, monkeypatch):
    runner = Runner(worker_settings(checkpoints("qwen3_vl")), *buffers)
    whole = runner._tower.run

    def spoilt(patches: Tensor, ready: Pass) -> Tensor:
        rows = whole(patches, ready)
        rows[5] = torch.inf
        return rows

    monkeypatch.setattr(runner._tower, "run", spoilt)
    for at in (0, 65536):
        put(buffers[0], at, seed=at)
    (done,) = runner.run(Batch([piece(0, 0), piece(65536, 512_000)]))
    assert done.not_finite == [1]
    assert not any(buffers[1].view[512_000:520_000])


def heard(staging: SharedBuffer, at: int, samples: int, seed: int, rows: int, clips: Processor) -> Piece:
    """A clip in the staging arena, as float32."""
    wave = torch.from_numpy(sounds.tune(2.0, seed)[:samples]) / 32768
    data = wave.float().numpy().tobytes()
    staging.view[at : at + len(data)] = data
    plan = clips.plan(Inspection(1, 1, frames=samples), Options())
    grid = (plan.grid.t, plan.grid.h, plan.grid.w)
    return Piece("audio", at, 1, 1, samples, plan.resized, grid, plan.tokens, rows, depth=plan.depth)


def test_clips_of_one_length_and_of_another_in_one_batch_have_the_rows_that_each_has_alone(tmp_path, buffers):
    folder = audio_checkpoint.make_audio_checkpoint(tmp_path)
    runner = Runner(worker_settings(folder), *buffers)
    settings = config.read(Checkpoint(folder))
    clips = settings.processors[Modality.AUDIO]
    lengths = (9000, 9000, 20_001, 9000)
    given = [heard(buffers[0], n << 17, count, n, n << 16, clips) for n, count in enumerate(lengths)]
    alone = []
    for each in given:
        assert [each.not_finite for each in runner.run(Batch([each]))] == [[]]
        alone.append(rows_at(buffers[1], each.rows, each.tokens, settings))
    assert not torch.allclose(alone[0], alone[1], atol=0.01), "any rows would do"
    buffers[1].view[:] = bytes(ROOM)
    assert [each.not_finite for each in runner.run(Batch(given))] == [[]]
    for each, expected in zip(given, alone, strict=True):
        found = rows_at(buffers[1], each.rows, each.tokens, settings)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.fixture
def foreign(checkpoints, tmp_path, monkeypatch):
    """A checkpoint whose family is not ours: a configuration of Qwen3-VL's, a tower and a processor of its own."""
    folder = tmp_path / "foreign"
    shutil.copytree(checkpoints("qwen3_vl"), folder)
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**about, "model_type": "foreign"}))
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    tower = ForeignTower(about["vision_config"])
    state = {f"model.visual.{name}": tensor for name, tensor in tower.state_dict().items()}
    save_file(state, folder / "model.safetensors")
    module = ModuleType("tests_foreign_tower")
    module.ForeignTower, module.foreign_patches = ForeignTower, foreign_patches
    monkeypatch.setitem(sys.modules, "tests_foreign_tower", module)
    family = replace(
        registry.FAMILIES["qwen3_vl"],
        tower="tests_foreign_tower:ForeignTower",
        processors=lambda checkpoint, tower: {Modality.IMAGE: ForeignProcessor()},
    )
    monkeypatch.setitem(registry.FAMILIES, "foreign", family)
    return folder, tower


def test_a_tower_that_is_not_built_from_our_blocks_is_served_with_its_own_processor(foreign, buffers):
    folder, tower = foreign
    runner = Runner(worker_settings(folder), *buffers)
    assert runner.warm_up().attention == "its own"
    pixels = put(buffers[0], 0, seed=1)
    settings = config.read(Checkpoint(folder))
    plan = settings.processors[Modality.IMAGE].plan(Inspection(SIDE, SIDE), Options())
    given = structs.replace(piece(0, 0), resized=plan.resized, grid=(1, 2, 2), tokens=plan.tokens)
    assert [each.not_finite for each in runner.run(Batch([given]))] == [[]]
    with torch.inference_mode():
        expected = tower(foreign_patches(pixels, plan.resized, ForeignProcessor()), [plan.grid]).flatten(1)
    torch.testing.assert_close(rows_at(buffers[1], 0, 1, settings), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("option", "error"), [({"attention": "sdpa"}, "--attention"), ({"graphs": [64]}, "graphs")])
def test_options_that_such_a_tower_has_no_use_for_are_refused_by_name(foreign, buffers, option, error):
    folder, _ = foreign
    with pytest.raises((AttentionUnavailable, GraphsUnavailable), match=error):
        Runner(worker_settings(folder, **option), *buffers)
