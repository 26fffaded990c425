"""A worker for a model that transformers computes: items of one shape go through its tower together, and as a replay
where there are graphs, with the rows that each gets alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from common.gpu.graphs import Capture
from common.hardware import usable_cores
from common.hf import models as hf_models
from common.process.core_share import CoreShare
from common.shm.arena import SharedBuffer
from encoder_service.models.hf.products import lay_out
from encoder_service.models.hf.tower import HfTower
from encoder_service.models.processor import Shown
from encoder_service.worker.__main__ import _answer, _begun
from encoder_service.worker.ahead import ahead, one_by_one
from encoder_service.worker.graphs import Choice
from encoder_service.worker.hf import runner as hf_runner
from encoder_service.worker.hf.batches import Made
from encoder_service.worker.hf.runner import HfRunner, noisy_sound, picture
from encoder_service.worker.messages import Batch, BatchDone, BatchFailed, Piece, WorkerSettings
from tools.models.recipes import RECIPES
from tools.models.recipes.recipe import LLAMA, VISION, part, whole
from tools.models.tiny import make, make_by

CPU = torch.device("cpu")
ROOM = 1 << 20
SIDES = ((64, 48), (64, 48), (80, 80), (64, 48))


class Again:
    """Captures by keeping the callable."""

    held = 0

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        return run


class Graphed(HfRunner):
    """As on a GPU."""

    def has_graphs(self, settings: WorkerSettings) -> bool:
        return settings.graphs != []

    def capture(self) -> Capture:
        return Again()

    def choice(self) -> Choice:
        return Choice(None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a tower whose layers fill whole vectors, as those of published towers do: where AVX-512 leaves some numbers
    over at the end of a pass, torch's functions give these other last digits."""
    tower = part("clip_vision_model", {**VISION, "intermediate_size": 64}, projection_dim=32)
    config = whole("llava", vision_config=tower, text_config=LLAMA, image_token_index="<image>")
    return make_by(replace(RECIPES["llava"], config=config), tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def arenas() -> Iterator[tuple[SharedBuffer, SharedBuffer]]:
    made = SharedBuffer.create("staging", ROOM), SharedBuffer.create("store", ROOM)
    yield made
    for each in made:
        each.close()


@pytest.mark.parametrize(
    ("kind", "most", "passes"),
    [(HfRunner, 256, [4]), (HfRunner, 0, [1, 1, 1, 1]), (Graphed, 256, [])],
)
def test_items_of_one_shape_share_a_pass_and_get_the_rows_that_they_get_alone(
    folder: Path,
    arenas: tuple[SharedBuffer, SharedBuffer],
    monkeypatch: pytest.MonkeyPatch,
    kind: type[HfRunner],
    most: int,
    passes: list[int],
) -> None:
    found, (staging, store) = hf_models.describe(folder), arenas
    runner = kind(WorkerSettings(str(folder), "cpu", "float32", 0, ROOM, ROOM, hf=found, batch_patches=most), *arenas)
    pictures, pieces, at = [picture(sides, seed) for seed, sides in enumerate(SIDES)], [], 0
    alone = HfTower(folder, found, torch.float32, CPU)
    expected: list[Tensor] = []
    for pixels in pictures:
        staging.view[at : at + pixels.size] = pixels.tobytes()
        tokens = sum(part.rows for part in runner._processor.replacement(pixels))
        with torch.inference_mode():
            expected.append(alone.rows(runner._processor.inputs(pixels), tokens))
        height, width = pixels.shape[:2]
        pieces.append(Piece("image", at, 1, height, width, (height, width), (1, 1, tokens), tokens, 4 * at))
        at += pixels.size
    calls: list[int] = []
    right = HfTower.rows

    def rows(tower: HfTower, inputs: dict[str, Tensor], *given: object) -> Tensor:
        calls.append(len(inputs["pixel_values"]))
        return right(tower, inputs, *given)

    assert runner.warm_up().graphs == ([] if kind is HfRunner else [16, 32, 64, 128, 256])
    monkeypatch.setattr(HfTower, "rows", rows)
    done = runner.run(Batch(pieces))
    assert [(each.not_finite, each.replayed) for each in done] == [([], kind is Graphed)] * len(done)
    assert [each.pieces for each in done] == ([[0], [1], [2], [3]] if not most else [[0, 1, 2, 3]])
    assert calls == passes, "a replay does operators alone"
    for piece, each in zip(pieces, expected, strict=True):
        written = bytearray(store.view[piece.rows : piece.rows + 4 * each.numel()])
        assert torch.equal(torch.frombuffer(written, dtype=torch.float32).view_as(each), each)


@pytest.mark.parametrize("take", [one_by_one, ahead])
def test_an_item_is_answered_before_the_processor_is_done_with_all(
    folder: Path,
    arenas: tuple[SharedBuffer, SharedBuffer],
    monkeypatch: pytest.MonkeyPatch,
    take: Callable[..., Iterator[Any]],
) -> None:
    """On a CPU in turn. Elsewhere the processor makes the next item while the tower computes, which here waits for
    that: were it not so, for ever."""
    found = hf_models.describe(folder)
    settings = WorkerSettings(str(folder), "cpu", "float32", 0, ROOM, ROOM, hf=found)
    runner, seen, made = HfRunner(settings, *arenas), list[str](), threading.Semaphore(0)
    inputs, rows = runner._processor.inputs, runner._tower_of_items.rows

    def noted(shown: Shown) -> dict[str, Any]:
        if seen.count("made") == 2 and take is ahead:
            assert answered.wait(180)
        seen.append("made")
        made.release()
        return inputs(shown)

    def computed(*given: Any) -> Tensor:
        if "computed" not in seen and take is ahead:
            assert made.acquire(timeout=180)
            assert made.acquire(timeout=180)
        seen.append("computed")
        return rows(*given)

    pixels, answered = picture((64, 48), 0), threading.Event()
    arenas[0].view[: pixels.size] = pixels.tobytes()
    tokens = sum(part.rows for part in runner._processor.replacement(pixels))
    monkeypatch.setattr(runner._processor, "inputs", noted)
    monkeypatch.setattr(runner._tower_of_items, "rows", computed)
    batch = Batch([Piece("image", 0, 1, 64, 48, (64, 48), (1, 1, tokens), tokens, 0)] * 3)
    places = list[int]()
    for begun in take(take([batch], runner.parts), partial(_begun, runner)):
        answer = _answer(runner, begun)
        assert isinstance(answer, BatchDone)
        places += answer.pieces
        answered.set()
        seen.append("answered")
    assert places == [0, 1, 2]
    if take is one_by_one:
        assert seen == ["made", "computed", "answered"] * 3
    else:
        assert seen[:3] == ["made", "made", "computed"]
        assert seen.index("answered") < len(seen) - 1 - seen[::-1].index("made")


def test_a_picture_that_the_tower_has_no_positions_for_fails_alone(
    arenas: tuple[SharedBuffer, SharedBuffer], tmp_path: Path
) -> None:
    gemma = make("gemma4", tmp_path)
    found = hf_models.describe(gemma)
    runner = HfRunner(WorkerSettings(str(gemma), "cpu", "float32", 0, ROOM, ROOM, hf=found), *arenas)

    def batch(height: int, width: int) -> Batch:
        pixels = picture((height, width), 0)
        arenas[0].view[: pixels.size] = pixels.tobytes()
        tokens = sum(part.rows for part in runner._processor.replacement(pixels))
        return Batch([Piece("image", 0, 1, height, width, (height, width), (1, 1, tokens), tokens, 0)])

    parts = one_by_one([batch(4, 800), batch(48, 64)], runner.parts)
    answers = [_answer(runner, begun) for begun in one_by_one(parts, partial(_begun, runner))]
    assert [type(answer) for answer in answers] == [BatchFailed, BatchDone]


def test_a_trial_has_each_shape_once_and_one_of_uneven_patches(
    folder: Path, arenas: tuple[SharedBuffer, SharedBuffer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A tower that has all patches of a pass in one attention gives items of other shapes their own bits."""
    tried: list[tuple[int, ...]] = []

    def why_apart(tower: HfTower, items: Sequence[Made], tokens: int, *, exact: bool) -> str:
        assert (len(items), tower.rows(items[0].inputs, tokens).shape[0], exact) == (3, tokens, True)
        tried.append(tuple(items[0].inputs["pixel_values"].shape[2:]))
        return ""

    monkeypatch.setattr(hf_runner, "why_apart", why_apart)
    for each in (folder, make("mistral3", tmp_path)):
        found = hf_models.describe(each)
        settings = WorkerSettings(str(each), "cpu", "float32", 0, ROOM, ROOM, hf=found, batch_patches=256)
        HfRunner(settings, *arenas)
    assert tried == [(56, 56), (84, 56), (84, 84), (112, 84)]


def test_sounds_that_are_filled_up_to_one_length_have_graphs(
    tmp_path: Path, arenas: tuple[SharedBuffer, SharedBuffer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf_runner, "_USUAL_SECONDS", ((1, 2), (31, 32)))
    folder, (staging, store) = make("voxtral", tmp_path), arenas
    found, pieces = hf_models.describe(folder), []
    settings = WorkerSettings(str(folder), "cpu", "float32", 0, ROOM, ROOM, hf=found, batch_patches=0)
    runner = Graphed(settings, *arenas)
    sounds, expected = [noisy_sound(seconds, found.sound_rate, seconds) for seconds in (3, 4)], []
    for at, heard in enumerate(sounds):
        staging.view[at * ROOM // 2 :][: heard.samples.nbytes] = heard.samples.tobytes()
        tokens = sum(part.rows for part in runner._processor.replacement(heard))
        with torch.inference_mode():
            expected.append(runner._tower_of_items.rows(runner._processor.inputs(heard), tokens, "audio"))
        size, place = heard.samples.nbytes, at * ROOM // 2
        pieces.append(Piece("audio", place, 1, 1, size, (1, size), (1, 1, tokens), tokens, place, depth=1))
    assert runner.warm_up().graphs == [tokens, 2 * tokens]
    done = runner.run(Batch(pieces))
    assert [(each.pieces, each.not_finite, each.replayed) for each in done] == [([0], [], True), ([1], [], True)]
    for piece, each in zip(pieces, expected, strict=True):
        written = bytearray(store.view[piece.rows : piece.rows + 4 * each.numel()])
        assert torch.equal(torch.frombuffer(written, dtype=torch.float32).view_as(each), each)


def test_cores_are_divided_with_others_who_compute(folder: Path, arenas: tuple[SharedBuffer, SharedBuffer]) -> None:
    threads, cores = torch.get_num_threads(), max(2, usable_cores())
    found, used = hf_models.describe(folder), list[int]()
    try:
        settings = WorkerSettings(str(folder), "cpu", "float32", cores, ROOM, ROOM, hf=found, core_share=True)
        runner = HfRunner(settings, *arenas)
        other = CoreShare.of_this_host(cores, used.append)
        assert other is not None
        with other.computing():
            tokens = sum(part.rows for part in runner._processor.replacement(picture((64, 48), 0)))
            (done,) = runner.run(Batch([Piece("image", 0, 1, 64, 48, (64, 48), (1, 1, tokens), tokens, 0)]))
            assert done.not_finite == []
            assert torch.get_num_threads() == cores // 2
        assert runner._share_of_cores is not None
        for share in (other, runner._share_of_cores):
            share.close()
    finally:
        torch.set_num_threads(threads)


def test_linear_layers_are_laid_out_by_a_pass_over_an_example(
    folder: Path, arenas: tuple[SharedBuffer, SharedBuffer], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    monkeypatch.setattr(hf_runner, "multiplies_as_stored", lambda _: False)
    monkeypatch.setattr(
        "encoder_service.models.hf.tower.lay_out", lambda *given: made.append(lay_out(*given)) or made[-1]
    )
    found = hf_models.describe(folder)
    runner = HfRunner(WorkerSettings(str(folder), "cpu", "float32", 0, ROOM, ROOM, hf=found), *arenas)
    linears = [part for part in runner._tower_of_items._model.modules() if type(part) is torch.nn.Linear]
    assert (made, linears) == ([20], []), "all of this tower"
    pixels = picture((64, 48), 0)
    tokens = sum(part.rows for part in runner._processor.replacement(pixels))
    inputs, plain = runner._processor.inputs(pixels), HfTower(folder, found, torch.float32, CPU)
    with torch.inference_mode():
        torch.testing.assert_close(runner._tower_of_items.rows(inputs, tokens), plain.rows(inputs, tokens))
