"""A checkpoint folder in the Hugging Face format: its JSON files and the index of its tensors, without torch.

Both layouts are read: one `model.safetensors`, or shards with `model.safetensors.index.json`.
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from common.checkpoints import tekken

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_QUANTIZATION = "hf_quant_config.json"
"""NVIDIA Model Optimizer's file; its older releases state quantisation only there."""
_MAX_HEADER = 100 << 20
_POINTER = b"version https://git-lfs"
"""The beginning of a file that Git LFS has not fetched."""
_FLOATS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
"""Types of floats of 16 or 32 bits, by config.json's word for each, in safetensors' word."""
_SETTINGS = ["*.json", "*.jinja", "*.txt"]
"""Downloaded first: everything but weights."""


class CheckpointError(ValueError):
    """The folder does not have a usable checkpoint; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's file, element type (in safetensors' words), shape, and byte range in the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Checkpoint:
    """A checkpoint folder, read as it is asked for. `name` is the model's, by default the folder's own."""

    def __init__(self, folder: Path, name: str = "", prefixes: Sequence[str] = ("",)) -> None:
        """Only shards with a tensor whose name begins with one of the `prefixes` are considered."""
        self._prefixes = tuple(prefixes)
        self.folder = folder
        self.name = name or folder.resolve().name
        if not (folder / "config.json").is_file():
            raise CheckpointError(f"{folder} has no config.json")

    @classmethod
    def resolve(
        cls, model: str, revision: str = "", needs: Callable[[Checkpoint], Sequence[str]] = lambda _: ("",)
    ) -> Checkpoint:
        """Opens a folder, or downloads a hub name such as `Qwen/Qwen3-VL-4B-Instruct`, which stays the model's name;
        `revision` is a branch, tag or commit there.

        `needs` returns the prefixes of the tensors needed, once everything but weights is there: other shards are not
        downloaded, and may be missing. Raises CheckpointError if there is no such checkpoint.
        """
        if Path(model).is_dir():
            if revision:
                raise CheckpointError(f"--revision is for names on the hub, and {model} is a folder")
            whole = cls(Path(model), Path(model).name.strip("."))
            return whole.part(needs(whole))
        if model.count("/") != 1 or model.startswith((".", "/", "~")):
            raise CheckpointError(f"{model} is neither a folder nor a hub name")
        whole = cls(_downloaded(model, revision or None, _SETTINGS), model)
        part = whole.part(needs(whole))
        _downloaded(model, whole.folder.name, part.weight_files())  # of the commit that the settings are of
        return part

    def part(self, prefixes: Sequence[str]) -> Checkpoint:
        """The same, with only the shards that have a tensor with such a prefix."""
        return Checkpoint(self.folder, self.name, prefixes)

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json. If it has no `quantization_config`, that of hf_quant_config.json is used, if there is one."""
        stated, beside = self.json("config.json"), self.json(_QUANTIZATION)
        return stated | {"quantization_config": beside} if beside and "quantization_config" not in stated else stated

    @property
    def architecture(self) -> str:
        """The model's class in config.json, or its `model_type` if it names none."""
        return str(next(iter(self.config.get("architectures") or [self.config.get("model_type", "")])))

    def json(self, name: str) -> dict[str, Any]:
        """A JSON file of the folder; an empty object if it is missing."""
        path = self.folder / name
        if not path.is_file():
            return {}
        try:
            value = json.loads(path.read_text("utf-8"))
        except ValueError as error:
            raise CheckpointError(_unlike(path, "JSON")) from error
        if not isinstance(value, dict):
            raise CheckpointError(f"{name} is not a JSON object")
        return value

    def text(self, name: str) -> str | None:
        """A text file of the folder, or None."""
        path = self.folder / name
        return path.read_text("utf-8") if path.is_file() else None

    def tokenizer(self) -> str:
        """The content of tokenizer.json, converted from Mistral's format if there is only that, which takes a second.
        Raises CheckpointError if there is neither."""
        if (found := self.text("tokenizer.json")) is not None:
            return found
        if not (stated := self.json(tekken.FILE)):
            raise CheckpointError("the checkpoint has no tokenizer.json")
        try:
            return json.dumps(tekken.tokenizer_settings(stated))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{tekken.FILE} is not in a known form") from error

    def tokenizer_settings(self) -> dict[str, Any]:
        """The same as an object, without truncation and padding, which may have been set for training batches."""
        settings = self.json("tokenizer.json") or json.loads(self.tokenizer())
        return {**settings, "truncation": None, "padding": None}

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        """Every tensor by its name in the files."""
        names = self.weight_files()
        found: dict[str, TensorInfo] = {}
        for name in names:
            path = self.folder / name
            if path.parent != self.folder or not path.is_file():
                raise CheckpointError(self._lacks(name))
            with path.open("rb") as file:
                found.update(_read_header(path, file))
        return found

    @cached_property
    def stored_in(self) -> str:
        """The float type (in safetensors' words) of 16 or 32 bits that most bytes of all shards have, needed or not, so
        that all services agree. If not all shards are here: the type stated for the text in config.json, else that of
        the shards here. For a quantised checkpoint, the type of the rest. Empty if there are no floats."""
        try:
            return _most_bytes(Checkpoint(self.folder).tensors)
        except CheckpointError:
            return self._stated_type() or _most_bytes(self.tensors)

    def _stated_type(self) -> str:
        """The type stated for the text in config.json; empty if none."""
        text = self.config.get("text_config")
        parts = [text, self.config] if isinstance(text, dict) else [self.config]
        stated = [part.get("dtype") or part.get("torch_dtype") for part in parts]
        return next((_FLOATS[name] for name in stated if isinstance(name, str) and name in _FLOATS), "")

    def _lacks(self, name: str) -> str:
        """Why there are no weights: a file of this name is missing."""
        if name != SINGLE:
            return f"{self.folder} has no {name}"
        if pickles := sorted(path.name for path in self.folder.glob("pytorch_model*.bin")):
            why = f"has its weights in {pickles[0]}, a pickle, which is not read"
        else:  # a hub's pickles are not here, whether it has any or not
            why = f"has no {name}, and pickles, such as pytorch_model.bin, are neither fetched nor read"
        return f"{self.folder} {why}: convert them to safetensors"

    def weight_files(self) -> list[str]:
        """The names of the files with its tensors, whether they are here or not. Raises CheckpointError if the index
        does not say."""
        if (files := self.shards()) is None:
            return [SINGLE]
        return sorted({file for tensor, file in files.items() if tensor.startswith(self._prefixes)})

    def shards(self) -> dict[str, str] | None:
        """The file of each tensor, according to the index; None without an index. Raises CheckpointError as
        `weight_files`."""
        if not (index := self.json(INDEX)):
            return None
        files = index.get("weight_map")
        if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
            raise CheckpointError(f"{INDEX} has no weight_map")
        return files


def _most_bytes(tensors: Mapping[str, TensorInfo]) -> str:
    totals = Counter[str]()
    for name, info in tensors.items():
        if ".weight." not in name:  # tensors below a weight are constants of its quantisation
            totals[info.dtype] += info.end - info.begin
    return max(_FLOATS.values(), key=lambda name: totals[name]) if any(map(totals.get, _FLOATS.values())) else ""


def _downloaded(model: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """The folder of a snapshot of the hub, named by its commit, with the files of these patterns."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=list(patterns)))
    except ValueError as error:
        raise CheckpointError(f"{model} is neither a folder nor a hub name") from error
    except OSError as error:  # the hub's own errors are some
        raise CheckpointError(f"{model} is not a folder here, and cannot be fetched: {_why(error)}") from error


def _why(error: OSError) -> str:
    """Why the hub does not give a model, in one line; its own words begin with a status and a request's number."""
    from huggingface_hub import errors

    match error:
        case errors.GatedRepoError():
            return "its terms have to be accepted on the hub first, and HF_TOKEN must hold a token"
        case errors.RepositoryNotFoundError():
            return "the hub has no such model, or shows it only with a token, in HF_TOKEN"
        case errors.RevisionNotFoundError():
            return "the hub has no such --revision of it"
    return str(error).partition("\n")[0].strip().removeprefix("Got: ")


def _read_header(path: Path, file: BinaryIO) -> dict[str, TensorInfo]:
    """The table at the start of a safetensors file: 8 bytes of length, then JSON, then data."""
    size = path.stat().st_size
    try:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > min(_MAX_HEADER, size):
            raise ValueError("the table is longer than the file")
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        found = {name: _entry(path, 8 + length, entry) for name, entry in header.items()}
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(_unlike(path, "a safetensors file")) from error
    if any(info.end > size for info in found.values()):
        raise CheckpointError(f"{path.name} is cut off: it is shorter than its table says")
    return found


def _unlike(path: Path, what: str) -> str:
    """Says that a file is invalid, and how to get one that Git LFS has not fetched."""
    with path.open("rb") as file:
        is_pointer = file.read(len(_POINTER)) == _POINTER
    why = ", but a pointer of Git LFS: `git lfs pull` fetches the file" if is_pointer else ""
    return f"{path.name} is not {what}{why}"


def _entry(path: Path, data: int, entry: dict[str, Any]) -> TensorInfo:
    begin, end = entry["data_offsets"]
    return TensorInfo(path, entry["dtype"], tuple(entry["shape"]), data + begin, data + end)
