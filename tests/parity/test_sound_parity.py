"""Log-mel frames and rows of clips against transformers' extractor and tower, on a tiny random checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from common.checkpoints.checkpoint import Checkpoint
from common.errors import InvalidInput
from common.media.item import Modality, Options
from encoder_service.families import config
from encoder_service.item import Inspection
from encoder_service.models.tower import load_tower
from encoder_service.worker.log_mel import preprocess
from testkit import audio_checkpoint
from tests import sounds

LENGTHS = (479, 641, 1000, 16_000, 20_001, 31_999, 32_000)


@pytest.fixture(scope="module", params=["hub", "saved"])
def folder(request, tmp_path_factory) -> Path:
    return audio_checkpoint.make_audio_checkpoint(tmp_path_factory.mktemp("audio"), layout=request.param)


def clip(samples: int) -> np.ndarray:
    return sounds.tune(2.0, samples)[:samples].astype(np.float32) / 32768


def test_frames_and_rows_are_the_references_whatever_is_beside_them(folder):
    checkpoint = Checkpoint(folder)
    settings = config.read(checkpoint)
    clips = settings.processors[Modality.AUDIO]
    tower = load_tower(checkpoint, settings, torch.device("cpu"), torch.float32)
    parts, plans, expected = [], [], []
    for samples in LENGTHS:
        wave = clip(samples)
        plan = clips.plan(Inspection(1, 1, frames=samples), Options())
        frames = preprocess(torch.from_numpy(wave).view(torch.uint8).view(1, 1, -1, 4), plan.resized, clips)
        given = audio_checkpoint.processor(folder).feature_extractor(wave, sampling_rate=16_000, return_tensors="np")
        reference = given["input_features"][0].T[: len(frames)]
        np.testing.assert_allclose(frames[: len(reference)].numpy(), reference, atol=1e-6)
        parts.append(frames)
        plans.append(plan)
        expected.append(audio_checkpoint.rows_of(folder, wave) if plan.tokens > 1 else None)
    rows = tower(torch.cat(parts), [plan.grid for plan in plans])[:, 0].split([plan.tokens for plan in plans])
    compared = [(ours, theirs) for ours, theirs in zip(rows, expected, strict=True) if theirs is not None]
    assert len(compared) >= 5, "of one row alone, transformers makes something else (its legacy way to merge)"
    for ours, theirs in compared:
        np.testing.assert_allclose(ours.numpy(), theirs, atol=2e-5)


@pytest.mark.parametrize(("samples", "reason"), [(32_001, "AUDIO_TOO_LONG"), (320, "AUDIO_TOO_SHORT")])
def test_a_clip_that_the_model_cannot_hear_is_refused(folder, samples, reason):
    clips = config.read(Checkpoint(folder)).processors[Modality.AUDIO]
    with pytest.raises(InvalidInput) as error:
        clips.plan(Inspection(1, 1, frames=samples), Options())
    assert error.value.reason == reason
