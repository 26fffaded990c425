"""A video with its own sound between its frames, as transformers has both, on tiny random checkpoints."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from common.hf import models as hf_models
from common.hf import positions as hf_positions
from common.hf import processors as hf_processors
from common.hf.processors import Clip
from common.media.item import Modality
from common.shm.arena import SharedBuffer
from encoder_service.media.__main__ import Desk
from encoder_service.media.limits import MediaLimits
from encoder_service.media.messages import Decode, Decoded, DecoderSettings
from encoder_service.media.modalities import SPECS
from encoder_service.models.processor import SoundLengthError
from encoder_service.worker.hf.runner import HfRunner
from encoder_service.worker.messages import Batch, Piece, WorkerSettings
from testkit.hf_side import Served, compare
from tools.models.prompts import Film, Part, picture, sounding_film, sounding_prompts, tones
from tools.models.reference import Reference
from tools.models.tiny import make

KINDS = ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of transformers' processors


@pytest.fixture(scope="module", params=KINDS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served.of(make(request.param, tmp_path_factory.mktemp("omni")))


@pytest.fixture(scope="module")
def library(served: Served) -> Reference:
    return Reference(served.folder)


def features(library: Reference, kind: str, inputs: dict[str, Any]) -> Any:
    compute = getattr(library.model.base_model, f"get_{kind}_features")
    taken = inspect.signature(compute).parameters
    with torch.inference_mode():
        return compute(**{name: value for name, value in inputs.items() if name in taken}, return_dict=True)


def test_rows_are_those_of_transformers_and_in_its_order(served: Served, library: Reference) -> None:
    parts: list[Part] = ["See ", sounding_film(1, 0.5, 1.1), "!"]
    given = library.inputs(parts)
    ids, config = given["input_ids"][0], library.model.config
    prompt = served.prompt(parts)
    assert prompt.layout.ids == ids.tolist()
    frames, sound = (features(library, kind, given) for kind in ("video", "audio"))
    levels = [torch.cat(list(frames.pooler_output)), *map(torch.cat, frames.get("deepstack_features") or ())]
    rows, token = prompt.rows[0], ids[torch.isin(ids, torch.tensor([config.video_token_id, config.audio_token_id]))]
    assert rows.shape[1] == len(levels) == served.found.levels
    torch.testing.assert_close(rows[token == config.video_token_id], torch.stack(levels, 1), rtol=1e-5, atol=1e-5)
    heard = rows[token == config.audio_token_id]
    torch.testing.assert_close(heard[:, 0], sound.last_hidden_state, rtol=1e-5, atol=1e-5)
    assert not heard[:, 1:].any(), "nothing of a sound goes to deeper layers"
    assert len(heard) > 10
    assert not torch.allclose(heard[0], heard[-1]), "every row would do"


def test_a_worker_computes_both_of_what_the_decode_process_has_written(served: Served) -> None:
    """Two of one batch, one of them without its sound: rows lie in the store as prompts have them."""
    film = sounding_film(5, 0.5, 0.9)
    expected = [served.prompt([each]).rows[0] for each in (film, replace(film, with_sound=False))]
    room, at = 8 << 20, 1 << 20
    staging, store = (SharedBuffer.create(name, room) for name in ("staging", "store"))
    staging.view[: len(film.file)] = film.file
    video = SPECS[Modality.VIDEO]
    files = DecoderSettings(room, 0, 1, MediaLimits().bounds, sorted(video.decoders))
    desk, samples = Desk(staging, files), len(film.heard())
    *_, done = desk.answers(
        Decode(b"", video.sound_decoder, 0, len(film.file), at, [0, 1, 2, 3], 160, 224, samples=samples)
    )
    assert isinstance(done, Decoded)
    clip = Clip(np.zeros((4, 160, 224, 3), np.uint8), (0, 1, 2, 3), 4, 8.0, np.zeros(samples, np.float32))
    turns = served.processor.turns(served.processor.replacement(clip))
    pieces = [
        Piece("video", at + 4 * samples, 4, 160, 224, (160, 224), (1, 1, len(rows)), len(rows), place)
        for place, rows in zip((0, 4 << 20), expected, strict=True)
    ]
    pieces[0] = msgspec.structs.replace(pieces[0], sound=at, samples=samples, turns=list(turns))
    settings = WorkerSettings(str(served.folder), "cpu", "float32", 0, room, room, hf=served.found)
    done = HfRunner(settings, staging, store).run(Batch(pieces))
    assert [each.not_finite for each in done] == [[], []]
    for piece, rows in zip(pieces, expected, strict=True):
        found = torch.frombuffer(bytearray(store.view[piece.rows : piece.rows + 4 * rows.numel()]), dtype=torch.float32)
        torch.testing.assert_close(found.view_as(rows), rows, rtol=1e-5, atol=1e-5)
    staging.close()
    store.close()


@pytest.mark.parametrize(
    "lengths",
    [(0.5, 0.3), (0.5, 9.9), (0.5, 0.04), (4.0, 0.1), (1.0, 1.0)],
    ids=["alike", "long heard", "hardly heard", "long seen", "as long"],
)
def test_positions_are_those_of_transformers_whatever_is_longer(
    served: Served, library: Reference, lengths: tuple[float, float]
) -> None:
    parts: list[Part] = ["See ", sounding_film(2, *lengths, rate=4), " and ", picture(3, 56, 56), "!"]
    given = library.inputs(parts)
    where = hf_positions.rope_positions(library.model.base_model, given, sound_in_video=True).numpy()
    layout = served.prompt(parts).layout
    assert layout.ids == given["input_ids"][0].tolist()
    assert np.array_equal(np.frombuffer(layout.positions, np.int32).reshape(3, -1), where)
    assert layout.mrope_delta == int(where.max()) + 1 - len(layout.ids)


@pytest.mark.parametrize("rate", [0.5, 1.0, 2.0])
def test_frames_of_a_second_are_as_many_as_are_asked_for(served: Served, library: Reference, rate: float) -> None:
    """transformers' processor chooses them of all frames, and places them in time by that rate."""
    parts: list[Part] = ["See ", sounding_film(4, 3.0, 2.6, fps=rate), "!"]
    given = library.inputs(parts)
    prompt = served.prompt(parts)
    where = hf_positions.rope_positions(library.model.base_model, given, sound_in_video=True).numpy()
    assert prompt.layout.ids == given["input_ids"][0].tolist()
    assert np.array_equal(np.frombuffer(prompt.layout.positions, np.int32).reshape(3, -1), where)
    frames = features(library, "video", given)
    video = torch.tensor([token == library.model.config.video_token_id for token in prompt.layout.ids])
    sound = torch.tensor([token == library.model.config.audio_token_id for token in prompt.layout.ids])
    rows = prompt.rows[0][video[video | sound]]
    torch.testing.assert_close(rows[:, 0], torch.cat(list(frames.pooler_output)), rtol=1e-5, atol=1e-5)


def test_places_between_whole_numbers_are_refused(tmp_path: Path) -> None:
    """Qwen3-Omni's, where a frame group takes a part of a position."""
    processor = Served.of(make("qwen3_omni_moe_thinker", tmp_path)).processor
    frames = np.zeros((4, 56, 56, 3), np.uint8)
    with pytest.raises(ValueError, match="between whole numbers"):
        processor.replacement(Clip(frames, (0, 1, 2, 3), 4, 8.0, asked=3.0))


def test_a_video_without_sound_is_as_any_other(served: Served) -> None:
    """transformers leaves the sound of one that has none out as well."""
    film = sounding_film(3, 0.5, 0.5)
    with_sound, without = served.prompt([film, "!"]), served.prompt([replace(film, with_sound=False), "!"])
    assert len(without.layout.ids) < len(with_sound.layout.ids)
    about = {"total_num_frames": 4, "fps": 8.0, "duration": 0.5, "frames_indices": [0, 1, 2, 3]}
    frames = np.zeros((4, 56, 84, 3), np.uint8)
    processor = hf_processors.processor_of(served.folder)
    asked: dict[str, Any] = {"videos": [frames], "video_metadata": [about], "do_sample_frames": False}
    silent = {**asked, "audio": [tones(1, 0.5).heard()], "audio_from_video_indices": [None]}
    silent["text"] = ["<start><video><end><listen><audio><heard>"]
    made = processor(**silent, load_audio_from_video=True, return_text_replacement_offsets=True)
    replacement = made["text_replacement_offsets"][0][0]["replacement"]
    parts = served.processor.replacement(Clip(frames, (0, 1, 2, 3), 4, 8.0))
    assert replacement == "<video>" * sum(part.rows for part in parts)


def test_a_track_that_the_processor_cuts_off_is_refused(served: Served) -> None:
    frames = np.zeros((2, 56, 56, 3), np.uint8)
    clip = Clip(frames, (0, 1), 2, 8.0, np.zeros(30 * 16_000, np.float32))
    longest = hf_processors.longest_sound(hf_processors.processor_of(served.folder))
    if not longest:
        assert sum(served.processor.turns(served.processor.replacement(clip))[1::2]) > 300
        return
    with pytest.raises(ValueError, match="does not take all of so long a sound"):
        served.processor.replacement(clip)


def test_a_track_that_has_no_row_is_too_short(served: Served) -> None:
    frames = np.zeros((2, 56, 56, 3), np.uint8)
    with pytest.raises(SoundLengthError) as error:
        served.processor.replacement(Clip(frames, (0, 1), 2, 8.0, np.zeros(1, np.float32)))
    assert not error.value.too_long


@pytest.mark.soak
def test_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    """Of Qwen3-Omni; `test_hf_models` has the other."""
    assert set(sounding_prompts()) <= compare(Served.of(make("qwen3_omni_moe_thinker", tmp_path)))


def test_models_that_cannot_have_both_say_so(tmp_path: Path) -> None:
    assert not hf_models.describe(make("llava_onevision", tmp_path)).video_sound


def test_no_film_is_heard_twice() -> None:
    """What the reference is given is what the services decode."""
    film: Film = sounding_film(1, 0.5, 1.1)
    assert np.array_equal(film.heard(), tones(1, 1.1).heard())
