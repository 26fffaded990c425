"""Checkpoint folders in both layouts, and broken ones."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
from huggingface_hub import errors
from safetensors.torch import save_file

from common.checkpoints.bitsandbytes import load_dense
from common.checkpoints.checkpoint import INDEX, SINGLE, Checkpoint, CheckpointError
from common.media.encoder_digest import VISION, encoder_digest
from common.rows.wire import DType
from encoder_service.families import config
from encoder_service.families.family import ModelConfig
from encoder_service.models.tower import load_tower


def put(folder: Path, tensors: dict[str, list[int]], name: str = SINGLE) -> None:
    """A safetensors file of float32 zeros."""
    header, at = {}, 0
    for tensor, shape in tensors.items():
        size = 4 * torch.Size(shape).numel()
        header[tensor] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    words = json.dumps(header).encode()
    (folder / name).write_bytes(struct.pack("<Q", len(words)) + words + bytes(at))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "tiny"}')
    put(tmp_path, {"a": [2, 3], "b": [4]})
    return tmp_path


def test_a_hub_that_cannot_be_reached_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> str:
        raise OSError("no route to the hub\nPlease check your connection")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(CheckpointError, match=r"^some/model is not a folder here, .*: no route to the hub$"):
        Checkpoint.resolve("some/model")


def test_a_single_file_is_read(folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    assert checkpoint.config == {"model_type": "tiny"}
    assert checkpoint.name == folder.name
    assert {name: (info.dtype, info.shape) for name, info in checkpoint.tensors.items()} == {
        "a": ("F32", (2, 3)),
        "b": ("F32", (4,)),
    }
    assert checkpoint.tensors["b"].end == (folder / SINGLE).stat().st_size


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], Path]:
    """Puts a folder on a hub of one model, whose snapshots are then where it says."""
    snapshot = tmp_path / "snapshots" / "0123abc"

    def publish(source: Path) -> Path:
        def download(model: str, *, revision: str | None, allow_patterns: list[str]) -> str:
            if " " in model:
                raise ValueError("no such name can be")
            if revision not in (None, "v2", snapshot.name):
                raise OSError(f"there is no {revision}")
            snapshot.mkdir(parents=True, exist_ok=True)
            for file in source.iterdir():
                if any(fnmatch(file.name, pattern) for pattern in allow_patterns):
                    shutil.copy(file, snapshot)
            return str(snapshot)

        monkeypatch.setattr("huggingface_hub.snapshot_download", download)
        return snapshot

    return publish


def test_a_model_is_called_what_the_command_line_calls_it(
    folder: Path, hub: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub(folder)
    (link := folder.parent / "current-model").symlink_to(folder)
    monkeypatch.chdir(folder)
    named = {"Qwen/Qwen3-VL-2B": "Qwen/Qwen3-VL-2B", str(link): link.name, f"{folder}/": folder.name, ".": folder.name}
    assert {model: Checkpoint.resolve(model).name for model in named} == named
    with pytest.raises(CheckpointError, match="neither a folder nor a hub name"):
        Checkpoint.resolve("Qwen/Qwen3 VL")


def test_a_revision_is_one_of_the_hubs(folder: Path, hub: Callable[[Path], Path]) -> None:
    snapshot = hub(folder)
    assert Checkpoint.resolve("a/model", "v2").folder == snapshot
    with pytest.raises(CheckpointError, match="a/model is not a folder here, and cannot be fetched: there is no v3"):
        Checkpoint.resolve("a/model", "v3")
    with pytest.raises(CheckpointError, match="--revision is for names on the hub"):
        Checkpoint.resolve(str(folder), "v2")


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (errors.RepositoryNotFoundError, "the hub has no such model, or shows it only with a token, in HF_TOKEN"),
        (errors.GatedRepoError, "its terms have to be accepted on the hub first, and HF_TOKEN must hold a token"),
        (errors.RevisionNotFoundError, "the hub has no such --revision of it"),
        (errors.LocalEntryNotFoundError, "ConnectError: no route"),
    ],
)
def test_a_refusal_of_the_hub_says_what_to_do_in_one_line(
    monkeypatch: pytest.MonkeyPatch, kind: type[OSError], told: str
) -> None:
    def download(*_: object, **__: object) -> str:
        error = kind.__new__(kind)  # the hub's own constructors want a response
        error.args = ("Got: ConnectError: no route\n\nSee the address.",)
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(CheckpointError) as refused:
        Checkpoint.resolve("a/model")
    assert str(refused.value) == f"a/model is not a folder here, and cannot be fetched: {told}"


def test_an_encoder_fetches_no_shards_but_those_of_its_tower(
    checkpoints: Callable[..., Path], hub: Callable[[Path], Path]
) -> None:
    source = checkpoints("qwen3_vl", sharded=True)
    every = {path.name for path in source.glob("*.safetensors")}
    snapshot = hub(source)
    part, tower_config = config.resolve("a/model")
    assert isinstance(tower_config, ModelConfig)
    fetched = {path.name for path in snapshot.glob("*.safetensors")}
    assert fetched < every, "the shards prove nothing"
    tower = load_tower(Checkpoint(snapshot), tower_config, torch.device("cpu"), torch.float32)
    whole = load_tower(Checkpoint(source), tower_config, torch.device("cpu"), torch.float32)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(tower.parameters(), whole.parameters(), strict=True))
    assert part.stored_in == "F32"
    with pytest.raises(CheckpointError, match="has no model-"):
        Checkpoint(snapshot).tensors  # noqa: B018 - all of them, which an LLM service asks for
    served = Checkpoint.resolve("a/model")
    assert {path.name for path in snapshot.glob("*.safetensors")} == every
    digests = {encoder_digest(each, DType.FLOAT32, VISION) for each in (part, served, Checkpoint(source))}
    assert len(digests) == 1


def test_shards_and_a_single_file_hold_the_same_tensors(checkpoints: Callable[..., Path]) -> None:
    single, sharded = Checkpoint(checkpoints("qwen3_vl")), Checkpoint(checkpoints("qwen3_vl", sharded=True))
    assert len({info.file for info in sharded.tensors.values()}) > 1
    assert {n: i.shape for n, i in single.tensors.items()} == {n: i.shape for n, i in sharded.tensors.items()}
    ours, theirs = (dict(load_dense(each, lambda name: name)) for each in (single, sharded))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_only_the_tensors_that_are_wanted_are_read(folder: Path) -> None:
    assert [(n, t.shape) for n, t in load_dense(Checkpoint(folder), {"b": "renamed"}.get)] == [("renamed", (4,))]


def test_files_that_are_not_there_read_as_nothing(folder: Path) -> None:
    assert Checkpoint(folder).json("generation_config.json") == {}
    assert Checkpoint(folder).text("chat_template.jinja") is None


@pytest.mark.parametrize("name", ["nothing/here/at/all", "../x/y", "/no/such", "word", "~/model"])
def test_what_is_neither_a_folder_nor_a_hub_name_is_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match="neither a folder nor a hub name"):
        Checkpoint.resolve(name)


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        Checkpoint.resolve(str(tmp_path))


BROKEN_WEIGHTS: dict[str, bytes] = {
    "empty": b"",
    "shorter than its length field": b"\1\0\0",
    "a length beyond all bounds": struct.pack("<Q", 1 << 60) + b"{}",
    "a length beyond the file": struct.pack("<Q", 500) + b"{}",
    "no JSON": struct.pack("<Q", 4) + b"{{{{",
    "not UTF-8": struct.pack("<Q", 4) + b"\xff\xfe\xfd\xfc",
    "a list": struct.pack("<Q", 2) + b"[]",
    "an entry without a place": struct.pack("<Q", 16) + b'{"a":{"x":"F32"}}'[:16],
    "an entry that is a number": struct.pack("<Q", 7) + b'{"a":1}',
    "HTML": b"<!DOCTYPE html><html><body>404</body></html>",
}


@pytest.mark.parametrize("name", BROKEN_WEIGHTS)
def test_a_broken_weights_file_is_one_clear_error(folder: Path, name: str) -> None:
    (folder / SINGLE).write_bytes(BROKEN_WEIGHTS[name])
    with pytest.raises(CheckpointError, match="safetensors"):
        _ = Checkpoint(folder).tensors


def test_what_git_left_to_its_extension_is_said_to_be_a_pointer(folder: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5000\n"
    for name in (SINGLE, "tokenizer.json"):
        (folder / name).write_text(pointer)
    with pytest.raises(CheckpointError, match=r"^model.safetensors is not a safetensors file, .*`git lfs pull`"):
        _ = Checkpoint(folder).tensors
    with pytest.raises(CheckpointError, match=r"^tokenizer.json is not JSON, .*`git lfs pull`"):
        Checkpoint(folder).tokenizer_settings()


@pytest.mark.parametrize(
    ("text", "said"),
    [('{"model": {"vocab"', "tokenizer.json is not JSON"), ("[]", "tokenizer.json is not a JSON object")],
)
def test_a_broken_tokenizer_file_is_one_clear_error(folder: Path, text: str, said: str) -> None:
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match=f"^{said}$"):
        Checkpoint(folder).tokenizer_settings()


def test_a_weights_file_cut_off_by_a_broken_download_is_told_at_once(folder: Path) -> None:
    whole = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match="cut off"):
        _ = Checkpoint(folder).tensors


@pytest.mark.parametrize(
    ("there", "said"),
    [
        (["pytorch_model.bin"], "has its weights in pytorch_model.bin, a pickle, which is not read"),
        (
            ["pytorch_model-00002-of-00002.bin", "pytorch_model-00001-of-00002.bin"],
            "has its weights in pytorch_model-00001-of-00002.bin, a pickle, which is not read",
        ),
        ([], "has no model.safetensors, and pickles, such as pytorch_model.bin, are neither fetched nor read"),
    ],
)
def test_weights_that_are_pickled_or_not_there_are_refused_with_the_way_out(
    folder: Path, there: list[str], said: str
) -> None:
    (folder / SINGLE).unlink()
    for name in there:
        (folder / name).write_bytes(b"\x80\x04N.")
    with pytest.raises(CheckpointError) as refused:
        _ = Checkpoint(folder).tensors
    assert str(refused.value) == f"{folder} {said}: convert them to safetensors"


@pytest.mark.parametrize("text", ["", "{", "[1]", "nonsense", '{"a": '])
def test_a_broken_configuration_is_one_clear_error(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        _ = Checkpoint(folder).config


@pytest.mark.parametrize(
    "index",
    [
        {"weight_map": {"a": "missing.safetensors"}},
        {"weight_map": {"a": "../outside.safetensors"}},
        {"weight_map": {"a": "/etc/passwd"}},
        {"weight_map": ["a"]},
        {"weight_map": {"a": 7}},
        {"metadata": {}},
    ],
)
def test_a_broken_index_is_one_clear_error(folder: Path, index: object) -> None:
    put(folder.parent, {"a": [1]}, "outside.safetensors")
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError):
        _ = Checkpoint(folder).tensors


def test_what_most_of_a_checkpoint_is_stored_in(tmp_path: Path) -> None:
    def stored(**tensors: torch.Tensor) -> str:
        folder = tmp_path / "-".join(tensors)
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        save_file(tensors, folder / "model.safetensors")
        return Checkpoint(folder).stored_in

    half, scales = torch.zeros(8, 9, dtype=torch.bfloat16), torch.zeros(4, 4)
    assert stored(weight=half, scale=scales) == "BF16"
    assert stored(small=half[:2].clone(), weight=scales) == "F32"
    assert stored(codes=torch.zeros(64, 64, dtype=torch.int8), norm=half) == "BF16"
    assert stored(codes=torch.zeros(64, 64, dtype=torch.int8)) == ""


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({"text_config": {"dtype": "bfloat16"}, "dtype": "float32"}, "BF16"),
        ({"text_config": {}, "torch_dtype": "bfloat16"}, "BF16"),
        ({"torch_dtype": "float16"}, "F16"),
        ({"text_config": 7, "dtype": ["bfloat16"]}, "F32"),
        ({}, "F32"),
    ],
)
def test_a_checkpoint_is_stored_in_one_type_whichever_of_its_shards_are_needed(
    tmp_path: Path, stated: dict[str, object], expected: str
) -> None:
    """A tower in float32, beside a larger text in bfloat16."""
    (tmp_path / "config.json").write_text(json.dumps(stated))
    save_file({"visual.weight": torch.zeros(4, 4)}, tmp_path / "tower.safetensors")
    save_file({"text.weight": torch.zeros(8, 9, dtype=torch.bfloat16)}, tmp_path / "text.safetensors")
    files = {"visual.weight": "tower.safetensors", "text.weight": "text.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": files}))
    assert [Checkpoint(tmp_path, prefixes=part).stored_in for part in (("",), ("visual.",))] == ["BF16", "BF16"]
    (tmp_path / "text.safetensors").unlink()
    assert Checkpoint(tmp_path, prefixes=("visual.",)).stored_in == expected
