"""Settings that no tower here has are refused by name, before weights are read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from encoder_service.families import config
from encoder_service.models.tower import load_tower
from testkit.checkpoints import TOWERS


@pytest.mark.parametrize("family", TOWERS)
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_heads": 3}, "3 heads"),
        ({"num_heads": 16}, "16 heads"),
        ({"hidden_act": "relu6"}, "the activation relu6"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rotary scaling yarn"),
        ({"depth": 5}, "do not fit"),
    ],
)
def test_a_tower_of_another_make_is_refused(
    family: str, change: dict[str, Any], says: str, checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(checkpoints(family), tmp_path / "model"))
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**about, "vision_config": {**about["vision_config"], **change}}))
    checkpoint = Checkpoint(folder)
    with pytest.raises(CheckpointError, match=says):
        load_tower(checkpoint, config.read(checkpoint), torch.device("cpu"), torch.float32)
