"""Where things lie: the training state outside the repository, the finished checkpoint inside."""

import os
import sys
from pathlib import Path
from typing import Any

import torch

TARGET = Path(__file__).resolve().parents[2] / "models" / "demo"


def cache() -> Path:
    """The folder of the training state, made when it is first asked for."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "twinlens" / "demo-model"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def saved(folder: Path) -> dict[str, Any]:
    """The training state in a folder; ends the program with one line if there is none."""
    if not (file := folder / "state.pt").exists():
        sys.exit(
            f"no training state is in {folder}: python -m tools.demo_model.train saves it there, or in its --cache"
        )
    return dict(torch.load(file, map_location="cpu", weights_only=True))
