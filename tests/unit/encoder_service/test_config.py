"""The encoder's options, and what a checkpoint's files say."""

from __future__ import annotations

import json

import pytest

from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from common.config import load
from common.media.item import Modality
from encoder_service.config import PREFIX, EncoderConfig
from encoder_service.families import config
from encoder_service.families.qwen2_vl import VIDEO_RULE


def options(*words: str, **environ: str) -> EncoderConfig:
    return load(EncoderConfig, PREFIX, "", list(words), environ)


def test_a_flag_wins_over_a_variable_and_a_variable_over_the_default():
    given = options("--model=m", "--store-bytes=8MiB", TWINLENS_ENCODER_STORE_BYTES="1g", TWINLENS_ENCODER_WORKERS="3")
    assert (given.store_bytes, given.workers, given.max_images) == (8 << 20, 3, 16)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "--model is needed"),
        (["--model=m", "--kernels=torch", "--attention=numba"], "--kernels torch does without"),
        (["--model=m", "--batch-patches=9", "--max-patches-per-call=8"], "--batch-patches"),
        (["--model=m", "--workers=0"], "not within"),
        (["--model=m", "--decode-memory-bytes=1MiB"], "--decode-memory-bytes must be at least 1 GiB"),
        (["--model=m", "--device=cuda:0"], "--device cuda:0: no GPU"),
        (["--model=m", "--max-image-bytes=lots"], "expected a size"),
        (["--model=m", "--tls-cert=x"], "--tls-key"),
        (["--model=m", "--device-pool-bytes=1g", "--shared-memory=no"], "--device-pool-bytes needs --shared-memory"),
        (["--model=m", "--shared-store=http://h"], "--shared-store: the address must begin with"),
        (["--model=m", "--shared-store=redis://:s3cret@h:port"], "--shared-store: the address cannot be parsed"),
        (["--model=m", "--shared-store=redis://:s3cret@h?nonsense=1"], "--shared-store: the address cannot be parsed"),
    ],
)
def test_options_that_cannot_be_are_named(capsys, words, says):
    with pytest.raises(SystemExit) as ended:
        options(*words)
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert says in told
    assert "s3cret" not in told


@pytest.mark.parametrize(
    ("words", "cores", "expected"),
    [
        ([], 1, 2),
        ([], 2, 2),
        ([], 6, 5),
        ([], 64, 8),
        (["--workers=4"], 6, 2),
        (["--workers=4"], 10, 6),
        (["--decode-processes=1"], 64, 1),
        (["--decode-processes=12"], 2, 12),
    ],
)
def test_there_is_a_decode_process_for_each_core_that_no_worker_needs(monkeypatch, words, cores, expected):
    monkeypatch.setattr("encoder_service.config.usable_cores", lambda: cores)
    assert options("--model=m", *words).decoders() == expected


@pytest.mark.parametrize(
    ("words", "limit", "expected"),
    [
        ([], None, 4 << 30),
        ([], 1 << 40, 4 << 30),
        ([], 4 << 30, 2 << 30),
        ([], 3 << 30, 3 << 29),
        ([], 1 << 30, 1 << 30),
        (["--decode-memory-bytes=3GiB"], 4 << 30, 3 << 30),
    ],
)
def test_a_decode_process_may_take_half_of_its_container(monkeypatch, words, limit, expected):
    monkeypatch.setattr("encoder_service.config.memory_limit", lambda: limit)
    assert options("--model=m", *words).decoder_bytes() == expected


def checkpoint(folder, vision=None, **files) -> Checkpoint:
    about = {"architectures": ["A"], "model_type": "qwen2_vl", "vision_config": vision or VISION}
    for name, content in {"config": about, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return Checkpoint(folder)


VISION = {"embed_dim": 32, "hidden_size": 64, "patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2}


def test_the_oldest_checkpoints_have_one_processor_for_both_kinds(tmp_path):
    found = config.read(checkpoint(tmp_path, preprocessor_config={"min_pixels": 3136, "max_pixels": 99999}))
    video = found.processors[Modality.VIDEO]
    for pixels in (found.processors[Modality.IMAGE].pixels, video.pixels):
        assert (pixels.min_pixels, pixels.max_pixels, pixels.factor) == (3136, 99999, 28)
    assert (found.width, found.levels, video.rule, video.fps) == (64, 1, VIDEO_RULE, 2.0)


def test_the_newest_keep_both_in_one_file(tmp_path):
    saved = {"image_processor": {"size": {"shortest_edge": 5, "longest_edge": 6}}, "video_processor": {"fps": 3}}
    found = config.read(checkpoint(tmp_path, processor_config=saved, preprocessor_config={"min_pixels": 1}))
    pixels, video = found.processors[Modality.IMAGE].pixels, found.processors[Modality.VIDEO]
    assert (pixels.min_pixels, pixels.max_pixels, video.fps) == (5, 6, 3.0)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"do_normalize": False}, "do_normalize"),
        ({"resample": 2}, "bicubic"),
        ({"patch_size": 16}, "patch_size is 16, and patch_size of the tower is 14"),
        ({"merge_size": 1}, "merge_size is 1, and spatial_merge_size of the tower is 2"),
        ({}, "no preprocessor_config.json"),
    ],
)
def test_settings_that_are_not_served_are_named(tmp_path, settings, says):
    with pytest.raises(CheckpointError, match=says):
        config.read(checkpoint(tmp_path, preprocessor_config=settings))


def test_rows_that_the_decoder_cannot_take_are_told_at_the_start(tmp_path):
    about = {"model_type": "qwen2_vl", "vision_config": VISION, "text_config": {"hidden_size": 96}}
    with pytest.raises(CheckpointError, match="64 numbers, and the decoder takes 96"):
        config.read(checkpoint(tmp_path, config=about, preprocessor_config={"fps": 1}))


QWEN3_5 = {"out_hidden_size": 64, "patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2}


@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_5_moe", "qwen4_exp"])
def test_rows_of_qwen3_5_have_one_level(tmp_path, model_type):
    about = {"model_type": model_type, "vision_config": QWEN3_5 | {"deepstack_visual_indexes": []}}
    found = config.read(checkpoint(tmp_path, config=about, preprocessor_config={"patch_size": 16}))
    assert (found.levels, found.width) == (1, 64)
    about["vision_config"]["deepstack_visual_indexes"] = [5]
    with pytest.raises(CheckpointError, match="deepstack"):
        config.read(checkpoint(tmp_path, config=about))


def test_a_kind_of_model_that_is_not_known_is_refused_with_those_that_are(tmp_path):
    with pytest.raises(CheckpointError, match=r"no_such_model is not supported.*qwen3_vl"):
        config.read(checkpoint(tmp_path, config={"model_type": "no_such_model", "vision_config": VISION}))


@pytest.mark.parametrize("missing", ["hidden_size", "patch_size", "temporal_patch_size", "spatial_merge_size"])
def test_a_vision_tower_of_another_kind_is_named_by_what_it_lacks(tmp_path, missing):
    vision = {name: value for name, value in VISION.items() if name != missing}
    with pytest.raises(CheckpointError, match=f"qwen2_vl.*{missing}"):
        config.read(checkpoint(tmp_path, vision, preprocessor_config={"fps": 1}))


@pytest.mark.parametrize(("text", "budgets"), [("auto", None), ("off", []), ("512, 1024", [512, 1024])])
def test_graphs_are_automatic_off_or_a_list_of_budgets(text, budgets):
    assert EncoderConfig(model="m", graphs=text).graph_budgets() == budgets


@pytest.mark.parametrize("text", ["on", "512,x", "0", "-4", ""])
def test_graphs_that_are_no_budgets_are_refused(text):
    with pytest.raises(ValueError, match="--graphs must be"):
        EncoderConfig(model="m", graphs=text).validate()
