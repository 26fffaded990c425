"""What an adapter's folder may hold; whatever else it has is refused before anything is made of it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from llm_service.model_config.adapter_folder import Adaptable, AdapterError, read
from tests.adapters import write

PREFIX = "base_model.model.model.language_model.layers.0"
SHAPES = {"layers.0.self_attn.q_proj": (6, 4), "layers.0.mlp.up_proj": (8, 4)}
ADAPTABLE = Adaptable(SHAPES, max_rank=4, bases=("base", "served"))


def tensors(
    rank: int = 2, outputs: int = 6, inputs: int = 4, name: str = "self_attn.q_proj"
) -> dict[str, torch.Tensor]:
    return {
        f"{PREFIX}.{name}.lora_A.weight": torch.randn(rank, inputs),
        f"{PREFIX}.{name}.lora_B.weight": torch.randn(outputs, rank),
    }


def good(root: Path, **config: Any) -> Path:
    return write(root / "good", tensors(), {"r": 2, "lora_alpha": 4, **config})


def refused(root: Path, folder: str | Path) -> str:
    with pytest.raises(AdapterError) as error:
        read(str(root), str(folder), ADAPTABLE)
    assert str(root) not in str(error.value), "a message names a place on this host"
    return str(error.value)


def test_what_is_read_and_what_it_is_scaled_with(tmp_path: Path) -> None:
    of_peft = {
        "bias": "none",
        "qalora_group_size": 16,
        "use_qalora": False,
        "modules_to_save": None,
        "loftq_config": {},
    }
    good(tmp_path, base_model_name_or_path="someone/base", **of_peft)  # as peft 0.21 writes it
    found = read(str(tmp_path), "good", ADAPTABLE)
    assert found.rank == 2
    assert found.scales == {"layers.0.self_attn.q_proj": 2.0}
    assert found.weights == (tmp_path / "good" / "adapter_model.safetensors").read_bytes()
    good(tmp_path, use_rslora=True)
    rs = read(str(tmp_path), str(tmp_path / "good"), ADAPTABLE)
    assert rs.scales == {"layers.0.self_attn.q_proj": 4 / math.sqrt(2)}
    assert rs.digest != found.digest, "another scale is another adapter"
    both = {**tensors(), **tensors(3, 8, 4, "mlp.up_proj")}
    patterns = {"rank_pattern": {"up_proj": 3}, "alpha_pattern": {"^model.language_model.layers.0.mlp.up_proj": 6}}
    write(tmp_path / "two", both, {"r": 2, "lora_alpha": 4, **patterns})
    assert read(str(tmp_path), "two", ADAPTABLE).scales == dict.fromkeys(SHAPES, 2.0)
    patterns = {"rank_pattern": {r"layers\.\d+\.mlp.*": 3}, "alpha_pattern": {r".*(up|down)_proj": 6, "up_proj": 9}}
    write(tmp_path / "two", both, {"r": 2, "lora_alpha": 4, **patterns})
    assert read(str(tmp_path), "two", ADAPTABLE).scales == dict.fromkeys(SHAPES, 2.0), "the first that fits counts"


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"target_parameters": ["experts.down_proj"]}, "target_parameters"),
        ({"peft_type": "LOHA"}, "not say that this is a LoRA"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"base_model_name_or_path": "someone/other"}, "'other', which is not served here"),
        ({"r": 3}, "do not agree about ranks"),
        ({"rank_pattern": {"(?!up)q_proj": 2}}, "rank_pattern has a pattern that has what is not read here"),
        ({"alpha_pattern": {"x" * 2000: 2}}, "alpha_pattern has a pattern that has more than 1024 characters"),
        ({"alpha_pattern": {str(number): 2 for number in range(5000)}}, "not a table of at most 4096"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern is not a table"),
        ({"lora_alpha": "4"}, "lora_alpha is not a number"),
        ({"lora_alpha": float("inf")}, "lora_alpha is not a number"),
    ],
)
def test_a_config_that_asks_for_something_else(tmp_path: Path, config: dict[str, Any], why: str) -> None:
    good(tmp_path, **config)
    assert why in refused(tmp_path, "good")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (tensors(outputs=7), "another shape"),
        (tensors(inputs=5), "another shape"),
        (tensors(rank=5), "--max-lora-rank is 4"),
        (tensors(name="mlp.experts.0.up_proj"), "cannot be adapted here"),
        (
            {f"{PREFIX.replace('language_model.layers', 'visual.blocks')}.qkv.lora_A.weight": torch.ones(2, 4)},
            "cannot be",
        ),
        ({"lm_head.weight": torch.ones(2, 4)}, "cannot be adapted here"),
        (dict([*tensors().items()][:1]), "do not go together"),
        ({name: tensor.to(torch.int8) for name, tensor in tensors().items()}, "not floats"),
        ({}, "adapts nothing"),
    ],
)
def test_weights_that_do_not_fit(tmp_path: Path, given: dict[str, torch.Tensor], why: str) -> None:
    write(tmp_path / "bad", given, {"r": 2, "lora_alpha": 4})
    assert why in refused(tmp_path, "bad")


def _pickle(root: Path) -> None:
    (root / "bad" / "adapter_model.safetensors").rename(root / "bad" / "adapter_model.bin")


def _sparse(root: Path) -> None:
    os.truncate(root / "bad" / "adapter_model.safetensors", 10 << 30)


def _cut(root: Path) -> None:
    file = root / "bad" / "adapter_model.safetensors"
    os.truncate(file, file.stat().st_size - 1)


def _long_table(root: Path) -> None:
    (root / "bad" / "adapter_model.safetensors").write_bytes((1 << 62).to_bytes(8, "little") + b"{}")


def _deep_table(root: Path) -> None:
    table = b'{"a":' + b"[" * 100_000
    (root / "bad" / "adapter_model.safetensors").write_bytes(len(table).to_bytes(8, "little") + table)


def _overlap(root: Path) -> None:
    file = root / "bad" / "adapter_model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    table = json.loads(content[8 : 8 + length])
    first, second = (table[name] for name in table if name != "__metadata__")
    second["data_offsets"] = first["data_offsets"]
    text = json.dumps(table).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def _pipe(root: Path) -> None:
    (root / "bad" / "adapter_config.json").unlink()
    os.mkfifo(root / "bad" / "adapter_config.json")


def _link(root: Path) -> None:
    file = root / "bad" / "adapter_model.safetensors"
    file.rename(root.parent / "outside.safetensors")
    file.symlink_to(root.parent / "outside.safetensors")


def _no_json(root: Path) -> None:
    (root / "bad" / "adapter_config.json").write_text("{")


def _huge_config(root: Path) -> None:
    os.truncate(root / "bad" / "adapter_config.json", 2 << 20)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (_pickle, "pickle"),
        (_sparse, "10737418240 bytes"),
        (_cut, "not a safetensors file|cut off"),
        (_long_table, "not a safetensors file"),
        (_deep_table, "not a safetensors file"),
        (_overlap, "not a safetensors file"),
        (_pipe, "not a file below"),
        (_link, "not a file below"),
        (_no_json, "not JSON"),
        (_huge_config, "2097152 bytes"),
    ],
)
def test_files_that_are_not_what_they_should_be(tmp_path: Path, spoil: Callable[[Path], None], why: str) -> None:
    root = tmp_path / "root"
    write(root / "bad", tensors(), {"r": 2, "lora_alpha": 4})
    spoil(root)
    message = refused(root, "bad")
    assert any(each in message for each in why.split("|")), message


def test_nothing_outside_of_the_folder_is_read(tmp_path: Path) -> None:
    root = tmp_path / "root"
    good(tmp_path)
    good(root)
    (root / "link").symlink_to(tmp_path / "good")
    (root / "inner").symlink_to(root / "good")
    for path in (
        "../good",
        str(tmp_path / "good"),
        "link",
        "",
        "nothing",
        "good\0",
        "x" * 5000,
        "good/adapter_config.json",
    ):
        assert refused(root, path) == "there is no such folder below --lora-dir"
    assert read(str(root), "inner", ADAPTABLE).rank == 2, "a link within it is none of these"


def test_a_file_of_the_largest_adapter_is_not_too_long(tmp_path: Path) -> None:
    every = {**tensors(4), **tensors(4, 8, 4, "mlp.up_proj")}
    write(tmp_path / "large", every, {"r": 4, "lora_alpha": 4})
    assert read(str(tmp_path), "large", ADAPTABLE).rank == 4
    save_file({**every, "more": torch.zeros(2 << 20)}, tmp_path / "large" / "adapter_model.safetensors")
    assert "bytes; such an adapter of this model has" in refused(tmp_path, "large")
