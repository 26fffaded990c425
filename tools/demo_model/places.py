"""Where things lie: the training state outside the repository, the finished checkpoint inside."""

import os
from pathlib import Path

TARGET = Path(__file__).resolve().parents[2] / "models" / "demo"


def cache() -> Path:
    """The folder of the training state, made when it is first asked for."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "twinlens" / "demo-model"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
