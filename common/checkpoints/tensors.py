"""Reads single tensors of a checkpoint on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from safetensors import safe_open

from common.checkpoints.checkpoint import Checkpoint


def load_slices(checkpoint: Checkpoint, wanted: Callable[[str], str | None]) -> Iterator[tuple[str, Any]]:
    """Yields (new name, reader) for each tensor whose name `wanted` maps to a new one; None skips it. Readers are
    indexed like tensors: `stored[0:8, 16:32]`."""
    with SliceReader(checkpoint) as reader:
        for name in checkpoint.tensors:
            if (renamed := wanted(name)) is not None:
                yield renamed, reader[name]


class SliceReader:
    """A checkpoint's tensors by name; each is read in part when it is indexed. A context manager: files are opened on
    first use and memory-mapped, so a tensor costs memory only while it is used."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._tensors = checkpoint.tensors
        self._files: dict[Path, Any] = {}
        self._open = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.clear()
        self._open.close()

    def __getitem__(self, name: str) -> Any:
        file = self._tensors[name].file
        if file not in self._files:
            self._files[file] = self._open.enter_context(safe_open(file, framework="pt"))
        return self._files[file].get_slice(name)
