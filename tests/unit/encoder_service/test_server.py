"""What the workers of a service are told at the start."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from common.checkpoints.checkpoint import Checkpoint
from common.rows.wire import DType, RowLayout
from encoder_service import server
from encoder_service.config import EncoderConfig


@pytest.mark.parametrize(
    ("asked", "found", "devices"),
    [
        ("auto", "cuda:0", ["cuda:0", "cuda:1", "cuda:0"]),
        ("cuda", "cuda", ["cuda:0", "cuda:1", "cuda:0"]),
        ("cuda:0", "cuda:0", ["cuda:0"] * 3),
        ("cuda:1", "cuda:1", ["cuda:1"] * 3),
        ("auto", "cpu", ["cpu"] * 3),
    ],
)
def test_gpus_are_handed_out_in_turn_unless_one_was_named(monkeypatch, tmp_path: Path, asked, found, devices):
    monkeypatch.setattr(server, "cuda_device_count", lambda: 2)
    (tmp_path / "config.json").write_text("{}")
    config = EncoderConfig(model="m", device=asked, workers=3)
    layout = RowLayout(1, 64, DType.FLOAT32)
    model = server._Model(Checkpoint(tmp_path), SimpleNamespace(), None, found, layout, "float32")
    settings = server._worker_settings(config, model)
    assert [each.device for each in settings] == devices


def test_workers_are_told_whether_they_wait_for_our_kernels(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    model = server._Model(
        Checkpoint(tmp_path), SimpleNamespace(), None, "cpu", RowLayout(1, 64, DType.FLOAT32), "float32"
    )
    (settings,) = server._worker_settings(EncoderConfig(model="m", kernels="wait"), model)
    assert settings.kernels == "wait"
